"""A GRPOTrainer small enough for a test: model, tokenizer, prompts and reward made on the spot, nothing downloaded."""

from __future__ import annotations

import atexit
import contextlib
import copy
import io
import tempfile
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn

pytest.importorskip("trl", reason="TRL is not installed; parity.txt lists it")

from trl import GRPOConfig

from grpo_kernels.integrations.trl import FusedGRPOTrainer

LETTERS = "abcdefghijklmnopqrstuvwxyz "
PROMPTS = ["abc", "hello", "xy", "the cat", "a", "zebra q", "mnop", "q r s"]
"""Of uneven length: prompts are padded on the left."""


_FOLDERS = tempfile.TemporaryDirectory()
atexit.register(_FOLDERS.cleanup)


def folder() -> str:
    """A new one, gone with the process."""
    return tempfile.mkdtemp(dir=_FOLDERS.name)


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    """One token a letter, and three special ones."""
    words = {word: index for index, word in enumerate(["<pad>", "<bos>", "<eos>", *LETTERS])}
    inner = Tokenizer(models.WordLevel(words, unk_token="<eos>"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    )


EOS = 2
SIZES = {
    "vocab_size": len(LETTERS) + 3, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": EOS,
}  # fmt: skip


def causal_lm(kind: str = "Qwen2", dtype: torch.dtype = torch.float32, **options: Any) -> transformers.PreTrainedModel:
    """A random model of a family, with log-probs far from uniform.

    It knows a folder with a slightly other one, which TRL loads as the reference.
    """
    torch.manual_seed(1)
    config = getattr(transformers, f"{kind}Config")(**SIZES | options)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "embed" in name or "lm_head" in name:
                parameter.normal_(std=0.5)
            elif parameter.ndim == 2:
                parameter.normal_(std=0.15)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.02)
    model.config._name_or_path = folder()
    other.save_pretrained(model.config._name_or_path)
    return model


def reward(completions: list[str], **_: Any) -> list[float]:
    """Likes vowels, and short answers: groups differ."""
    return [sum(text.count(v) for v in "aeiou") - 0.1 * len(text) for text in completions]


DEFAULTS: dict[str, Any] = {
    "per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 8, "learning_rate": 0.05,
    "lr_scheduler_type": "constant", "optim": "sgd", "logging_steps": 1, "report_to": [], "save_strategy": "no",
    "use_cpu": True, "bf16": False, "activation_checkpointing": False, "disable_tqdm": True, "seed": 7,
    "dataloader_pin_memory": False,
}  # fmt: skip


def build(cls: type, model: nn.Module, **options: Any) -> Any:
    """A trainer of this class on a copy of the model; what GRPOConfig does not know goes to the trainer."""
    to_trainer = {name: options.pop(name) for name in ("peft_config", "eval_dataset") if name in options}
    with quiet():
        args = GRPOConfig(output_dir=folder(), **DEFAULTS | options)
        return cls(
            model=copy.deepcopy(model), reward_funcs=reward, args=args, processing_class=tokenizer(),
            train_dataset=Dataset.from_dict({"prompt": PROMPTS * 4}), **to_trainer,
        )  # fmt: skip


def train(trainer: Any) -> list[dict[str, Any]]:
    """What a run logs at each step, without times."""
    with quiet():
        trainer.train()
    timed = ("time", "per_second", "flos")
    return [
        {name: value for name, value in entry.items() if not any(word in name for word in timed)}
        for entry in trainer.state.log_history
    ]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without what other packages print and warn of; our own warnings stay errors."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", message=r"FusedGRPOTrainer|integrations|GRPOLossConfig|\w*(loss|logps):")
        yield


def put_into_batches(trainer: Any, add: Callable[[dict[str, Any]], None]) -> Any:
    """Let `add` change every generated batch, as a tool-calling loop or an engine would."""
    generate = trainer._generate_and_score_completions

    def generated(inputs: Any) -> dict[str, Any]:
        batch: dict[str, Any] = generate(inputs)
        add(batch)
        return batch

    trainer._generate_and_score_completions = generated
    return trainer


def worst_of(theirs: list[dict[str, Any]], ours: list[dict[str, Any]], floor: float) -> tuple[float, str]:
    """The largest relative difference of two logs, a value nearer 0 than `floor` counting as that."""
    assert len(theirs) == len(ours)
    found = [(0.0, "")]
    for step, (a, b) in enumerate(zip(theirs, ours, strict=True)):
        assert set(a) == set(b), set(a) ^ set(b)
        for name, value in a.items():
            if value is None or b[name] is None:
                assert value is b[name], name
                continue
            gap = abs(value - b[name]) / max(abs(value), floor)
            found.append((gap if gap == gap else float("inf"), f"{name} at step {step + 1}: {b[name]}, TRL {value}"))
    return max(found)


def batch(
    lengths: tuple[int, ...] = (2, 4), advantages: tuple[float, ...] = (1.0, -1.0), **more: Any
) -> dict[str, Any]:
    """What TRL hands to the loss."""
    rng = torch.Generator().manual_seed(0)
    rows, width = len(lengths), max(lengths)
    mask = (torch.arange(width) < torch.tensor(lengths)[:, None]).long()
    return {
        "prompt_ids": torch.randint(3, 30, (rows, 3), generator=rng),
        "prompt_mask": torch.ones(rows, 3, dtype=torch.int64),
        "completion_ids": torch.randint(3, 30, (rows, width), generator=rng),
        "completion_mask": mask,
        "advantages": torch.tensor(advantages),
        "num_items_in_batch": mask.sum(),
    } | more


def scoring(**options: Any) -> Any:
    """Our trainer, as it stands before a micro-batch that is an update of its own."""
    trainer = build(FusedGRPOTrainer, causal_lm(), **{"loss_type": "dapo"} | options)
    trainer.args.steps_per_generation = trainer.current_gradient_accumulation_steps = 1
    return trainer
