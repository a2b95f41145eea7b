"""The whole loss on the Triton kernels: one pass for what it claims, the general route for the rest."""

from __future__ import annotations

import math
from collections.abc import Callable
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
    assert_same_run,
    default_impl,
    full_options,
    make_batch,
    objective_options,
    same_bits,
)
from triton_support import assert_run_within_budget, run_on

import grpo_kernels as gk

INF, NAN = math.inf, math.nan
LENGTHS = (3, 1, 4)
CLIPPED = [name for name in LOSS_TYPES if name != "cispo"]
ONE_PASS, GENERAL = "triton one-pass", "triton"

EXTRAS: dict[str, dict[str, Any]] = {
    "plain": {},
    "asymmetric clip": {"epsilon": 0.1, "epsilon_high": 0.28},
    "k1": {"beta": 0.2, "kl_estimator": "k1"},
    "k2": {"beta": 0.2, "kl_estimator": "k2"},
    "k3": {"beta": 0.2},
    "k1 bias": {"beta": 0.2, "kl_estimator": "k1", "use_bias_correction_kl": True},
    "k2 bias": {"beta": 0.2, "kl_estimator": "k2", "use_bias_correction_kl": True},
    "k3 bias": {"beta": 0.2, "use_bias_correction_kl": True},
    "negative beta": {"beta": -0.2},
    "delta": {"delta": 1.5, "epsilon_high": 0.28},
    "delta inside the clip": {"delta": 1.1, "epsilon_high": 0.28},
    "dual clip": {"dual_clip": 1.3},
    "delta and dual clip": {"delta": 1.4, "dual_clip": 1.3},
    "entropy metric": {"entropy": True},
    "entropy bonus": {"entropy": True, "entropy_coef": 0.3},
    "entropy penalty": {"entropy": True, "entropy_coef": -0.3, "beta": 0.1},
    "temperature": {"temperature": 0.7},
    "softcap": {"softcap": 4.0},
    "logit scale": {"logit_scale": 0.25},
    "everything": {
        "temperature": 0.7, "softcap": 4.0, "logit_scale": 1.5, "beta": 0.1, "entropy": True, "entropy_coef": 0.1,
    },
}  # fmt: skip
CYCLE = [(dtype, layout) for layout in LAYOUTS for dtype in DTYPES]


def route(opt: Options) -> str:
    return ONE_PASS if opt.importance_sampling_level == "token" else GENERAL


# Every option


