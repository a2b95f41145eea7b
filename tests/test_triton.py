"""The Triton kernels, interpreted: the float64 oracle's numbers for statistics, gradients and the one-pass loss."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from oracle import Options
from support import make_batch, run

import grpo_kernels as gk
from grpo_kernels.ops import rows

pytest.importorskip("triton")
launch = pytest.importorskip("grpo_kernels.backends.triton.launch")

BASE = Options(epsilon_high=0.28, max_completion_length=9, temperature=0.7)
OPTIONS = {
    "clip": BASE,
    "delta, dual clip": dataclasses.replace(BASE, loss_type="grpo", delta=2.0, dual_clip=3.0),
    "k1": dataclasses.replace(BASE, loss_type="dr_grpo", beta=0.1, kl_estimator="k1"),
    "k2, corrected": dataclasses.replace(BASE, beta=0.1, kl_estimator="k2", use_bias_correction_kl=True),
    "k3, softcap": dataclasses.replace(BASE, loss_type="bnpo", beta=0.1, softcap=8.0),
    "cispo": dataclasses.replace(BASE, loss_type="cispo", epsilon_high=1.1, beta=0.1, use_bias_correction_kl=True),
    "entropy": dataclasses.replace(BASE, entropy_coef=0.1, logit_scale=1.3),
    "sequence": dataclasses.replace(BASE, importance_sampling_level="sequence", beta=0.1),
}


@pytest.fixture(autouse=True)
def silent_numpy() -> Iterator[None]:
    """The interpreter computes with numpy, which warns of the infinities that kernels mean."""
    with np.errstate(all="ignore"):
        yield


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("shape", [(2, 2, 7), (2, 131), (2, 640)], ids=str)
def test_rows(shape: tuple[int, ...], softcap: float | None, dtype: torch.dtype) -> None:
    logits, targets = (torch.randn(*shape) * 3).to(dtype), torch.randint(0, shape[-1], shape[:-1])
    targets.view(-1)[0] = -1
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    arguments = (targets, torch.tensor(0.7, dtype=wide), 1.3, softcap, True)
    truth = rows.row_stats(logits.double(), targets, torch.tensor(0.7, dtype=wide).double(), 1.3, softcap, True)
    ours = launch.row_stats(logits, *arguments)
    tolerance = {"rtol": 1e-12, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 3e-6, "atol": 3e-6}
    for mine, right in zip(ours[:3], truth[:3], strict=True):
        torch.testing.assert_close(mine.double(), right, **tolerance)
    upstream = torch.randn(2, *shape[:-1], dtype=wide)
    options = (targets, torch.tensor(0.7, dtype=wide), 1.3, softcap)
    grad = launch.row_grad(logits, *options, ours[1], *ours[3:], *upstream)
    right = rows.row_grad(logits.double(), *options, truth[1], *truth[3:], *upstream.double())
    step = {"rtol": float(torch.finfo(dtype).eps), "atol": 3e-6 if wide == torch.float32 else 1e-12}
    torch.testing.assert_close(grad.double(), right, **step)
    assert (grad.reshape(-1, shape[-1])[0] == 0).all()
    over = logits.clone()
    launch.row_grad_(over, *options, ours[1], *ours[3:], *upstream)
    assert torch.equal(over, grad)


@pytest.mark.parametrize("name", list(OPTIONS))
@pytest.mark.parametrize("on_policy", [False, True])
def test_losses(name: str, on_policy: bool) -> None:
    opt = OPTIONS[name]
    batch = make_batch(seed=5, lengths=(3, 2), vocab=37, dtype=torch.float64, weight="token")
    batch = batch.but(old=None) if on_policy else batch
    expected = run(batch, opt, torch.float64, impl="torch")
    ours = run(batch, opt, torch.float64, impl="triton")
    assert gk.backends.last_used() == ("triton" if name == "sequence" else "triton one-pass")
    torch.testing.assert_close(ours.loss, expected.loss, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(ours.grad, expected.grad, rtol=1e-9, atol=1e-12)
    for metric, value in expected.metrics.items():
        torch.testing.assert_close(ours.metrics[metric], value, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["clip", "k3, softcap", "entropy"])
def test_one_launch_in_place(name: str) -> None:
    batch = make_batch(seed=6, lengths=(3, 2), vocab=37, dtype=torch.float64)
    grads: list[Any] = []
    for impl, inplace in (("torch", False), ("triton", True)):
        leaf = torch.as_tensor(batch.logits.copy()).requires_grad_()
        out = gk.grpo_loss(
            leaf * 1, torch.as_tensor(batch.ids), config=gk.GRPOLossConfig(**vars(OPTIONS[name])),
            advantages=torch.as_tensor(batch.advantages), completion_mask=torch.as_tensor(batch.mask),
            old_per_token_logps=torch.as_tensor(batch.old), ref_per_token_logps=torch.as_tensor(batch.ref),
            impl=impl, inplace=inplace,
        )  # fmt: skip
        used = gk.backends.last_used()
        (out.loss * 3).backward()
        grads.append(leaf.grad)
    assert used == "triton one-kernel"
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("rewards", [[1.0, 0.0, 0.5, 0.2], [1.0, float("nan"), 0.3, 0.3], [0.1, 0.1, 2e6, 2e6 + 1]])
def test_rewards_are_normalised_in_the_kernel(rewards: list[float]) -> None:
    logits, ids = torch.randn(4, 1, 11), torch.tensor([[1], [2], [3], [4]])
    values = torch.tensor(rewards)
    ours, theirs = (
        gk.grpo_loss(logits, ids, rewards=values, group_size=2, impl=impl, return_per_token=True).per_token
        for impl in ("triton", "torch")
    )
    torch.testing.assert_close(ours.loss, theirs.loss, rtol=1e-5, atol=1e-6)
