"""The advised group size: the minimiser, its limits, its interval and its flags."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from grpo_kernels import lab
from grpo_kernels.lab.studies import pilot_study

BANDIT = lab.GradConstants(Vb=0.0133302, A=0.658886, B2=0.745568, J2=0.0395002, A0=0.981529)


def changed(**values: Any) -> lab.GradConstants:
    return dataclasses.replace(BANDIT, **values)


def test_a_bandits_advice() -> None:
    advice = lab.optimal_group_size(BANDIT)
    assert advice.g_cont == pytest.approx(1 + math.sqrt(0.745568 / 0.0133302))
    assert (round(advice.g_cont, 2), advice.g_int) == (8.48, 8)
    assert advice.g_cross == pytest.approx(lab.crossing(BANDIT))
    low, high = advice.interval_5pct
    assert math.ceil(low) == 5
    assert math.floor(high) == 15
    best = lab.fixed_budget(BANDIT, [8])[0]
    assert all(
        (cost <= 1.05 * best) == (low <= G <= high) for G in range(2, 40) for cost in lab.fixed_budget(BANDIT, [G])
    )
    assert advice.ci is None
    assert advice.flags == ()
    assert dict(advice.curve)[8] == pytest.approx(1, abs=2e-3)
    assert "Use G = 8: the optimum is 8.5." in advice.why()
    assert "Up to G = 3.3 subtracting nothing has the smaller error than the group mean." in advice.why()
    assert not any("subtracting" in line for line in lab.optimal_group_size(changed(A0=2.0)).why())
    assert any("At every G" in line for line in lab.optimal_group_size(changed(A0=0.5)).why())


def test_the_price_of_a_prompt_makes_groups_larger() -> None:
    sizes = [lab.optimal_group_size(BANDIT, c_prompt=ratio).g_int for ratio in (0, 1, 4, 16, 64)]
    assert sizes == [8, 11, 17, 30, 58]
    assert (
        lab.optimal_group_size(BANDIT, c_prompt=16, c_response=2).g_int
        == lab.optimal_group_size(BANDIT, c_prompt=8).g_int
    )


@pytest.mark.parametrize("c_prompt", [0.0, 0.5, 7.0, 300.0])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"multiple_of": 4},
        {"g_min": 5, "g_max": 12},
        {"N": 24, "multiple_of": 8},
        {"N": 50},
        {"N": 997, "g_max": 40},
    ],
)
def test_the_integer_is_the_best_that_is_allowed(c_prompt: float, options: dict[str, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    for vb, a, b2 in (10 ** (3 * torch.rand(40, 3, generator=generator, dtype=torch.float64) - 1.5)).tolist():
        constants = lab.GradConstants(Vb=vb, A=a, B2=b2, J2=1.0)
        limit = min(options.get("g_max", 4000), options.get("N", 4000))
        step = options.get("multiple_of", 1)
        allowed = [G for G in range(options.get("g_min", 2), limit + 1) if G % step == 0]
        sizes = torch.tensor(allowed)
        paid = options["N"] / (options["N"] // sizes) if "N" in options else sizes  # responses left over cost too
        best = allowed[int(((c_prompt + paid) * lab.mse(constants, 1, sizes)).argmin())]
        assert lab.optimal_group_size(constants, c_prompt=c_prompt, **options).g_int == best  # type: ignore[arg-type]


def test_limits_and_budget() -> None:
    assert lab.optimal_group_size(BANDIT, N=1024) == lab.optimal_group_size(BANDIT)
    small = lab.optimal_group_size(BANDIT, N=4)
    assert small.g_int == 4
    assert small.flags == ("N_LT_G",)
    assert lab.optimal_group_size(BANDIT, g_max=6).g_int == 6
    assert lab.optimal_group_size(BANDIT, g_min=20).g_int == 20
    assert lab.optimal_group_size(BANDIT, multiple_of=8).g_int == 8
    assert lab.optimal_group_size(changed(B2=0.0)).g_int == 2


def test_prompts_that_do_not_differ() -> None:
    advice = lab.optimal_group_size(changed(Vb=-0.01))
    assert (advice.g_cont, advice.g_int) == (math.inf, None)
    assert advice.flags == ("VB_NONPOSITIVE",)
    assert advice.interval_5pct[1] == math.inf
    assert lab.optimal_group_size(changed(Vb=0.0), N=64).g_int == 64
    assert lab.optimal_group_size(changed(Vb=0.0), g_max=32, multiple_of=12).g_int == 24
    assert "No best group size" in advice.why()[0]


def test_intervals_over_pilots() -> None:
    tight = torch.tensor([[v, 0.66, 0.75, 0.04, 0.98] for v in (0.012, 0.013, 0.0135, 0.014)], dtype=torch.float64)
    advice = lab.optimal_group_size(changed(boot=tight))
    assert advice.ci == pytest.approx([1 + math.sqrt(0.75 / v) for v in (0.014, 0.012)])
    assert advice.flags == ()
    loose = tight.clone()
    loose[:, 0] = torch.tensor([-0.01, 0.0002, 0.05, 0.4])
    advice = lab.optimal_group_size(changed(boot=loose))
    assert advice.ci is not None
    assert advice.ci[1] == math.inf
    assert advice.flags == ("PILOT_TOO_SMALL",)
    assert "infinity" in " ".join(advice.why())


def test_every_flag_has_its_meaning() -> None:
    assert set(lab.FLAGS) == {
        "NO_SIGNAL", "VB_NONPOSITIVE", "PILOT_TOO_SMALL", "SCORES_NOT_CENTRED", "SILENT_RATE_HIGH", "N_LT_G",
    }  # fmt: skip


def test_pilots_advise_well() -> None:
    """512 prompts x 16 responses: regret at most 3 % in 95 % of 40 seeds; the interval covers in 75 %."""
    record = pilot_study("bandit", n=512, G=16, seeds=40, n_boot=200)
    assert [item["holds"] for item in record["claims"]] == [True, True], record["claims"]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"c_prompt": -1.0}, "c_prompt must be at least 0, got -1"),
        ({"c_response": 0.0}, "c_response must be > 0 if c_prompt is 0"),
        ({"g_min": 1}, "g_min must be >= 2, got 1"),
        ({"N": 1}, "N must be >= 2, got 1"),
        ({"g_min": 9, "g_max": 15, "multiple_of": 8}, "multiple_of must have a multiple within the limits, got 8"),
    ],
)
def test_refusals(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        lab.optimal_group_size(BANDIT, **options)
