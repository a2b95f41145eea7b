"""The loss of any transformers causal LM, from its hidden states: the logits never exist."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from .. import checks
from ..config import GRPOLossConfig
from ..functional_linear import linear_grpo_loss
from ..outputs import GRPOLossOutput
from .fused_forward import call_in_place_of_head
from .head_check import check_head, check_head_once
from .lm_head import CausalLMHead, causal_lm, causal_lm_head

__all__ = ["CausalLMHead", "causal_lm_grpo_loss", "causal_lm_head", "check_head", "with_head"]

_DEFAULT_CONFIG = GRPOLossConfig()


def with_head(config: GRPOLossConfig, head: CausalLMHead) -> GRPOLossConfig:
    """The config with the head's own softcap and logit_scale.

    Raises:
        ValueError: the config sets another one.
    """
    for field, usual in (("softcap", None), ("logit_scale", 1.0)):
        given, own = getattr(config, field), getattr(head, field)
        if given not in (usual, own):
            advice = "Leave it out: the model's own is taken."
            raise ValueError(checks.complain("causal_lm_grpo_loss", field, f"is {own} in this model", given, advice))
    return dataclasses.replace(config, softcap=head.softcap, logit_scale=head.logit_scale)


def causal_lm_grpo_loss(
    model: nn.Module,
    input_ids: Tensor,
    attention_mask: Tensor,
    *,
    completion_mask: Tensor,
    config: GRPOLossConfig = _DEFAULT_CONFIG,
    model_inputs: Mapping[str, Any] | None = None,
    **loss_arguments: Any,
) -> GRPOLossOutput:
    """`linear_grpo_loss` of the last T tokens of `input_ids`, computed inside the model's forward.

    Args:
        model: a transformers causal LM, also inside DDP, FSDP or PEFT. Its own softcap and logit_scale are applied. On
            the first call one more forward without a graph proves that its head is known (`check_head`): of four
            tokens, or of this batch if the model is multimodal.
        input_ids: `[B, L]`, prompts and completions; as in TRL prompts are padded on the left.
        attention_mask: `[B, L]`.
        completion_mask: `[B, T]`, T < L: which of the last T tokens count. Every other token tensor has this shape.
        config: which loss.
        model_inputs: further arguments of the forward (`pixel_values`, `position_ids`), passed on as they are.
        loss_arguments: those of `linear_grpo_loss` (`advantages`, `old_per_token_logps`, `normalizer`, ...).

    Returns:
        GRPOLossOutput, as `grpo_loss`.

    Raises:
        ValueError, TypeError: before the forward for what concerns masks and head, else as `linear_grpo_loss`.
    """
    name = "causal_lm_grpo_loss"
    if completion_mask.ndim != 2 or input_ids.ndim != 2 or not 0 < completion_mask.shape[1] < input_ids.shape[1]:
        got = f"{checks.shape_of(completion_mask)} for input_ids {checks.shape_of(input_ids)}"
        advice = "T counts the tokens of the completions; the first token of a sequence has nothing before it."
        raise ValueError(checks.complain(name, "completion_mask", "must be [B, T] with 0 < T < L", got, advice))
    if attention_mask.shape != input_ids.shape:
        got = f"{checks.shape_of(attention_mask)} with input_ids {checks.shape_of(input_ids)}"
        advice = "Give one value per token; nothing is broadcast."
        raise ValueError(checks.complain(name, "attention_mask", "must have the shape of input_ids", got, advice))
    base = causal_lm(model)
    _check_model_inputs(name, base, model_inputs or {})
    inputs = {"input_ids": input_ids, "attention_mask": attention_mask, **(model_inputs or {})}
    check_head_once(model, inputs)
    width = completion_mask.shape[1]

    def loss(outputs: Any, _kwargs: Mapping[str, Any]) -> GRPOLossOutput:
        head = causal_lm_head(base)  # looked up here: sharded parameters are whole inside the forward alone
        hidden = outputs.last_hidden_state[:, :-1][:, -width:].to(head.weight.device)
        return linear_grpo_loss(
            hidden, head.weight, input_ids[:, -width:], bias=head.bias, config=with_head(config, head),
            completion_mask=completion_mask, **loss_arguments,
        )  # fmt: skip

    out: GRPOLossOutput = call_in_place_of_head(name, model, loss, inputs)
    return out


def _check_model_inputs(function: str, base: Any, model_inputs: Mapping[str, Any]) -> None:
    """None that only the part of the forward would see which this loss takes the place of, and none twice."""
    for argument in ("input_ids", "attention_mask"):
        if argument in model_inputs:
            got = f"shape {list(getattr(model_inputs[argument], 'shape', []))}"
            advice = f"Give it as {argument}."
            raise ValueError(checks.complain(function, argument, "must be left out of model_inputs", got, advice))
    outer, inner = _arguments_of(type(base)), _arguments_of(type(base.base_model))
    for argument in model_inputs:
        if argument in outer - inner or argument in ("return_dict", "output_router_logits"):
            wanted = "must be left out of model_inputs"
            advice = "The loss takes the place of the head, which alone reads it; auxiliary losses are not added here."
            raise ValueError(checks.complain(function, argument, wanted, repr(model_inputs[argument]), advice))


def _arguments_of(model: type) -> set[str]:
    """Of its forward and of those that it overrides: one that adds an argument may hide the others behind **kwargs."""
    forwards = [vars(cls)["forward"] for cls in model.__mro__ if "forward" in vars(cls)]
    return {name for forward in forwards for name in inspect.signature(forward).parameters}
