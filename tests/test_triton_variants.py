"""A training run compiles few variants of a kernel, whatever lengths, batches and schedules it goes through."""

from __future__ import annotations

import functools
import random
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from uninterpreted import answer, printed_by

pytest.importorskip("triton")
from grpo_kernels.backends.triton import launch
from grpo_kernels.backends.triton.compile import VOCAB, launches

MOST = 4
LENGTHS = random.Random(0).sample(range(37, 4001), 100)
SCENES: dict[str, dict[str, Any]] = {
    "padded": {},
    "packed": {"packed": True},
    "rewards": {"rewards": True},
    "odd vocabulary": {"vocab": 50_257},
    "views": {"views": True},
    "temperature of each token": {"tempered": True},
    "micro-batches": {"micro": True},
}


def calls(
    step: int, length: int, *, vocab: int = VOCAB, packed: bool = False, rewards: bool = False, views: bool = False,
    tempered: bool = False, micro: bool = False, entropy: bool = False,
) -> dict[str, Callable[[], Any]]:  # fmt: skip
    """The ops on a batch of 8 sequences; batch, temperature, clip bounds and beta change with the step.

    views: logits without their last token, log-probs as parts of longer tensors. micro: one, one, two and four
    sequences of a batch in turn.
    """
    rows = [slice(0, 1), slice(1, 2), slice(2, 4), slice(4, 8)][step % 4] if micro else slice(1 + step % 8)

    def tokens(dtype: torch.dtype = torch.float32, late: int = 0) -> Tensor:
        if views:
            return torch.empty(8, length + 1 + late, dtype=dtype, device="meta")[rows, late : length + late]
        part = torch.empty(8, length, dtype=dtype, device="meta")[rows]
        return part.flatten() if packed else part

    ids, old, ref, weight = tokens(torch.int64), tokens(), tokens(late=3), tokens(late=5)
    logits = torch.empty(*ids.shape, vocab, dtype=torch.bfloat16, device="meta")
    if views:
        logits = torch.empty(len(ids), length + 1, vocab, dtype=torch.bfloat16, device="meta")[:, :-1]
    row = torch.empty(ids.shape, device="meta")
    one = torch.empty((), device="meta")
    sequences = torch.empty(8, device="meta")[rows]
    source = (sequences, 1) if rewards else (row if packed else sequences[:, None], 0)
    schedule = (0.8 - step / 1000, 1.2 + step / 1000, float("inf"), 3.0 + step)
    limits = [*schedule, 1.0, 1.05, float("inf"), 0.01 * (step + 1), 20.0, 10.0]
    loss = (*source, old, ref, weight, limits, "clip", "k3", True, False)
    arguments = (logits, ids, row if tempered else one, 1.0, None)
    gradient = (*arguments, *[row] * 5, row if entropy else None)
    return {
        "row_stats": lambda: launch.row_stats(*arguments, entropy),
        "row_grad": lambda: launch.row_grad_into(
            logits, torch.empty(logits.shape, dtype=logits.dtype, device="meta"), *gradient[1:]
        ),
        "row_grad_": lambda: launch.row_grad_into(logits, *gradient),
        "loss_stats": lambda: launch.loss_stats(*arguments, entropy, *loss),
        "loss_grad_": lambda: launch.loss_grad_(*arguments, entropy, *loss, row, one),
        "row_scale_": lambda: launch.row_scale_(logits, one),
    }


def variants() -> dict[str, dict[str, int]]:
    """How many compiled kernels Triton's cache would tell apart, by scene and op."""
    keys: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for step, length in enumerate(LENGTHS):
        options = SCENES | {"entropy from half way": {"entropy": step >= 50}}
        for scene, chosen in options.items():
            for op, call in calls(step, length, **chosen).items():
                keys[scene][op] |= {made.key for made in launches("sm_90", call)}
    return {scene: {op: len(found) for op, found in ops.items()} for scene, ops in keys.items()}


@functools.cache
def counted() -> dict[str, dict[str, int]]:
    printed: dict[str, dict[str, int]] = printed_by(__file__, variants.__name__)
    return printed


@pytest.mark.parametrize("scene", SCENES)
def test_few_variants_over_a_hundred_lengths(scene: str) -> None:
    assert {op: count for op, count in counted()[scene].items() if not 1 <= count <= MOST} == {}


def test_what_is_compiled_in_makes_another_variant() -> None:
    """The count can count: switching an option on half way adds variants, but for the op that does not have it."""
    usual, switched = counted()["padded"], counted()["entropy from half way"]
    assert [op for op in usual if switched[op] <= usual[op]] == ["row_scale_"]


if __name__ == "__main__":
    answer(variants)
