"""The linear form in mixed precision: two dtypes, autocast, scaled float16."""

from __future__ import annotations

import warnings

import pytest
import torch
from linear_support import MODES, loss_of, make_problem, run_linear
from oracle import Options
from support import same_bits
from torch import Tensor

import grpo_kernels as gk

PAIRS = [
    (torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16), (torch.float16, torch.bfloat16),
    (torch.float32, torch.float16), (torch.float32, torch.float64), (torch.float64, torch.float32),
]  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("of_hidden", "of_weight"), PAIRS, ids=str)
def test_two_dtypes_compute_in_the_wider_and_give_each_its_own(
    of_hidden: torch.dtype, of_weight: torch.dtype, mode: str
) -> None:
    operands, loss = loss_of()
    hidden = operands[0].detach().to(of_hidden).requires_grad_()
    weight = operands[1].detach().to(of_weight).requires_grad_()
    wide = torch.promote_types(of_hidden, of_weight)
    out = loss(hidden, weight, mode=mode)
    grads = torch.autograd.grad(out.loss, (hidden, weight))
    assert [grad.dtype for grad in grads] == [of_hidden, of_weight]
    exact = [x.detach().to(wide).requires_grad_() for x in (hidden, weight)]
    expected = loss(*exact, mode=mode)
    torch.testing.assert_close(out.loss.double(), expected.loss.double(), rtol=1e-6, atol=1e-7)
    for grad, right in zip(grads, torch.autograd.grad(expected.loss, exact), strict=True):
        eps = torch.finfo(grad.dtype).eps
        torch.testing.assert_close(grad.double(), right.double(), rtol=max(eps, 1e-5), atol=1e-7)


# Autocast


@pytest.mark.parametrize("function", [*MODES, "logps"])
def test_autocast_rounds_what_the_head_would_round(function: str) -> None:
    """hidden and weight to bfloat16, as `F.linear` does there; the logits stay float32, gradients the inputs' own."""
    operands, loss = loss_of(bias=False)
    narrow = [x.detach().bfloat16().requires_grad_() for x in operands]
    ids = torch.arange(32).reshape(4, 8)

    def value(hidden: Tensor, weight: Tensor) -> Tensor:
        if function == "logps":
            return gk.linear_per_token_logps(hidden, weight, ids).logps.mean()
        return loss(hidden, weight, mode=function).loss

    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = value(*operands)
    exact, rounded = value(*operands), value(*narrow)
    assert cast.dtype == torch.float32
    torch.testing.assert_close(cast, rounded, rtol=1e-6, atol=1e-7)
    assert (cast - exact).abs() > 1e-5
    grads, right = torch.autograd.grad(cast, operands), torch.autograd.grad(rounded, narrow)
    for grad, other in zip(grads, right, strict=True):
        assert grad.dtype == torch.float32
        torch.testing.assert_close(grad, other.float(), rtol=2.0**-8, atol=1e-6)


def test_autocast_that_is_off_or_of_another_device_changes_nothing() -> None:
    operands, loss = loss_of()
    plain = loss(*operands).loss
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=False):
        assert same_bits(loss(*operands).loss, plain)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that there is no CUDA
        context = torch.autocast("cuda", dtype=torch.bfloat16)
    with context:
        assert same_bits(loss(*operands).loss, plain)


def test_backward_after_autocast_is_the_same_outside_of_it() -> None:
    operands, loss = loss_of()
    for mode in MODES:
        grads = []
        for inside in (False, True):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                out = loss(*operands, mode=mode).loss
                if inside:
                    grads.append(torch.autograd.grad(out, operands))
            if not inside:
                grads.append(torch.autograd.grad(out, operands))
        assert all(same_bits(a, b) for a, b in zip(*grads, strict=True))


def test_grad_scaler_gives_the_plain_step() -> None:
    results = []
    for scaled in (False, True):
        operands, loss = loss_of()
        optimizer = torch.optim.SGD(operands, lr=1.0)
        scaler = torch.amp.GradScaler("cpu", enabled=scaled)
        scaler.scale(loss(*operands).loss).backward()
        scaler.step(optimizer)
        results.append([x.detach() for x in operands])
    torch.testing.assert_close(results[0], results[1], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("mode", MODES)
def test_a_scaled_float16_loss_keeps_small_gradients(mode: str) -> None:
    """A mean over 1e8 tokens is below float16's smallest number: the loss scale must meet the gradient in float32."""
    opt = Options()
    problem = make_problem(seed=63, dtype=torch.float16).but(normalizer=1e8, old=None)
    ran = run_linear(problem, opt, mode=mode, upstream=2.0**16)
    exact = run_linear(problem.but(normalizer=1e8 / 2**16), opt, mode=mode)
    for name, grad in ran.grads.items():
        assert grad.abs().max() > 1e-5
        torch.testing.assert_close(grad.float(), exact.grads[name].float(), rtol=1e-3, atol=1e-7)
