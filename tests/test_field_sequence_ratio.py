"""The sequence-level ratio: a geometric mean over live tokens, and nothing else."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from support import (
    same_bits,
    uniform,
)

import grpo_kernels as gk

INF, NAN = math.inf, math.nan


# The sequence ratio


def gspo(mask_value: float, epsilon: float, epsilon_high: float, weight: Any = None, loss_type: str = "grpo") -> Any:
    """One sequence of log-ratios [ln 2, 0, `mask_value` (masked)], A = +1; returns the output and dL/dlogp."""
    logits = uniform(1, 3, dtype=torch.float64).requires_grad_()
    old = -math.log(4) - torch.tensor([[math.log(2), 0.0, mask_value]], dtype=torch.float64)
    config = gk.GRPOLossConfig(
        loss_type=loss_type, importance_sampling_level="sequence", epsilon=epsilon, epsilon_high=epsilon_high,
        max_completion_length=2,
    )  # fmt: skip
    out = gk.grpo_loss(
        logits, torch.zeros(1, 3, dtype=torch.long), config=config, advantages=torch.ones(1), old_per_token_logps=old,
        completion_mask=torch.tensor([[1, 1, 0]]), importance_sampling_ratio=weight, return_per_token=True,
    )  # fmt: skip
    out.loss.backward()
    assert logits.grad is not None
    return out, logits.grad[0, :, 0] / 0.75, logits.grad


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo"])
def test_sequence_ratio_is_the_geometric_mean_of_live_tokens(loss_type: str) -> None:
    out, slope, _ = gspo(9.0, 0.2, 0.28, loss_type=loss_type)
    np.testing.assert_allclose(out.per_token.ratio[0, :2].numpy(), 2**0.5, rtol=1e-12)
    np.testing.assert_allclose(out.per_token.loss[0].numpy(), [-1.28, -1.28, 0.0], rtol=1e-12)
    assert slope.tolist() == [0.0, 0.0, 0.0]
    out, slope, _ = gspo(9.0, 0.99, 1.0, loss_type=loss_type)
    assert out.loss.item() == pytest.approx(-(2**0.5), rel=1e-12)
    np.testing.assert_allclose(slope.numpy(), [-(2**-0.5), -(2**-0.5), 0.0], rtol=1e-12)


def test_a_masked_log_ratio_moves_no_bit_at_sequence_level() -> None:
    clean = gspo(9.0, 0.99, 1.0)
    for value in (0.0, -700.0, 1e10, NAN, INF, -INF):
        spoilt = gspo(value, 0.99, 1.0)
        assert same_bits(spoilt[0].loss, clean[0].loss)
        assert same_bits(spoilt[2], clean[2])


def test_sequence_ratio_with_sampler_weights() -> None:
    """Per-token weights w: loss -s mean(w); each token of the mean gets the same share of the gradient."""
    out, slope, _ = gspo(9.0, 0.99, 1.0, torch.tensor([[0.5, 2.0, NAN]], dtype=torch.float64))
    assert out.loss.item() == pytest.approx(-(2**0.5) * 1.25, rel=1e-12)
    np.testing.assert_allclose(slope.numpy(), [-(2**-0.5) * 1.25, -(2**-0.5) * 1.25, 0.0], rtol=1e-12)
    for shape in ((1,), (1, 1)):
        out, slope, _ = gspo(9.0, 0.99, 1.0, torch.full(shape, 0.5, dtype=torch.float64))
        assert out.loss.item() == pytest.approx(-(2**0.5) * 0.5, rel=1e-12)
        np.testing.assert_allclose(slope.numpy(), [-(2**-0.5) * 0.5, -(2**-0.5) * 0.5, 0.0], rtol=1e-12)
