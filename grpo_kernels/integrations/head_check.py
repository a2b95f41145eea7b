"""The proof that a causal LM's logits are those of its head as `causal_lm_head` reads it, and nothing else."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from .. import checks
from .fused_forward import call_in_place_of_head, check_call
from .lm_head import NAME, causal_lm, causal_lm_head, linear_head, softcap_and_scale

_PROVED: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_TOKENS = 4


def check_head_once(model: nn.Module, inputs: Mapping[str, Any]) -> None:
    """`check_head`, unless the model has passed it: of four tokens, or of `inputs` for a multimodal model.

    Such a model may refuse text alone; what it is about to be called with suits it.
    """
    base = causal_lm(model)
    if base in _PROVED:
        return
    if base.config.get_text_config() is base.config:
        check_head(model)
    elif set(inputs) == {"input_ids", "attention_mask"}:
        check_head(model, {name: value[:1] for name, value in inputs.items()})
    else:
        check_head(model, inputs)


def check_head(model: nn.Module, inputs: Mapping[str, Any] | None = None) -> None:
    """Prove that the model's logits are `causal_lm_head` of its backbone's output, and nothing else.

    One forward, in which hooks leave the head four tokens, compare what it makes of them with the linear map, and put
    a ramp from -60 to 60 in its place, which shows every later cap, scale or cut. Where the forward goes around the
    backbone (OPT calls the decoder inside) one more finds what the backbone returns. The random state is left as it
    was. A loss of a model that passed does not check it again.

    Args:
        model: a transformers causal LM, inside the wrappers that it runs in (DDP, FSDP, PEFT): all processes call this.
        inputs: arguments of the forward, whole batches; None: four tokens of text, which some multimodal models refuse.

    Raises:
        TypeError, ValueError: as `causal_lm_head`.
        ValueError: the model's logits are something else; ask for those and call `grpo_loss`.
    """
    check_call("check_head", model)
    base = causal_lm(model)
    linear_head(base)
    if inputs is None:
        ids = torch.arange(_TOKENS, device=base.device)[None]  # more than one: that of padding is 0 in some models
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    seen = _Seen(base)
    with torch.no_grad():
        with _same_random_state(base.device), seen.watching(), torch.compiler.set_stance("force_eager"):
            logits = model(**{**inputs, "use_cache": False}).logits
        if not seen.backbone:
            with _same_random_state(base.device):
                call_in_place_of_head("check_head", model, seen.keep, inputs)
    wrong = seen.fault(logits)
    if wrong is not None:
        requirement = "must make its logits of the backbone's output by a linear head, a scale and a softcap alone"
        advice = f"Call per_token_logps or grpo_loss on the model's own logits: {wrong}."
        raise ValueError(checks.complain(NAME, "model", requirement, type(base).__name__, advice))
    _PROVED.add(base)


class _Seen:
    """What hooks see in one forward of this thread, and whether the head explains it."""

    def __init__(self, base: PreTrainedModel) -> None:
        self._base = base
        self.backbone: list[Tensor] = []
        self._entered: list[Tensor] = []
        self._linear: list[Tensor] = []
        self._returned: list[Tensor] = []
        self._biased = False
        self._same_forward = True

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """The hooks; the last of each kind, so that they see what other hooks made."""
        thread = threading.get_ident()

        def mine(see: Callable[..., Any]) -> Callable[..., Any]:
            return lambda *seen: see(*seen) if threading.get_ident() == thread else None

        head = self._base.get_output_embeddings()
        hooks = [
            self._base.base_model.register_forward_hook(mine(lambda _module, _inputs, output: self._leaves(output))),
            head.register_forward_pre_hook(mine(self._enters)),
            head.register_forward_hook(mine(self._ramp)),
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def keep(self, output: Any, _kwargs: Mapping[str, Any]) -> Any:
        """Of a forward that ends after the backbone."""
        self._same_forward = False
        self._leaves(output)
        return output

    def _leaves(self, output: Any) -> None:
        self.backbone.append(output.last_hidden_state)

    def _enters(self, _module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden = inputs[0]
        few = hidden[:1, -_TOKENS:] if hidden.ndim == 3 else hidden
        head = causal_lm_head(self._base)  # here, where sharded parameters are whole
        self._biased = head.bias is not None
        self._entered.append(hidden)
        self._linear.append(F.linear(few.to(head.weight.device, head.weight.dtype), head.weight, head.bias))
        return few, *inputs[1:]

    def _ramp(self, _module: nn.Module, _inputs: tuple[Any, ...], output: Tensor) -> Tensor:
        self._returned.append(output)
        return _ramp_like(output).expand_as(output)

    def fault(self, logits: Tensor) -> str | None:
        """What the head and its transform do not explain; None: nothing."""
        if not len(self.backbone) == len(self._returned) == 1:
            return f"its forward calls the backbone {len(self.backbone)} and the head {len(self._returned)} times"
        entered, hidden, returned = self._entered[0], self.backbone[0], self._returned[0]
        half = any(values.dtype in (torch.float16, torch.bfloat16) for values in (hidden, entered, returned))
        if not _close(returned, self._linear[0].to(returned.device), half):
            return f"{type(self._base.get_output_embeddings()).__name__} does more than multiply by its weight"
        softcap, scale = softcap_and_scale(self._base)
        hidden = hidden.to(entered.device)
        exact = entered.shape == hidden.shape and _equal(entered, hidden)
        if not exact:
            if scale != 1.0 and not self._biased and _close(entered, hidden * scale, half):
                scale = 1.0  # MiniCPM3 scales what enters the head, which is the same
            elif self._same_forward or not _close(entered, hidden, half):
                return "what enters its head is not what the backbone returns"
        expected = _ramp_like(returned).double() * scale
        if softcap is not None:
            expected = softcap * torch.tanh(expected / softcap)
        if logits.shape[-1] != len(expected) or not _close(logits, expected.expand(logits.shape), half):
            return f"they are not the head's output by the config's scale ({scale:g}) and softcap ({softcap})"
        return None


def _ramp_like(output: Tensor) -> Tensor:
    return torch.linspace(-60.0, 60.0, output.shape[-1], device=output.device).to(output.dtype)


def _equal(a: Tensor, b: Tensor) -> bool:
    """Of NaN too: processes that wait for another's weights hold anything."""
    return torch.allclose(a.float(), b.float(), rtol=0.0, atol=0.0, equal_nan=True)


def _close(a: Tensor, b: Tensor, half: bool) -> bool:
    """To the rounding of the largest number, in half precision or better."""
    if a.shape != b.shape:
        return False
    largest = float(b.nan_to_num(0.0, 0.0, 0.0).abs().max())
    rounding = (2e-2 if half else 1e-4) * largest
    return torch.allclose(a.double(), b.double().to(a.device), rtol=0.0, atol=rounding, equal_nan=True)


@contextlib.contextmanager
def _same_random_state(device: torch.device) -> Iterator[None]:
    devices = [] if device.type in ("cpu", "meta") else [device]
    with torch.random.fork_rng(devices, device_type="cuda" if not devices else device.type):
        yield
