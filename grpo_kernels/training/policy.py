"""The policy: a transformers causal LM, asked for the hidden states of chosen rows and for one decoding step."""

from __future__ import annotations

import copy
import importlib.util
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import Cache, DynamicCache

from .bounds import ConfigError
from .config import LoraConfig, ModelConfig
from .packing import Layout, Pack, make_packs


class Policy(nn.Module):
    """Wraps a causal LM so that the head never runs and any packing reads the same.

    The body runs on a whole pack; `head` is for the loss to multiply, a chunk of rows at a time. Models whose logits
    are more than `head(body(ids))` (soft-capped or scaled), or whose head is no plain linear layer, run whole and give
    logits. Dropout stays off: the module is always in eval mode, so that the policy that is updated is the one that
    sampled.

    Args:
        causal_lm: the model; its attention implementation decides how sequences are packed.
        packing: False: never pack, one padded row per sequence.
    """

    def __init__(self, causal_lm: PreTrainedModel, *, packing: bool = True) -> None:
        super().__init__()
        self.network: nn.Module = causal_lm  # or peft's wrapper of it
        accepted = inspect.signature(causal_lm.forward).parameters
        self._cache_argument = "cache" if "cache" in accepted else "past_key_values"  # renamed in transformers 5.24
        self._takes_positions = "position_ids" in accepted
        self._last_row_only = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}
        self.eval()
        self._split = self._head_is_separate()
        self.layout = self._choose_layout(packing)
        self._check_cache()

    @property
    def causal_lm(self) -> PreTrainedModel:
        """The transformers model; with LoRA its linear layers carry the adapters."""
        network: Any = self.network
        return network if isinstance(network, PreTrainedModel) else network.get_base_model()

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self.causal_lm.device

    def head(self) -> nn.Linear | None:
        """What turns the rows that `forward` gives into logits; None if they are logits already."""
        model: Any = self.causal_lm
        head = model.get_output_embeddings()
        # a subclass, or an adapter around it, computes something else than weight and bias say
        return head if self._split and type(head) is nn.Linear and type(head.weight) is nn.Parameter else None

    def forward(self, pack: Pack) -> Tensor:
        """Hidden states `[n, H]` of the rows that predict `pack.completion_ids [n]`; without `head` logits `[n, V]`."""
        model: Any = self.causal_lm
        inputs: dict[str, Any] = {"attention_mask": pack.attention_mask, "use_cache": False}
        if self._takes_positions:
            inputs["position_ids"] = pack.position_ids
        if self.head() is None:
            everything: Tensor = model(pack.input_ids, **inputs).logits  # (b, L, V)
            return everything.flatten(0, 1).index_select(0, pack.rows)
        hidden = model.get_decoder()(pack.input_ids, **inputs).last_hidden_state  # (b, L, H)
        # not hidden[rows]: its backward adds with float atomics on several threads, and no run would repeat
        rows: Tensor = hidden.flatten(0, 1).index_select(0, pack.rows)  # (n, H)
        return rows

    def logits(self, pack: Pack) -> Tensor:
        """Logits `[n, V]` of the rows that predict `pack.completion_ids [n]`; no view, a loss may overwrite it."""
        rows: Tensor = self(pack)
        head = self.head()
        return rows if head is None else head(rows)

    def new_cache(self) -> DynamicCache:
        """An empty KV cache for `next_logits`."""
        return DynamicCache(config=self.causal_lm.config)

    def next_logits(self, input_ids: Tensor, attention_mask: Tensor, cache: Cache) -> Tensor:
        """Logits `[b, V]` after `input_ids [b, t]`, which the cache absorbs.

        attention_mask `[b, cached + t]` has zeros where a prompt was padded on the left.
        """
        inputs: dict[str, Any] = {self._cache_argument: cache, "use_cache": True, **self._last_row_only}
        if self._takes_positions:
            positions = attention_mask.cumsum(dim=1)[:, -input_ids.shape[1] :] - 1
            inputs["position_ids"] = positions.clamp(min=0)
        logits: Tensor = self.causal_lm(input_ids, attention_mask=attention_mask, **inputs).logits  # (b, 1 or t, V)
        return logits[:, -1]

    def add_lora(self, config: LoraConfig) -> None:
        """Put low-rank adapters into the linear layers and freeze everything else."""
        from peft import LoraConfig as PeftLoraConfig
        from peft import get_peft_model

        modules = "all-linear" if config.target_modules == ("all-linear",) else list(config.target_modules)
        self.network = get_peft_model(
            self.causal_lm,
            PeftLoraConfig(
                r=config.rank, lora_alpha=config.alpha, target_modules=modules, lora_dropout=0.0, task_type="CAUSAL_LM"
            ),
        )
        self.eval()

    @contextmanager
    def reference(self, frozen: Policy | None) -> Iterator[Policy]:
        """The policy before training: `frozen`, or with LoRA (None) this model with its adapters off."""
        if frozen is not None:
            yield frozen
            return
        network: Any = self.network
        with network.disable_adapter():
            yield self

    def save(self, folder: str | Path, tokenizer: PreTrainedTokenizerBase) -> None:
        """Write the model (with LoRA the adapters) and the tokenizer as a folder that transformers or peft loads."""
        network: Any = self.network
        network.save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    def frozen_copy(self) -> Policy:
        """A copy that does not train: the reference of a run without LoRA."""
        return copy.deepcopy(self).requires_grad_(False)

    @torch.no_grad()
    def _head_is_separate(self) -> bool:
        model = self.causal_lm
        head = model.get_output_embeddings()
        if head is None or model.get_decoder() is model:
            return False
        ids = _probe_ids(model, 6)[None]  # (1, 6)
        whole = model(ids, use_cache=False).logits
        return _agree(head(model.get_decoder()(ids, use_cache=False).last_hidden_state), whole)

    @torch.no_grad()
    def _check_cache(self) -> None:
        """Decoding behind a padded prompt must give what a plain forward gives: recurrent models, say, may not."""
        ids = _probe_ids(self.causal_lm, 6)[None]  # (1, 6)
        cache, mask = self.new_cache(), torch.ones(1, 8, dtype=torch.int64, device=self.device)
        mask[:, :2] = 0
        padded = torch.cat([ids[:, :1], ids[:, :1], ids], dim=1)  # (1, 8)
        self.next_logits(padded[:, :6], mask[:, :6], cache)
        for end in (7, 8):
            decoded = self.next_logits(padded[:, end - 1 : end], mask[:, :end], cache)
            if not _agree(decoded, self.causal_lm(ids[:, : end - 2], use_cache=False).logits[:, -1]):
                raise ConfigError(
                    "Policy: causal_lm must decode with a KV cache behind padding, got other logits from "
                    f"{type(self.causal_lm).__name__} than without. Choose an attention model."
                )

    @torch.no_grad()
    def _choose_layout(self, packing: bool) -> Layout:
        """The tightest layout this model computes exactly; tried on a few tokens rather than believed."""
        config = self.causal_lm.config
        wanted: Layout = "padded"
        if packing and self._takes_positions:
            if config._attn_implementation == "flash_attention_2":
                wanted = "varlen"
            elif config._attn_implementation == "sdpa" and not _has_windows(config):
                wanted = "block"
        if wanted == "padded":
            return "padded"
        ids = _probe_ids(self.causal_lm, 16).tolist()
        prompts, completions = [ids[:5], ids[5:7]], [ids[7:9], ids[9:12], ids[12:15], ids[15:]]
        packed, padded = (
            self(make_packs(prompts, completions, layout=layout, max_tokens=64, device=self.device)[0])
            for layout in (wanted, "padded")
        )
        return wanted if _agree(packed, padded) else "padded"


