"""Log-probabilities and entropies that public kernels got wrong, each with its kind.

The truth is the NumPy oracle or hand arithmetic on the inputs as they were rounded; memory is poisoned.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from oracle import Options
from support import (
    DTYPES,
    LOSS_TYPES,
    from_probabilities,
    make_batch,
    normal,
    plain_row_stats,
    result_dtype,
    run,
    same_bits,
    score,
    truth_of,
)
from tolerance import as_array, assert_within_budget
from torch import Tensor

import grpo_kernels as gk

INF, NAN = math.inf, math.nan
WIDE = [1, 2, 3, 255, 257, 1023, 1025, 4097, 32001, 50257, 129920, 151665, 151936, 248320]


# Columns beyond the vocabulary


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_phantom_columns_in_a_peaked_negative_row(dtype: torch.dtype) -> None:
    logits = torch.full((1, 1, 129920), -12.0, dtype=dtype)
    logits[..., 7] = 4.0
    out = score(logits, [[7]])
    rest = 129919 * math.exp(-16)
    assert out.logps.item() == pytest.approx(-math.log1p(rest), abs=1e-7)
    assert out.logps.item() == pytest.approx(-0.0145146, abs=1e-6)
    assert out.entropy.item() == pytest.approx(math.log1p(rest) + 16 * rest / (1 + rest), abs=1e-6)
    assert out.entropy.item() == pytest.approx(0.2450711, abs=1e-6)


@pytest.mark.parametrize("value", [-1000.0, -30.0, 0.0, 30.0])
@pytest.mark.parametrize("vocab", WIDE)
def test_constant_rows_are_uniform(vocab: int, value: float) -> None:
    """V = 257 at -30 is -5.5490761; phantom zeros would give -35.54."""
    for dtype in DTYPES:
        out = score(torch.full((1, 2, vocab), value, dtype=dtype), [[0, vocab - 1]])
        expected = -math.log(vocab)
        step = torch.finfo(result_dtype(dtype)).eps * max(1.0, -expected)
        for row in range(2):
            assert abs(out.logps[0, row].item() - expected) <= 2 * step, (dtype, row)
            assert abs(out.entropy[0, row].item() + expected) <= 2 * step, (dtype, row)
            assert abs(out.lse[0, row].item() - (value - expected)) <= 2 * step + abs(value) * step, (dtype, row)
            assert out.logps[0, row].item() <= 0
            assert 0 <= out.entropy[0, row].item() <= -expected + 1e-5


def test_the_known_wrong_number_of_257_columns() -> None:
    assert score(torch.full((1, 1, 257), -30.0), [[3]]).logps.item() == pytest.approx(-5.5490761, abs=2e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("std", "mean"), [(1, 0), (10, 0), (3, -40), (30, -900), (1, 200)])
@pytest.mark.parametrize("vocab", [1, 2, 3, 17, 129, 600, 1025, 4097])
def test_row_statistics_are_inside_the_error_budget(dtype: torch.dtype, std: float, mean: float, vocab: int) -> None:
    logits = normal(12, vocab, dtype, std=std, mean=mean, seed=vocab)
    ids = torch.randint(0, vocab, (1, 12), generator=torch.Generator().manual_seed(1))
    ids[0, :4] = logits[0, :4].float().argmax(-1)
    truth = truth_of(logits, ids, np.longdouble)
    out = score(logits, ids)
    plain = plain_row_stats(logits[0], ids[0])
    for name, ours, ref in zip(("logps", "entropy", "lse"), (out.logps, out.entropy, out.lse), plain, strict=True):
        assert_within_budget(ours[0], ref, getattr(truth, name), result_dtype(dtype), name=name)
    assert (out.logps <= 0).all()
    assert (out.entropy >= 0).all()
    assert (out.entropy <= math.log(vocab) + 1e-5).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [2, 37, 1025])
@pytest.mark.parametrize("std", [1.0, 8.0])
def test_row_gradients_are_inside_the_error_budget(dtype: torch.dtype, vocab: int, std: float) -> None:
    ids = torch.randint(0, vocab, (1, 9), generator=torch.Generator().manual_seed(2))
    upstream = torch.randn(2, 1, 9, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    upstream = upstream.to(result_dtype(dtype))

    def gradient(form: Any) -> Tensor:
        logits = normal(9, vocab, dtype, std=std, seed=4).requires_grad_()
        logps, entropy = form(logits)
        (logps * upstream[0] + entropy * upstream[1]).sum().backward()
        assert logits.grad is not None
        return logits.grad

    ours = gradient(lambda x: score(x, ids)[:2])
    ref = gradient(lambda x: [y[None] for y in plain_row_stats(x[0], ids[0])[:2]])
    truth = truth_of(normal(9, vocab, dtype, std=std, seed=4), ids, np.longdouble)
    expected = as_array(upstream[0])[0][:, None] * truth.dlogps + as_array(upstream[1])[0][:, None] * truth.dentropy
    assert ours.dtype == dtype
    scale = np.abs(as_array(upstream[0])[0]) + np.abs(as_array(upstream[1])[0]) * (1 + truth.entropy)
    floor = np.broadcast_to(scale[:, None], expected.shape)
    assert_within_budget(ours[0], ref[0], expected, dtype, compute=result_dtype(dtype), floor=floor, name="dlogits")


# Intermediates in the input's 16 bits


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sixteen_bit_logits_score_like_the_same_values_in_float32(dtype: torch.dtype) -> None:
    logits = normal(64, 64000, dtype)
    ids = torch.randint(0, 64000, (1, 64), generator=torch.Generator().manual_seed(1))
    low, full = score(logits, ids), score(logits.float(), ids)
    assert low.logps.dtype == full.logps.dtype == low.entropy.dtype == low.lse.dtype == torch.float32
    for name in ("logps", "entropy", "lse"):
        assert (getattr(low, name) - getattr(full, name)).abs().max() < 1e-5, name
    old = full.logps + 0.3 * torch.randn(1, 64, generator=torch.Generator().manual_seed(2))
    loss = [
        gk.grpo_loss(x, ids, advantages=torch.tensor([1.5]), old_per_token_logps=old).loss
        for x in (logits, logits.float())
    ]
    assert loss[0].dtype == torch.float32
    assert abs(loss[1].item()) > 0.01
    assert abs(loss[0].item() - loss[1].item()) < 1e-5


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_results_are_float32_or_float64(dtype: torch.dtype) -> None:
    batch = make_batch(dtype=dtype, weight="token")
    got = run(batch, Options(loss_type="grpo", beta=0.1, entropy=True), dtype)
    expected = result_dtype(dtype)
    assert got.loss.dtype == expected
    assert got.grad.dtype == dtype
    for name, value in got.per_token._asdict().items():
        assert value.dtype == expected, name
    for name, value in got.metrics.items():
        assert value.dim() == 0 and not value.requires_grad, name


# Minus infinity


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hidden", [-INF, "min"])
def test_removed_columns_have_no_mass_no_entropy_and_no_gradient(dtype: torch.dtype, hidden: Any) -> None:
    value = torch.finfo(dtype).min if hidden == "min" else hidden
    logits = torch.tensor([[[0.0, 0.0, value]]], dtype=dtype, requires_grad=True)
    out = score(logits, [[0]])
    assert out.logps.item() == pytest.approx(-0.6931472, abs=1e-7)
    assert out.entropy.item() == pytest.approx(0.6931472, abs=1e-7)
    (dlogp,) = torch.autograd.grad(out.logps.sum(), logits, retain_graph=True)
    assert dlogp.flatten().tolist() == [0.5, -0.5, 0.0]
    (dentropy,) = torch.autograd.grad(out.entropy.sum(), logits)
    np.testing.assert_allclose(as_array(dentropy).ravel(), 0, atol=1e-7)
    assert dentropy[0, 0, 2].item() == 0.0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hidden", [-INF, "min"])
@pytest.mark.parametrize("where", ["first block", "scattered", "all but one", "last"])
@pytest.mark.parametrize(
    "transform", [{}, {"softcap": 5.0, "logit_scale": 0.5, "temperature": 0.6}], ids=["plain", "capped"]
)
def test_result_equals_the_run_without_the_removed_columns(
    dtype: torch.dtype, hidden: Any, where: str, transform: dict[str, Any]
) -> None:
    value = torch.finfo(dtype).min if hidden == "min" else hidden
    vocab, rows = 5003, 3
    logits = normal(rows, vocab, dtype, std=3.0)
    keep = torch.zeros(vocab, dtype=torch.bool)
    if where == "first block":
        keep[4600:] = True
    elif where == "scattered":
        keep[1::3] = True
    elif where == "all but one":
        keep[4999] = True
    else:
        keep[:-7] = True
    logits[..., ~keep] = value
    kept = keep.nonzero().ravel()
    short = torch.arange(rows)[None] % len(kept)
    full_in, short_in = logits.clone().requires_grad_(), logits[..., keep].clone().requires_grad_()
    full, brief = score(full_in, kept[short], **transform), score(short_in, short, **transform)
    for name in ("logps", "entropy", "lse"):
        a, b = getattr(full, name), getattr(brief, name)
        assert torch.isfinite(a).all(), name
        torch.testing.assert_close(a, b, rtol=1e-6, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}")
    for out in (full, brief):
        (out.logps * torch.tensor([1.0, -2.0, 0.5])).sum().add(0.7 * out.entropy.sum()).backward()
    assert full_in.grad is not None and short_in.grad is not None
    assert (full_in.grad[..., ~keep] == 0).all()
    # one rounding of the gradient's own dtype: the sums ran in another order
    tolerance = {"rtol": torch.finfo(dtype).eps, "atol": 2e-6}
    torch.testing.assert_close(full_in.grad[..., keep], short_in.grad, **tolerance)


def test_the_extremes_of_float16() -> None:
    rows = [[65504.0, -65504.0], [65504.0, -65504.0], [65504.0, -65472.0]]
    logits = torch.tensor([rows], dtype=torch.float16, requires_grad=True)
    out = score(logits, [[0, 1, 1]])
    assert out.logps[0].tolist() == [0.0, -131008.0, -130976.0]
    # exact in torch, to half an ulp of log S = 0 in Triton, whose maximum times log2(e) / T is rounded
    allowed = 6e-8 if gk.backends.last_used() == "triton" else 0.0
    assert out.entropy[0].tolist() == pytest.approx([0.0, 0.0, 0.0], abs=allowed)
    out.logps.sum().backward()
    assert logits.grad is not None
    assert logits.grad[0, 0].tolist() == [0.0, 0.0]
    assert logits.grad[0, 1].tolist() == [-1.0, 0.0], "finfo.min means removed, and removed columns have no gradient"
    assert logits.grad[0, 2].tolist() == [-1.0, 1.0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bad", ["all -inf", "+inf", "nan", "+inf target"])
@pytest.mark.parametrize(
    "transform", [{}, {"softcap": 5.0, "logit_scale": 0.5, "temperature": 0.6}], ids=["plain", "capped"]
)
def test_a_bad_live_row_is_nan_alone(dtype: torch.dtype, bad: str, transform: dict[str, Any]) -> None:
    logits = normal(5, 301, dtype, std=2.0)
    ids = torch.tensor([[3, 300, 17, 0, 9]])
    clean_in, spoilt_in = logits.clone().requires_grad_(), logits.clone()
    if bad == "all -inf":
        spoilt_in[0, 2] = -INF
    else:
        spoilt_in[0, 2, 17 if bad.endswith("target") else 40] = NAN if bad == "nan" else INF
    spoilt_in.requires_grad_()
    clean, spoilt = score(clean_in, ids, **transform), score(spoilt_in, ids, **transform)
    others = torch.tensor([0, 1, 3, 4])
    for name in ("logps", "entropy", "lse"):
        a, b = getattr(spoilt, name), getattr(clean, name)
        assert a[0, 2].isnan(), name
        assert same_bits(a[:, others], b[:, others]), name
    for out in (clean, spoilt):
        (out.logps.sum() + out.entropy.sum()).backward()
    assert clean_in.grad is not None and spoilt_in.grad is not None
    assert same_bits(spoilt_in.grad[:, others], clean_in.grad[:, others])


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("bad", ["all -inf", "+inf", "nan"])
def test_a_bad_live_row_spoils_the_loss_but_not_other_rows_gradients(loss_type: str, bad: str) -> None:
    batch = make_batch(vocab=11)
    opt = Options(loss_type=loss_type, beta=0.1, epsilon_high=1.1, max_completion_length=9, entropy_coef=0.1)
    clean = run(batch, opt)
    logits = batch.logits.copy()
    logits[2, 0] = -INF if bad == "all -inf" else logits[2, 0]
    if bad != "all -inf":
        logits[2, 0, 4] = INF if bad == "+inf" else NAN
    spoilt = run(batch.but(logits=logits), opt)
    assert spoilt.loss.isnan()
    rows = torch.ones(batch.ids.shape, dtype=torch.bool)
    rows[2, 0] = False
    assert same_bits(spoilt.grad[rows], clean.grad[rows])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_target_that_was_removed_is_impossible(dtype: torch.dtype) -> None:
    logits = torch.tensor([[[1.0, -INF, 2.0, 0.5]]], dtype=dtype, requires_grad=True)
    out = score(logits, [[1]])
    assert out.logps.item() == -INF
    p = np.exp([1.0, 2.0, 0.5]) / np.exp([1.0, 2.0, 0.5]).sum()
    assert out.entropy.item() == pytest.approx(float(-(p * np.log(p)).sum()), rel=1e-6)
    out.logps.sum().backward()
    assert logits.grad is not None
    gradient = as_array(logits.grad).ravel()
    assert gradient[1] == 0
    np.testing.assert_allclose(gradient[[0, 2, 3]], -p, rtol=torch.finfo(dtype).eps * 2)


# Float16 at its edge


def test_float16_near_its_largest_number_stays_finite() -> None:
    logits = torch.zeros(1, 3, 9, dtype=torch.float16)
    logits[0, 0], logits[0, 1, 4], logits[0, 2, 4] = 60000.0, 60000.0, -60000.0
    for options in ({}, {"logit_scale": 2.0}, {"temperature": 0.25}):
        leaf = logits.clone().requires_grad_()
        out = score(leaf, [[0, 4, 0]], **options)
        np.testing.assert_allclose(out.logps[0].detach().numpy(), [-math.log(9), 0.0, -math.log(8)], atol=1e-6)
        np.testing.assert_allclose(out.entropy[0].detach().numpy(), [math.log(9), 0.0, math.log(8)], atol=1e-6)
        (out.logps.sum() + out.entropy.sum()).backward()
        assert leaf.grad is not None and torch.isfinite(leaf.grad).all()


def test_an_infinite_float16_row_spoils_only_itself() -> None:
    logits = normal(4, 33, torch.float16)
    clean = score(logits, [[1, 2, 3, 4]])
    logits[0, 1, 7] = INF
    out = score(logits, [[1, 2, 3, 4]])
    assert out.logps[0, 1].isnan()
    assert same_bits(out.logps[:, [0, 2, 3]], clean.logps[:, [0, 2, 3]])
    masked = score(logits, [[1, 2, 3, 4]], mask=torch.tensor([[1, 0, 1, 1]]))
    assert masked.logps[0, 1].item() == 0.0
    assert masked.entropy[0, 1].item() == 0.0


def test_log_of_probabilities_stays_exact_in_every_dtype_that_holds_it() -> None:
    p = [[0.5, 0.25, 0.125, 0.125]]
    out = score(from_probabilities([p]), [[1]])
    assert out.logps.item() == pytest.approx(math.log(0.25), rel=1e-15)
    assert out.entropy.item() == pytest.approx(1.75 * math.log(2), rel=1e-15)
    assert out.lse.item() == pytest.approx(0.0, abs=1e-15)
