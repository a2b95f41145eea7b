"""A loss from log-probs that are there already: for trainers that hand over nothing else, and losses left per token."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from .. import checks, objective
from ..arguments import LossArguments, check_loss_arguments
from ..autograd import detached_outputs, once_differentiable
from ..checks_data import check_live_finite, check_mask_values
from ..config import GRPOLossConfig
from ..inputs import TokenData, token_inputs
from ..outputs import GRPOLossOutput

__all__ = [
    "UNCLIPPED_BELOW", "check_alike", "check_tokens", "clipped", "loss_of_logps", "lower_clip", "mean_over",
    "token_losses_of_logps", "widened",
]  # fmt: skip

UNCLIPPED_BELOW: Final = math.nextafter(1.0, 0.0)
"""The greatest epsilon below 1: it stands for those of 1 and more, whose clip at 1 - epsilon no ratio is below."""


def loss_of_logps(name: str, config: GRPOLossConfig, logps: Tensor, mask: Tensor, **arguments: Any) -> GRPOLossOutput:
    """`grpo_loss` of given log-probs `[B, T]`, with per-token results: the same arithmetic, and gradients of `logps`.

    Args:
        name: of the caller, for messages.
        config: without a term of the entropy, which is not here.
        logps: log-probs under the policy, in nats; results are float64 for float64, else float32.
        mask: as `completion_mask` of `grpo_loss`.
        arguments: `advantages`, `old`, `ref`, `weight`, `normalizer`.

    Raises:
        ValueError, TypeError: as `grpo_loss`.
    """
    given, data = _checked(name, config, logps, mask, **arguments)
    live_logps = torch.where(data.live, logps, 0.0).to(data.advantages.dtype)
    tokens, result = _evaluate(config, live_logps, data, given.call.normalizer)
    slope = torch.where(result.coef == 0, 0.0, result.coef * result.scale)
    loss = result.loss + _zero(live_logps, slope).sum()
    return given.output(loss, list(detached_outputs(tokens, result)), return_per_token=True)


def token_losses_of_logps(
    name: str, config: GRPOLossConfig, logps: Tensor, mask: Tensor, **arguments: Any
) -> tuple[Tensor, Tensor | None, Tensor]:
    """`(losses, kl, ratio)` of each token before aggregation, `[B, T]`, 0 where dead; kl is None when beta is 0.

    Losses are differentiable in `logps` for any upstream gradient. Arguments: as `loss_of_logps`; of levels above the
    token "sequence" with a clipped loss.
    """
    plain = dataclasses.replace(config, aggregation="token_sum")
    _, data = _checked(name, plain, logps, mask, **arguments)
    live_logps = torch.where(data.live, logps, 0.0).to(data.advantages.dtype)
    if config.importance_sampling_level == "token":
        _, result = _evaluate(plain, live_logps, data, None)
        losses = result.token_loss + _zero(live_logps, result.coef)
        return losses, result.kl, result.ratio
    lengths = data.live.sum(-1, keepdim=True).clamp(min=1)
    gap = _zero(live_logps, torch.ones_like(live_logps)) if data.old is None else live_logps - data.old
    gap = torch.where(data.live, gap, 0.0).sum(-1, keepdim=True) / lengths
    gap = torch.where(data.live, gap, 0.0)
    # the policy term of a token sees its sequence's ratio as its own
    policy = dataclasses.replace(plain, importance_sampling_level="token", beta=0.0)
    _, result = _evaluate(policy, gap, data._replace(old=torch.zeros_like(gap), ref=None), None)
    losses, kl = result.token_loss + _zero(gap, result.coef), None
    if config.beta != 0 and data.ref is not None:
        apart = data.ref - live_logps
        k3 = torch.expm1(apart) - apart
        kl = torch.where(data.live, k3 * gap.exp() if config.use_bias_correction_kl else k3, 0.0)
        losses = losses + config.beta * kl
    return losses, None if kl is None else kl.detach(), result.ratio


def lower_clip(epsilon: Any) -> Any:
    """epsilon of a clip on ratios as `GRPOLossConfig` takes it, from a project where 1 or more means no lower clip."""
    number = isinstance(epsilon, (int, float)) and not isinstance(epsilon, bool)
    return UNCLIPPED_BELOW if number and epsilon >= 1 else epsilon


def clipped(config: GRPOLossConfig, ratio: Tensor, advantages: Tensor) -> Tensor:
    """Tokens whose clipped loss is above the unclipped one; advantages broadcastable to the ratios."""
    high = (ratio > config.upper_bound) & (advantages > 0)
    if config.epsilon == UNCLIPPED_BELOW:
        return high
    return high | ((ratio < config.lower_bound) & (advantages < 0))


def widened(values: Tensor) -> Tensor:
    """In float32 at least: 16 bits hold no count of tokens, and no small difference of two log-probs."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def mean_over(mask: Tensor, values: Tensor) -> Tensor:
    """Mean of a token tensor over live tokens, in float32 at least; 0 if there is none."""
    live = mask != 0
    return torch.where(live, widened(values), 0.0).sum() / live.sum().clamp(min=1)


