"""The enumerable transformer: its sums are sums over sequences, its scores are gradients, its constants the truth."""

from __future__ import annotations

import pytest
import torch

from grpo_kernels import lab
from grpo_kernels.lab import studies, training_study
from grpo_kernels.lab import transformer as model


@pytest.fixture(scope="module")
def start() -> model.Parameters:
    return model.warm_up("pair", steps=120, learning_rate=3e-3)


@pytest.fixture(scope="module")
def atoms(start: model.Parameters) -> lab.Atoms:
    return model.exact_atoms(start, "pair")


def test_it_is_small_and_normalised(start: model.Parameters) -> None:
    assert model.count_parameters(start) <= 10_000
    logps = model.log_probabilities(start, model.PROMPTS)
    assert logps.shape == (100, 100)
    torch.testing.assert_close(logps.exp().sum(1), torch.ones(100), rtol=1e-5, atol=1e-5)
    assert logps.exp().std() > 1e-3


def test_a_branch_sees_its_own_digit_alone(start: model.Parameters) -> None:
    """Twelve tokens in one sequence say what each three-token sequence says."""
    prompt = torch.tensor([[3, 8]])
    together = model.log_probabilities(start, prompt).view(10, 10)
    hidden = model.body(start, torch.tensor([[3, 8, 5]]), torch.tensor([0, 1, 2]))  # plain, causal
    steps = (hidden @ start["head"]).log_softmax(-1)[0]
    torch.testing.assert_close(together[5], steps[1, 5] + steps[2], rtol=1e-5, atol=1e-5)


def test_rewards() -> None:
    pair, spelled, bonus = (model.rewards(task) for task in model.TASKS)
    assert pair[10 * 3 + 8, 10 * 2 + 9] == 1
    assert pair[10 * 3 + 8].sum() == 8  # 2 + 9 to 9 + 2
    assert spelled[10 * 3 + 8].nonzero().flatten().tolist() == [11]
    assert torch.equal(bonus, spelled + 1)


def test_scores_are_gradients(start: model.Parameters, atoms: lab.Atoms) -> None:
    values = {name: value.double().requires_grad_() for name, value in start.items()}
    logp = model.log_probabilities(values, model.PROMPTS[38:39])[0, 29]
    grads = torch.cat([grad.flatten() for grad in torch.autograd.grad(logp, list(values.values()))])
    torch.testing.assert_close(atoms.S[38, 29].double(), grads, rtol=1e-4, atol=1e-6)
    mean = torch.einsum("k,kd->d", atoms.P[38], atoms.S[38].double())
    assert mean.abs().max() < 1e-5 * grads.abs().max()


def test_the_gradient_is_the_sum_over_everything(start: model.Parameters, atoms: lab.Atoms) -> None:
    values = {name: value.double().requires_grad_() for name, value in start.items()}
    objective = model.expected_reward(values, model.rewards("pair"))
    grads = torch.autograd.grad(objective, list(values.values()))
    constants = lab.exact_constants(atoms.P, atoms.R, atoms.S)
    assert sum(grad.square().sum().item() for grad in grads) == pytest.approx(constants.J2, rel=1e-5)
    assert constants.J2 > 1e-3


@pytest.mark.parametrize("kind", ["loo", "oracle", "vanilla"])
def test_simulation_agrees_with_the_formula(kind: str, atoms: lab.Atoms) -> None:
    constants = lab.exact_constants(atoms.P, atoms.R, atoms.S)
    found = lab.simulate_mse(atoms.P, atoms.R, atoms.S, 8, 8, (kind,), reps=700)[kind]
    truth = lab.mse(constants, 8, 8, kind)
    assert abs(found.mse / truth - 1) < 0.05
    assert abs(found.mse - truth) < 4 * found.error


def test_training_improves_and_repeats(start: model.Parameters) -> None:
    begin = model.expected_reward(start, model.rewards("pair")).item()
    options = {"N": 64, "G": 8, "learning_rate": 0.25, "iterations": (5, 40), "seeds": range(3)}
    values, path = training_study.train_group(start, "pair", **options)  # type: ignore[arg-type]
    again, _ = training_study.train_group(start, "pair", **options)  # type: ignore[arg-type]
    assert torch.equal(values, again)
    assert values.shape == (2, 3)
    assert values[1].mean() > begin + 0.05
    assert len(path) == 2
    assert model.expected_reward(path[1], model.rewards("pair")).item() == pytest.approx(values[1, 0].item(), abs=1e-5)


def test_an_update_is_the_estimator(start: model.Parameters) -> None:
    """The mean step of many seeds is the learning rate times grad J, as far as their number shows."""
    values = {name: value.double().requires_grad_() for name, value in start.items()}
    right = model.rewards("pair")
    grads = torch.autograd.grad(model.expected_reward(values, right), list(values.values()))
    truth = torch.cat([grad.flatten() for grad in grads])
    seeds = range(300)
    slope = []
    for seed in seeds:
        _, path = training_study.train_group(start, "pair", N=64, G=8, learning_rate=1.0, iterations=(1,), seeds=[seed])
        step = torch.cat([(path[0][name] - start[name]).double().flatten() for name in start])
        slope.append((step @ truth / truth.square().sum()).item())
    found = torch.tensor(slope)
    assert abs(found.mean().item() - 1) < 4 * found.std().item() / len(slope) ** 0.5
    assert found.std().item() / len(slope) ** 0.5 < 0.1


def test_cells_are_judged_by_combined_errors() -> None:
    cell = training_study.Cell(64, 100, {2: (0.5, 0.03), 4: (0.6, 0.04), 8: (0.55, 0.03)})
    assert cell.best() == 4
    assert cell.deficit(4) == 0
    assert cell.deficit(2) == pytest.approx(2.0)
    assert cell.deficit(8) == pytest.approx(1.0)


def test_a_constant_bonus_puts_vanilla_last() -> None:
    """Where "sum" has no crossing, "sum_bonus" has one, and above it the order is oracle, group mean, vanilla."""
    start = model.warm_up("sum", steps=120, learning_rate=3e-3)
    plain, bonus = (
        lab.exact_constants(found.P, found.R, found.S)
        for found in (model.exact_atoms(start, task) for task in ("sum", "sum_bonus"))
    )
    assert lab.crossing(plain) == float("inf")
    cross = lab.crossing(bonus)
    assert cross < 8
    for G in (8, 32, 64):
        oracle, loo, vanilla = (lab.mse(bonus, 1, G, kind) for kind in ("oracle", "loo", "vanilla"))
        assert oracle < loo < vanilla


def test_small_studies_hold_their_claims() -> None:
    curve = studies.mse_curve("bandit", groups=(2, 4, 8, 16, 32, 64), N=128, reps=4000)
    assert all(item["holds"] for item in curve["claims"]), curve["claims"]
    assert len(curve["rows"]) == 18
    assert curve["g_cross"] is not None
    sweep = studies.budget_sweep("bandit", budgets=(64, 256), groups=(2, 4, 8, 16, 32, 64), reps=6000)
    assert all(item["holds"] for item in sweep["claims"]), sweep["claims"]
    assert sweep["best"] == {"64": 8, "256": 8}
