"""What the tests of the C++ kernels share: both instruction sets, and rows around the borders of their loops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import normal_rows
from torch import Tensor

from grpo_kernels import backends

BLOCK = 2048  # columns summed relative to one maximum, on each side of the target
CHAIN = 128  # columns of a float32 sum before it goes to float64; a step is 16, of float64 8
WIDTHS = [1, 2, 3, 7, 8, 9, 15, 16, 17, 33, CHAIN - 1, CHAIN, CHAIN + 1, BLOCK, BLOCK + 2, 2 * BLOCK + CHAIN + 18]
INSTRUCTION_SETS = ["avx512", "avx2", "baseline"]
MISSING = backends.report()["cpp"]
needs_cpp = pytest.mark.skipif(not MISSING.startswith("available"), reason=MISSING)


@pytest.fixture(params=INSTRUCTION_SETS)
def instruction_set(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The kernels of one instruction set, where the machine has it."""
    monkeypatch.setenv("GRPO_KERNELS_CPU", request.param)
    try:
        torch.ops.grpo_kernels.row_stats_cpp(torch.zeros(1, 1), torch.zeros(1).long(), torch.ones(()), 1.0, None, False)
    except RuntimeError as error:
        pytest.skip(str(error).splitlines()[0])
    return request.param


def places(vocab: int) -> Tensor:
    """Targets at both ends, in the middle and on both sides of the borders. int64 [N]."""
    wanted = (0, 1, 7, 8, CHAIN - 1, CHAIN, BLOCK - 1, BLOCK, BLOCK + 1, vocab // 2, vocab - 2, vocab - 1)
    return torch.tensor(sorted({column for column in wanted if 0 <= column < vocab}))


def rows_like(vocab: int, dtype: torch.dtype, *, std: float = 2.0, mean: float = 0.0, seed: int = 0) -> Tensor:
    """Logits [N, V], one row for each of `places`; in the last the target is the largest."""
    ids = places(vocab)
    logits = normal_rows(len(ids), vocab, std=std, mean=mean, seed=seed)
    logits[-1, ids[-1]] = logits[-1].max() + std
    return logits.to(dtype)


def row_op(kind: str) -> Any:
    return backends.row_op(kind, "cpp")
