"""Row statistics and their gradient in plain torch, a few rows at a time: any device, any dtype, no `[N, V]` temporary.

A row's bits depend on that row alone: functions that torch computes alike at every position (`exp`; its `exp2` differs
between vector body and tail), maxima, and sums over fixed blocks, so that neither the height of a chunk nor the number
of threads changes an order of addition.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .limits import BLOCK, exp_is_zero_below, masked_below
from .schema import DEAD, stats_dtype
from .weights import overwrite_with_gradient

_CHUNK_CPU = 1 << 19  # elements of one chunk: 2 MiB of float32, so that its passes stay in cache
_CHUNK_DEVICE = 1 << 25
_MAX_ROWS_DEVICE = 1024


class Rows(NamedTuple):
    """The part of a call that concerns one chunk; see schema.py for the transform."""

    x: Tensor  # (R, V) in the logits' dtype
    target: Tensor  # (R, 1) int64
    temperature: Tensor  # 0-d or (R, 1)
    logit_scale: float
    softcap: float | None

    def slope(self) -> Tensor:
        """k = d z / d c(x), in the dtype of the statistics."""
        return (self.logit_scale if self.softcap is None else 1.0) / self.temperature

    def capped(self, dtype: torch.dtype) -> Tensor:
        """c(x) in a buffer of its own, (R, P): masked columns and those beyond V, up to a whole block, hold -inf."""
        height, width = self.x.shape
        capped = self.x.new_empty((height, width if width <= BLOCK else -(-width // BLOCK) * BLOCK), dtype=dtype)
        capped[:, width:] = -torch.inf
        inside = capped[:, :width].copy_(self.x)
        if self.softcap is not None:
            inside.mul_(self.logit_scale).div_(self.softcap).tanh_().mul_(self.softcap)
            inside.masked_fill_(self.x <= masked_below(self.x.dtype), -torch.inf)
            inside.masked_fill_(self.x == torch.inf, torch.nan)  # the cap would make it an ordinary logit
        elif self.x.dtype == torch.float16:  # its lowest number would count under a high temperature
            inside.masked_fill_(self.x <= masked_below(self.x.dtype), -torch.inf)
        return capped

    def exponents(self, capped: Tensor, row_max: Tensor) -> Tensor:
        """y = (c(x) - row_max) * k, over c(x)."""
        y = capped.sub_(row_max)
        if self.softcap is None and self.logit_scale != 1.0:
            y.mul_(self.logit_scale)
        if self.temperature.ndim == 0 and self.temperature.device.type == "cpu" and self.temperature.item() == 1.0:
            return y
        return y.div_(self.temperature)


def _blocks(values: Tensor) -> Tensor:
    height, width = values.shape
    return values.view(height, -1, min(width, BLOCK))


def _block_sum(values: Tensor) -> Tensor:
    """Sum of each row, (R, P) -> (R, 1), over fixed blocks."""
    return _blocks(values).sum(-1).sum(-1, keepdim=True)


def _block_max(values: Tensor) -> tuple[Tensor, Tensor]:
    """Largest value of each row and the first column that holds it, (R, P) -> (R, 1) each; faster than max(dim)."""
    blocks = _blocks(values)
    row_max, block = blocks.amax(-1).max(-1, keepdim=True)
    column = blocks.gather(1, block.unsqueeze(2).expand(-1, -1, blocks.shape[2])).argmax(-1)
    return row_max, block * blocks.shape[2] + column


def row_stats(
    logits: Tensor, targets: Tensor, temperature: Tensor, logit_scale: float, softcap: float | None, entropy: bool
) -> tuple[Tensor, ...]:
    """logps, entropy, lse, row_max, sum_exp, sum_others of every live row (schema.py); 0 at dead rows."""
    dtype = stats_dtype(logits)
    outputs = torch.zeros((6, targets.numel()), dtype=dtype, device=logits.device)
    for rows, index, count, _ in _chunks(logits, targets, targets.reshape(-1) >= 0, temperature, logit_scale, softcap):
        outputs[:, index] = _chunk_stats(rows, dtype, entropy)[:, :count]
    shaped = [row.view(targets.shape).clone() for row in outputs.unbind()]  # outputs of an op may not share storage
    if not entropy:
        shaped[1] = outputs.new_empty(0)
    return tuple(shaped)


def _chunk_stats(rows: Rows, dtype: torch.dtype, entropy: bool) -> Tensor:
    capped = rows.capped(dtype)
    row_max, top = _block_max(capped)
    # a row of nothing but what stands for -inf is no distribution
    row_max.masked_fill_(row_max <= masked_below(rows.x.dtype), -torch.inf)
    y = rows.exponents(capped, row_max)
    y_target = y.gather(1, rows.target)
    weights = y.exp()
    target_weight = weights.gather(1, rows.target)
    # the largest term, exactly 1 (or NaN), stays out of the sum: a confident row keeps the digits of what is left
    nothing = weights.gather(1, top) - 1.0
    rest = _block_sum(weights.scatter_(1, top, 0.0)) + nothing
    log_total = torch.log1p(rest)
    others = torch.where(y_target == 0, rest, 1.0 + (rest - target_weight))
    lse = row_max * rows.slope() + log_total
    if entropy:
        # H = log S + sum p (-y): two terms >= 0, so nothing cancels. The floor keeps 0 * -inf away.
        gap = y.clamp_(min=exp_is_zero_below(dtype)).neg_()
        spread = log_total + _block_sum(weights.mul_(gap)) / (1.0 + rest)
    else:
        spread = log_total
    return torch.stack([t.squeeze(1) for t in (y_target - log_total, spread, lse, row_max, 1.0 + rest, others)])


def row_grad_into(
    logits: Tensor, out: Tensor, targets: Tensor, temperature: Tensor, logit_scale: float, softcap: float | None,
    entropy: Tensor, row_max: Tensor, sum_exp: Tensor, sum_others: Tensor, grad_logps: Tensor,
    grad_entropy: Tensor | None,
) -> None:  # fmt: skip
    """The gradient of row_stats (schema.py) in `out`, which may be the logits."""
    if (
        out is logits
        and logits.ndim == 2
        and logits.dtype == row_max.dtype
        and grad_entropy is None
        and softcap is None
    ):
        overwrite_with_gradient(logits, targets, temperature, logit_scale, row_max, sum_exp, sum_others, grad_logps)
        return
    needed = grad_logps != 0  # NaN is needed: it must show
    per_row = [row_max, sum_exp, sum_others, grad_logps]
    if grad_entropy is not None:
        needed = needed | (grad_entropy != 0)
        per_row += [entropy, grad_entropy]
    needed = (needed & (targets != DEAD)).reshape(-1)
    flat = [t.reshape(-1, 1) for t in per_row]
    by = _split(out, logits)
    destinations = _matrices(out, by)
    for matrix, rows_of in destinations:
        matrix.index_fill_(0, (~needed[rows_of]).nonzero().squeeze(1), 0.0)
    for rows, index, count, place in _chunks(logits, targets, needed, temperature, logit_scale, softcap, by):
        grad = _chunk_grad(rows, *(_pick(t, index, rows.x.shape[0]) for t in flat))[:count]
        _store(destinations[place.matrix][0], place.rows, grad)


def _chunk_grad(
    rows: Rows, row_max: Tensor, total: Tensor, others: Tensor, grad_logps: Tensor,
    entropy: Tensor | None = None, grad_entropy: Tensor | None = None,
) -> Tensor:  # fmt: skip
    dtype, width = row_max.dtype, rows.x.shape[1]
    capped = rows.capped(dtype)
    y = rows.exponents(capped, row_max)
    elsewhere = rows.target < 0
    column = rows.target.clamp(min=0)
    slope = rows.slope()
    target_grad = grad_logps * (others / total)
    if entropy is None or grad_entropy is None:
        grad = y.exp_()
        target_weight = grad.gather(1, column)
        grad.mul_(-grad_logps / total * slope)
    else:
        # R < 1 where the target is the largest: there 1 + R has lost the digits of R
        log_total = torch.where(others < 1, torch.log1p(others), torch.log(total))
        grad = y.exp()
        target_weight = grad.gather(1, column)
        # d H / d z = -p (log p - sum p log p) = -p (y + mean gap)
        y.clamp_(min=exp_is_zero_below(dtype)).add_(entropy - log_total)
        target_grad = target_grad - grad_entropy * (target_weight / total) * y.gather(1, column)
        grad.mul_(y.mul_(-grad_entropy).sub_(grad_logps)).mul_(slope / total)
    masked = (target_weight == 0) & (rows.x.gather(1, column) <= masked_below(rows.x.dtype))
    target_grad = torch.where(masked, 0.0, target_grad * slope)
    grad.scatter_(1, column, torch.where(elsewhere, grad.gather(1, column), target_grad))
    grad = grad[:, :width]
    if rows.softcap is None:
        return grad
    # d c / d x = logit_scale * (1 - tanh(u)^2) as 4q / (1 + q)^2, q = exp(-2 |u|): the difference would cancel
    q = rows.x.to(dtype).mul(rows.logit_scale).div_(rows.softcap).abs_().mul_(-2.0).exp_()
    return grad.mul_(q).div_(q.add_(1.0).square_()).mul_(4.0 * rows.logit_scale)


def _split(*tensors: Tensor) -> str:
    """How `[N, V]` matrices without a copy cover all of these `[N, V]` or `[B, T, V]` tensors, in as few as may be."""
    shape = tensors[0].shape
    if len(shape) == 2:
        return "whole"
    batch, length = shape[:2]
    if batch == 1 or length == 1 or all(t.stride(0) == length * t.stride(1) for t in tensors):
        return "whole"
    return "batch" if batch <= length else "token"


def _matrices(tensor: Tensor, by: str) -> list[tuple[Tensor, slice]]:
    """`[M, V]` views of a tensor, each with its flat rows."""
    if tensor.ndim == 2:
        return [(tensor, slice(None))]
    batch, length = tensor.shape[:2]
    if by == "batch":
        return [(tensor[i], slice(i * length, (i + 1) * length)) for i in range(batch)]
    if by == "token":
        return [(tensor[:, i], slice(i, None, length)) for i in range(length)]
    if batch == 1:
        return [(tensor[0], slice(None))]
    return [(tensor[:, 0] if length == 1 else tensor.flatten(0, 1), slice(None))]


class _Place(NamedTuple):
    """Where the rows of a chunk lie: in which matrix, and which of its rows."""

    matrix: int
    rows: Tensor | slice


def _chunks(
    logits: Tensor,
    targets: Tensor,
    selected: Tensor,
    temperature: Tensor,
    logit_scale: float,
    softcap: float | None,
    by: str | None = None,
) -> Iterator[tuple[Rows, Tensor, int, _Place]]:
    """The selected rows, a chunk at a time: data, flat row indices, how many rows are not filling, and their place."""
    target = targets.reshape(-1, 1).to(torch.int64)
    if temperature.ndim > 0:
        temperature = temperature.expand(targets.shape).reshape(-1, 1)
    on_cpu = _reads_in_place(logits.device)
    height = max(1, (_CHUNK_CPU if on_cpu else _CHUNK_DEVICE) // max(1, logits.shape[-1]))
    height = height if on_cpu else min(height, _MAX_ROWS_DEVICE)
    flat_rows = torch.arange(selected.shape[0], device=selected.device)
    for number, (matrix, rows_of) in enumerate(_matrices(logits, by or _split(logits))):
        chosen, flat = selected[rows_of], flat_rows[rows_of]
        whole = on_cpu and bool(chosen.all())
        local = None if whole else chosen.nonzero().squeeze(1)
        total = matrix.shape[0] if local is None else local.shape[0]
        for start in range(0, total, height):
            stop = min(start + height, total)
            # on the CPU a run of rows is read where it lies; elsewhere every chunk has full height, since the order of
            # addition of a GPU reduction depends on the shape
            if local is None:
                part: Tensor | slice = slice(start, stop)
                x = matrix[start:stop]
            else:
                part = local[start:stop]
                missing = 0 if on_cpu else height - (stop - start)
                x = matrix.index_select(0, torch.cat([part, part[-1:].expand(missing)]) if missing else part)
            index = flat[part]
            own = [_pick(t, index, x.shape[0]) for t in ((target, temperature) if temperature.ndim else (target,))]
            heat = own[1] if temperature.ndim else temperature
            yield Rows(x, own[0], heat, logit_scale, softcap), index, stop - start, _Place(number, part)


def _reads_in_place(device: torch.device) -> bool:
    return device.type == "cpu"


def _pick(values: Tensor, index: Tensor, height: int) -> Tensor:
    """Rows of a per-row tensor, the last repeated up to the height of the chunk."""
    rows = values[index]
    missing = height - rows.shape[0]
    return rows if missing == 0 else torch.cat([rows, rows[-1:].expand(missing, -1)])


def _store(matrix: Tensor, rows: Tensor | slice, grad: Tensor) -> None:
    """Write the rows of one chunk where they belong, with the one rounding to the output's dtype."""
    if isinstance(rows, slice):
        matrix[rows].copy_(grad)
    else:
        matrix.index_copy_(0, rows, grad.to(matrix.dtype))
