"""Rows of hidden states against the head, a chunk at a time: statistics, and gradients while the logits are alive."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import backends, observers
from .config import GRPOLossConfig
from .head import Head
from .ops.schema import DEAD

_FEW = 1 << 18  # elements of a copy on the way
Weigh = Callable[..., Any] | None


def few_rows(matrix: Tensor) -> int:
    """How many rows of a matrix may be copied on the way."""
    return max(1, _FEW // matrix.shape[1])


class Rows(NamedTuple):
    """What the row ops take besides logits: targets `[N]`, the temperature `[N]` or 0-d, the config, the backend."""

    targets: Tensor
    temperature: Tensor
    config: GRPOLossConfig
    impl: str

    def of(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Targets and temperatures of rows."""
        heat = self.temperature
        return self.targets[index], heat if heat.ndim == 0 else heat[index]


class Chunk(NamedTuple):
    """Rows with their logits, or what the row op left of them, and their statistics."""

    positions: Tensor
    hidden: Tensor
    logits: Tensor
    stats: tuple[Tensor, ...]


class Order(NamedTuple):
    """Rows to compute, `[L]`; the first `wanted` of them may have a gradient; whether some only fill up a count."""

    positions: Tensor
    wanted: int
    filled: bool


def flat_rows(targets: Tensor, temperature: Tensor, config: GRPOLossConfig, impl: str) -> Rows:
    """Rows of token tensors."""
    heat = temperature if temperature.ndim == 0 else temperature.expand(targets.shape).reshape(-1)
    return Rows(targets.reshape(-1), heat, config, impl)


def order_of(wanted: Tensor, others: Tensor | None, count: int | None) -> Order:
    """Flat positions of the `wanted` rows, then of the `others`, each in their order.

    Their number takes one host sync on a device; none if it is given, and then all of them are wanted.
    """
    rank = torch.where(wanted.reshape(-1), 0, 2)
    if others is not None:
        rank = torch.where(others.reshape(-1) & (rank == 2), 1, rank)
    index = torch.argsort(rank, stable=True)
    if count is not None and not backends.reads_are_free(wanted.device):
        return Order(index[:count], count, True)
    first, both = torch.stack([(rank == 0).sum(), (rank < 2).sum()]).tolist()
    return Order(index[:both], first, False)


def weigh_op(head: Head, rows: Rows, entropy_gradient: bool = False) -> Weigh:
    """The op that uses up the logits, where it can serve."""
    if head.logits_dtype != head.sums or entropy_gradient:
        return None
    return backends.weigh_op(rows.impl, rows.targets.device, rows.config.softcap)


