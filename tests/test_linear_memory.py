"""Memory of the linear form, from the allocations that torch reports: one slab, the gradients, nothing that grows."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from linear_support import MODES, bytes_of, memory_changes, peak_bytes, step_of

import grpo_kernels as gk

V, H, ROWS = 16384, 128, 32
SLAB = bytes_of(ROWS, V)  # 2 MiB; the weight has 8 in float32
N = 512
MIB = 2**20
ROW_OPS = 7 * MIB  # buffers of the row kernels for entropies and caps: the same whatever N, V and the slab
DTYPES = [torch.float32, torch.bfloat16]


def changes_of(rows: tuple[int, ...], **options: Any) -> list[int]:
    """Allocations of one training step with slabs of `SLAB` bytes."""
    return memory_changes(step_of(rows, V, H, **{"chunk_bytes": SLAB} | options))


def allowed(mode: str, dtype: torch.dtype, rows: int, frozen: Iterable[str] = ()) -> float:
    """The budget in bytes: gradients that are handed out, one slab, dweight in the precision of its sum."""
    size = dtype.itemsize
    narrow = size == 2
    dhidden = 0 if "hidden" in frozen else rows * H * size
    head = 0 if "weight" in frozen else V * H
    widened = SLAB if narrow else 0  # one slice of the weight
    if mode == "fast":
        total = max(SLAB, head * size) + head * 4
    else:
        total = SLAB + head * size + (rows * H * 4 if narrow and dhidden else 0)
    total += dhidden + widened + 64 * rows
    return total + max(0.02 * total, MIB)


@pytest.mark.parametrize("frozen", [(), ("weight",), ("hidden",)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_the_budget(mode: str, dtype: torch.dtype, frozen: tuple[str, ...]) -> None:
    changes = changes_of((4, N // 4), mode=mode, dtype=dtype, frozen=frozen)
    assert peak_bytes(changes) <= allowed(mode, dtype, N, frozen)
    assert max(changes) < N * V * dtype.itemsize, "logits of all rows"


def test_the_meter_sees_a_buffer() -> None:
    changes = memory_changes(lambda: [torch.empty(1000, dtype=torch.float32) for _ in range(3)])
    assert 12000 <= peak_bytes(changes) <= 13000 and max(changes) < 5000
    assert peak_bytes(memory_changes(lambda: [torch.empty(1000).sum() for _ in range(3)])) < 5000


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_four_times_the_rows_cost_their_own_gradient_only(mode: str, dtype: torch.dtype) -> None:
    small, large = (peak_bytes(changes_of((4, n // 4), mode=mode, dtype=dtype)) for n in (N, 4 * N))
    row = H * dtype.itemsize + 64 + (H * 4 if mode == "lean" and dtype.itemsize == 2 else 0)
    assert large - small <= 3 * N * row + 0.02 * small


@pytest.mark.parametrize("mode", MODES)
def test_one_long_sequence_costs_what_many_short_ones_do(mode: str) -> None:
    long, short = (
        peak_bytes(memory_changes(step_of(rows, 1024, 16, mode=mode, chunk_bytes=bytes_of(64, 1024))))
        for rows in ((1, 4096), (32, 128))
    )
    assert abs(long - short) <= 16 * 4096


@pytest.mark.parametrize("chunk_rows", [8, 64])
@pytest.mark.parametrize("mode", MODES)
def test_chunk_bytes_bounds_the_slab(mode: str, chunk_rows: int) -> None:
    """A frozen head has no other large buffer."""
    slab = bytes_of(chunk_rows, V)
    changes = changes_of((4, N // 4), mode=mode, frozen=("weight",), chunk_bytes=slab)
    assert max(changes) <= slab
    assert peak_bytes(changes) <= slab + N * (H * 4 + 64) + max(0.02 * slab, MIB)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_a_frozen_head_has_no_buffer_of_its_size(mode: str, dtype: torch.dtype) -> None:
    """Neither a gradient nor, in 16 bit, a copy of the weight in float32."""
    trained, frozen = (changes_of((4, N // 4), mode=mode, dtype=dtype, frozen=f) for f in ((), ("weight",)))
    assert max(frozen) < V * H * dtype.itemsize
    assert peak_bytes(trained) - peak_bytes(frozen) >= 0.75 * V * H * dtype.itemsize


def test_lean_has_no_float32_buffer_of_a_16_bit_head() -> None:
    assert max(changes_of((4, N // 4), mode="lean", dtype=torch.bfloat16)) < V * H * 4


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mode", [*MODES, "auto"])
def test_without_grad_there_is_no_gradient_buffer(mode: str, dtype: torch.dtype) -> None:
    step = step_of((4, N // 4), V, H, mode=mode, dtype=dtype, chunk_bytes=SLAB)
    with torch.no_grad():
        changes = memory_changes(step)
    assert max(changes) < V * H * dtype.itemsize
    widened = SLAB if dtype.itemsize == 2 else 0
    assert peak_bytes(changes) <= SLAB + widened + 64 * N + MIB


@pytest.mark.parametrize("mode", MODES)
def test_a_16_bit_head_is_never_widened_as_a_whole(mode: str) -> None:
    """Nor where the slab that is allowed would have room for it."""
    for frozen, chunk in ((("weight",), None), (("weight",), 64 * MIB), ((), None)):
        changes = changes_of((2, 8), mode=mode, dtype=torch.bfloat16, frozen=frozen, chunk_bytes=chunk)
        whole = [size for size in changes if size >= V * H * 4]
        # the logits of one panel are as large as this head; fast keeps a float32 gradient besides
        assert len(whole) == (2 if mode == "fast" and not frozen else 1)


def logps_step(rows: int, dtype: torch.dtype, frozen: bool = False) -> Callable[[], Any]:
    """A general objective on log-probs and entropy."""
    hidden = torch.randn(rows, H).to(dtype).requires_grad_()
    weight = torch.randn(V, H).to(dtype).requires_grad_(not frozen)
    ids = torch.randint(0, V, (rows,))

    def step() -> Any:
        out = gk.linear_per_token_logps(hidden, weight, ids, entropy=True, chunk_bytes=SLAB)
        total = out.logps.exp().sum() - 0.1 * out.entropy.square().sum()
        return torch.autograd.grad(total, [hidden] if frozen else [hidden, weight])

    return step


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_general_route_has_the_budget_of_lean(dtype: torch.dtype, frozen: bool) -> None:
    small, large = (peak_bytes(memory_changes(logps_step(n, dtype, frozen))) for n in (N, 4 * N))
    assert small <= allowed("lean", dtype, N, ("weight",) if frozen else ()) + 64 * N + ROW_OPS  # the objective's own
    assert large - small <= 3 * N * (H * (4 + 2 if dtype.itemsize == 2 else 4) + 128) + 0.02 * small


def test_a_view_of_the_hidden_states_is_not_copied() -> None:
    """`hidden[:, :-1]` of a batch of which few rows are live."""
    hidden = torch.randn(4, 1025, 512)
    weight, ids = torch.randn(64, 512), torch.zeros(4, 1024, dtype=torch.long)
    mask = torch.zeros(4, 1024).index_fill(1, torch.arange(8), 1)
    with torch.no_grad():
        changes = memory_changes(lambda: gk.linear_per_token_logps(hidden[:, :-1], weight, ids, mask=mask))
    assert peak_bytes(changes) < hidden.numel() * 4 / 4