@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_every_option_at_token_level_is_one_pass_within_the_budget(extra: str, loss_type: str) -> None:
    number = list(EXTRAS).index(extra) + 3 * LOSS_TYPES.index(loss_type)
    dtype, layout = CYCLE[number % len(CYCLE)]
    batch = make_batch(
        seed=300 + number, lengths=LENGTHS, dtype=dtype, layout=layout, weight=[None, "token", "[B]"][number % 3],
        token_advantages=number % 2 == 1,
    )  # fmt: skip
    opt = objective_options(loss_type, "token", EXTRAS[extra])
    got = run_on("triton", batch, opt, dtype)
    assert gk.backends.last_used() == ONE_PASS
    assert abs(got.loss.item()) > 0.005
    assert_run_within_budget(got, batch, opt, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("loss_type", ["dapo", "cispo"])
def test_every_dtype_and_layout(dtype: torch.dtype, layout: str, loss_type: str) -> None:
    batch = make_batch(seed=7, lengths=LENGTHS, vocab=130, dtype=dtype, layout=layout, weight="token")
    opt = full_options(loss_type, softcap=6.0)
    got = run_on("triton", batch, opt, dtype)
    assert gk.backends.last_used() == ONE_PASS
    assert_run_within_budget(got, batch, opt, dtype)


@pytest.mark.parametrize(
    ("extra", "loss_type"), [(extra, CLIPPED[number % len(CLIPPED)]) for number, extra in enumerate(EXTRAS)]
)
def test_sequence_level_takes_the_general_route(extra: str, loss_type: str) -> None:
    number = list(EXTRAS).index(extra)
    dtype, layout = CYCLE[(number + number // 8) % len(CYCLE)]
    batch = make_batch(seed=200 + number, lengths=LENGTHS, dtype=dtype, layout=layout, weight="token")
    opt = objective_options(loss_type, "sequence", EXTRAS[extra])
    got = run_on("triton", batch, opt, dtype)
    assert gk.backends.last_used() == GENERAL
    assert_run_within_budget(got, batch, opt, dtype)


def test_auto_on_the_cpu_is_not_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(gk.backends.ENVIRONMENT, raising=False)
    gk.grpo_loss(torch.zeros(1, 1, 4), torch.zeros(1, 1, dtype=torch.long), advantages=torch.ones(1))
    assert str(gk.backends.last_used()).split()[0] == default_impl() != "triton"


# Rewards, normalised in the kernel


def rewarded(rewards: Any, group_size: int | None, opt: Options, dtype: torch.dtype = torch.float32) -> None:
    """A loss with rewards against the oracle's advantages; a wrong advantage of one row changes its gradient."""
    values = np.asarray(rewards)
    batch = make_batch(seed=len(values), lengths=(2,) * len(values), holes=False, dtype=dtype, weight="token")
    mask = np.array(batch.mask)
    mask[0] = False  # a sequence without a live token is scored all the same
    groups = np.arange(len(values)) // (group_size or len(values))
    truth = oracle.group_advantages(values, groups).astype(float)
    batch = batch.but(mask=mask, advantages=truth)
    side = torch.float64 if dtype == torch.float64 else torch.float32
    groups_of = {"rewards": torch.tensor(values, dtype=side), "group_size": group_size}
    got = run_on("triton", batch, opt, dtype, advantages=None, **groups_of)
    assert gk.backends.last_used() == route(opt)
    assert_run_within_budget(got, batch, opt, dtype, slack=4.0)  # mean, deviation and quotient are rounded as well
    silent = torch.as_tensor(truth == 0)
    if opt.beta == 0 and opt.entropy_coef == 0:
        assert (got.grad[silent] == 0).all()


REWARDS: dict[str, tuple[list[float], int | None]] = {
    "one group": ([1.0, 0.0, 0.25, 2.0], None),
    "pairs": ([1.0, 0.0, 0.25, 2.0], 2),
    "threes": ([1.0, 0.0, 0.25, 2.0, -3.0, 0.1], 3),
    "five": ([1.0, 0.0, 0.25, 2.0, 0.5], 5),
    "seven, one group": ([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.9], None),
    "singletons": ([1.0, 0.0, 0.25], 1),
    "one response": ([3.5], None),
    "a silent group": ([0.1, 0.1, 0.1, 0.3, -0.1, 0.2], 3),
    "unscored": ([NAN, 1.0, 0.0, NAN, 2.0, 0.5], 3),
    "one scored": ([NAN, 1.0, NAN, 1.0, NAN, 2.0], 3),
    "none scored": ([NAN, NAN, 1.0, 3.0], 2),
    "equal where scored": ([NAN, 0.3, 0.3, 1.0, 2.0, NAN], 3),
    "large offset": ([1e6, 1e6 + 1, 1e6 + 2, 1e6 + 3], 4),
    "large negative offset": ([-1e6, -1e6 + 1, -1e6 + 2, 7.0, 8.0, 9.0], 3),
    "tiny": ([1e-30, 2e-30, 4e-30], 3),
}


@pytest.mark.parametrize("case", REWARDS)
@pytest.mark.parametrize("beta", [0.0, 0.2])
def test_rewards_are_normalised_in_their_groups(case: str, beta: float) -> None:
    rewards, group_size = REWARDS[case]
    rewarded(rewards, group_size, objective_options("dapo", "token", {"beta": beta}))


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rewards_with_every_loss_and_dtype(loss_type: str, dtype: torch.dtype) -> None:
    rewarded([1.0, 0.0, 0.25, NAN, -3.0, 0.1], 3, objective_options(loss_type, "token", {"beta": 0.1}), dtype)


@pytest.mark.parametrize("value", [0.1, 1e-30, 1e30, -7.3])
@pytest.mark.parametrize("count", [2, 3, 7])
def test_equal_rewards_give_exactly_zero(value: float, count: int) -> None:
    batch = make_batch(lengths=(1,) * count, vocab=5)
    got = run_on(
        "triton", batch, objective_options("dapo", "token", {}), advantages=None, rewards=torch.full((count,), value)
    )
    assert got.loss.item() == 0 and (got.grad == 0).all()


STRIDED: dict[str, Callable[[list[float]], torch.Tensor]] = {
    "column": lambda values: torch.tensor([values, [50.0] * len(values)]).T[:, 0],
    "[B, 1] column": lambda values: torch.tensor([values, [50.0] * len(values)]).T[:, :1],
    "part of a longer one": lambda values: torch.tensor([9.0, *values, 9.0])[1:-1],
}


@pytest.mark.parametrize("form", STRIDED)
def test_rewards_may_have_any_strides(form: str) -> None:
    batch, opt = make_batch(seed=3, lengths=(1, 2, 1, 2)), objective_options("dapo", "token", {})
    values = [1.0, 0.0, 0.25, 2.0]
    got, expected = (
        run_on("triton", batch, opt, advantages=None, rewards=rewards, group_size=2)
        for rewards in (STRIDED[form](values), torch.tensor(values))
    )
    assert_same_run(got, expected, form)
    assert got.grad.norm() > 1e-3


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [([1e20, 1e20, 1e20, 2e20], [-0.5, -0.5, -0.5, 1.5]), ([1e38, -1e38, 1e38, -1e38], [0.75**0.5, -(0.75**0.5)] * 2)],
)
def test_large_rewards_do_not_overflow(rewards: list[float], expected: list[float]) -> None:
    batch = make_batch(lengths=(1,) * 4, vocab=5, holes=False).but(old=None)
    got = run_on(
        "triton", batch, objective_options("dapo", "token", {}), advantages=None, rewards=torch.tensor(rewards)
    )
    torch.testing.assert_close(got.per_token.loss[:, 0], -torch.tensor(expected), rtol=1e-6, atol=0)


ROUTED: dict[str, dict[str, Any]] = {
    "packed": {"layout": "packed", "group_size": 2},
    "group_ids": {"group_ids": torch.tensor([5, 1, 5, 5])},
    "integers": {"group_size": 2, "rewards": torch.tensor([1, 0, 0, 3])},
    "float64 beside float32 logits": {"group_size": 2, "rewards": torch.tensor([1.0, 0.0, 0.1, 3.0]).double()},
    "bfloat16": {"group_size": 2, "rewards": torch.tensor([1.0, 0.0, 0.1, 3.0]).bfloat16()},
    "sequence level": {"group_size": 2, "level": "sequence"},
}


@pytest.mark.parametrize("case", ROUTED)
def test_other_rewards_are_normalised_before_the_kernel(case: str) -> None:
    settings = {"layout": "padded", "level": "token", "rewards": torch.tensor([1.0, 0.0, 0.25, 2.0])} | ROUTED[case]
    layout, level, rewards = (settings.pop(name) for name in ("layout", "level", "rewards"))
    batch = make_batch(seed=27, lengths=(2, 1, 2, 1), layout=layout)
    opt = objective_options("grpo", level, {"beta": 0.1})
    made = gk.group_advantages(rewards, **settings)
    expected = run_on("triton", batch, opt, advantages=made)
    got = run_on("triton", batch, opt, advantages=None, rewards=rewards, **settings)
    assert gk.backends.last_used() == route(opt)
    assert_same_run(got, expected, case)
    assert got.grad.norm() > 1e-3


# In place: one kernel


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_in_place_is_within_the_budget_too(dtype: torch.dtype, layout: str, loss_type: str) -> None:
    batch = make_batch(seed=8, lengths=(2, 3), vocab=70, dtype=dtype, layout=layout, weight="token")
    opt = full_options(loss_type)
    got = run_on("triton", batch, opt, dtype, inplace=True)
    # with 1 / Z inside, most float16 gradients would flush to 0 before a loss scale reaches them
    assert gk.backends.last_used() == (ONE_PASS if dtype == torch.float16 else "triton one-kernel")
    assert_run_within_budget(got, batch, opt, dtype)


@pytest.mark.parametrize("case", ["threes", "unscored", "singletons"])
def test_in_place_with_rewards(case: str) -> None:
    rewards, group_size = REWARDS[case]
    batch = make_batch(seed=9, lengths=(2,) * len(rewards), weight="token")
    opt = full_options("grpo")
    groups = {"advantages": None, "rewards": torch.tensor(rewards), "group_size": group_size}
    expected = run_on("triton", batch, opt, **groups)
    assert_same_run(run_on("triton", batch, opt, inplace=True, **groups), expected, case)


# Corners


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("inplace", [False, True])
def test_on_policy_ratio_is_exactly_one(loss_type: str, inplace: bool) -> None:
    batch = make_batch(lengths=(2, 3)).but(old=None)
    opt = objective_options(loss_type, "token", {"beta": 0.1})
    got = run_on("triton", batch, opt, inplace=inplace)
    assert (got.per_token.ratio[torch.as_tensor(batch.mask)] == 1.0).all()
    assert all(got.metrics[f"ratio/{name}"].item() == 1.0 for name in ("mean", "min", "max"))
    assert_run_within_budget(got, batch, opt, torch.float32)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("bad", ["all -inf", "+inf", "nan"])
@pytest.mark.parametrize("on_policy", [False, True])
def test_a_bad_live_row_spoils_the_loss_but_not_other_rows(loss_type: str, bad: str, on_policy: bool) -> None:
    batch = make_batch(lengths=(2, 2), vocab=11, holes=False)
    batch = batch.but(old=None) if on_policy else batch
    opt = full_options(loss_type)
    logits = batch.logits.copy()
    logits[1, 0, :: 1 if bad == "all -inf" else 6] = {"all -inf": -INF, "+inf": INF, "nan": NAN}[bad]
    clean, spoilt = run_on("triton", batch, opt), run_on("triton", batch.but(logits=logits), opt)
    assert spoilt.loss.isnan()
    rows = torch.ones(batch.ids.shape, dtype=torch.bool)
    rows[1, 0] = False
    assert same_bits(spoilt.grad[rows], clean.grad[rows])


OVERFLOWS = [
    (1.0, {}, -1.2), (0.0, {}, 0.0), (-1.0, {"delta": 4.0}, 4.0), (-1.0, {"dual_clip": 4.0}, 4.0),
    (0.0, {"delta": 4.0}, 0.0), (1.0, {"delta": 4.0}, -1.2), (1.0, {"dual_clip": 4.0}, -1.2),
]  # fmt: skip


@pytest.mark.parametrize(("advantage", "extra", "loss"), OVERFLOWS)
@pytest.mark.parametrize("inplace", [False, True])
def test_an_overflowing_ratio_does_not_reach_the_gradient(
    advantage: float, extra: dict[str, float], loss: float, inplace: bool
) -> None:
    batch = oracle.Batch(
        np.zeros((1, 1, 4)), np.array([[2]]), np.array([advantage]), np.ones((1, 1)), old=np.array([[-200.0]])
    )
    got = run_on("triton", batch, Options(**extra), inplace=inplace)
    assert got.loss.item() == pytest.approx(loss, abs=1e-6)
    assert got.grad.flatten().tolist() == [0.0] * 4


@pytest.mark.parametrize("corrected", [False, True])
def test_an_overflowing_kl_leaves_other_rows_alone(corrected: bool) -> None:
    batch = make_batch(lengths=(2, 2), vocab=11, holes=False)
    opt = Options(beta=0.1, use_bias_correction_kl=corrected)
    ref = np.array(batch.ref)
    ref[1, 0] += 100
    clean, spoilt = run_on("triton", batch, opt), run_on("triton", batch.but(ref=ref), opt)
    rows = torch.ones(batch.ids.shape, dtype=torch.bool)
    rows[1, 0] = False
    assert same_bits(spoilt.grad[rows], clean.grad[rows])
    # bias-corrected, the KL is infinite and its slope, -d ratio, is not
    assert spoilt.grad[1, 0].isfinite().all() if corrected else not spoilt.grad[1, 0].isfinite().any()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dead_by", ["mask", "ids"])
@pytest.mark.parametrize("inplace", [False, True])
def test_no_live_token_gives_zero(layout: str, dead_by: str, inplace: bool) -> None:
    batch = make_batch(lengths=(2, 3), layout=layout, weight="token")
    nothing = np.zeros_like(np.asarray(batch.mask))
    batch = batch.but(mask=nothing) if dead_by == "mask" else batch.but(ids=np.full_like(batch.ids, -100), mask=None)
    got = run_on("triton", batch, full_options("grpo"), inplace=inplace)
    assert got.loss.item() == 0.0 and (got.grad == 0).all()
    assert all(torch.isfinite(value) for value in got.metrics.values())


@pytest.mark.parametrize("scale", [3.0, -0.5, 0.0])
@pytest.mark.parametrize("inplace", [False, True])
def test_the_upstream_gradient_is_honoured(scale: float, inplace: bool) -> None:
    batch = make_batch(lengths=(2, 2))
    plain = run_on("triton", batch, full_options("grpo"))
    scaled = run_on("triton", batch, full_options("grpo"), inplace=inplace, upstream=scale)
    torch.testing.assert_close(scaled.grad, scale * plain.grad, rtol=1e-6, atol=1e-9)


def test_side_inputs_may_have_any_strides() -> None:
    batch = make_batch(seed=9, lengths=(3, 2), weight="token", token_advantages=True)
    opt = full_options("dapo")

    def spread(value: Any, step: int) -> torch.Tensor:
        wide = torch.full((value.shape[0], value.shape[1] * step + 3), NAN)
        wide[:, : value.shape[1] * step : step] = torch.as_tensor(value)
        return wide[:, : value.shape[1] * step : step]

    side = {
        "old_per_token_logps": spread(batch.old, 3),
        "ref_per_token_logps": torch.as_tensor(batch.ref).float().T.contiguous().T,
        "advantages": spread(batch.advantages, 2),
        "importance_sampling_ratio": torch.as_tensor(batch.weight).float().T.contiguous().T,
        "completion_mask": torch.as_tensor(batch.mask).T.contiguous().T,
        "temperature": torch.full((1, 1), 0.8).expand(batch.ids.shape),
    }
    assert not any(value.is_contiguous() for value in side.values())
    assert_same_run(run_on("triton", batch, opt, **side), run_on("triton", batch, opt), "strided side inputs")


def test_given_normalizers_are_used_as_they_are() -> None:
    batch = make_batch(seed=22, lengths=(3, 2)).but(normalizer=0.25, entropy_normalizer=37.0)
    opt = full_options("dr_grpo")
    for inplace in (False, True):
        assert_run_within_budget(run_on("triton", batch, opt, inplace=inplace), batch, opt, torch.float32)
