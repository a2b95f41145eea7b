"""Objectives that public losses got wrong, and the sweep over every option against the oracle."""

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
    LAYOUTS,
    LOSS_TYPES,
    OBJECTIVES,
    assert_same_run,
    from_probabilities,
    make_batch,
    objective_options,
    plain_loss,
    result_dtype,
    run,
    uniform,
)
from tolerance import as_array, assert_within_budget

import grpo_kernels as gk

CLIPPED = [name for name in LOSS_TYPES if name != "cispo"]
TOKEN = torch.zeros(1, 1, dtype=torch.long)


# The sweep: every option against the oracle, in every dtype and layout

EXTRAS: dict[str, dict[str, Any]] = {
    "plain": {},
    "asymmetric clip": {"epsilon": 0.1, "epsilon_high": 0.28},
    "k1": {"beta": 0.2, "kl_estimator": "k1"},
    "k2": {"beta": 0.2, "kl_estimator": "k2"},
    "k3": {"beta": 0.2},
    "k1 bias": {"beta": 0.2, "kl_estimator": "k1", "use_bias_correction_kl": True},
    "k3 bias": {"beta": 0.2, "use_bias_correction_kl": True},
    "negative beta": {"beta": -0.2},
    "delta": {"delta": 1.5, "epsilon_high": 0.28},
    "delta inside the clip": {"delta": 1.1, "epsilon_high": 0.28},
    "dual clip": {"dual_clip": 1.3},
    "delta and dual clip": {"delta": 1.4, "dual_clip": 1.3},
    "entropy": {"entropy": True, "entropy_coef": 0.3},
    "entropy penalty": {"entropy": True, "entropy_coef": -0.3, "beta": 0.1},
    "transform": {
        "temperature": 0.7,
        "softcap": 4.0,
        "logit_scale": 1.5,
        "beta": 0.1,
        "entropy": True,
        "entropy_coef": 0.1,
    },
}


