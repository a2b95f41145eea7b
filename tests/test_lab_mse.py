"""The exact error of each estimator: the theory's table, simulation, and what follows for G."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from grpo_kernels import lab

BANDIT = lab.GradConstants(Vb=0.0133302, A=0.658886, B2=0.745568, J2=0.0395002, A0=0.981529, Aopt=0.641591)
TABLE = {  # n, G -> leave-one-out, oracle, vanilla, mean
    (1, 2): (0.715557, 0.342773, 0.504095, 0.188764),
    (4, 4): (0.060046, 0.044513, 0.064678, 0.036244),
    (4, 8): (0.027251, 0.023923, 0.034005, 0.021481),
    (8, 16): (0.007202, 0.006814, 0.009334, 0.006484),
    (4, 32): (0.008668, 0.008480, 0.011001, 0.008173),
}
FIXED_BUDGET = {2: 1.4311, 4: 0.9607, 8: 0.8720, 16: 0.9219, 32: 1.1095, 64: 1.5239}


@pytest.mark.parametrize(("n", "G"), TABLE)
def test_table_of_a_bandit(n: int, G: int) -> None:
    ours = [lab.mse(BANDIT, n, G, kind) for kind in ("loo", "oracle", "vanilla", "mean")]
    assert ours == pytest.approx(TABLE[n, G], abs=1e-6)


def test_fixed_budgets_ratios_and_crossing_of_that_bandit() -> None:
    assert lab.fixed_budget(BANDIT, list(FIXED_BUDGET)) == pytest.approx(list(FIXED_BUDGET.values()), abs=5e-5)
    given_x = [1 + BANDIT.B2 / BANDIT.A / (G - 1) for G in (2, 4, 8, 16, 32, 64)]
    assert given_x == pytest.approx([2.13, 1.377, 1.162, 1.075, 1.0365, 1.018], abs=2e-3)
    total = [lab.mse(BANDIT, 1, G) / lab.mse(BANDIT, 1, G, "oracle") for G in (2, 8, 32)]
    assert total == pytest.approx([2.088, 1.139, 1.022], abs=1e-3)
    assert lab.crossing(BANDIT) == pytest.approx(1 + 0.745568 / (0.981529 - 0.658886))
    assert lab.crossing(lab.GradConstants(Vb=1, A=2, B2=1, J2=1, A0=2)) == math.inf


def test_the_group_mean_of_all_responses_estimates_nothing_at_one() -> None:
    assert lab.mse(BANDIT, 3, 1, "mean") == pytest.approx(BANDIT.J2)
    assert lab.mse(BANDIT, 1, 2, "mean") == pytest.approx(lab.mse(BANDIT, 1, 2) / 4 + BANDIT.J2 / 4)


def test_numbers_arrays_and_tensors_broadcast() -> None:
    assert isinstance(lab.mse(BANDIT, 4, 8), float)
    array = lab.mse(BANDIT, np.array([[1], [4]]), np.array([2, 4, 8]))
    assert isinstance(array, np.ndarray)
    assert array.shape == (2, 3)
    assert array[1, 2] == pytest.approx(TABLE[4, 8][0], abs=1e-6)
    tensor = lab.mse(BANDIT, 4, torch.tensor([2, 8]), "oracle")
    assert isinstance(tensor, torch.Tensor)
    assert tensor.dtype == torch.float64
    assert tensor[1].item() == pytest.approx(TABLE[4, 8][1], abs=1e-6)


def test_confident_right_answers_make_no_baseline_the_best() -> None:
    """Four atoms where vanilla beats the oracle by far."""
    S = np.array([[[0.1, 0], [-0.9, 0], [0, 3], [0, -3]]])
    constants = lab.exact_constants(np.array([[0.45, 0.05, 0.25, 0.25]]), np.array([[1.0, 1, 0, 0]]), S)
    assert (constants.A0, constants.A, constants.Aopt) == pytest.approx((0.045, 1.136, 0.0446), abs=1e-3)
    assert lab.crossing(constants) == math.inf


def test_only_vanilla_feels_a_constant_reward() -> None:
    atoms = lab.make_bandit(seed=1)
    one = lab.exact_constants(atoms.P, atoms.R, atoms.S)
    other = lab.exact_constants(atoms.P, atoms.R + 2, atoms.S)
    for name in ("Vb", "A", "B2", "J2", "Aopt"):
        assert getattr(other, name) == pytest.approx(getattr(one, name), rel=1e-10), name
    assert one.A0 is not None
    assert other.A0 is not None
    assert other.A0 > 2 * one.A0
    assert one.Aopt is not None
    assert one.Aopt < one.A


def test_constants_by_hand() -> None:
    """Two prompts of two answers, one parameter: p = 1/4 with s = (3, -1) k, k = 1 and 2."""
    S = [[[3.0], [-1.0]], [[6.0], [-2.0]]]
    constants = lab.exact_constants([[0.25, 0.75]] * 2, [[1.0, 0.0]] * 2, S)
    g = np.array([0.75, 1.5])
    assert pytest.approx(g.mean() ** 2) == constants.J2
    assert constants.Vb == pytest.approx((g**2).mean() - g.mean() ** 2)
    assert pytest.approx((3 / 16 * np.array([3.0, 12.0]) + g**2).mean()) == constants.B2
    assert pytest.approx(((9 / 16 * 9 / 4 + 1 / 16 * 3 / 4) * np.array([1.0, 4.0]) - g**2).mean()) == constants.A
    assert pytest.approx((np.array([9, 36]) / 4 - g**2).mean()) == constants.A0
    weighted = lab.exact_constants([[0.25, 0.75]] * 2, [[1.0, 0.0]] * 2, S, w=[1.0, 0.0])
    assert (weighted.Vb, weighted.J2) == pytest.approx((0, 0.75**2))


@pytest.mark.parametrize("n_and_G", [(1, 2), (4, 4), (4, 8), (4, 32)])
def test_simulation_agrees(n_and_G: tuple[int, int]) -> None:
    n, G = n_and_G
    atoms = lab.make_bandit()
    constants = lab.exact_constants(atoms.P, atoms.R, atoms.S)
    kinds = ("loo", "oracle", "vanilla", "mean", "optimal")
    found = lab.simulate_mse(atoms.P, atoms.R, atoms.S, n, G, kinds, reps=6000, seed=G)
    for kind in kinds:
        truth = lab.mse(constants, n, G, kind)
        assert abs(found[kind].mse / truth - 1) < 0.05, kind
        assert abs(found[kind].mse - truth) < 4 * found[kind].error, kind


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: lab.mse(BANDIT, 1, 1), "mse: G must be at least 2, got 1"),
        (lambda: lab.mse(BANDIT, 0, 2), "mse: n must be at least 1, got 0"),
        (lambda: lab.mse(BANDIT, 1, 2, "vanila"), "Did you mean 'vanilla'?"),
        (lambda: lab.mse(lab.GradConstants(Vb=1, A=1, B2=1, J2=1), 1, 2, "vanilla"), "constants must have A0"),
        (lambda: lab.exact_constants([[0.5, 0.4]], [[1, 0]], [[[1.0], [1.0]]]), "P must be probabilities"),
        (lambda: lab.exact_constants([[0.5, 0.5]], [[1, 0, 0]], [[[1.0], [1.0]]]), r"R must have the shape \[1, 2\]"),
        (lambda: lab.exact_constants([[0.5, 0.5]], [[1, 0]], [[1.0, 1.0]]), r"S must be \[1, 2\] and d"),
        (lambda: lab.exact_constants([[0.5, 0.5]], [[1, 0]], [[[1.0], [1.0]]], w=[2.0]), "w must be probabilities"),
    ],
)
def test_refusals(call: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        call()