def load_pretrained(path: str, dtype: str, attn: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The causal LM and tokenizer of the folder `path`. ConfigError when it is not such a folder."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation=attn)
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(
            f"load_pretrained: model.path must be a folder with a transformers causal LM, got {path!r}. {error}"
        ) from error
    return model, tokenizer


def choose_attention(config: ModelConfig, device: torch.device) -> str:
    """For "auto": flash_attention_2 on CUDA where flash_attn is installed and the arithmetic is bfloat16, else sdpa.

    Any other request is returned as it is; ConfigError if it cannot run here.
    """
    installed = importlib.util.find_spec("flash_attn") is not None
    half = config.dtype == "bfloat16" or config.mixed_precision == "bf16"  # flash attention has no float32
    flash_runs = device.type == "cuda" and installed and half
    if config.attn == "auto":
        return "flash_attention_2" if flash_runs else "sdpa"
    if config.attn == "flash_attention_2" and not flash_runs:
        got = f"{device.type}, {'with' if installed else 'without'} flash_attn, {config.dtype}"
        raise ConfigError(
            f'choose_attention: model.attn = "flash_attention_2" must have CUDA, flash_attn and bfloat16, got {got}. '
            'Install grpo-kernels[flash] and set model.dtype = "bfloat16", or use "auto".'
        )
    return config.attn


def _probe_ids(model: PreTrainedModel, count: int) -> Tensor:
    embeddings: Any = model.get_input_embeddings()
    vocabulary: int = embeddings.weight.shape[0]
    return (torch.arange(1, count + 1, device=model.device) * 7919) % vocabulary


def _agree(ours: Tensor, theirs: Tensor) -> bool:
    tolerance = 1e-3 if ours.dtype in (torch.float32, torch.float64) else 3e-2
    return bool((ours - theirs).abs().max() <= tolerance * theirs.abs().max())


def _has_windows(config: Any) -> bool:
    """Whether some layer does not see all earlier tokens: a ready-made mask would widen its window."""
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        return any(kind != "full_attention" for kind in kinds)
    return getattr(config, "sliding_window", None) is not None
