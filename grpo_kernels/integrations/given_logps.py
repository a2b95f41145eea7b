"""A loss from log-probs that are there already: for trainers that hand over nothing else, and losses left per token."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from .. import objective
from ..arguments import LossArguments, check_loss_arguments
from ..autograd import detached_outputs
from ..config import GRPOLossConfig
from ..inputs import TokenData, token_inputs
from ..outputs import GRPOLossOutput

__all__ = ["loss_of_logps", "mean_over", "token_losses_of_logps"]


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
    loss = result.loss + (_zero(live_logps) * slope).sum()
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
        losses = result.token_loss + _zero(live_logps) * result.coef
        return losses, result.kl, result.ratio
    lengths = data.live.sum(-1, keepdim=True).clamp(min=1)
    gap = _zero(live_logps) if data.old is None else live_logps - data.old
    gap = torch.where(data.live, gap, 0.0).sum(-1, keepdim=True) / lengths
    gap = torch.where(data.live, gap, 0.0)
    # the policy term of a token sees its sequence's ratio as its own
    policy = dataclasses.replace(plain, importance_sampling_level="token", beta=0.0)
    _, result = _evaluate(policy, gap, data._replace(old=torch.zeros_like(gap), ref=None), None)
    losses, kl = result.token_loss + _zero(gap) * result.coef, None
    if config.beta != 0 and data.ref is not None:
        apart = data.ref - live_logps
        k3 = torch.expm1(apart) - apart
        kl = torch.where(data.live, k3 * gap.exp() if config.use_bias_correction_kl else k3, 0.0)
        losses = losses + config.beta * kl
    return losses, None if kl is None else kl.detach(), result.ratio


def mean_over(mask: Tensor, values: Tensor) -> Tensor:
    """Mean of a token tensor over live tokens; 0 if there is none."""
    live = mask != 0
    return torch.where(live, values, 0.0).sum() / live.sum().clamp(min=1)


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


def _zero(values: Tensor) -> Tensor:
    """0 with the derivative of `values`: what carries a slope that is known in closed form."""
    return values - values.detach()