def check_tokens(
    function: str, logps: tuple[str, Any], old: tuple[str, Any], mask: tuple[str, Any], **values: Any
) -> None:
    """The arguments of a project's loss, each with its name there, before ours check them under their own.

    Args:
        logps, old, mask: `[B, T]`.
        values: `[B, T]` or `[B, 1]`; None is left out.

    Raises:
        ValueError, TypeError: as `grpo_loss`.
    """
    check_alike(function, *logps, dict([logps, old]), dtypes=checks.FLOATS)
    check_alike(function, *logps, dict([mask]))
    check_alike(
        function, *logps, {name: value for name, value in values.items() if value is not None}, [len(logps[1]), 1]
    )
    check_mask_values(function, *mask)
    check_live_finite(function, *old, mask[1] != 0)


def check_alike(
    function: str, anchor: str, like: object, tensors: dict[str, object], *other_shapes: list[int],
    dtypes: Sequence[torch.dtype] = checks.REALS,
) -> None:  # fmt: skip
    """Tensors with the device and the shape `[B, T]` of the one named `anchor`, by their caller's own names.

    Args:
        other_shapes: which the tensors may have too.

    Raises:
        ValueError, TypeError: as `grpo_loss`.
    """
    like = checks.check_tensor(function, anchor, like, checks.REALS, "numbers")
    shape = checks.shape_of(like)
    if len(shape) != 2:
        raise ValueError(checks.complain(function, anchor, "must be [B, T]", shape, "Add or merge the leading axes."))
    known = {name: checks.check_tensor(function, name, tensor, dtypes, "numbers") for name, tensor in tensors.items()}
    for argument, tensor in known.items():
        if checks.shape_of(tensor) not in (shape, *other_shapes):
            wanted = f"must have the shape of {anchor}, {' or '.join(map(str, (shape, *other_shapes)))}"
            advice = "Reshape it; nothing else is broadcast."
            raise ValueError(checks.complain(function, argument, wanted, checks.shape_of(tensor), advice))
    checks.check_device(function, anchor, like.device, {**known})


def _checked(
    name: str, config: GRPOLossConfig, logps: Tensor, mask: Tensor, *, advantages: Tensor, old: Tensor | None,
    ref: Tensor | None = None, weight: Tensor | None = None, normalizer: float | Tensor | None = None,
) -> tuple[LossArguments, TokenData]:  # fmt: skip
    dtype = torch.float64 if logps.dtype == torch.float64 else torch.float32
    known = torch.zeros_like(logps, dtype=torch.int64)  # one token, which every row has: the mask says what is live
    given = check_loss_arguments(
        name, "torch", "log_probs", logps.device, 1, dtype, known, config, advantages=advantages, completion_mask=mask,
        old_per_token_logps=old, ref_per_token_logps=ref, importance_sampling_ratio=weight, normalizer=normalizer,
        rewards=None, group_size=None, group_ids=None, cu_seqlens=None, rollout_per_token_logps=None,
        temperature=None, entropy_normalizer=None, generator=None,
    )  # fmt: skip
    return given, token_inputs(
        config, given.call, 1, dtype, given.ids, given.mask, given.advantages(), given.old, given.ref
    )


@torch.no_grad()
def _evaluate(
    config: GRPOLossConfig, logps: Tensor, data: TokenData, normalizer: Tensor | None
) -> tuple[objective.TokenInputs, objective.Objective]:
    tokens = objective.TokenInputs(logps.detach(), None, data.live, data.advantages, data.old, data.ref, data.weight)
    return tokens, objective.evaluate(config, tokens, data.layout, normalizer, None)


class _Zero(torch.autograd.Function):
    """0, whose slope is known in closed form: nothing is subtracted, which an infinite log-prob would make NaN."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, slope: Tensor) -> Tensor:
        ctx.save_for_backward(values, slope)
        return torch.zeros_like(values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None]:
        values, slope = ctx.saved_tensors
        return once_differentiable(grad * slope, grad, values), None


def _zero(values: Tensor, slope: Tensor) -> Tensor:
    zero: Tensor = _Zero.apply(values, slope)  # type: ignore[no-untyped-call]
    return zero
