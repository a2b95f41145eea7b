"""Accuracy where the vocabulary is large or the target nearly certain."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from support import (
    DTYPES,
    normal,
    score,
    truth_of,
)
from tolerance import as_array

# Large vocabularies


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("vocab", "rows"), [(64000, 12), (151936, 6)])
@pytest.mark.parametrize("tau", [0.9, 0.7])
def test_large_vocabularies_within_1e_5(dtype: torch.dtype, vocab: int, rows: int, tau: float) -> None:
    logits = normal(rows, vocab, dtype, std=2.0)
    ids = torch.randint(0, vocab, (1, rows), generator=torch.Generator().manual_seed(3))
    ids[0, 0] = logits[0, 0].float().argmax()
    out = score(logits, ids, temperature=tau)
    truth = truth_of(logits, ids, temperature=tau)
    assert np.abs(as_array(out.logps)[0] - truth.logps).max() < (1e-11 if dtype == torch.float64 else 1e-5)
    assert np.abs(as_array(out.entropy)[0] - truth.entropy).max() < (1e-11 if dtype == torch.float64 else 1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_logits_near_minus_1000_within_1e_5(dtype: torch.dtype) -> None:
    logits = normal(4, 151936, dtype, std=3.0, mean=-1000.0)
    ids = torch.tensor([[0, 151935, 77, 4096]])
    ids[0, 2] = logits[0, 2].float().argmax()
    out = score(logits, ids)
    truth = truth_of(logits, ids)
    assert np.abs(as_array(out.logps)[0] - truth.logps).max() < 1e-5
    assert np.abs(as_array(out.entropy)[0] - truth.entropy).max() < 1e-5


@pytest.mark.parametrize("vocab", [262144, 248320])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_quarter_of_a_million_columns(vocab: int, dtype: torch.dtype) -> None:
    values = normal(3, vocab, torch.bfloat16, std=3.0).to(dtype)
    logits = values.clone().requires_grad_()
    ids = torch.tensor([[5, vocab - 1, vocab // 2]])
    out = score(logits, ids)
    truth = truth_of(values, ids)
    assert np.abs(as_array(out.logps)[0] - truth.logps).max() < 1e-5
    assert np.abs(as_array(out.entropy)[0] - truth.entropy).max() < 1e-4
    out.logps.sum().backward()
    assert logits.grad is not None
    if dtype == torch.float32:
        assert logits.grad.double().sum(-1).abs().max() < 1e-4
    error = np.abs(as_array(logits.grad)[0] - truth.dlogps)
    assert (error <= torch.finfo(dtype).eps * np.abs(truth.dlogps) + 1e-7).all()


@pytest.mark.parametrize("offset", [0.0, -1000.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_gradient_of_a_nearly_certain_target_keeps_its_digits(dtype: torch.dtype, offset: float) -> None:
    """1 - p = 6e-8: `p - 1` in float32 is off by all of it."""
    vocab = 1025
    gap = math.log((vocab - 1) / 6e-8)
    logits = torch.full((1, 1, vocab), offset - gap if dtype == torch.float64 else offset - 23.5, dtype=dtype)
    logits[0, 0, 1000] = offset
    truth = truth_of(logits, torch.tensor([[1000]]), np.longdouble)
    logits.requires_grad_()
    out = score(logits, [[1000]])
    out.logps.sum().backward()
    assert logits.grad is not None
    assert 2e-8 < float(truth.dlogps[0, 1000]) < 6e-7
    assert logits.grad[0, 0, 1000].item() == pytest.approx(float(truth.dlogps[0, 1000]), rel=0.01)
    assert out.logps.item() == pytest.approx(float(truth.logps[0]), rel=1e-5)


@pytest.mark.parametrize("offset", [0.0, -1000.0, 500.0])
def test_small_entropy_keeps_its_digits(offset: float) -> None:
    """H near 7e-5: sums of x exp(x) in raw logits are off by 10 %."""
    logits = torch.full((1, 1, 1000), offset - 19.5, dtype=torch.float32)
    logits[0, 0, 3] = offset
    truth = truth_of(logits, torch.tensor([[3]]), np.longdouble)
    out = score(logits, [[3]])
    assert 1e-5 < float(truth.entropy[0]) < 1e-3
    assert out.entropy.item() == pytest.approx(float(truth.entropy[0]), rel=1e-5)


@pytest.mark.parametrize("offset", [0.0, -1000.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_entropy_gradient_of_a_nearly_certain_row_keeps_its_digits(dtype: torch.dtype, offset: float) -> None:
    """H near 1e-6 with 1 - p = 6e-8: `log p` of the leader is all rounding unless it is made from what is left over."""
    logits = torch.full((1, 1, 1025), offset - 23.5, dtype=dtype)
    logits[0, 0, 1000] = offset
    truth = truth_of(logits, torch.tensor([[1000]]), np.longdouble)
    logits.requires_grad_()
    score(logits, [[1000]]).entropy.sum().backward()
    np.testing.assert_allclose(as_array(logits.grad)[0, 0], truth.dentropy[0].astype(float), rtol=0.01)
