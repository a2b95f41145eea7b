"""Row ops for a slab of logits that nobody else needs: over the logits, with no temporary but a few rows.

A row's bits depend on that row alone, as in rows.py. Here the target's column stays out of the sum, as in the Triton
kernels.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .limits import BLOCK, exp_is_zero_below, masked_below
from .schema import DEAD

_CHUNK = 1 << 19  # elements that stay in cache over the passes


def row_weights_(
    logits: Tensor, targets: Tensor, temperature: Tensor, logit_scale: float, entropy: bool
) -> tuple[Tensor, ...]:
    """The statistics of schema.py for logits `[R, V]` of their dtype; overwrites them by exp(y), the target's by 0."""
    column = targets.clamp(min=0).unsqueeze(1)
    x_target = logits.gather(1, column)
    logits.scatter_(1, column, -torch.inf)
    heat = temperature if temperature.ndim == 0 else temperature.unsqueeze(1)
    row_max, others, energy = (torch.empty_like(x_target) for _ in range(3))
    for rows in _blocks(logits):
        x, own_heat = logits[rows], heat if heat.ndim == 0 else heat[rows]
        top = torch.maximum(x.amax(1, keepdim=True), x_target[rows])
        y = _exponents_(x, top, own_heat, logit_scale)
        weights = y.exp() if entropy else y.exp_()
        row_max[rows], others[rows] = top, _sum(weights)
        if entropy:
            # the floor keeps 0 * -inf away
            energy[rows] = _sum(y.clamp_(min=exp_is_zero_below(x.dtype)).mul_(weights))
            x.copy_(weights)
    # a row of nothing but what stands for -inf is no distribution
    others.masked_fill_(row_max <= masked_below(logits.dtype), torch.nan)
    x_target.masked_fill_(x_target <= masked_below(logits.dtype), -torch.inf)
    y_target = _exponents_(x_target, row_max, heat, logit_scale)
    target_weight = y_target.exp()
    total = others + target_weight
    log_total = torch.where(y_target == 0, torch.log1p(others), torch.log(total))
    stats = [y_target - log_total, log_total, row_max * (logit_scale / heat) + log_total, row_max, total, others]
    if entropy:
        # H = log S + sum p (-y): two terms >= 0, so nothing cancels
        energy += target_weight * y_target.clamp(min=exp_is_zero_below(logits.dtype))
        stats[1] = log_total - energy / total
    dead = targets == DEAD
    stats = [t.squeeze(1).masked_fill(dead, 0.0) for t in stats]
    if not entropy:
        stats[1] = logits.new_empty(0)
    return tuple(stats)


def _blocks(logits: Tensor) -> Iterator[slice]:
    height = max(1, _CHUNK // logits.shape[1])
    return (slice(start, start + height) for start in range(0, logits.shape[0], height))


def _exponents_(x: Tensor, row_max: Tensor, temperature: Tensor, logit_scale: float) -> Tensor:
    """y = (x - row_max) * logit_scale / temperature, over x."""
    y = x.sub_(row_max)
    if logit_scale != 1.0:
        y.mul_(logit_scale)
    if temperature.ndim > 0 or temperature.device.type != "cpu" or temperature.item() != 1.0:
        y.div_(temperature)
    return y


def _sum(values: Tensor) -> Tensor:
    """Sum of each row over fixed blocks, so that float32 loses no more than an ulp or two: (R, V) -> (R, 1)."""
    whole = values.shape[1] // BLOCK * BLOCK
    total = values[:, whole:].sum(1, keepdim=True)
    if whole:
        total += values[:, :whole].unflatten(1, (-1, BLOCK)).sum(-1).sum(-1, keepdim=True)
    return total


def overwrite_with_gradient(
    logits: Tensor, targets: Tensor, temperature: Tensor, logit_scale: float, row_max: Tensor, sum_exp: Tensor,
    sum_others: Tensor, grad_logps: Tensor,
) -> None:  # fmt: skip
    """d/dlogits of sum(grad_logps * logps) over logits `[R, V]` of the statistics' dtype; targets as in schema.py."""
    slope = logit_scale / temperature
    factor = (-grad_logps / sum_exp * slope).unsqueeze(1)
    target_grad = (grad_logps * (sum_others / sum_exp) * slope).unsqueeze(1)
    column, elsewhere = targets.clamp(min=0).unsqueeze(1), (targets < 0).unsqueeze(1)
    removed = logits.gather(1, column) <= masked_below(logits.dtype)
    for rows in _blocks(logits):
        heat = temperature if temperature.ndim == 0 else temperature[rows].unsqueeze(1)
        grad = _exponents_(logits[rows], row_max[rows].unsqueeze(1), heat, logit_scale).exp_()
        gone = removed[rows] & (grad.gather(1, column[rows]) == 0)
        grad.mul_(factor[rows])
        of_target = torch.where(elsewhere[rows], grad.gather(1, column[rows]), target_grad[rows])
        grad.scatter_(1, column[rows], torch.where(gone, 0.0, of_target))
    logits.index_fill_(0, ((grad_logps == 0) | (targets == DEAD)).nonzero().squeeze(1), 0.0)
