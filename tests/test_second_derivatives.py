"""Differentiable once: each way to a second derivative raises, none is silently wrong."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import grpo_kernels as gk

IDS = torch.tensor([[0, 3, 1], [2, 4, 0]])
HIDDEN = torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(0))


def logps(logits: Tensor) -> Tensor:
    return gk.per_token_logps(logits, IDS).logps.mean()


def loss(logits: Tensor) -> Tensor:
    return gk.grpo_loss(
        logits, IDS, advantages=torch.tensor([1.0, -0.5]), old_per_token_logps=torch.full((2, 3), -2.0)
    ).loss


@pytest.mark.parametrize("objective", [logps, loss])
def test_a_second_derivative_with_named_inputs_raises(objective: Callable[[Tensor], Tensor]) -> None:
    weight = torch.randn(6, 5, requires_grad=True)
    (grad,) = torch.autograd.grad(objective(torch.tanh(HIDDEN @ weight)), weight, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward is not supported"):
        torch.autograd.grad(grad.square().sum(), weight)


@pytest.mark.parametrize("objective", [logps, loss])
def test_hessians_raise(objective: Callable[[Tensor], Tensor]) -> None:
    logits = torch.randn(2, 3, 5)
    with pytest.raises(RuntimeError, match="double backward is not supported"):
        torch.autograd.functional.hvp(objective, logits, torch.ones_like(logits))


@pytest.mark.parametrize("objective", [logps, loss])
def test_an_upstream_that_requires_grad_raises(objective: Callable[[Tensor], Tensor]) -> None:
    logits, scale = torch.randn(2, 3, 5, requires_grad=True), torch.ones((), requires_grad=True)
    (grad,) = torch.autograd.grad(objective(logits) * scale, logits, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward is not supported"):
        torch.autograd.grad(grad.sum(), scale)


def test_a_first_derivative_with_a_graph_is_right() -> None:
    logits = torch.randn(2, 3, 5, requires_grad=True)
    (plain,) = torch.autograd.grad(loss(logits), logits)
    (kept,) = torch.autograd.grad(loss(logits), logits, create_graph=True)
    assert plain.abs().sum() > 0.01
    assert torch.equal(plain, kept)
