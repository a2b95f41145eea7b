"""The output head of a transformers causal LM: its parameters, and what the model does to its logits afterwards."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .. import checks

NAME = "causal_lm_head"
_SHARDED = (
    "This looks like a sharded parameter; gather first: deepspeed.zero.GatheredParameters under ZeRO-3, or call the "
    "loss inside the model's forward, as causal_lm_grpo_loss and FusedGRPOTrainer do."
)


class CausalLMHead(NamedTuple):
    """`logits = cap(logit_scale * (hidden @ weight.T + bias))`: what the functions of this library take."""

    weight: Tensor
    """`[V, H]`: the parameter itself, tied or not; full where it was a DTensor."""
    bias: Tensor | None
    softcap: float | None
    logit_scale: float


def causal_lm(model: nn.Module) -> PreTrainedModel:
    """The transformers model inside wrappers: DDP, FSDP, DeepSpeed, torch.compile, PEFT.

    Raises:
        TypeError: there is none.
    """
    inner: Any = model
    while not isinstance(inner, PreTrainedModel):
        if hasattr(inner, "get_base_model"):
            inner = inner.get_base_model()
        elif isinstance(getattr(inner, "_orig_mod", None), nn.Module):
            inner = inner._orig_mod
        elif isinstance(getattr(inner, "module", None), nn.Module):
            inner = inner.module
        else:
            advice = "Pass a model of transformers, wrapped or not; for another one call linear_grpo_loss."
            raise TypeError(checks.complain(NAME, "model", "must be a PreTrainedModel", type(model).__name__, advice))
    return inner


def causal_lm_head(model: nn.Module) -> CausalLMHead:
    """The head of a causal LM, as `model.forward` applies it.

    Knows Gemma's `final_logit_softcapping`, Cohere's `logit_scale`, Falcon-H1's `lm_head_multiplier`, Granite's
    `logits_scaling` (a divisor; HyperCLOVA X multiplies by it) and `output_multiplier`, as TRL 1.16 reads them.
    `check_head` proves that a model does nothing else.

    Args:
        model: a transformers causal LM, or a wrapper of one.

    Raises:
        TypeError: no transformers model, or a head that is not linear.
        ValueError: an adapter on the head, a sharded weight, an encoder-decoder.
    """
    base = causal_lm(model)
    head = _linear_head(base)
    weight, bias = head.weight, head.bias
    if type(weight).__name__ == "DTensor":  # FSDP2; differentiable
        weight = weight.full_tensor()
        bias = None if bias is None else bias.full_tensor()
    if weight.ndim != 2 or weight.numel() == 0:
        got = checks.shape_of(weight)
        raise ValueError(checks.complain(NAME, "weight", "must be a matrix [V, H]", got, _SHARDED))
    return CausalLMHead(weight, bias, *_transform(base.config.get_text_config()))


def _linear_head(base: PreTrainedModel) -> Any:
    """The module that holds weight and bias."""
    if getattr(base.config, "is_encoder_decoder", False):
        raise ValueError(
            checks.complain(NAME, "model", "must be decoder-only", type(base).__name__, "Call linear_grpo_loss.")
        )
    if base.base_model is base:
        advice = "Call linear_grpo_loss on its last hidden state."
        raise TypeError(checks.complain(NAME, "model", "must have a backbone", type(base).__name__, advice))
    head: Any = base.get_output_embeddings()
    if hasattr(head, "base_layer"):
        raise ValueError(
            checks.complain(
                NAME, "model", "must have no adapter on its head: the weight is read directly, so that the adapter "
                "would never be trained", type(head).__name__,
                "Take 'lm_head' out of target_modules, or put it into modules_to_save, which trains it whole.",
            )
        )  # fmt: skip
    inner = getattr(head, "original_module", head)  # PEFT's modules_to_save: attributes are those of the active one
    if not isinstance(inner, nn.Linear) or not inner.weight.is_floating_point():
        got = type(inner).__name__
        advice = "Call per_token_logps or grpo_loss on the model's own logits."
        raise TypeError(checks.complain(NAME, "model", "must have a linear head in floating point", got, advice))
    return head


def _transform(config: Any) -> tuple[float | None, float]:
    """`(softcap, logit_scale)` of a text config."""
    scale = 1.0
    for field in ("logit_scale", "output_multiplier", "lm_head_multiplier"):
        if getattr(config, field, None) is not None:
            return getattr(config, "final_logit_softcapping", None), float(getattr(config, field))
    if getattr(config, "logits_scaling", None) is not None:
        multiplies = config.model_type == "hyperclovax"
        scale = float(config.logits_scaling) if multiplies else 1.0 / float(config.logits_scaling)
    return getattr(config, "final_logit_softcapping", None), scale


def check_head(model: nn.Module) -> None:
    """Prove on four tokens that the model's logits are `causal_lm_head` of its backbone's output, and nothing else.

    One forward: hooks see what the head gets, and put a ramp from -60 to 60 in place of what it returns, which shows
    every later cap, scale or cut. The random state is left as it was.

    Raises:
        ValueError: the model's logits are something else; ask for those and call `grpo_loss`.
    """
    base = causal_lm(model)
    _linear_head(base)
    backbone: list[Any] = []
    head: list[Any] = []

    def ramp(_module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
        values = torch.linspace(-60.0, 60.0, output.shape[-1], device=output.device).to(output.dtype)
        head.extend((inputs[0], values, _transform(base.config.get_text_config())))
        return values.expand_as(output)

    hooks = [
        base.base_model.register_forward_hook(lambda _module, _inputs, output: backbone.append(output)),
        base.get_output_embeddings().register_forward_hook(ramp),
    ]
    device = base.device
    try:
        with torch.no_grad(), _same_random_state(device):
            ids = torch.arange(4, device=device)[None]  # more than one: that of padding is 0 in some models
            logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
    finally:
        for hook in hooks:
            hook.remove()
    if not (len(head) == 3 and len(backbone) == 1 and _explained(logits, backbone[0].last_hidden_state, *head)):
        requirement = "must make its logits of the backbone's output by a linear head, a scale and a softcap alone"
        advice = "Call per_token_logps or grpo_loss on the model's own logits."
        raise ValueError(checks.complain(NAME, "model", requirement, type(base).__name__, advice))


def _explained(
    logits: Tensor, last_hidden: Tensor, given: Tensor, returned: Tensor, transform: tuple[float | None, float]
) -> bool:
    """Whether the head got the backbone's output, and the logits are what `transform` makes of what it returned."""
    softcap, logit_scale = transform
    expected = returned.double() * logit_scale
    if softcap is not None:
        expected = softcap * torch.tanh(expected / softcap)
    if not torch.equal(given.float(), last_hidden.float()) or logits.shape[-1] != len(expected):
        return False
    half = returned.dtype in (torch.float16, torch.bfloat16)
    rounding = (2e-2 if half else 1e-4) * expected.abs().max()
    return bool(((logits.double() - expected).abs() <= rounding).all())


@contextlib.contextmanager
def _same_random_state(device: torch.device) -> Iterator[None]:
    devices = [] if device.type in ("cpu", "meta") else [device]
    with torch.random.fork_rng(devices, device_type="cuda" if not devices else device.type):
        yield
