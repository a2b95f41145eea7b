"""Inputs that a pilot, a run or a command line should never hold, and sometimes does."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from grpo_kernels import lab

BANDIT = lab.GradConstants(Vb=0.0133302, A=0.658886, B2=0.745568, J2=0.0395002, A0=0.981529)
NAMES = ("Vb", "A", "B2", "J2", "A0", "Aopt")


def pilot(P: int = 10, G: int = 6, d: int = 4, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.rand(P, G, generator=generator, dtype=torch.float64)
    return rewards, torch.randn(P, G, d, generator=generator, dtype=torch.float64)


def changed(**values: Any) -> lab.GradConstants:
    return dataclasses.replace(BANDIT, **values)


@pytest.mark.parametrize("parts", [(0.0, 0.0, 0.0), (-0.1, -1e-3, 0.0)])
@pytest.mark.parametrize("options", [{}, {"N": 64}, {"c_prompt": 4.0}, {"c_prompt": 1.0, "c_response": 0.0}])
def test_without_a_signal_the_advice_says_so(parts: tuple[float, ...], options: dict[str, Any]) -> None:
    Vb, A, B2 = parts
    advice = lab.optimal_group_size(lab.GradConstants(Vb=Vb, A=A, B2=B2, J2=0.0, A0=0.0), **options)
    assert advice.flags == ("NO_SIGNAL",)
    assert advice.g_int is None
    assert math.isnan(advice.g_cont)
    assert "No group size to advise" in advice.why()[0]
    assert not any("subtracting nothing" in line for line in advice.why())


def test_constant_rewards_go_through_the_monitor() -> None:
    monitor = lab.GroupSizeMonitor(c_prompt=2.0)
    _, scores = pilot()
    assert monitor.update(torch.full((10, 6), 0.1), scores)
    advice = monitor.advice()
    assert advice is not None
    assert advice.flags == ("NO_SIGNAL", "SILENT_RATE_HIGH")


@pytest.mark.parametrize("c_prompt", [0.0, 1e-300, 1.0, 1e300])
def test_constants_of_any_size_give_advice(c_prompt: float) -> None:
    sizes = (0.0, 5e-324, 1e-40, 1.0, 1e300)
    for vb in sizes:
        for a in sizes:
            for b2 in sizes:
                advice = lab.optimal_group_size(lab.GradConstants(Vb=vb, A=a, B2=b2, J2=1.0), N=64, c_prompt=c_prompt)
                assert advice.g_int is not None or advice.flags == ("NO_SIGNAL",), (vb, a, b2)
                assert advice.why()
    scaled = lab.optimal_group_size(changed(Vb=0.0133302e-200, A=0.658886e-200, B2=0.745568e-200), c_prompt=4.0)
    assert scaled.g_int == lab.optimal_group_size(BANDIT, c_prompt=4.0).g_int


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("name", NAMES)
def test_constants_that_are_not_finite_are_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"optimal_group_size: constants must have a finite {name}"):
        lab.optimal_group_size(changed(**{name: value}))
    boot = torch.ones(3, 5, dtype=torch.float64)
    boot[1, 0] = value
    with pytest.raises(ValueError, match="constants must have finite boot"):
        lab.optimal_group_size(changed(boot=boot))


def test_the_crossing_of_nan_is_nan() -> None:
    assert math.isnan(lab.crossing(changed(A=math.nan)))
    assert math.isnan(lab.crossing(changed(B2=math.nan)))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_where_a_response_is_scored_is_refused(value: float) -> None:
    rewards, scores = pilot()
    spoilt = scores.clone()
    spoilt[3, 2, 1] = value
    for call in (lab.group_ustats, lab.estimate_constants):
        with pytest.raises(lab.NotFiniteError, match=rf"{call.__name__}: scores must be finite, got .* at \[3, 2, 1\]"):
            call(rewards, spoilt)
    gram = torch.einsum("pad,qbd->paqb", scores, scores)
    gram[0, 1, 5, 2] = value
    with pytest.raises(lab.NotFiniteError, match="estimate_constants: gram must be finite"):
        lab.estimate_constants(rewards, gram=gram)
    if math.isinf(value):
        high = rewards.clone()
        high[2, 2] = value
        with pytest.raises(lab.NotFiniteError, match="rewards must be finite"):
            lab.group_ustats(high, scores)
        mask = torch.ones(10, 6)
        mask[2, 2] = 0
        assert lab.group_ustats(high, scores, mask).count[2] == 5


def test_scores_too_large_to_be_squared_are_refused() -> None:
    rewards, scores = pilot()
    with pytest.raises(lab.NotFiniteError, match="an overflow"):
        lab.estimate_constants(rewards, 1e200 * scores)


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e200])
def test_one_bad_step_does_not_enter_the_averages(value: float) -> None:
    rewards, scores = pilot()
    monitor = lab.GroupSizeMonitor()
    monitor.update(rewards, scores)
    before = monitor.state_dict()
    spoilt = scores.clone()
    spoilt[0, 0, 0] = value
    with pytest.warns(RuntimeWarning, match="this step is left out"):
        assert monitor.update(rewards, spoilt) is False
    assert monitor.state_dict() == before
    with pytest.raises(ValueError, match="load_state_dict: state must be finite"):
        monitor.load_state_dict({**before, "silent": math.nan})


def test_an_unscored_response_does_not_reach_the_own_squares() -> None:
    rewards, scores = pilot(P=4, G=6)
    short, of_short = rewards[:, :5], scores[:, :5]
    loo = lab.group_ustats(short, of_short).loo
    square = loo.sum(0).square().sum()
    right = lab.estimate_constants(short, gram=lab.score_gram(of_short), loo_sum_sq=square)
    holes, gram = rewards.clone(), lab.score_gram(scores)
    holes[:, 5] = math.nan
    gram[:, 5], gram[:, :, 5] = math.nan, math.nan
    found = lab.estimate_constants(holes, gram=gram, loo_sum_sq=square.item())
    for name in NAMES:
        assert getattr(found, name) == pytest.approx(getattr(right, name), rel=1e-9), name


@pytest.mark.parametrize(("P", "small"), [(2, True), (3, True), (7, True), (8, False)])
def test_a_pilot_of_few_prompts_is_flagged_and_has_no_interval(P: int, small: bool) -> None:
    constants = lab.estimate_constants(*pilot(P=P))
    advice = lab.optimal_group_size(dataclasses.replace(constants, Vb=0.5, A=1.0, B2=2.0, boot=None))
    assert ("PILOT_TOO_SMALL" in advice.flags) == small
    assert (lab.optimal_group_size(constants).ci is None) == small


def test_an_interval_of_no_width_is_none() -> None:
    boot = torch.tensor([[0.0133302, 0.658886, 0.745568, 0.04, 0.98]], dtype=torch.float64).expand(50, 5)
    assert lab.optimal_group_size(changed(boot=boot, n=512)).ci is None


def test_intervals_in_words_do_not_turn_around() -> None:
    narrow = torch.tensor([[v, 0.66, 0.75, 0.04, 0.98] for v in (0.0140, 0.0141)], dtype=torch.float64)
    advice = lab.optimal_group_size(changed(boot=narrow, n=512))
    assert advice.ci is not None
    assert f"From other pilots of this size: {advice.ci[0]:.1f} to {advice.ci[1]:.1f}." in advice.why()
    # nothing but 2 is within 5 %: no line, instead of "from 3 to 2"
    steep = lab.optimal_group_size(lab.GradConstants(Vb=1.0, A=0.0, B2=0.0, J2=1.0))
    assert steep.g_int == 2
    assert not any("Any G" in line for line in steep.why())


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        ({"scores": 1, "loo_sum_sq": 1.0}, "loo_sum_sq must be None with scores"),
        ({"scores": 1, "loo_gram": 1}, "loo_gram must be None with scores"),
        ({"whole": 1, "loo_sum_sq": 1.0}, "loo_sum_sq must be None with a whole gram"),
        ({"whole": 1, "loo_gram": 1}, "loo_gram must be None with a whole gram"),
        ({"gram": 1, "loo_gram": 1, "loo_sum_sq": 1.0}, "loo_sum_sq must be None with loo_gram"),
        ({"gram": 1, "loo_sum_sq": 1.0, "cross": "zero"}, "loo_sum_sq must be None with cross='zero'"),
        ({"gram": 1, "loo_gram": 1, "cross": "zero"}, "loo_gram must be None with cross='zero'"),
        ({"gram": 1, "loo_sum_sq": math.nan}, "loo_sum_sq must be finite and at least 0"),
        ({"gram": 1, "loo_sum_sq": -1.0}, "loo_sum_sq must be finite and at least 0"),
    ],
)
def test_no_argument_is_ignored(extra: dict[str, Any], text: str) -> None:
    rewards, scores = pilot()
    loo = lab.group_ustats(rewards, scores).loo
    arrays = {
        "scores": scores, "whole": torch.einsum("pad,qbd->paqb", scores, scores), "gram": lab.score_gram(scores),
        "loo_gram": loo @ loo.T,
    }  # fmt: skip
    given = {"gram" if key == "whole" else key: arrays.get(key, value) for key, value in extra.items()}
    with pytest.raises(ValueError, match=f"estimate_constants: {text}"):
        lab.estimate_constants(rewards, **given)


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"c_prmpt": 1.0}, TypeError, "c_prmpt"),
        ({"c_prompt": -1.0}, ValueError, "GroupSizeMonitor: c_prompt must be at least 0"),
        ({"c_response": math.nan}, ValueError, "GroupSizeMonitor: c_response must be at least 0"),
        ({"c_prompt": "4"}, TypeError, "GroupSizeMonitor: c_prompt must be a number, got str"),
        ({"g_min": 9, "g_max": 8}, ValueError, "GroupSizeMonitor: g_max must be >= 9"),
        ({"ema": "0.9"}, TypeError, "GroupSizeMonitor: ema must be a number"),
    ],
)
def test_a_monitor_checks_its_arguments_at_once(options: dict[str, Any], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        lab.GroupSizeMonitor(**options)


def test_lists_of_numbers_are_not_taken_for_parameters() -> None:
    _, scores = pilot(P=2, G=3)
    for call, name in ((lab.score_gram, "scores"), (lambda value: lab.sketch(value, 4), "grads")):
        with pytest.raises(TypeError, match=f"{name} must be an array, or several, got a list of list"):
            call(scores.tolist())
        with pytest.raises(TypeError, match=f"{name} must be an array, or several, got a NoneType"):
            call(None)
        with pytest.raises(ValueError, match=rf"{name} must be \[P, G, ...\], got \[4\]"):
            call(torch.zeros(4))
    torch.testing.assert_close(lab.score_gram(list(scores.split(1, 2))), scores @ scores.mT)
    empty = torch.zeros(2, 3, 0)
    assert torch.equal(lab.score_gram(empty), torch.zeros(2, 3, 3, dtype=torch.float64))
    assert lab.sketch(empty, 4).shape == (2, 3, 4)


ATOMS: dict[str, Any] = {"P": [[0.5, 0.5]], "R": [[1.0, 0.0]], "S": [[[1.0], [-1.0]]]}


@pytest.mark.parametrize(
    ("change", "kind", "text"),
    [
        ({"P": [[0.5, 0.4]]}, ValueError, "P must be probabilities"),
        ({"P": [[math.nan, 1.0]]}, ValueError, "P must be probabilities"),
        ({"P": torch.zeros(0, 2), "R": torch.zeros(0, 2), "S": torch.zeros(0, 2, 1)}, ValueError, "P must have M, K"),
        ({"R": [[1.0]]}, ValueError, r"R must have the shape \[1, 2\]"),
        ({"R": [[math.inf, 0.0]]}, ValueError, "R must be finite"),
        ({"S": [[[math.nan], [1.0]]]}, ValueError, "S must be finite"),
        ({"S": [[1.0, -1.0]]}, ValueError, r"S must be \[1, 2\] and d"),
        ({"S": torch.zeros(1, 2, 0)}, ValueError, r"S must be \[1, 2\] and d"),
    ],
)
def test_atoms_are_checked_alike(change: dict[str, Any], kind: type[Exception], text: str) -> None:
    atoms = {**ATOMS, **change}
    with pytest.raises(kind, match=f"exact_constants: {text}"):
        lab.exact_constants(**atoms)
    with pytest.raises(kind, match=f"simulate_mse: {text}"):
        lab.simulate_mse(**atoms, n=2, G=2, reps=3)


def test_kinds_are_several_words() -> None:
    for kinds, kind, text in (
        ("loo", TypeError, "kinds must be several words, got 'loo'"),
        ((), ValueError, "kinds must name an estimator"),
        (["looo"], ValueError, "Did you mean 'loo'?"),
    ):
        with pytest.raises(kind, match=text):
            lab.simulate_mse(**ATOMS, n=2, G=2, kinds=kinds, reps=3)
    found = lab.simulate_mse(**ATOMS, n=2, G=2, kinds=(kind for kind in ("mean", "loo")), reps=3)
    assert list(found) == ["mean", "loo"]


@pytest.mark.parametrize("N", [3, 5, 7, 10, 13, 31, 100])
def test_a_small_budget_is_a_whole_number_of_groups(N: int) -> None:
    advice = lab.optimal_group_size(BANDIT, N=N)
    errors = {G: lab.mse(BANDIT, N // G, G) for G in range(2, N + 1)}
    assert advice.g_int == min(errors, key=lambda G: errors[G])
    free = N * errors[advice.g_int] / lab.fixed_budget(BANDIT, [8])[0] - 1
    assert advice.penalty == pytest.approx(free, abs=1e-12)


def test_limits_say_what_they_cost() -> None:
    advice = lab.optimal_group_size(BANDIT, multiple_of=32)
    (at_32, at_8) = lab.fixed_budget(BANDIT, [32, 8])
    assert advice.penalty == pytest.approx(at_32 / at_8 - 1)
    assert advice.why()[0].startswith("Use G = 32, the best within the limits: it costs 27 % more than the best G")
    assert not any("Any G" in line for line in advice.why())
    assert lab.optimal_group_size(BANDIT, multiple_of=8).penalty == 0
    alike = lab.optimal_group_size(changed(Vb=0.0), N=64)
    assert "Use G = 64, the best within the limits: without them, the larger the better." in alike.why()
    assert lab.optimal_group_size(BANDIT, N=7, g_max=6).flags == ()  # g_max binds, N does not
    assert lab.optimal_group_size(BANDIT, N=7, g_max=7).flags == ()
    assert lab.optimal_group_size(BANDIT, N=7).flags == ("N_LT_G",)


def test_one_group_of_all_responses_is_the_whole_gram() -> None:
    """What the page tells users of score_gram and ghost_gram, and that loo_gram and loo_sum_sq say the same."""
    rewards, scores = pilot()
    right = lab.estimate_constants(rewards, scores)
    whole = lab.score_gram([part.reshape(1, 60, -1) for part in scores.split(2, 2)])[0]
    ghost = lab.ghost_gram(scores.reshape(1, 60, 1, 4), torch.ones(1, 60, 1, 1))[0]
    loo = lab.group_ustats(rewards, scores).loo
    for options in (
        {"gram": whole},
        {"gram": ghost},
        {"gram": lab.score_gram(scores), "loo_gram": loo @ loo.T},
        {"gram": lab.score_gram(scores), "loo_sum_sq": float(loo.sum(0).square().sum())},
    ):
        found = lab.estimate_constants(rewards, **options)
        for name in NAMES:
            assert getattr(found, name) == pytest.approx(getattr(right, name), rel=1e-9), name


def test_a_product_between_groups_that_is_not_finite_is_refused() -> None:
    rewards, scores = pilot()
    loo = lab.group_ustats(rewards, scores).loo
    between = loo @ loo.T
    between[0, 1] = math.nan
    with pytest.raises(lab.NotFiniteError, match="loo_gram must be finite"):
        lab.estimate_constants(rewards, gram=lab.score_gram(scores), loo_gram=between)
