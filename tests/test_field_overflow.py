"""Exponentials that overflow where nobody looks: the branch not taken, the reference far away."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from oracle import Options
from support import (
    DTYPES,
    LOSS_TYPES,
    make_batch,
    normal,
    poisoned,
    result_dtype,
    run,
    same_bits,
    score,
    uniform,
)

import grpo_kernels as gk

INF, NAN = math.inf, math.nan
CLIPPED = [name for name in LOSS_TYPES if name != "cispo"]


# Overflow in the branch that is not taken


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", CLIPPED)
@pytest.mark.parametrize(
    ("advantage", "extra", "loss"),
    [
        (1.0, {}, -1.2),
        (0.0, {}, 0.0),
        (-1.0, {"delta": 4.0}, 4.0),
        (-1.0, {"dual_clip": 4.0}, 4.0),
        (0.0, {"delta": 4.0}, 0.0),
        (1.0, {"delta": 4.0}, -1.2),
        (1.0, {"dual_clip": 4.0}, -1.2),
    ],
)
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
        logits,
        torch.tensor([[2]]),
        config=config,
        advantages=torch.tensor([1.0]),
        old_per_token_logps=torch.tensor([[-200.0]]),
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


# KL far away


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
        logits,
        torch.tensor([[0]]),
        config=config,
        advantages=torch.zeros(1),
        ref_per_token_logps=ref,
        return_per_token=True,
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


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", CLIPPED)
def test_a_weight_of_zero_removes_an_overflowing_token(loss_type: str, level: str) -> None:
    """Token masks of rollout corrections are weights of 0: 0 * inf must not become NaN."""
    logits = uniform(1, 1).requires_grad_()
    config = gk.GRPOLossConfig(loss_type=loss_type, importance_sampling_level=level, max_completion_length=1)
    out = gk.grpo_loss(
        logits,
        torch.tensor([[2]]),
        config=config,
        advantages=torch.tensor([-1.0]),
        old_per_token_logps=torch.tensor([[-200.0]]),
        importance_sampling_ratio=torch.zeros(1, 1),
    )
    out.loss.backward()
    assert out.loss.item() == 0.0
    assert logits.grad is not None and logits.grad.flatten().tolist() == [0.0] * 4


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_a_ratio_of_zero_removes_an_overflowing_corrected_kl(loss_type: str) -> None:
    """r = exp(-1e4) is 0 and k3 = exp(1e4) is inf: their product is selected, not multiplied."""
    logits = uniform(1, 1).requires_grad_()
    config = gk.GRPOLossConfig(
        loss_type=loss_type, beta=0.1, use_bias_correction_kl=True, max_completion_length=1, epsilon_high=2.0
    )
    out = gk.grpo_loss(
        logits,
        torch.tensor([[2]]),
        config=config,
        advantages=torch.zeros(1),
        old_per_token_logps=torch.tensor([[1e4]]),
        ref_per_token_logps=torch.tensor([[1e4]]),
    )
    out.loss.backward()
    assert out.loss.item() == 0.0 and out.metrics["kl"].item() == 0.0
    assert logits.grad is not None and logits.grad.flatten().tolist() == [0.0] * 4


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("on_policy", [True, False])
def test_a_zero_advantage_silences_an_impossible_token(loss_type: str, on_policy: bool) -> None:
    """logp = -inf with A = 0: -A p is 0 * inf."""
    logits = torch.tensor([[[0.0, -INF, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]]], requires_grad=True)
    config = gk.GRPOLossConfig(loss_type=loss_type, max_completion_length=2, epsilon_high=2.0)
    out = gk.grpo_loss(
        logits,
        torch.tensor([[1, 1]]),
        config=config,
        advantages=torch.tensor([[0.0, 1.0]]),
        old_per_token_logps=None if on_policy else torch.full((1, 2), -math.log(4)),
    )
    out.loss.backward()
    per_token = math.log(4) if loss_type == "cispo" else -1.0
    assert out.loss.item() == pytest.approx(per_token / 2, rel=1e-6)
    assert logits.grad is not None and torch.isfinite(logits.grad).all()
    assert (logits.grad[0, 0] == 0).all() and (logits.grad[0, 1] != 0).all()


@pytest.mark.parametrize("d", [1e-4, 0.2, 3.0, 20.0, 25.0, 60.0])
def test_the_gradient_of_a_bias_corrected_k3_on_policy_is_minus_d(d: float) -> None:
    """Its two parts, exp(d) - d - 1 through the ratio and 1 - exp(d), cancel: at d = 25 nothing is left in float32."""
    logits = uniform(1, 1).requires_grad_()
    ref = torch.full((1, 1), d - math.log(4))
    out = gk.grpo_loss(
        logits, torch.tensor([[2]]), config=gk.GRPOLossConfig(beta=0.5, use_bias_correction_kl=True),
        advantages=torch.zeros(1), ref_per_token_logps=ref,
    )  # fmt: skip
    out.loss.backward()
    assert logits.grad is not None
    distance = float(ref.double() + math.log(4))  # as rounded
    assert logits.grad[0, 0, 2].item() == pytest.approx(-0.5 * distance * 0.75, rel=1e-6, abs=1e-7)
