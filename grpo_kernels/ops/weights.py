"""Row statistics that leave the weights exp(y) where the logits were, and the gradient from those weights.

For a slab of logits that nobody else needs: half the passes of row_stats and row_grad, and no temporary but a few rows.
A row's bits depend on that row alone, as in rows.py. Here the target's column stays out of the sum, as in the Triton
kernels; its slot holds 0, or REMOVED where the target's logit stands for -inf.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .limits import BLOCK, exp_is_zero_below, masked_below
from .schema import DEAD

_CHUNK = 1 << 18  # elements that stay in cache over the passes
_REMOVED = -1.0


def row_weights_(
    logits: Tensor, targets: Tensor, temperature: Tensor, logit_scale: float, entropy: bool
) -> tuple[Tensor, ...]:
    """The statistics of schema.py, logits `[R, V]` of the statistics' dtype; overwrites them by exp(y)."""
    outputs = torch.zeros((6, targets.shape[0]), dtype=logits.dtype, device=logits.device)
    column = targets.clamp(min=0).unsqueeze(1)
    for rows in _blocks(logits):
        heat = temperature if temperature.ndim == 0 else temperature[rows].unsqueeze(1)
        outputs[:, rows] = _weigh(logits[rows], column[rows], heat, logit_scale, entropy)
    outputs.masked_fill_(targets == DEAD, 0.0)
    stats = [row.clone() for row in outputs.unbind()]  # outputs of an op may not share storage
    if not entropy:
        stats[1] = outputs.new_empty(0)
    return tuple(stats)


def _blocks(logits: Tensor) -> Iterator[slice]:
    height = max(1, _CHUNK // logits.shape[1])
    return (slice(start, start + height) for start in range(0, logits.shape[0], height))


def _weigh(x: Tensor, column: Tensor, temperature: Tensor, logit_scale: float, entropy: bool) -> Tensor:
    row_max = x.amax(1, keepdim=True)
    # a row of nothing but what stands for -inf is no distribution
    row_max.masked_fill_(row_max <= masked_below(x.dtype), torch.nan)
    removed = x.gather(1, column) <= masked_below(x.dtype)
    y = _exponents_(x, row_max, temperature, logit_scale)
    y_target = y.gather(1, column)
    weights = y.exp() if entropy else y.exp_()
    target_weight = weights.gather(1, column)
    weights.scatter_(1, column, 0.0)
    others = _sum(weights)
    total = others + target_weight
    log_total = torch.where(y_target == 0, torch.log1p(others), torch.log(total))
    spread = log_total
    if entropy:
        # H = log S + sum p (-y): two terms >= 0, so nothing cancels. The floor keeps 0 * -inf away.
        floor = exp_is_zero_below(x.dtype)
        energy = _sum(y.clamp_(min=floor).mul_(weights)) + target_weight * y_target.clamp(min=floor)
        spread = log_total - energy / total
        x.copy_(weights)
    x.scatter_(1, column, torch.where(removed, _REMOVED, 0.0).to(x.dtype))
    lse = row_max * (logit_scale / temperature) + log_total
    return torch.stack([t.squeeze(1) for t in (y_target - log_total, spread, lse, row_max, total, others)])


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


def row_weights_grad_(
    weights: Tensor, targets: Tensor, temperature: Tensor, logit_scale: float, sum_exp: Tensor, sum_others: Tensor,
    grad_logps: Tensor,
) -> None:  # fmt: skip
    """d/dlogits of sum(grad_logps * logps) over what row_weights_ left; rows with grad_logps 0 become 0."""
    per_row = _per_row(targets, temperature, logit_scale, sum_exp, sum_others, grad_logps)
    removed = weights.gather(1, per_row[0]) == _REMOVED
    for rows in _blocks(weights):
        column, factor, target_grad = (t[rows] for t in per_row)
        _finish(weights[rows], column, factor, target_grad, removed[rows])
    _clear(weights, targets, grad_logps)


def overwrite_with_gradient(
    logits: Tensor, targets: Tensor, temperature: Tensor, logit_scale: float, row_max: Tensor, sum_exp: Tensor,
    sum_others: Tensor, grad_logps: Tensor,
) -> None:  # fmt: skip
    """The same over logits `[R, V]` themselves, of the statistics' dtype; targets may be ELSEWHERE (schema.py)."""
    per_row = _per_row(targets, temperature, logit_scale, sum_exp, sum_others, grad_logps)
    removed = logits.gather(1, per_row[0]) <= masked_below(logits.dtype)
    for rows in _blocks(logits):
        heat = temperature if temperature.ndim == 0 else temperature[rows].unsqueeze(1)
        weights = _exponents_(logits[rows], row_max[rows].unsqueeze(1), heat, logit_scale).exp_()
        column, factor, target_grad = (t[rows] for t in per_row)
        gone = removed[rows] & (weights.gather(1, column) == 0)
        _finish(weights, column, factor, target_grad, gone, (targets[rows] < 0).unsqueeze(1))
    _clear(logits, targets, grad_logps)


def _per_row(
    targets: Tensor, temperature: Tensor, logit_scale: float, sum_exp: Tensor, sum_others: Tensor, grad_logps: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The target's column, the factor of every other column's weight, the target's gradient; (R, 1) each."""
    slope = logit_scale / temperature
    factor = -grad_logps / sum_exp * slope
    target_grad = grad_logps * (sum_others / sum_exp) * slope
    return targets.clamp(min=0).unsqueeze(1), factor.unsqueeze(1), target_grad.unsqueeze(1)


def _finish(
    weights: Tensor, column: Tensor, factor: Tensor, target_grad: Tensor, removed: Tensor,
    elsewhere: Tensor | None = None,
) -> None:  # fmt: skip
    """The gradient over the weights."""
    weights.mul_(factor)
    target_grad = torch.where(removed, 0.0, target_grad)
    if elsewhere is not None:
        target_grad = torch.where(elsewhere, weights.gather(1, column), target_grad)
    weights.scatter_(1, column, target_grad)


def _clear(grad: Tensor, targets: Tensor, grad_logps: Tensor) -> None:
    grad.index_fill_(0, ((grad_logps == 0) | (targets == DEAD)).nonzero().squeeze(1), 0.0)
