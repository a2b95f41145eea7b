"""One absolute number per loss type, by hand, so that no shared factor can hide; and the proof of oracle and helpers.

Two sequences over V = 4, every probability a simple fraction, eps 0.2 / 0.28, beta 0.1, k3. `r` = p / old, `l` the
policy loss, `k` = ref / p - ln(ref / p) - 1, slope = dl/dp + 0.1 (1 - ref / p) with p for its logarithm:

    A     p    old  ref   r     l               k               slope
    +1    1/2  2/5  1/4   1.25  -1.25           1/2 + ln 2 - 1  -1.25 + 0.05 = -1.20
          1/4  1/8  1/4   2     -1.28 (clip)    0                0    + 0    =  0
    -1    1/4  1/2  1/2   0.5    0.8  (clip)    2 - ln 2 - 1     0    - 0.10 = -0.10
          3/4  1/2  3/4   1.5    1.5  (A < 0)   0                1.5  + 0    =  1.50
          a hole in the mask
          1/4  1/4  1/8   1      1              1/2 + ln 2 - 1   1    + 0.05 =  1.05

So the KL sums are ln 2 - 1/2 = 0.1931471806 and 1/2.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from oracle import Batch, Options
from support import DTYPES, OBJECTIVES, Ran, from_probabilities, make_batch, pack, poisoned, run
from tolerance import as_array, assert_within_budget

import grpo_kernels as gk

HALF, QUARTER, MOST = [1 / 2, 1 / 8, 1 / 8, 1 / 4], [1 / 4, 1 / 4, 1 / 4, 1 / 4], [1 / 12, 3 / 4, 1 / 12, 1 / 12]
PROBABILITIES = [[HALF, QUARTER, HALF, HALF], [QUARTER, MOST, HALF, QUARTER]]
BATCH = Batch(
    logits=np.log(np.asarray(PROBABILITIES)),
    ids=np.array([[0, 3, 1, 1], [2, 1, 0, 1]]),
    advantages=np.array([1.0, -1.0]),
    mask=np.array([[1, 1, 0, 0], [1, 1, 0, 1]]),
    old=np.log([[2 / 5, 1 / 8, 0.9, 0.9], [1 / 2, 1 / 2, 0.9, 1 / 4]]),
    ref=np.log([[1 / 4, 1 / 4, 0.1, 0.1], [1 / 2, 3 / 4, 0.1, 1 / 8]]),
)
CLIP = Options(epsilon=0.2, epsilon_high=0.28, beta=0.1)
LIVE = np.array([[1, 1, 0, 0], [1, 1, 0, 1]], dtype=bool)

GOLDEN = {
    # ((-2.53 + 0.1 * 0.1931471806) / 2 + (3.3 + 0.05) / 3) / 2
    "grpo": (dataclasses.replace(CLIP, loss_type="grpo"), None, -0.0693379872),
    # (-2.53 + 0.0193147181 + 3.35) / 5
    "bnpo": (dataclasses.replace(CLIP, loss_type="bnpo"), None, 0.1678629436),
    # 0.8393147181 / (2 * 8)
    "dr_grpo": (dataclasses.replace(CLIP, loss_type="dr_grpo", max_completion_length=8), None, 0.0524571699),
    # 0.8393147181 / 8: the denominator is the one given
    "dapo": (CLIP, 8.0, 0.1049143398),
    # w = min(r, 1.3): (1.25 ln 2 + 1.3 ln 4 - 0.5 ln 4 + 1.3 ln 0.75 - ln 4 + 0.0193147181 + 0.05) / 5
    "cispo": (Options(loss_type="cispo", epsilon_high=1.3, beta=0.1), None, 0.0569006255),
}
# dL/dlogp before 1/Z and 1/n_i: the right column of the table above; cispo: -w A + the KL column
COEFFICIENT = np.array([[-1.20, 0.0, 0, 0], [-0.10, 1.50, 0, 1.05]])
CISPO_COEFFICIENT = np.array([[-1.20, -1.3, 0, 0], [0.40, 1.30, 0, 1.05]])
WEIGHTS = {
    "grpo": np.array([[0.25], [1 / 6]]), "bnpo": np.full((2, 1), 0.2), "dr_grpo": np.full((2, 1), 1 / 16),
    "dapo": np.full((2, 1), 1 / 8), "cispo": np.full((2, 1), 0.2),
}  # fmt: skip


def golden_gradient(name: str) -> np.ndarray[Any, Any]:
    coefficient = (CISPO_COEFFICIENT if name == "cispo" else COEFFICIENT) * WEIGHTS[name]
    one_hot = np.eye(4)[BATCH.ids]
    return coefficient[..., None] * (one_hot - np.asarray(PROBABILITIES))


@pytest.mark.parametrize("name", GOLDEN)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_loss_and_gradient_are_the_hand_numbers(name: str, dtype: torch.dtype, layout: str) -> None:
    opt, normalizer, loss = GOLDEN[name]
    assert abs(loss) > 0.01
    batch = BATCH.but(normalizer=normalizer)
    # old and ref are given as log-probabilities, so 16-bit logits move the ratio: 2^-9 relative in the logit
    tolerance = {torch.float64: 1e-9, torch.float32: 1e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    gradient = golden_gradient(name)
    if layout == "packed":
        batch, gradient = pack(batch, (2, 4), tail=0), np.concatenate([gradient[0, :2], gradient[1]])
    got = run(batch, opt, dtype)
    assert got.loss.item() == pytest.approx(loss, abs=tolerance)
    np.testing.assert_allclose(as_array(got.grad), gradient, rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", ["grpo", "bnpo"])
def test_sequence_level_golden(name: str) -> None:
    """s = sqrt(1.25 * 2) = 1.5811 -> 1.28 for A = +1; (0.5 * 1.5 * 1)^(1/3) = 0.9085602964 for A = -1."""
    opt = dataclasses.replace(CLIP, loss_type=name, importance_sampling_level="sequence")
    expected = {
        "grpo": ((-1.28 + 0.0193147181 / 2) + (0.9085602964 + 0.05 / 3)) / 2,  # -0.1725579
        "bnpo": (-2.56 + 0.0193147181 + 3 * 0.9085602964 + 0.05) / 5,  # 0.0469991
    }[name]
    got = run(BATCH, opt, torch.float64)
    assert got.loss.item() == pytest.approx(expected, abs=1e-9)
    # (1/3) * sum of s over the sequence = s on each live token of sequence 1, KL on top
    unit = np.array([[0.05, 0.0, 0, 0], [0.8085602964, 0.9085602964, 0, 0.9585602964]])
    coefficient = unit * WEIGHTS[name]
    gradient = coefficient[..., None] * (np.eye(4)[BATCH.ids] - np.asarray(PROBABILITIES))
    np.testing.assert_allclose(as_array(got.grad), gradient, rtol=0, atol=1e-9)


def test_bias_corrected_kl_golden() -> None:
    """KL times r: 1.25 * 0.1931471806 and 0.5 * 0.3068528194 + 0.1931471806; its slope r (k + 1 - ref / p)."""
    opt = dataclasses.replace(CLIP, loss_type="bnpo", use_bias_correction_kl=True)
    got = run(BATCH, opt, torch.float64)
    assert got.loss.item() == pytest.approx((0.77 + 0.1 * (0.2414339757 + 0.1534264097 + 0.1931471806)) / 5, abs=1e-9)
    unit = np.array(
        [[-1.25 + 0.125 * 0.6931471806, 0, 0, 0], [0.05 * (0.3068528194 - 1), 1.5, 0, 1 + 0.1 * 0.6931471806]]
    )
    gradient = 0.2 * unit[..., None] * (np.eye(4)[BATCH.ids] - np.asarray(PROBABILITIES))
    np.testing.assert_allclose(as_array(got.grad), gradient, rtol=0, atol=1e-9)


def test_rewards_golden() -> None:
    """Rewards 1, 0, 0, 0 in one group give 1.4997000600 and -0.4999000200 three times; lengths 1, 2, 3, 4 on-policy."""
    ids = torch.zeros(4, 4, dtype=torch.long)
    mask = torch.ones(4, 4).tril()
    logits = torch.zeros(4, 4, 4, dtype=torch.float64, requires_grad=True)
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0])
    out = gk.grpo_loss(logits, ids, rewards=rewards, group_size=4, completion_mask=mask)
    out.loss.backward()
    assert out.loss.item() == pytest.approx((-1.4997000600 + 9 * 0.4999000200) / 10, abs=1e-6)
    assert logits.grad is not None
    assert logits.grad[0, 0, 0].item() == pytest.approx(-0.149970006 * 0.75, abs=1e-6)
    assert logits.grad[2, 1, 2].item() == pytest.approx(0.04999 * -0.25, abs=1e-6)


@pytest.mark.parametrize("name", GOLDEN)
def test_the_oracle_agrees_with_the_hand_numbers(name: str) -> None:
    opt, normalizer, loss = GOLDEN[name]
    truth = oracle.grpo(BATCH.but(normalizer=normalizer), opt)
    assert float(truth.loss) == pytest.approx(loss, abs=1e-9)
    np.testing.assert_allclose(truth.dlogits.astype(float), golden_gradient(name), rtol=0, atol=1e-9)


@pytest.mark.parametrize(("loss_type", "level"), OBJECTIVES)
@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"beta": 0.3, "kl_estimator": "k1", "entropy_coef": 0.2},
        {
            "beta": 0.3,
            "kl_estimator": "k2",
            "softcap": 3.0,
            "logit_scale": 1.3,
            "temperature": 0.7,
            "entropy_coef": -0.4,
        },
        {"beta": 0.3, "use_bias_correction_kl": True, "delta": 1.1},
        {"beta": 0.3, "dual_clip": 1.05, "epsilon_high": 0.1},
    ],
    ids=["plain", "k1", "transform", "bias", "dual"],
)
def test_the_oracle_gradient_is_the_central_difference(
    loss_type: str, level: str, layout: str, extra: dict[str, Any]
) -> None:
    if loss_type == "cispo":
        extra = {k: v for k, v in extra.items() if k not in ("delta", "dual_clip")} | {"epsilon_high": 1.1}
    opt = Options(loss_type=loss_type, importance_sampling_level=level, max_completion_length=9, **extra)
    batch = make_batch(seed=5, lengths=(3, 1, 4), vocab=5, spread=1.0, layout=layout, weight="token")
    truth = oracle.grpo(batch, opt)
    rng = np.random.default_rng(1)
    direction = rng.normal(size=batch.logits.shape)
    step = 1e-5

    def at(h: float) -> Any:
        moved = batch.but(logits=batch.logits.astype(np.longdouble) + h * direction)
        if loss_type != "cispo":
            return oracle.grpo(moved, opt).loss
        # the weight of cispo is a constant of the step, so its difference is taken of sum(coef * logp) instead
        values = oracle.grpo(moved, opt)
        fixed = (truth.coef * values.logps).sum()
        return fixed - opt.entropy_coef * values.entropy.sum() / max(truth.live.sum(), 1)

    slope = (at(step) - at(-step)) / (2 * step)
    direction[~np.isfinite(batch.logits)] = 0
    assert float(slope) == pytest.approx(float((np.nan_to_num(truth.dlogits) * direction).sum()), rel=1e-6, abs=1e-9)


DROPPED = {
    "old log-probs": lambda b, o: (b.but(old=None), o),
    "reference": lambda b, o: (b, dataclasses.replace(o, beta=0.0)),
    "KL estimator": lambda b, o: (b, dataclasses.replace(o, kl_estimator="k2")),
    "bias correction": lambda b, o: (b, dataclasses.replace(o, use_bias_correction_kl=False)),
    "mask": lambda b, o: (b.but(mask=None), o),
    "holes": lambda b, o: (b.but(mask=np.arange(b.ids.shape[1])[None] < b.mask.sum(1, keepdims=True)), o),
    "advantage sign": lambda b, o: (b.but(advantages=abs(b.advantages)), o),
    "sampler weight": lambda b, o: (b.but(weight=None), o),
    "temperature": lambda b, o: (b, dataclasses.replace(o, temperature=1.0)),
    "softcap": lambda b, o: (b, dataclasses.replace(o, softcap=None)),
    "logit scale": lambda b, o: (b, dataclasses.replace(o, logit_scale=1.0)),
    "entropy bonus": lambda b, o: (b, dataclasses.replace(o, entropy_coef=0.0)),
    "normalizer": lambda b, o: (b.but(normalizer=None), o),
    "entropy normalizer": lambda b, o: (b.but(entropy_normalizer=None), o),
    "lower clip": lambda b, o: (b, dataclasses.replace(o, epsilon=0.9)),
    "upper clip": lambda b, o: (b, dataclasses.replace(o, epsilon_high=9.0)),
    "delta": lambda b, o: (b, dataclasses.replace(o, delta=None)),
    "aggregation": lambda b, o: (b, dataclasses.replace(o, loss_type="grpo")),
    "level": lambda b, o: (b, dataclasses.replace(o, importance_sampling_level="sequence")),
}
FULL = Options(
    loss_type="dapo", epsilon=0.2, epsilon_high=0.28, delta=1.6, beta=0.2, use_bias_correction_kl=True, temperature=0.8,
    softcap=6.0, logit_scale=1.2, entropy_coef=0.1,
)  # fmt: skip


def assert_parity(got: Ran, truth: oracle.Truth) -> None:
    assert got.loss.item() == pytest.approx(float(truth.loss), rel=1e-5, abs=1e-6)
    np.testing.assert_allclose(as_array(got.grad), truth.dlogits.astype(float), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("factor", DROPPED)
def test_parity_fails_when_a_factor_is_dropped(factor: str) -> None:
    """The comparison that the other tests make must notice each factor: a batch where one may vanish proves nothing."""
    batch = make_batch(seed=11, weight="token", off_policy=0.6).but(normalizer=31.0, entropy_normalizer=17.0)
    got = run(batch, FULL)
    truth = oracle.grpo(batch, FULL)
    assert abs(float(truth.loss)) > 0.01
    assert_parity(got, truth)
    wrong = oracle.grpo(*DROPPED[factor](batch, FULL))
    with pytest.raises(AssertionError):
        assert_parity(got, wrong)


def test_log_of_probabilities_is_itself() -> None:
    """The golden batch rests on softmax(log p) = p."""
    out = gk.per_token_logps(from_probabilities(PROBABILITIES), torch.as_tensor(BATCH.ids))
    expected = np.log(np.take_along_axis(np.asarray(PROBABILITIES), BATCH.ids[..., None], -1)[..., 0])
    np.testing.assert_allclose(out.logps.numpy(), expected, rtol=1e-14)


@pytest.mark.parametrize(
    ("ours", "message"),
    [
        ([1.0, 2.0 + 5e-7, -math.inf, math.nan], r"1 of 4 beyond the budget; worst at \(1,\)"),
        ([1.0, 2.0, math.inf, math.nan], r"worst at \(2,\)"),
        ([1.0, math.nan, -math.inf, math.nan], r"worst at \(1,\)"),
        ([1.0, 2.0, -math.inf, 0.0], r"worst at \(3,\)"),
        ([1.0, 2.0, -math.inf], "shape"),
    ],
)
def test_the_error_budget_can_be_exceeded(ours: list[float], message: str) -> None:
    truth = np.array([1.0, 2.0, -math.inf, math.nan])
    assert_within_budget([1.0, 2.0 + 2e-7, -math.inf, math.nan], truth, truth, torch.float32)
    assert_within_budget(
        [1.0, 2.0 + 5e-7, -math.inf, math.nan], np.array([1.0, 2.0 + 4e-7, -math.inf, math.nan]), truth, torch.float32
    )
    with pytest.raises(AssertionError, match=message):
        assert_within_budget(ours, truth, truth, torch.float32)


def test_poisoned_memory_is_poisoned() -> None:
    with poisoned():
        assert torch.empty(3).isnan().all()
        assert torch.empty_like(torch.zeros(2, 2, dtype=torch.bfloat16)).isnan().all()
        assert torch.zeros(4).new_empty(4).isnan().all()
    assert not torch.are_deterministic_algorithms_enabled()
