"""The scores of a language-model head, from the fused loss: their Gram matrix, or a sketch, out of the living slab.

The head's part of a response's score is S_i = sum_t delta_t h_t^T with delta = d log p(y_t) / d logits, which the
linear functions have in their hands for a slab of rows at a time. Nobody forms an S_i `[V, H]`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from ..checks import check_choice, complain
from ..observers import Scored, observing
from .arrays import check_whole, seeded

_BLOCK = 128  # rows of a block of a symmetric product


class HeadScores:
    """Collects the head's scores of B responses, consecutive groups of G, from the linear calls made under `watch`.

    "exact": `gram`, with (G T)^2 V multiplications a group, about half of them saved by symmetry: cheap beside the loss
    while a group's tokens G T are fewer than about its width H. A slab must hold a whole group: raise `chunk_bytes`.
    "sketch": `scores`, with k V multiplications a token, whatever the group; the vocabulary's side of S_i is multiplied
    by a random sign matrix `[k, V]`, the other kept, or, with `k_hidden`, sketched too. Inner products are unbiased.

    Args:
        num_sequences: B.
        group_size: G.
        method: "exact" or "sketch".
        k, k_hidden: sizes of the sketch.
        seed: of its signs.

    Source: the products are those of "ghost" gradients; see `ghost_gram`.
    """

    def __init__(
        self, num_sequences: int, group_size: int, *, method: str = "exact", k: int = 64,
        k_hidden: int | None = None, seed: int = 0,
    ) -> None:  # fmt: skip
        name = "HeadScores"
        group_size = check_whole(name, "group_size", group_size, 1, "Responses per prompt.")
        num_sequences = check_whole(name, "num_sequences", num_sequences, 0, "All responses.")
        check_choice(name, "method", method, ("exact", "sketch"))
        k = check_whole(name, "k", k, 1, "Try 64.")
        if k_hidden is not None:
            k_hidden = check_whole(name, "k_hidden", k_hidden, 1, "None keeps the hidden side whole.")
        if num_sequences % group_size:
            got = f"{num_sequences} and {group_size}"
            raise ValueError(complain(name, "num_sequences", "must be a multiple of group_size", got, "Drop the rest."))
        self._shape = (num_sequences // group_size, group_size)
        self.method = method
        self._sizes = (k, k_hidden)
        self._generators = {"V": seeded(name, seed), "H": seeded(name, seed + 1)}
        self._sketches: dict[str, Tensor] = {}
        self._gram = torch.zeros(self._shape[0], group_size, group_size, dtype=torch.float64)
        self._scores: Tensor | None = None
        self._seen: set[int] = set()

    @property
    def gram(self) -> Tensor:
        """`[P, G, G]` inner products within the groups, float64."""
        if self.method == "exact":
            return self._gram
        scores = self.scores.to(torch.float64)
        return scores @ scores.mT

    @property
    def scores(self) -> Tensor:
        """`[P, G, d]` sketched scores, d = k H (k k_hidden); ValueError for "exact", which forms none."""
        if self.method == "exact":
            advice = "Use method='sketch', or gram."
            raise ValueError(complain("HeadScores", "method", "must be 'sketch' for scores", "'exact'", advice))
        if self._scores is None:
            raise ValueError(
                complain("HeadScores", "watch", "must have seen a linear call", "none", "Call the loss inside it.")
            )
        return self._scores.view(*self._shape, -1)

    @contextlib.contextmanager
    def watch(self, completion_ids: Tensor, *, cu_seqlens: Tensor | None = None, first: int = 0) -> Iterator[None]:
        """See the one linear call inside.

        Args:
            completion_ids, cu_seqlens: as given to it.
            first: which of the B responses its first sequence is; several calls, each in a `watch` of its own, may
                bring them, for "exact" whole groups at a time.
        """
        sequences = len(completion_ids) if cu_seqlens is None else len(cu_seqlens) - 1
        if cu_seqlens is None and completion_ids.ndim != 2:
            advice = "Pass cu_seqlens."
            raise ValueError(
                complain("HeadScores.watch", "completion_ids", "must be [B, T]", list(completion_ids.shape), advice)
            )
        if first < 0 or first + sequences > self._shape[0] * self._shape[1]:
            got, advice = f"{first} and {sequences} sequences", "Give the constructor all of them."
            raise ValueError(complain("HeadScores.watch", "first", "must be within num_sequences", got, advice))
        length = completion_ids.shape[-1]
        with observing(_View(self, sequences, length, cu_seqlens, first)):
            yield

    def add(self, sequences: Tensor, rows: Scored) -> None:
        """Rows of known sequences, ascending in runs."""
        if self.method == "exact":
            self._add_products(sequences, rows)
        else:
            self._add_sketch(sequences, rows)

    def mark(self, sequences: range) -> None:
        """RuntimeError when a sequence comes in a second call."""
        twice = self._seen.intersection(sequences)
        if twice:
            advice = "Watch one call; make another HeadScores for the next."
            raise RuntimeError(complain("HeadScores.watch", "each response", "must be seen once", min(twice), advice))
        self._seen.update(sequences)

    @property
    def group_size(self) -> int:
        """G."""
        return self._shape[1]

    def _add_products(self, sequences: Tensor, rows: Scored) -> None:
        G = self._shape[1]
        groups, counts = torch.unique_consecutive(sequences // G, return_counts=True)
        start = 0
        for group, count in zip(groups.tolist(), counts.tolist(), strict=True):
            part = slice(start, start + count)
            start += count
            products = _symmetric(rows.matrix[part], rows.factor[part], rows.hidden[part], rows.has_bias)
            member = torch.nn.functional.one_hot(sequences[part] - group * G, G).to(torch.float64)
            self._gram[group] += (member.T @ products.to(torch.float64) @ member).cpu()

    def _add_sketch(self, sequences: Tensor, rows: Scored) -> None:
        k, k_hidden = self._sizes
        deltas = (rows.matrix @ self._signs("V", rows.matrix, k)) * (rows.factor / k**0.5).unsqueeze(1)
        hidden = rows.hidden.to(deltas.dtype)
        if rows.has_bias:
            hidden = torch.cat([hidden, hidden.new_ones(len(hidden), 1)], 1)
        if k_hidden is not None:
            hidden = hidden @ self._signs("H", hidden, k_hidden) / k_hidden**0.5
        if self._scores is None:
            shape = (self._shape[0] * self._shape[1], k, hidden.shape[1])
            self._scores = torch.zeros(shape, dtype=deltas.dtype, device=deltas.device)
        runs, counts = torch.unique_consecutive(sequences, return_counts=True)
        start = 0
        for sequence, count in zip(runs.tolist(), counts.tolist(), strict=True):
            part = slice(start, start + count)
            start += count
            self._scores[sequence].addmm_(deltas[part].T, hidden[part])

    def _signs(self, side: str, like: Tensor, k: int) -> Tensor:
        """One random matrix of signs, `[width, k]`, for all calls."""
        width = like.shape[1]
        found = self._sketches.get(side)
        if found is None:
            drawn = torch.randint(2, (width, k), generator=self._generators[side], dtype=torch.int8)
            found = (2 * drawn - 1).to(like.device, like.dtype)
            self._sketches[side] = found
        return found


class _View:
    """The observer of one call: which sequence each of its tokens is of."""

    def __init__(self, target: HeadScores, sequences: int, length: int, cu_seqlens: Tensor | None, first: int) -> None:
        self._target, self._length, self._ends, self._first = target, length, cu_seqlens, first
        self._members = range(first, first + sequences)
        self.in_order = target.method == "exact"

    def parts(self, positions: Tensor, height: int) -> Iterable[slice]:
        """Slabs of whole groups for the exact products, full slabs for the sketch."""
        self._target.mark(self._members)
        if self.in_order:
            return self._whole_groups(positions, height)
        return [slice(at, at + height) for at in range(0, len(positions), height)]

    def see(self, rows: Scored) -> None:
        """Pass the rows on with their sequences."""
        self._target.add(self._sequences(rows.positions), rows)

    def _whole_groups(self, positions: Tensor, height: int) -> list[slice]:
        groups = self._sequences(positions) // self._target.group_size
        _, counts = torch.unique_consecutive(groups, return_counts=True)
        parts, start, end = [], 0, 0
        for count in counts.tolist():
            if count > height:
                advice = "Raise chunk_bytes to that many rows of logits, or use method='sketch'."
                raise ValueError(
                    complain("HeadScores", "chunk_bytes", f"must hold a group's {count} tokens", height, advice)
                )
            if end + count - start > height:
                parts.append(slice(start, end))
                start = end
            end += count
        return [*parts, slice(start, end)] if end > start else parts

    def _sequences(self, positions: Tensor) -> Tensor:
        if self._ends is not None:
            ends = self._ends[1:].to(positions.device, positions.dtype)
            return torch.searchsorted(ends, positions, right=True) + self._first
        return positions // self._length + self._first


def _symmetric(matrix: Tensor, factor: Tensor, hidden: Tensor, has_bias: bool) -> Tensor:
    """(d_t . d_t') (h_t . h_t' + bias) of all pairs of rows, the blocks above the diagonal by symmetry."""
    count = len(matrix)
    out = torch.empty(count, count, dtype=matrix.dtype, device=matrix.device)
    step = max(_BLOCK, -(-count // 8))
    for start in range(0, count, step):
        block = slice(start, min(start + step, count))
        out[block, : block.stop] = matrix[block] @ matrix[: block.stop].T
        out[:start, block] = out[block, :start].T
    scaled = factor.unsqueeze(1) * hidden
    inner = scaled @ scaled.T
    if has_bias:
        inner += torch.outer(factor, factor)
    return out * inner