@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize(("loss_type", "level"), OBJECTIVES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_loss_gradient_and_metrics_are_inside_the_error_budget(
    extra: str, loss_type: str, level: str, dtype: torch.dtype, layout: str
) -> None:
    opt = objective_options(loss_type, level, EXTRAS[extra])
    seed = 100 + sorted(EXTRAS).index(extra)
    batch = make_batch(seed=seed, dtype=dtype, layout=layout, weight="token" if seed % 2 else None)
    truth = oracle.grpo(batch, opt)
    assert abs(float(truth.loss)) > 0.01
    got = run(batch, opt, dtype)
    ref_loss, ref_grad, ref_tokens = plain_loss(batch, opt, dtype)
    side, live = result_dtype(dtype), torch.as_tensor(truth.live)
    assert_within_budget(got.loss, ref_loss, truth.loss, side, floor=max(1, truth.loss_scale), name="loss")
    rows = truth.dlogits_scale.reshape(*batch.ids.shape, 1)
    assert_within_budget(
        got.grad,
        ref_grad,
        truth.dlogits,
        dtype,
        compute=side,
        floor=np.broadcast_to(rows, batch.logits.shape),
        name="dlogits",
    )
    assert_within_budget(
        got.per_token.loss.reshape(-1)[live], ref_tokens, truth.token_loss[truth.live], side,
        floor=np.maximum(1, truth.token_scale[truth.live]), name="per_token.loss",
    )  # fmt: skip
    for name in ("logps", "entropy", "kl", "ratio"):
        value = getattr(got.per_token, name)
        if value is not None and (name != "kl" or opt.beta != 0) and (name != "entropy" or opt.entropy):
            np.testing.assert_allclose(
                as_array(value).reshape(-1)[truth.live], getattr(truth, name)[truth.live].astype(float),
                rtol=1e-5, atol=1e-6, err_msg=name,
            )  # fmt: skip
            assert torch.isfinite(value).all(), name
    assert set(got.metrics) == set(truth.metrics)
    for name, value in truth.metrics.items():
        assert got.metrics[name].item() == pytest.approx(value, rel=1e-5, abs=1e-6), name
    assert got.metrics["policy_loss"].dtype == side


@pytest.mark.parametrize("weight", ["[B]", "[B, 1]", "token"])
@pytest.mark.parametrize("token_advantages", [False, True])
@pytest.mark.parametrize(("loss_type", "level"), OBJECTIVES)
def test_every_shape_of_weights_and_advantages(weight: str, token_advantages: bool, loss_type: str, level: str) -> None:
    opt = objective_options(loss_type, level, {"beta": 0.1})
    batch = make_batch(seed=21, weight=weight, token_advantages=token_advantages)
    cases = [batch] if token_advantages else [batch, batch.but(advantages=batch.advantages[:, None])]
    for case in cases:
        truth, got = oracle.grpo(case, opt), run(case, opt)
        assert got.loss.item() == pytest.approx(float(truth.loss), rel=1e-5)
        np.testing.assert_allclose(as_array(got.grad), truth.dlogits.astype(float), rtol=1e-5, atol=1e-7)
    if not token_advantages:
        assert_same_run(run(cases[1], opt), run(cases[0], opt), "[B, 1]")


@pytest.mark.parametrize(("loss_type", "level"), OBJECTIVES)
def test_normalizers_replace_the_denominator_as_given(loss_type: str, level: str) -> None:
    """Never clamped: 0.25 divides by 0.25. As a number or as a 0-d tensor, and apart for the entropy."""
    opt = objective_options(loss_type, level, {"beta": 0.1, "entropy": True, "entropy_coef": 0.2})
    batch = make_batch(seed=22)
    for normalizer, entropy_normalizer in ((0.25, None), (37.0, 0.5), (None, 100.0)):
        case = batch.but(normalizer=normalizer, entropy_normalizer=entropy_normalizer)
        truth, got = oracle.grpo(case, opt), run(case, opt)
        assert got.loss.item() == pytest.approx(float(truth.loss), rel=1e-5)
        np.testing.assert_allclose(as_array(got.grad), truth.dlogits.astype(float), rtol=1e-5, atol=1e-6)
        tensors = {
            "normalizer": None if normalizer is None else torch.tensor(normalizer),
            "entropy_normalizer": None if entropy_normalizer is None else torch.tensor(entropy_normalizer),
        }
        assert_same_run(run(case, opt, **tensors), got, "0-d normalizers")


def test_an_integer_normalizer_is_a_number() -> None:
    batch, opt = make_batch(seed=22), objective_options("dapo", "token", {})
    expected = run(batch.but(normalizer=16.0), opt)
    for value in (16, torch.tensor(16), torch.tensor(16, dtype=torch.int32), np.float64(16)):
        assert_same_run(run(batch, opt, normalizer=value), expected, repr(value))


# The sampler's weight and the order of KL


@pytest.mark.parametrize(("loss_type", "level"), OBJECTIVES)
@pytest.mark.parametrize("shape", ["[B]", "[B, 1]", "token"])
def test_a_weight_of_one_hundredth_scales_the_policy_gradient(loss_type: str, level: str, shape: str) -> None:
    opt = objective_options(loss_type, level, {})
    batch = make_batch(seed=23)
    b, t = batch.ids.shape
    full = {"[B]": np.full(b, 0.01), "[B, 1]": np.full((b, 1), 0.01), "token": np.full((b, t), 0.01)}[shape]
    plain, scaled = run(batch, opt), run(batch.but(weight=full), opt)
    torch.testing.assert_close(scaled.grad, plain.grad * 0.01, rtol=1e-6, atol=1e-12)
    assert scaled.loss.item() == pytest.approx(0.01 * plain.loss.item(), rel=1e-6)
    for name in ("mean", "min", "max"):
        assert scaled.metrics[f"importance_sampling_ratio/{name}"].item() == pytest.approx(0.01, rel=1e-6)
        assert f"importance_sampling_ratio/{name}" not in plain.metrics


@pytest.mark.parametrize("loss_type", CLIPPED)
def test_the_weight_does_not_scale_the_kl(loss_type: str) -> None:
    """logp -1, ref -0.5: -0.01 + 0.1 * 0.1487213; scaling both would give -0.0098513."""
    e = math.exp(-1)
    logits = from_probabilities([[[e, 1 - e]]])
    config = gk.GRPOLossConfig(loss_type=loss_type, beta=0.1, max_completion_length=1)
    out = gk.grpo_loss(
        logits,
        TOKEN,
        config=config,
        advantages=torch.ones(1),
        ref_per_token_logps=torch.tensor([[-0.5]], dtype=torch.float64),
        importance_sampling_ratio=torch.tensor([0.01], dtype=torch.float64),
    )
    assert out.loss.item() == pytest.approx(0.0048721, abs=1e-7)


# Cispo


def two_tokens(cap: float) -> Any:
    """logp [-1, -1], old [-1, -3], A = 1: weights [1, e^2]."""
    e = math.exp(-1)
    logits = from_probabilities([[[e, 1 - e]] * 2]).requires_grad_()
    out = gk.grpo_loss(
        logits,
        torch.zeros(1, 2, dtype=torch.long),
        config=gk.GRPOLossConfig(loss_type="cispo", epsilon_high=cap),
        advantages=torch.ones(1),
        old_per_token_logps=torch.tensor([[-1.0, -3.0]], dtype=torch.float64),
        return_per_token=True,
    )
    out.loss.backward()
    assert logits.grad is not None
    return out, 2 * logits.grad[0, :, 0] / (1 - e)


@pytest.mark.parametrize(("cap", "losses"), [(5.0, [1, 5]), (1.28, [1, 1.28]), (100.0, [1, math.exp(2)])])
def test_cispo_caps_at_epsilon_high_itself_and_detaches_the_weight(cap: float, losses: list[float]) -> None:
    out, slope = two_tokens(cap)
    np.testing.assert_allclose(out.per_token.loss[0].numpy(), losses, rtol=1e-6)
    np.testing.assert_allclose(slope.numpy(), -np.asarray(losses), rtol=1e-6)
    assert out.loss.item() == pytest.approx(sum(losses) / 2, rel=1e-6)
    assert out.metrics["cispo_clip_ratio"].item() == pytest.approx(0.5 if cap < math.exp(2) else 0.0)
    assert not any(name.startswith("clip_ratio") for name in out.metrics)


@pytest.mark.parametrize("cap", [0.28, 0.99])
def test_a_cispo_cap_below_one_warns(cap: float) -> None:
    with pytest.warns(UserWarning, match="epsilon_high"):
        two_tokens(cap)


def test_without_epsilon_high_the_cispo_cap_is_epsilon_and_warns() -> None:
    batch = make_batch(seed=31)
    opt = Options(loss_type="cispo", epsilon=0.3)
    with pytest.warns(UserWarning, match="epsilon_high"):
        got = run(batch, opt)
    truth = oracle.grpo(batch, opt)
    assert got.loss.item() == pytest.approx(float(truth.loss), rel=1e-5)
    np.testing.assert_allclose(as_array(got.grad), truth.dlogits.astype(float), rtol=1e-5, atol=1e-7)
    assert got.metrics["cispo_clip_ratio"].item() == pytest.approx(truth.metrics["cispo_clip_ratio"], rel=1e-6)


def test_per_token_results_only_when_asked_and_zero_at_dead_tokens() -> None:
    batch, opt = make_batch(seed=32), objective_options("grpo", "token", {"beta": 0.1, "entropy": True})
    assert run(batch, opt, return_per_token=False).per_token is None
    got = run(batch, opt).per_token
    dead = torch.as_tensor(~np.asarray(batch.mask))
    for name in ("logps", "entropy", "loss", "kl"):
        value = getattr(got, name)
        assert value.shape == batch.ids.shape and (value[dead] == 0).all(), name


def test_a_cispo_cap_of_one_or_more_does_not_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for cap in (1.0, 1.28, 5.0):
            two_tokens(cap)


# Clip, delta, dual clip


def one_ratio(
    r: float, advantage: float, loss_type: str = "dapo", level: str = "token", **options: Any
) -> tuple[float, float, Any]:
    """Loss and `dloss/dlogp` of one token with ratio `r`."""
    logits = uniform(1, 1, dtype=torch.float64).requires_grad_()
    old = torch.full((1, 1), -math.log(4) - math.log(r), dtype=torch.float64)
    config = gk.GRPOLossConfig(
        loss_type=loss_type,
        importance_sampling_level=level,
        epsilon=0.2,
        epsilon_high=0.28,
        max_completion_length=1,
        **options,
    )
    out = gk.grpo_loss(
        logits, TOKEN, config=config, advantages=torch.tensor([advantage], dtype=torch.float64), old_per_token_logps=old
    )
    out.loss.backward()
    assert logits.grad is not None
    return out.loss.item(), logits.grad[0, 0, 0].item() / 0.75, out.metrics


CLIP_TABLE = [
    (1.0, 0.5, -0.5, -0.5),
    (1.0, 1.0, -1.0, -1.0),
    (1.0, 1.279, -1.279, -1.279),
    (1.0, 1.5, -1.28, 0.0),
    (1.0, 1e30, -1.28, 0.0),
    (-1.0, 0.5, 0.8, 0.0),
    (-1.0, 0.801, 0.801, 0.801),
    (-1.0, 1.5, 1.5, 1.5),
    (-1.0, 1e30, 1e30, 1e30),
    (0.0, 1e30, 0.0, 0.0),
]


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", CLIPPED)
@pytest.mark.parametrize(("advantage", "r", "loss", "slope"), CLIP_TABLE)
def test_the_clip_table(loss_type: str, level: str, advantage: float, r: float, loss: float, slope: float) -> None:
    got = one_ratio(r, advantage, loss_type, level)
    assert got[:2] == (pytest.approx(loss, rel=1e-6), pytest.approx(slope, rel=1e-6))
    for bound in ({"delta": 4.0}, {"dual_clip": 4.0}):
        bounded = one_ratio(r, advantage, loss_type, level, **bound)
        cut = advantage < 0 and r > 4
        assert bounded[0] == pytest.approx(4.0 if cut else loss, rel=1e-6)
        assert bounded[1] == pytest.approx(0.0 if cut else slope, rel=1e-6)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize(
    ("advantage", "r", "low", "high"),
    [(1.0, 1.5, 0, 1), (-1.0, 1.5, 0, 0), (1.0, 0.5, 0, 0), (-1.0, 0.5, 1, 0), (1.0, 1.1, 0, 0), (0.0, 1.5, 0, 0)],
)
def test_clip_metrics(level: str, advantage: float, r: float, low: int, high: int) -> None:
    metrics = one_ratio(r, advantage, level=level)[2]
    assert [metrics[f"clip_ratio/{k}_mean"].item() for k in ("low", "high", "region")] == [low, high, low + high]
    assert metrics["ratio/mean"].item() == pytest.approx(r, rel=1e-6)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_ratio_on_the_clip_bound_keeps_its_whole_gradient(level: str, advantage: float) -> None:
    """At a tie torch's min gives half to each side, and both sides move with r on the closed interval."""
    for epsilon, log_ratio in ((0.0, 0.0),):
        logits = uniform(1, 1, dtype=torch.float64).requires_grad_()
        p = gk.per_token_logps(logits.detach(), TOKEN).logps
        config = gk.GRPOLossConfig(epsilon=epsilon, epsilon_high=0.0, importance_sampling_level=level)
        gk.grpo_loss(
            logits, TOKEN, config=config, advantages=torch.tensor([advantage]), old_per_token_logps=p - log_ratio
        ).loss.backward()
        assert logits.grad is not None
        assert logits.grad[0, 0, 0].item() == pytest.approx(-0.75 * advantage, rel=1e-12)


# Zero loss and zero clip ratio on-policy


@pytest.mark.parametrize(("loss_type", "level"), [x for x in OBJECTIVES if x[0] != "cispo"])
def test_on_policy_loss_is_zero_and_its_gradient_is_not(loss_type: str, level: str) -> None:
    batch = make_batch(seed=26, lengths=(4, 4), holes=False).but(old=None, ref=None, advantages=np.array([1.0, -1.0]))
    got = run(batch, objective_options(loss_type, level, {}))
    assert abs(got.loss.item()) < 1e-7
    assert got.grad.norm() > 0.01
    assert all(got.metrics[f"clip_ratio/{k}_mean"].item() == 0 for k in ("low", "high", "region"))
