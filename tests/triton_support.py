"""What the tests of the Triton kernels share. They run where torch sees a GPU on it, elsewhere in Triton's interpreter.

The interpreter takes some 20 ms a row, so rows are few and each is worth having: `places` puts one target into every
part of a row that the kernels treat apart, WIDTHS are the vocabularies around the borders of their blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from kernel_support import (
    DEVICE,
    Scored,
    assert_close,
    assert_rows_within_budget,
    assert_run_within_budget,
    run_on,
    scored,
    upstream_of,
)
from torch import Tensor

pytest.importorskip("triton")
from grpo_kernels.backends.triton import launch

__all__ = [
    "DEVICE", "WIDTHS", "Blocks", "Scored", "assert_close", "assert_rows_within_budget", "assert_run_within_budget",
    "blocks_of", "places", "rows_like", "run_on", "scored", "upstream_of",
]  # fmt: skip
WIDTHS: dict[str, Callable[[int, int], int]] = {
    "1": lambda block, program: 1,
    "2": lambda block, program: 2,
    "3": lambda block, program: 3,
    "17": lambda block, program: 17,
    "block - 1": lambda block, program: block - 1,
    "block": lambda block, program: block,
    "block + 1": lambda block, program: block + 1,
    "2 blocks": lambda block, program: 2 * block,
    "2 blocks + 1": lambda block, program: 2 * block + 1,
    "program - 1": lambda block, program: program - 1,
    "program": lambda block, program: program,
    "program + 1": lambda block, program: program + 1,
}


class Blocks(NamedTuple):
    """Columns of one step of the forward loop, and of one program of the gradient."""

    block: int
    program: int


def blocks_of(dtype: torch.dtype, vocab: int = 2) -> Blocks:
    target = launch.target_of(torch.empty(1, vocab, dtype=dtype, device=DEVICE))
    tile = launch.TILES[target.name]
    lanes, vector = launch.lanes_and_vector(tile, target, dtype)
    return Blocks(2 * lanes * vector, tile.blocks * lanes * vector)


def places(vocab: int, dtype: torch.dtype) -> Tensor:
    """Targets in the first, a middle, the last whole block and in the tail, on both sides of a border. int64 [N]."""
    block, program = blocks_of(dtype, vocab)
    wanted = (0, block - 1, block, vocab // 2, program, vocab // block * block, vocab - 1)
    return torch.tensor(sorted({column for column in wanted if column < vocab}))


def rows_like(vocab: int, dtype: torch.dtype, *, std: float = 2.0, mean: float = 0.0, seed: int = 0) -> Tensor:
    """Logits [N, V], one row for each of `places`; in the last the target is the largest."""
    ids = places(vocab, dtype)
    logits = torch.randn(len(ids), vocab, generator=torch.Generator().manual_seed(seed)) * std + mean
    logits[-1, ids[-1]] = logits[-1].max() + std
    return logits.to(dtype)
