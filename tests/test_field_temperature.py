"""The transform of the logits, and samplers that scored without it."""

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
    make_batch,
    normal,
    plain_row_stats,
    result_dtype,
    run,
    score,
    truth_of,
    uniform,
)
from tolerance import as_array, assert_within_budget

import grpo_kernels as gk

INF, NAN = math.inf, math.nan


# Temperature, soft cap, scale


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
    [
        {"temperature": 0.6},
        {"softcap": 3.0},
        {"logit_scale": 0.25},
        {"logit_scale": 1.7, "softcap": 5.0, "temperature": 0.4},
        {"logit_scale": 0.5, "temperature": 3.0},
    ],
    ids=str,
)
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
        "number": tau,
        "0-d": torch.tensor(tau),
        "[B, 1]": torch.tensor([[1.0], [tau]]),
        "token": torch.tensor([[1.0, 1.0], [1.0, tau]]),
    }[form]
    with pytest.raises(ValueError, match="temperature"):
        gk.per_token_logps(uniform(2, 2), torch.zeros(2, 2, dtype=torch.long), temperature=value)
    with pytest.raises(ValueError, match="temperature"):
        gk.grpo_loss(uniform(2, 2), torch.zeros(2, 2, dtype=torch.long), advantages=torch.ones(2), temperature=value)


# The sampler's own numbers


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