def chunks(head: Head, order: Order, rows: Rows, weigh: Weigh) -> Iterator[Chunk]:
    """Logits and statistics of the rows, a chunk at a time; the next one overwrites them."""
    height, panel, _ = head.sizes
    if len(order.positions) == 0:
        return
    config = rows.config
    slab = torch.empty(height, head.vocabulary, dtype=head.logits_dtype, device=order.positions.device)
    observer = observers.current()
    parts: Iterable[slice] = (slice(at, at + height) for at in range(0, len(order.positions), height))
    for part in parts if observer is None else observer.parts(order.positions, height):
        index = order.positions[part]
        padded = -(-len(index) // panel) * panel
        hidden = head.rows(index, padded)
        targets, heat = rows.of(index)
        if order.filled:  # what only fills up a count may hold anything
            hidden[: len(index)].masked_fill_((targets == DEAD).unsqueeze(1), 0.0)
        head.logits_(hidden, slab[:padded])
        logits = slab[: len(index)]
        if weigh is not None:
            stats = weigh(logits, targets, heat, config.logit_scale, config.needs_entropy)
        else:
            stats = _stats_beside(head, rows, logits, targets, heat)
        chunk = Chunk(index, hidden[: len(index)], logits, stats)
        if observer is not None:
            with _scored(head, chunk, rows, weigh) as scored:
                observer.see(scored)
        yield chunk


@contextlib.contextmanager
def _scored(head: Head, chunk: Chunk, rows: Rows, weigh: Weigh) -> Iterator[observers.Scored]:
    """The rows' d logp / d logits: in the slab itself where that is a factor away, else beside it."""
    positions, hidden, logits, (logps, entropy, _, *per_row) = chunk
    targets, heat = rows.of(positions)
    has_bias = head.bias is not None
    if weigh is None:
        gradient = torch.empty(logits.shape, dtype=head.product, device=logits.device)
        arguments = (targets, heat, rows.config.logit_scale, rows.config.softcap, entropy, *per_row)
        backends.row_op("row_grad_into", rows.impl)(logits, gradient, *arguments, torch.ones_like(logps), None)
        yield observers.Scored(positions, hidden, gradient, torch.ones_like(logps), has_bias)
        return
    _, sum_exp, sum_others = per_row
    column = targets.clamp(min=0).unsqueeze(1)
    # 1 - p of the target as the sum over the others, not as a difference; a target that was removed has no gradient
    logits.scatter_(1, column, torch.where(logps == -torch.inf, 0.0, -sum_others).unsqueeze(1))
    yield observers.Scored(positions, hidden, logits, -rows.config.logit_scale / (heat * sum_exp), has_bias)
    logits.scatter_(1, column, 0.0)


def _stats_beside(head: Head, rows: Rows, logits: Tensor, targets: Tensor, heat: Tensor) -> tuple[Tensor, ...]:
    """Statistics of logits that stay; the same bits as where they are used up."""
    config = rows.config
    weigh = weigh_op(head, rows)
    if weigh is None:
        options = (config.logit_scale, config.softcap, config.needs_entropy)
        stats: tuple[Tensor, ...] = backends.row_op("row_stats", rows.impl)(logits, targets, heat, *options)
        return stats
    step = few_rows(logits)
    parts = [
        weigh(
            logits[part].clone(), targets[part], heat if heat.ndim == 0 else heat[part], config.logit_scale,
            config.needs_entropy,
        )
        for part in (slice(start, start + step) for start in range(0, len(targets), step))
    ]  # fmt: skip
    return tuple(torch.cat(values) for values in zip(*parts, strict=True))


def all_stats(head: Head, order: Order, rows: Rows, shape: torch.Size) -> list[Tensor]:
    """The six statistics of every row, in this shape; 0 where none was computed, an empty entropy if not asked."""
    outputs = [torch.zeros(shape, dtype=head.sums, device=rows.targets.device) for _ in range(6)]
    for chunk in chunks(head, order, rows, weigh_op(head, rows)):
        for output, values in zip(outputs, chunk.stats, strict=True):
            if values.numel():
                output.view(-1)[chunk.positions] = values
    if not rows.config.needs_entropy:
        outputs[1] = outputs[1].new_empty(0)
    return outputs


class Gradient(NamedTuple):
    """The gradient of some rows' logits. With `target_grad` it is `logits * factor` and that at the targets."""

    positions: Tensor
    hidden: Tensor
    logits: Tensor
    targets: Tensor
    factor: Tensor | None = None
    target_grad: Tensor | None = None


def chunk_gradient(
    head: Head, chunk: Chunk, rows: Rows, weigh: Weigh, coef: Tensor, entropy_coef: Tensor | None
) -> Gradient:
    """The gradient of the first rows, those with a coefficient, of a chunk.

    On the CPU a row whose coefficient came out 0 is left out; elsewhere finding it would cost a host sync.
    """
    chunk = _rows_of_chunk(chunk, slice(len(coef)))
    if entropy_coef is None and backends.reads_are_free(coef.device):
        kept = (coef != 0).nonzero().squeeze(1)
        if len(kept) < len(coef):
            _move_up(chunk.logits, kept)
            chunk = _rows_of_chunk(chunk._replace(logits=chunk.logits[: len(kept)]), kept)
            coef = coef[kept]
    positions, hidden, logits, (logps, entropy, _, *per_row) = chunk
    targets, heat = rows.of(positions)
    if weigh is None:
        stats = [entropy, *per_row, coef, entropy_coef]
        return Gradient(positions, hidden, logits_gradient(head, logits, targets, heat, rows, stats), targets)
    _, sum_exp, sum_others = per_row
    share = coef * (rows.config.logit_scale / heat) / sum_exp
    # a target that was removed has no gradient
    return Gradient(
        positions, hidden, logits, targets, -share, torch.where(logps == -torch.inf, 0.0, share * sum_others)
    )


def logits_gradient(
    head: Head, logits: Tensor, targets: Tensor, heat: Tensor, rows: Rows, per_row: list[Tensor | None]
) -> Tensor:
    """The gradient over the logits, or beside them in the dtype that products take. `per_row`: as row_grad takes it."""
    arguments = (targets, heat, rows.config.logit_scale, rows.config.softcap, *per_row)
    if head.in_place:
        backends.row_op("row_grad_", rows.impl)(logits, *arguments)
        return logits
    grad = torch.empty(logits.shape, dtype=head.product, device=logits.device)
    backends.row_op("row_grad_into", rows.impl)(logits, grad, *arguments)
    return grad


def _rows_of_chunk(chunk: Chunk, kept: Tensor | slice) -> Chunk:
    """Some rows; the logits are cut where the others are selected, since moving them is the caller's."""
    logits = chunk.logits[kept] if isinstance(kept, slice) else chunk.logits
    stats = tuple(s if s.numel() == 0 else s[kept] for s in chunk.stats)
    return Chunk(chunk.positions[kept], chunk.hidden[kept], logits, stats)


def _move_up(logits: Tensor, kept: Tensor) -> None:
    """Rows `kept`, ascending, to the top, a few at a time: each comes from below where it goes."""
    step = few_rows(logits)
    for start in range(0, len(kept), step):
        part = kept[start : start + step]
        logits[start : start + len(part)] = logits.index_select(0, part)
