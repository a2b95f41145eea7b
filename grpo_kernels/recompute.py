"""Gradients of the head from statistics alone: its logits once more, by slices of the vocabulary."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .head import Head
from .ops.schema import ELSEWHERE
from .slabs import Order, Rows, few_rows, logits_gradient


def recomputed_gradients(
    head: Head, order: Order, rows: Rows, per_row: list[Tensor | None], needs: tuple[bool, ...], factor: Tensor | None
) -> list[Tensor | None]:
    """Gradients of hidden, weight and bias, where they are needed.

    `per_row`: entropy, row_max, sum_exp, sum_others, grad_logps, grad_entropy of the rows of `order`, as row_grad takes
    them. `factor` multiplies the float32 sums before they are rounded.
    """
    return _Recomputation(head, order, rows, per_row, needs).run(factor)


class _Recomputation:
    def __init__(
        self, head: Head, order: Order, rows: Rows, per_row: list[Tensor | None], needs: tuple[bool, ...]
    ) -> None:
        self.head, self.order, self.rows, self.per_row = head, order, rows, per_row
        self.targets, self.heat = rows.of(order.positions)
        count, width = len(order.positions), head.weight.shape[1]
        self.everything = count == rows.targets.shape[0] and not order.filled
        self.shared = head.all_rows() if self.everything else None
        device = order.positions.device
        # where nothing is rounded, the rows are summed in the result's own memory and moved to their places at the end
        self.in_result = head.hidden.dtype == head.sums and not order.filled
        height = rows.targets.shape[0] if self.in_result else count
        self.hidden = torch.zeros(height, width, dtype=head.sums, device=device) if needs[0] else None
        self.weight = torch.empty(head.weight.shape, dtype=head.weight.dtype, device=device) if needs[1] else None
        self.bias = torch.zeros(head.vocabulary, dtype=head.sums, device=device) if needs[2] else None

    def run(self, factor: Tensor | None) -> list[Tensor | None]:
        if len(self.order.positions) == 0:
            if self.weight is not None:
                self.weight.zero_()
        else:
            self._sweep(factor)
        hidden, bias = self._placed(factor), self.bias
        if bias is not None and self.head.bias is not None:
            bias = (bias if factor is None else bias * factor).to(self.head.bias.dtype)
        return [hidden, self.weight, bias]

    def _sweep(self, factor: Tensor | None) -> None:
        head, count = self.head, len(self.order.positions)
        height, width = head.tiles(count, gathered=self.shared is None)
        narrow = self.weight is not None and self.weight.dtype != head.sums
        summed = self.targets.new_empty(width, head.weight.shape[1], dtype=head.sums) if narrow else None
        slab = torch.empty(min(height, count) * width, dtype=head.logits_dtype, device=self.targets.device)
        for part, weight in head.columns(width):
            inside = (self.targets >= part.start) & (self.targets < part.stop)
            local = torch.where(inside, self.targets - part.start, ELSEWHERE)
            # a slice of the weight's gradient is summed in the result itself, if that is wide enough
            of_slice = None if self.weight is None else self.weight[part]
            if summed is not None:
                of_slice = summed[: weight.shape[0]]
            for tile in _tiles(count, height):
                hidden = self._hidden_rows(tile)
                logits = slab[: hidden.shape[0] * weight.shape[0]].view(hidden.shape[0], -1)
                head.product_(hidden, weight, part, logits)
                heat = self.heat if self.heat.ndim == 0 else self.heat[tile]
                per_row = [t if t is None or t.numel() == 0 else t[tile] for t in self.per_row]
                grad = logits_gradient(head, logits, local[tile], heat, self.rows, per_row)
                if self.hidden is not None:
                    head.add_hidden_grad(self.hidden[tile], grad, weight)
                if of_slice is not None:
                    head.add_weight_grad(of_slice, grad, hidden, first=tile.start == 0)
                if self.bias is not None:
                    self.bias[part] += grad.sum(0, dtype=self.bias.dtype)
            if self.weight is not None and of_slice is not None:
                if factor is not None:
                    of_slice.mul_(factor)
                if summed is not None:
                    self.weight[part] = of_slice

    def _hidden_rows(self, tile: slice) -> Tensor:
        if self.shared is not None:
            return self.shared[tile]
        rows = self.head.rows(self.order.positions[tile])
        if self.order.filled:
            rows.masked_fill_((self.targets[tile] < 0).unsqueeze(1), 0.0)
        return rows

    def _placed(self, factor: Tensor | None) -> Tensor | None:
        """The rows' gradients at their places, 0 elsewhere."""
        if self.hidden is None:
            return None
        if factor is not None:
            self.hidden[: len(self.order.positions)].mul_(factor)  # the others are 0, whatever the factor
        shape, dtype = self.head.hidden.shape, self.head.hidden.dtype
        if self.everything or self.in_result:
            if not self.everything:
                _move_down(self.hidden, self.order.positions)
            return self.hidden.to(dtype).view(shape)
        result = torch.zeros(shape, dtype=dtype, device=self.hidden.device)
        result.view(-1, shape[-1]).index_copy_(0, self.order.positions, self.hidden.to(dtype))
        return result


def _tiles(count: int, height: int) -> Iterator[slice]:
    return (slice(start, min(start + height, count)) for start in range(0, count, height))


def _move_down(rows: Tensor, index: Tensor) -> None:
    """The first len(index) rows to their places, ascending, from the last: each goes no further up. 0 elsewhere."""
    step = few_rows(rows)
    for start in reversed(range(0, len(index), step)):
        part = slice(start, min(start + step, len(index)))
        moved = rows[part].clone()
        rows[part] = 0.0
        rows[index[part]] = moved
