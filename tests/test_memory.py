"""Memory, from the allocations that torch reports: no temporary of the logits' size, none at all in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import grpo_kernels as gk

VOCABULARY = 32001
CHUNKS = 16 * 2**20  # a few float32 buffers of one chunk; the same for any N


def peak_of(work: Callable[[], Any]) -> int:
    """Largest sum of allocations alive at once during `work`, in bytes: deterministic, unlike the process's memory."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        kept = work()
    del kept
    held = peak = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


def step(rows: int, dtype: torch.dtype, **options: Any) -> tuple[Callable[[], Tensor], int]:
    """Forward and backward of the loss on the output of an op, and the bytes of its logits."""
    base = torch.randn(2, rows // 2, VOCABULARY).to(dtype)
    ids = torch.randint(0, VOCABULARY, base.shape[:2])
    old = torch.full(base.shape[:2], -10.0)
    config = gk.GRPOLossConfig(beta=0.1, entropy_coef=0.01)

    class Made(torch.autograd.Function):  # logits that are the output of an op which needs no memory in backward
        @staticmethod
        def forward(ctx: Any, source: Tensor) -> Tensor:
            return base.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad.sum().reshape(1).float()

    logits = Made.apply(torch.ones(1, requires_grad=True))

    def run() -> Tensor:
        out = gk.grpo_loss(
            logits,
            ids,
            config=config,
            advantages=torch.ones(2),
            old_per_token_logps=old,
            ref_per_token_logps=old,
            **options,
        )
        out.loss.backward()
        return out.loss

    return run, base.numel() * base.element_size()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_in_place_needs_no_memory_that_grows_with_the_vocabulary(dtype: torch.dtype) -> None:
    small, large = (peak_of(step(rows, dtype, inplace=True)[0]) for rows in (128, 512))
    assert large <= CHUNKS + 256 * 512
    assert large - small <= 256 * (512 - 128)
    assert large < step(512, dtype)[1] / 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_default_adds_one_gradient_of_the_logits(dtype: torch.dtype) -> None:
    run, logits_bytes = step(512, dtype)
    assert logits_bytes <= peak_of(run) <= logits_bytes + CHUNKS + 256 * 512


def test_log_probs_without_grad_need_one_chunk() -> None:
    logits = torch.randn(512, VOCABULARY)
    ids = torch.randint(0, VOCABULARY, (512,))
    assert peak_of(lambda: gk.per_token_logps(logits, ids, entropy=True)) <= CHUNKS + 256 * 512
    assert peak_of(lambda: gk.per_token_logps(logits[:, :-1], ids.clamp(max=7))) <= CHUNKS + 256 * 512
