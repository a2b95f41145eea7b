"""Numerical faults seen in public GRPO kernels (cases 1, 2, 4 to 9, 11, 13, 14), each with its kind.

The truth is the NumPy oracle or hand arithmetic, on the inputs as they were rounded; memory is poisoned before each call.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from oracle import Options
from support import (
    DTYPES,
    LOSS_TYPES,
    from_probabilities,
    make_batch,
    plain_row_stats,
    poisoned,
    result_dtype,
    run,
    same_bits,
    uniform,
)
from tolerance import as_array, assert_within_budget
from torch import Tensor

import grpo_kernels as gk

INF, NAN = math.inf, math.nan
WIDE = [1, 2, 3, 255, 257, 1023, 1025, 4097, 32001, 50257, 129920, 151665, 151936, 248320]
CLIPPED = [name for name in LOSS_TYPES if name != "cispo"]


def score(logits: Tensor, ids: Any, **options: Any) -> Any:
    with poisoned():
        return gk.per_token_logps(logits, torch.as_tensor(ids), entropy=True, **options)


def normal(rows: int, vocab: int, dtype: torch.dtype, *, std: float = 1.0, mean: float = 0.0, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(1, rows, vocab, generator=generator) * std + mean).to(dtype)


def truth_of(logits: Tensor, ids: Tensor, real: type = np.float64, **options: Any) -> oracle.RowStats:
    return oracle.row_stats(
        as_array(logits).reshape(-1, logits.shape[-1]), as_array(ids).reshape(-1), real=real, **options
    )


# Case 1: columns beyond the vocabulary


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


# Case 2: intermediates in the input's 16 bits


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
        gk.grpo_loss(x, ids, advantages=torch.tensor([1.5]), old_per_token_logps=old).loss for x in (logits, logits.float())
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


# Case 4: minus infinity


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
@pytest.mark.parametrize("transform", [{}, {"softcap": 5.0, "logit_scale": 0.5, "temperature": 0.6}], ids=["plain", "capped"])
def test_result_equals_the_run_without_the_removed_columns(
    dtype: torch.dtype, hidden: Any, where: str, transform: dict[str, Any]
) -> None:
    if hidden == "min" and "softcap" in transform:
        pytest.skip("a soft cap lifts finfo.min to -softcap: then it is a logit like any other")
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
    assert out.entropy[0].tolist() == [0.0, 0.0, 0.0]
    out.logps.sum().backward()
    assert logits.grad is not None
    assert logits.grad[0, 0].tolist() == [0.0, 0.0]
    assert logits.grad[0, 1].tolist() == [-1.0, 0.0], "finfo.min means removed, and removed columns have no gradient"
    assert logits.grad[0, 2].tolist() == [-1.0, 1.0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bad", ["all -inf", "+inf", "nan"])
def test_a_bad_live_row_is_nan_alone(dtype: torch.dtype, bad: str) -> None:
    logits = normal(5, 301, dtype, std=2.0)
    ids = torch.tensor([[3, 300, 17, 0, 9]])
    clean_in, spoilt_in = logits.clone().requires_grad_(), logits.clone()
    if bad == "all -inf":
        spoilt_in[0, 2] = -INF
    else:
        spoilt_in[0, 2, 40] = INF if bad == "+inf" else NAN
    spoilt_in.requires_grad_()
    clean, spoilt = score(clean_in, ids), score(spoilt_in, ids)
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


# Case 5: overflow in the branch that is not taken


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", CLIPPED)
@pytest.mark.parametrize(
    ("advantage", "extra", "loss"),
    [(1.0, {}, -1.2), (0.0, {}, 0.0), (-1.0, {"delta": 4.0}, 4.0), (-1.0, {"dual_clip": 4.0}, 4.0), (0.0, {"delta": 4.0}, 0.0),
     (1.0, {"delta": 4.0}, -1.2), (1.0, {"dual_clip": 4.0}, -1.2)],
)  # fmt: skip
def test_an_overflowing_ratio_does_not_reach_the_gradient(
    dtype: torch.dtype, level: str, loss_type: str, advantage: float, extra: dict[str, float], loss: float
) -> None:
    logits = uniform(1, 1, dtype=dtype).requires_grad_()
    config = gk.GRPOLossConfig(
        loss_type=loss_type, importance_sampling_level=level, max_completion_length=1, **extra
    )  # fmt: skip
    old = torch.tensor([[-200.0]], dtype=result_dtype(dtype))
    with poisoned():
        out = gk.grpo_loss(
            logits, torch.tensor([[2]]), config=config, advantages=torch.tensor([advantage]), old_per_token_logps=old
        )
        out.loss.backward()
    assert out.loss.item() == pytest.approx(loss, abs=1e-6)
    assert logits.grad is not None
    assert logits.grad.flatten().tolist() == [0.0] * 4


def test_cispo_caps_an_overflowing_ratio() -> None:
    logits = uniform(1, 1).requires_grad_()
    config = gk.GRPOLossConfig(loss_type="cispo", epsilon_high=5.0)
    out = gk.grpo_loss(
        logits, torch.tensor([[2]]), config=config, advantages=torch.tensor([1.0]), old_per_token_logps=torch.tensor([[-200.0]])
    )
    out.loss.backward()
    assert out.loss.item() == pytest.approx(5 * math.log(4), rel=1e-6)
    assert logits.grad is not None
    np.testing.assert_allclose(logits.grad.flatten().numpy(), [1.25, 1.25, -3.75, 1.25], rtol=1e-6)


@pytest.mark.parametrize(("loss_type", "advantage"), [(n, a) for n in CLIPPED for a in (1.0, 0.0, -1.0)])
def test_an_overflowing_row_leaves_the_others_alone(loss_type: str, advantage: float) -> None:
    """A = -1 without delta is unbounded by definition: its own loss may be inf, the gradients of other rows may not."""
    logits = normal(3, 7, torch.float32).requires_grad_()
    calm_logits = logits.detach().clone().requires_grad_()
    ids = torch.tensor([[1, 2, 3]])
    p = score(logits.detach(), ids).logps
    config = gk.GRPOLossConfig(loss_type=loss_type, max_completion_length=3)
    adv = torch.tensor([[0.7, advantage, -0.4]])
    old, calm = p - torch.tensor([[0.1, 200.0, -0.1]]), p - torch.tensor([[0.1, 0.0, -0.1]])
    gk.grpo_loss(logits, ids, config=config, advantages=adv, old_per_token_logps=old).loss.backward()
    gk.grpo_loss(calm_logits, ids, config=config, advantages=adv, old_per_token_logps=calm).loss.backward()
    assert logits.grad is not None and calm_logits.grad is not None
    assert same_bits(logits.grad[:, [0, 2]], calm_logits.grad[:, [0, 2]])
    if advantage >= 0:
        assert (logits.grad[:, 1] == 0).all()


# Case 6: KL far away


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("d", "k3"), [(0.5, 0.1487213), (-0.5, 0.1065307), (5.0, 142.41316), (20.0, 4.851651744e8), (0.0, 0.0)]
)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_kl_of_a_known_gap(dtype: torch.dtype, loss_type: str, d: float, k3: float) -> None:
    values = {"k1": -d, "k2": d * d / 2, "k3": k3}
    slopes = {"k1": 1.0, "k2": -d, "k3": 1 - math.exp(d)}
    for name, expected in values.items():
        logits = uniform(1, 1, dtype=dtype).requires_grad_()
        p = score(logits.detach(), [[0]]).logps
        config = gk.GRPOLossConfig(
            loss_type=loss_type, beta=0.1, kl_estimator=name, max_completion_length=1, epsilon_high=1.1
        )  # fmt: skip
        out = gk.grpo_loss(
            logits, torch.tensor([[0]]), config=config, advantages=torch.zeros(1), ref_per_token_logps=p + d,
            return_per_token=True,
        )  # fmt: skip
        out.loss.backward()
        # d = (p + d) - p is rounded once: 1e-7 absolute, which e^d magnifies relative to itself
        assert out.per_token.kl.item() == pytest.approx(expected, rel=2e-6, abs=5e-7), name
        assert out.metrics["kl"].item() == pytest.approx(expected, rel=2e-6, abs=5e-7), name
        assert out.loss.item() == pytest.approx(0.1 * expected, rel=2e-6, abs=5e-7), name
        assert logits.grad is not None
        assert logits.grad[0, 0, 0].item() == pytest.approx(0.075 * slopes[name], rel=2e-6, abs=5e-7), name


@pytest.mark.parametrize("d", [1e-3, -1e-3, 1e-4])
def test_k3_of_a_tiny_gap_is_within_one_rounding(d: float) -> None:
    """The gap counts as it was rounded, and exp(d) - d - 1 may lose one ulp of 1, no more."""
    logits = torch.zeros(1, 1, 2, dtype=torch.float32)
    p = score(logits, [[0]]).logps
    ref = p + d
    gap = ref.double().item() - p.double().item()
    config = gk.GRPOLossConfig(beta=1.0)
    out = gk.grpo_loss(
        logits, torch.tensor([[0]]), config=config, advantages=torch.zeros(1), ref_per_token_logps=ref, return_per_token=True
    )
    assert abs(out.per_token.kl.item() - (math.expm1(gap) - gap)) <= 1.2e-7


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("bias", [False, True])
def test_an_overflowing_kl_leaves_other_rows_alone(loss_type: str, bias: bool) -> None:
    batch = make_batch(vocab=11)
    opt = Options(
        loss_type=loss_type, beta=0.1, epsilon_high=1.1, max_completion_length=9, use_bias_correction_kl=bias
    )  # fmt: skip
    clean = run(batch, opt)
    assert batch.ref is not None
    ref = batch.ref.copy()
    ref[2, 0] += 100
    spoilt = run(batch.but(ref=ref), opt)
    rows = torch.ones(batch.ids.shape, dtype=torch.bool)
    rows[2, 0] = False
    assert same_bits(spoilt.grad[rows], clean.grad[rows])


# Case 7: temperature, soft cap, scale


TEMPERED = {
    0.6: (-1.8747271, 0.5876596, [-1.3535966, 1.4110053, -0.0482882, -0.0091205]),
    0.9: (-1.4985718, None, None),
    2.0: (-1.2873387, None, None),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", ["number", "0-d", "[B, 1]", "token"])
@pytest.mark.parametrize("tau", TEMPERED)
def test_temperature_reaches_logps_entropy_and_gradient(dtype: torch.dtype, form: str, tau: float) -> None:
    value: Any = {
        "number": tau, "0-d": torch.tensor(tau), "[B, 1]": torch.tensor([[tau], [1.7]]),
        "token": torch.tensor([[tau, 5.0], [1.7, 1.7]]),
    }[form]  # fmt: skip
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0], dtype=dtype).expand(2, 2, 4).clone().requires_grad_()
    out = score(logits, [[1, 1], [1, 1]], temperature=value)
    logp, entropy, gradient = TEMPERED[tau]
    assert out.logps[0, 0].item() == pytest.approx(logp, abs=1e-6)
    if entropy is not None:
        assert out.entropy[0, 0].item() == pytest.approx(entropy, abs=1e-6)
    (got,) = torch.autograd.grad(out.logps[0, 0], logits)
    if gradient is not None:
        np.testing.assert_allclose(as_array(got)[0, 0], gradient, rtol=torch.finfo(dtype).eps, atol=2e-7)
    taus = np.broadcast_to(np.asarray(value, dtype=np.float64), (2, 2)).ravel()
    truth = truth_of(logits.detach(), torch.ones(2, 2), temperature=taus)
    np.testing.assert_allclose(as_array(out.logps).ravel(), truth.logps, rtol=1e-6)
    np.testing.assert_allclose(as_array(out.entropy).ravel(), truth.entropy, rtol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("spread", [1.0, 20.0])
@pytest.mark.parametrize(
    "transform",
    [{"temperature": 0.6}, {"softcap": 3.0}, {"logit_scale": 0.25}, {"logit_scale": 1.7, "softcap": 5.0, "temperature": 0.4},
     {"logit_scale": 0.5, "temperature": 3.0}],
    ids=str,
)  # fmt: skip
def test_the_transform_has_one_order(dtype: torch.dtype, spread: float, transform: dict[str, float]) -> None:
    """scale, then cap, then temperature: any other order differs by far more than the budget."""
    ids = torch.randint(0, 33, (1, 6), generator=torch.Generator().manual_seed(0))
    logits = normal(6, 33, dtype, std=spread, seed=7).requires_grad_()
    plain_in = logits.detach().clone().requires_grad_()
    out = score(logits, ids, **transform)
    ref = plain_row_stats(plain_in[0], ids[0], **transform)
    truth = truth_of(logits.detach(), ids, np.longdouble, **transform)
    # the transformed logits are rounded too: eps times their size
    for name, ours, plain in zip(("logps", "entropy", "lse"), (out.logps, out.entropy, out.lse), ref, strict=True):
        assert_within_budget(ours[0], plain, getattr(truth, name), result_dtype(dtype), floor=truth.size, name=name)
    (out.logps.sum() + out.entropy.sum()).backward()
    (ref[0].sum() + ref[1].sum()).backward()
    assert logits.grad is not None and plain_in.grad is not None
    expected = truth.dlogps + truth.dentropy
    steepest = transform.get("logit_scale", 1.0) / transform.get("temperature", 1.0)
    floor = np.broadcast_to((steepest * truth.size * (1 + truth.entropy))[:, None], expected.shape)
    assert_within_budget(
        logits.grad[0], plain_in.grad[0], expected, dtype, compute=result_dtype(dtype), floor=floor, name="dlogits"
    )


@pytest.mark.parametrize("form", ["config", "argument", "[B, 1]", "token"])
def test_the_loss_takes_temperature_every_way(form: str) -> None:
    batch, opt = make_batch(), Options(loss_type="grpo", beta=0.1, temperature=0.7)
    truth = oracle.grpo(batch, opt)
    plain = Options(loss_type="grpo", beta=0.1)
    shape = batch.ids.shape
    tau: Any = {"argument": 0.7, "[B, 1]": np.full((shape[0], 1), 0.7), "token": np.full(shape, 0.7)}.get(form)
    got = run(batch, opt) if form == "config" else run(batch.but(temperature=tau), plain)
    assert got.loss.item() == pytest.approx(float(truth.loss), rel=1e-5)
    np.testing.assert_allclose(as_array(got.grad), truth.dlogits.astype(float), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("form", ["number", "0-d", "[S, 1]", "[N]"])
def test_a_packed_loss_takes_temperature_every_way(form: str) -> None:
    batch, opt = make_batch(layout="packed"), Options(loss_type="grpo", beta=0.1, temperature=0.7)
    truth = oracle.grpo(batch, opt)
    n = len(batch.ids)
    tau: Any = {
        "number": 0.7, "0-d": torch.tensor(0.7), "[S, 1]": torch.full((4, 1), 0.7), "[N]": torch.full((n,), 0.7),
    }[form]  # fmt: skip
    got = run(batch, Options(loss_type="grpo", beta=0.1), temperature=tau)
    assert got.loss.item() == pytest.approx(float(truth.loss), rel=1e-5)
    np.testing.assert_allclose(as_array(got.grad), truth.dlogits.astype(float), rtol=1e-5, atol=1e-7)


def test_packed_sequences_have_their_own_temperatures() -> None:
    batch = make_batch(layout="packed")
    taus = np.array([0.5, 1.0, 2.0, 0.75])
    seq, _ = oracle.sequence_index(batch)
    opt = Options(loss_type="grpo", beta=0.1)
    truth = oracle.grpo(batch.but(temperature=np.where(seq >= 0, taus[seq], 1.0)), opt)
    got = run(batch, opt, temperature=torch.as_tensor(taus, dtype=torch.float32)[:, None])
    assert got.loss.item() == pytest.approx(float(truth.loss), rel=1e-5)
    np.testing.assert_allclose(as_array(got.grad), truth.dlogits.astype(float), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("tau", [0.0, -1.0, NAN, -INF])
@pytest.mark.parametrize("form", ["number", "0-d", "[B, 1]", "token"])
def test_a_temperature_that_is_not_positive_is_refused(tau: float, form: str) -> None:
    value: Any = {
        "number": tau, "0-d": torch.tensor(tau), "[B, 1]": torch.tensor([[1.0], [tau]]), "token": torch.tensor([[1.0, 1.0], [1.0, tau]]),
    }[form]  # fmt: skip
    with pytest.raises(ValueError, match="temperature"):
        gk.per_token_logps(uniform(2, 2), torch.zeros(2, 2, dtype=torch.long), temperature=value)
    with pytest.raises(ValueError, match="temperature"):
        gk.grpo_loss(uniform(2, 2), torch.zeros(2, 2, dtype=torch.long), advantages=torch.ones(2), temperature=value)


# Case 8: the sampler's own numbers


def test_rollout_logps_of_the_same_policy_agree_silently() -> None:
    logits, ids = normal(64, 50, torch.float32, std=2.0), torch.arange(64)[None] % 50
    engine = plain_row_stats(logits[0], ids[0], temperature=0.6)[0][None]
    ours = score(logits, ids, temperature=0.6).logps
    np.testing.assert_allclose((ours - engine).exp().numpy(), 1, atol=1e-5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gk.check_rollout_logps(engine, ours)
        gk.check_rollout_logps(engine + 1e-3 * torch.randn(1, 64, generator=torch.Generator().manual_seed(0)), ours)


def test_rollout_logps_of_another_temperature_warn_with_the_mean_ratio() -> None:
    """Constant gap ln 2: the mean ratio is 2."""
    ours = torch.full((2, 8), -1.0)
    with pytest.warns(UserWarning, match=r"\b2\.0"):
        gk.check_rollout_logps(ours - math.log(2), ours)
    logits, ids = normal(64, 50, torch.float32, std=2.0), normal(64, 50, torch.float32, std=2.0).argmax(-1)
    with pytest.warns(UserWarning, match="ratio"):
        gk.check_rollout_logps(score(logits, ids).logps, score(logits, ids, temperature=0.6).logps)


def test_rollout_check_reads_live_tokens_only_and_reports_missing_values() -> None:
    ours = torch.full((1, 4), -1.0)
    mask = torch.tensor([[1, 1, 0, 1]])
    engine = torch.tensor([[-1.0, -1.0, NAN, -1.0]])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gk.check_rollout_logps(engine, ours, mask)
        gk.check_rollout_logps(torch.tensor([[-1.0, -1.0, -9.0, -1.0]]), ours, mask)
        gk.check_rollout_logps(engine, ours, torch.zeros(1, 4))
    with pytest.warns(UserWarning, match="missing|NaN|nan"):
        gk.check_rollout_logps(engine, ours)


# Case 9: a row's numbers are its own


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [5, 257, 32001])
@pytest.mark.parametrize("transform", [{}, {"temperature": 0.7, "softcap": 9.0}], ids=["plain", "capped"])
def test_a_row_is_bitwise_the_same_in_any_company(dtype: torch.dtype, vocab: int, transform: dict[str, float]) -> None:
    rows = 11
    logits = normal(rows, vocab, dtype, std=3.0)[0]
    ids = torch.arange(rows) * 7 % vocab
    together = score(logits, ids, **transform)
    wide = torch.full((2 * rows, vocab + 3), NAN, dtype=dtype)
    wide[::2, 1:-2] = logits
    padded = torch.full((8, 4, vocab), 3.0, dtype=dtype)
    padded[:, :2] = logits[torch.arange(16) % rows].reshape(8, 2, vocab)
    views = {
        "one by one": [score(logits[i : i + 1], ids[i : i + 1], **transform) for i in range(rows)],
        "strided": score(wide[::2, 1:-2], ids, **transform),
        "reversed": score(logits.flip(0), ids.flip(0), **transform),
        "padded": score(padded, torch.cat([ids[torch.arange(16) % rows].reshape(8, 2), torch.zeros(8, 2).long()], 1), **transform),
        "masked company": score(
            torch.cat([torch.full((3, vocab), NAN, dtype=dtype), logits]), torch.cat([torch.zeros(3).long(), ids]),
            mask=torch.tensor([0] * 3 + [1] * rows), **transform,
        ),
    }  # fmt: skip
    for name in ("logps", "entropy", "lse"):
        expected = getattr(together, name)
        for how, got in views.items():
            if how == "one by one":
                value = torch.cat([getattr(x, name) for x in got])
            elif how == "reversed":
                value = getattr(got, name).flip(0)
            elif how == "padded":
                value = getattr(got, name)[:, :2].reshape(-1)[:rows]
            elif how == "masked company":
                value = getattr(got, name)[3:]
            else:
                value = getattr(got, name)
            assert same_bits(value, expected), f"{name}, {how}"


@pytest.mark.parametrize("inplace", [False, True])
def test_many_rows_in_several_chunks_are_what_each_is_alone(inplace: bool) -> None:
    """Dead NaN rows among them, so that compaction and chunk borders fall anywhere."""
    rows, vocab = 6000, 513
    logits, ids = normal(rows, vocab, torch.float32, std=3.0)[0], torch.arange(rows) * 11 % vocab
    mask = torch.rand(rows, generator=torch.Generator().manual_seed(5)) > 0.3
    logits[~mask] = NAN
    leaf = logits.clone().requires_grad_()
    out = score(leaf * 1.0, ids, mask=mask, inplace=inplace)
    picks = [0, 1, 2047, 2048, 4095, 4096, 4097, rows - 2, rows - 1, *range(100, rows, 397)]
    alone = [score(logits[i : i + 1].clone().requires_grad_(), ids[i : i + 1]) for i in picks if mask[i]]
    (out.logps.sum() + out.entropy.sum()).backward()
    assert leaf.grad is not None
    assert (leaf.grad[~mask] == 0).all() and (out.logps[~mask] == 0).all() and (out.entropy[~mask] == 0).all()
    for i, one in zip([i for i in picks if mask[i]], alone, strict=True):
        for name in ("logps", "entropy", "lse"):
            assert same_bits(getattr(out, name)[i : i + 1], getattr(one, name)), (name, i)
    truth = truth_of(logits[:300], ids[:300], mask=mask[:300].numpy())
    live = truth.live
    np.testing.assert_allclose(
        as_array(leaf.grad)[:300][live], (truth.dlogps + truth.dentropy)[live].astype(float), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("vocab", [129, 50257])
def test_thread_count_and_repetition_change_no_bit(vocab: int) -> None:
    logits = normal(24, vocab, torch.bfloat16, std=3.0)
    ids = torch.arange(24)[None] * 5 % vocab
    results = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3, 1):
            torch.set_num_threads(threads)
            leaf = logits.clone().requires_grad_()
            out = score(leaf, ids)
            (out.logps.sum() + 0.1 * out.entropy.sum()).backward()
            assert leaf.grad is not None
            results.append((*out, leaf.grad))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(same_bits(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_on_policy_ratio_is_exactly_one(dtype: torch.dtype, loss_type: str) -> None:
    batch = make_batch(dtype=dtype).but(old=None)
    opt = Options(loss_type=loss_type, beta=0.1, epsilon_high=1.1, max_completion_length=9)
    got = run(batch, opt, dtype)
    assert batch.mask is not None
    assert (got.per_token.ratio[torch.as_tensor(batch.mask)] == 1.0).all()
    assert all(got.metrics[f"ratio/{k}"].item() == 1.0 for k in ("mean", "min", "max"))


# Cases 11 and 14: large vocabularies


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


# Case 13: float16 at its edge


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
