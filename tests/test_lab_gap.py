"""Where training settles at a constant step: predicted law, and chains of updates."""

from __future__ import annotations

import pytest
import torch

from grpo_kernels.lab import studies
from grpo_kernels.lab.gap_law import make_table, noise_covariance, predicted_weights, stationary_gap


def test_the_optimum_is_one_and_flat_along_shifts() -> None:
    table = make_table(seed=2)
    point = table.optimum().requires_grad_()
    (slope,) = torch.autograd.grad(table.objective(point), point)
    assert slope.abs().max() < 1e-14
    assert table.objective(
        point + 0.1 * torch.randn(3, 3, generator=torch.Generator().manual_seed(0))
    ) < table.objective(point)
    assert table.objective(point + 3).item() == pytest.approx(table.objective(point).item(), abs=1e-14)
    assert len(predicted_weights(table, 2, 4, 0.1)) == 6  # of 9


@pytest.mark.parametrize(("n", "G"), [(2, 2), (2, 4), (1, 8)])
def test_mean_of_the_law_is_a_quarter_of_eta_times_the_error(n: int, G: int) -> None:
    table = make_table()
    weights = predicted_weights(table, n, G, 0.2)
    error = noise_covariance(table, n, G).trace()
    torch.testing.assert_close(weights.sum() / 2, 0.2 / 4 * error, rtol=1e-9, atol=0)
    assert (weights > 0).all()


def test_noise_is_that_of_simulated_estimates() -> None:
    from grpo_kernels.lab import exact_constants, mse

    table = make_table()
    policy = table.optimum().softmax(1)
    scores = torch.zeros(3, 3, 9, dtype=torch.float64)
    for x in range(3):
        scores[x, :, 3 * x : 3 * x + 3] = torch.eye(3) - policy[x]
    constants = exact_constants(policy, table.reward, scores)
    assert noise_covariance(table, 2, 4).trace().item() == pytest.approx(mse(constants, 2, 4), rel=1e-12)


def test_chains_settle_as_predicted() -> None:
    record = studies.gap_study(cells=((2, 4),), eta=0.2, chains=2500)
    assert all(item["holds"] for item in record["claims"]), record["claims"]
    assert len(record["rows"]) == 5


def test_refusals() -> None:
    with pytest.raises(ValueError, match="eta must be > 0, got 0"):
        stationary_gap(make_table(), n=1, G=2, eta=0.0)
    with pytest.raises(ValueError, match="G must be >= 2, got 1"):
        stationary_gap(make_table(), n=1, G=1, eta=0.1)
