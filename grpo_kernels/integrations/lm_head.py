"""The output head of a transformers causal LM: its parameters, and what the model does to its logits afterwards."""

from __future__ import annotations

from typing import Any, NamedTuple

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
    head = linear_head(base)
    weight, bias = head.weight, head.bias
    if type(weight).__name__ == "DTensor":  # FSDP2; differentiable
        weight = weight.full_tensor()
        bias = None if bias is None else bias.full_tensor()
    if weight.ndim != 2 or weight.numel() == 0:
        got = checks.shape_of(weight)
        raise ValueError(checks.complain(NAME, "weight", "must be a matrix [V, H]", got, _SHARDED))
    return CausalLMHead(weight, bias, *softcap_and_scale(base))


def linear_head(base: PreTrainedModel) -> Any:
    """The module that holds weight and bias.

    Raises:
        TypeError, ValueError: as `causal_lm_head`, but for sharded weights.
    """
    if getattr(base.config, "is_encoder_decoder", False):
        raise ValueError(
            checks.complain(NAME, "model", "must be decoder-only", type(base).__name__, "Call linear_grpo_loss.")
        )
    if base.base_model is base:
        advice = "Call linear_grpo_loss on its last hidden state."
        raise TypeError(checks.complain(NAME, "model", "must have a backbone", type(base).__name__, advice))
    head: Any = base.get_output_embeddings()
    adapter = hasattr(head, "base_layer") or hasattr(head, "token_adapter")  # PEFT's, of the matrix or of some tokens
    # modules_to_save: the attributes of the wrapper are those of the active copy
    inner = head if adapter else getattr(head, "original_module", head)
    if not adapter and not (isinstance(inner, nn.Linear) and inner.weight.is_floating_point()):
        got = type(inner).__name__
        advice = "Call per_token_logps or grpo_loss on the model's own logits."
        raise TypeError(checks.complain(NAME, "model", "must have a linear head in floating point", got, advice))
    parameters = {name.split(".")[0] for name, _ in inner.named_parameters()}
    if adapter or parameters - {"weight", "bias", "parametrizations"}:
        raise ValueError(
            checks.complain(
                NAME, "model", "must have no adapter on its head: the weight is read directly, so that the adapter "
                "would never be trained", type(head).__name__,
                "Take the head out of target_modules and trainable_token_indices (tied embeddings carry it along), "
                "or put 'lm_head' into modules_to_save, which trains it whole.",
            )
        )  # fmt: skip
    return head


def softcap_and_scale(base: PreTrainedModel) -> tuple[float | None, float]:
    """`(softcap, logit_scale)` by the model's text config."""
    config: Any = base.config.get_text_config()
    scale = 1.0
    for field in ("logit_scale", "output_multiplier", "lm_head_multiplier"):
        if getattr(config, field, None) is not None:
            return getattr(config, "final_logit_softcapping", None), float(getattr(config, field))
    if getattr(config, "logits_scaling", None) is not None:
        multiplies = config.model_type == "hyperclovax"
        scale = float(config.logits_scaling) if multiplies else 1.0 / float(config.logits_scaling)
    return getattr(config, "final_logit_softcapping", None), scale
