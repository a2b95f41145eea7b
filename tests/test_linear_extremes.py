"""The fused linear form where numbers are tiny, missing or infinite, and where nothing may be computed at all."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import grpo_kernels as gk


def problem(dtype: torch.dtype, rows: int = 256, vocab: int = 500) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    hidden, weight = torch.randn(4, rows // 4, 64).to(dtype), (torch.randn(vocab, 64) * 0.05).to(dtype)
    return hidden, weight, torch.randint(0, vocab, (4, rows // 4)), torch.randn(4)


@pytest.mark.parametrize("mode", ["fast", "lean"])
@pytest.mark.parametrize("logits_dtype", ["float32", "input"])
@pytest.mark.parametrize(("loss_type", "normalizer"), [("dapo", 65536.0), ("grpo", 65536.0)])
def test_small_coefficients_keep_their_digits_in_float16(
    mode: str, logits_dtype: str, loss_type: str, normalizer: float
) -> None:
    hidden, weight, ids, advantages = problem(torch.float16)
    config = gk.GRPOLossConfig(loss_type=loss_type)
    wide = [t.double().requires_grad_() for t in (hidden, weight)]
    truth = gk.grpo_loss(wide[0] @ wide[1].t(), ids, config=config, advantages=advantages, normalizer=normalizer)
    expected = torch.autograd.grad(truth.loss * 65536, wide)
    narrow = [t.clone().requires_grad_() for t in (hidden, weight)]
    out = gk.linear_grpo_loss(
        *narrow, ids, config=config, advantages=advantages, normalizer=normalizer, mode=mode, logits_dtype=logits_dtype
    )
    for ours, right in zip(torch.autograd.grad(out.loss * 65536, narrow), expected, strict=True):
        assert (ours.double() - right).abs().max() / right.abs().max() < 1e-3


def test_a_float32_bias_beside_16_bit_operands_is_not_rounded() -> None:
    bias = torch.tensor([100.1] + [0.0] * 8)
    hidden, weight = torch.zeros(1, 1, 4).bfloat16(), torch.zeros(9, 4).bfloat16()
    out = gk.linear_per_token_logps(hidden, weight, torch.ones(1, 1, dtype=torch.long), bias=bias)
    assert out.logps.item() == pytest.approx(-100.1, abs=1e-5)


@pytest.mark.parametrize("mode", ["fast", "lean"])
@pytest.mark.parametrize("upstream", [math.inf, math.nan])
def test_a_dead_row_has_gradient_zero_whatever_comes_from_above(mode: str, upstream: float) -> None:
    hidden, weight, ids, advantages = problem(torch.float32)
    hidden.requires_grad_()
    mask = torch.ones(ids.shape)
    mask[:, 3] = 0
    out = gk.linear_grpo_loss(hidden, weight, ids, advantages=advantages, completion_mask=mask, mode=mode)
    out.loss.backward(torch.tensor(upstream))
    assert hidden.grad is not None
    assert (hidden.grad[:, 3] == 0).all() and not hidden.grad[:, 0].isfinite().any()


@pytest.mark.parametrize("mode", ["fast", "lean"])
def test_a_nan_that_makes_the_loss_nan_shows_in_the_gradient(mode: str) -> None:
    hidden, weight, ids, _ = problem(torch.float32)
    hidden[1, 2] = math.nan
    hidden.requires_grad_()
    old = torch.full(ids.shape, -6.0)
    advantages = torch.tensor([1.0, 0.0, -1.0, 0.5])
    out = gk.linear_grpo_loss(hidden, weight, ids, advantages=advantages, old_per_token_logps=old, mode=mode)
    out.loss.backward()
    assert hidden.grad is not None
    assert out.loss.isnan() and hidden.grad[1, 2].isnan().all() and hidden.grad[0].isfinite().all()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # torch.compile looks at it
def test_the_bare_function_may_be_called_in_compiled_code() -> None:
    hidden, weight, ids, advantages = problem(torch.float32)
    hidden.requires_grad_()

    def call(hidden: Tensor) -> Tensor:
        arguments = (hidden, weight, None, ids, advantages, None, None, None, gk.GRPOLossConfig())
        return gk.LinearGRPOLossFunction.apply(*arguments)[0]

    torch.testing.assert_close(torch.compile(call, backend="eager")(hidden), call(hidden))


def test_a_sparse_weight_is_refused() -> None:
    hidden, weight, ids, _ = problem(torch.float32)
    with pytest.raises(TypeError, match=r"linear_per_token_logps: weight must be dense, got torch.sparse_coo\. Call"):
        gk.linear_per_token_logps(hidden, weight.to_sparse(), ids)


def test_log_probs_may_be_masked_in_place() -> None:
    hidden, weight, ids, _ = problem(torch.float32)
    hidden.requires_grad_()
    logps = gk.linear_per_token_logps(hidden, weight, ids).logps
    logps.mul_(torch.zeros(ids.shape)).sum().backward()
    assert hidden.grad is not None and (hidden.grad == 0).all()
