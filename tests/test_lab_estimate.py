"""Pilots: unbiased constants from scores, Gram matrices and sketches, with groups that lack responses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_kernels import lab
from grpo_kernels.lab import draw_pilot

NAMES = ("Vb", "A", "B2", "J2", "A0")


def pilot(P: int = 5, G: int = 6, d: int = 4, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.rand(P, G, generator=generator, dtype=torch.float64)
    return rewards, torch.randn(P, G, d, generator=generator, dtype=torch.float64)


def same(one: lab.GradConstants, other: lab.GradConstants, *names: str) -> None:
    for name in names or NAMES:
        assert getattr(one, name) == pytest.approx(getattr(other, name), rel=1e-9, abs=1e-12), name


def test_estimates_are_unbiased() -> None:
    """Small pilots of the bandit, many of them: the means within four standard errors of the truth."""
    atoms = lab.make_bandit()
    truth = lab.exact_constants(atoms.P, atoms.R, atoms.S)
    found = []
    for seed in range(400):
        rewards, scores = draw_pilot(atoms, 32, 5, seed)
        constants = lab.estimate_constants(rewards, scores, n_boot=0)
        found.append([getattr(constants, name) for name in NAMES])
    values = torch.tensor(found, dtype=torch.float64)
    error = values.std(0) / len(values) ** 0.5
    for index, name in enumerate(NAMES):
        z = (values[:, index].mean().item() - getattr(truth, name)) / error[index].item()
        assert abs(z) < 4, (name, z)
        assert error[index].item() < 0.2 * abs(getattr(truth, name)), name


def test_vb_is_the_sample_variance_of_the_gradients_less_their_own_noise() -> None:
    rewards, scores = pilot()
    stats = lab.group_ustats(rewards, scores)
    assert stats.loo is not None
    G, mean = 6, stats.loo.mean(0)
    a = 4 * (stats.a3 - stats.a4)
    own = a / G + (2 * (stats.a2 - stats.a4) - a) / (G * (G - 1))
    expected = (stats.loo - mean).square().sum() / 4 - own.mean()
    assert lab.estimate_constants(rewards, scores).Vb == pytest.approx(expected.item(), rel=1e-9)


def test_gram_matrices_say_what_scores_say() -> None:
    rewards, scores = pilot()
    whole = torch.einsum("pad,qbd->paqb", scores, scores)
    stats = lab.group_ustats(rewards, scores)
    assert stats.loo is not None
    right = lab.estimate_constants(rewards, scores, seed=3)
    for gram, options in (
        (whole, {}),
        (whole.reshape(30, 30), {}),
        (lab.score_gram(scores), {"loo_gram": stats.loo @ stats.loo.T}),
    ):
        other = lab.estimate_constants(rewards, gram=gram, seed=3, **options)  # type: ignore[arg-type]
        same(right, other)
        assert right.boot is not None
        assert other.boot is not None
        torch.testing.assert_close(right.boot, other.boot, rtol=1e-9, atol=1e-12)
    summed = lab.estimate_constants(
        rewards, gram=lab.score_gram(scores), loo_sum_sq=stats.loo.sum(0).square().sum().item()
    )
    same(right, summed)
    assert summed.boot is None
    assert lab.optimal_group_size(summed).ci is None
    zero = lab.estimate_constants(rewards, gram=lab.score_gram(scores), cross="zero")
    assert zero.Vb == pytest.approx(right.Vb + right.J2)
    assert zero.J2 == 0


def test_unscored_and_masked_responses_are_as_if_they_were_not_there() -> None:
    rewards, scores = pilot(P=4, G=7)
    short = lab.estimate_constants(rewards[:, :5], scores[:, :5], seed=1)
    holes = rewards.clone()
    holes[:, 5:] = torch.nan
    spoilt = scores.clone()
    spoilt[:, 5:] = torch.nan
    same(short, lab.estimate_constants(holes, spoilt, seed=1))
    mask = torch.ones(4, 7)
    mask[:, 5:] = 0
    same(short, lab.estimate_constants(rewards, spoilt, mask=mask, seed=1))
    whole = torch.einsum("pad,qbd->paqb", spoilt, spoilt)
    same(short, lab.estimate_constants(holes, gram=whole, seed=1))


def test_groups_of_different_sizes() -> None:
    rewards, scores = pilot(P=4, G=7)
    rewards[0, 4:] = torch.nan
    rewards[1, 3:] = torch.nan  # three: left out
    stats = lab.group_ustats(rewards, scores)
    assert stats.count.tolist() == [4, 3, 7, 7]
    assert stats.a4.isnan().tolist() == [False, True, False, False]
    alone = lab.group_ustats(rewards[:1, :4], scores[:1, :4])
    assert stats.a3[0].item() == pytest.approx(alone.a3.item())
    constants = lab.estimate_constants(rewards, scores)
    kept = [0, 2, 3]
    assert (constants.n, constants.G) == (3, 6)
    same(constants, lab.estimate_constants(rewards[kept], scores[kept]))
    assert pytest.approx((4 * (stats.a3 - stats.a4))[kept].mean().item()) == constants.A


def test_numpy_lists_and_tensors_are_one() -> None:
    rewards, scores = pilot()
    right = lab.estimate_constants(rewards, scores)
    same(right, lab.estimate_constants(rewards.numpy(), scores.numpy()))
    same(right, lab.estimate_constants(rewards.tolist(), scores.tolist()))
    single = lab.estimate_constants(rewards, scores.to(torch.float32))
    assert pytest.approx(right.A, rel=1e-5) == single.A


def test_autograd_stays_out() -> None:
    rewards, scores = pilot()
    assert lab.group_ustats(rewards, scores.requires_grad_()).a2.requires_grad is False


def test_silence_and_off_centre_scores_are_noticed() -> None:
    rewards, scores = pilot(P=40)
    quiet = rewards.clone()
    quiet[:30] = 1.0
    constants = lab.estimate_constants(quiet, scores)
    assert constants.silent == pytest.approx(0.75)
    assert "SILENT_RATE_HIGH" in lab.optimal_group_size(constants).flags
    assert abs(constants.off_centre or 0) < 3
    moved = lab.estimate_constants(rewards, scores + 2)
    assert (moved.off_centre or 0) > 4
    assert "SCORES_NOT_CENTRED" in lab.optimal_group_size(moved).flags
    same(moved, lab.estimate_constants(rewards, scores), "Vb", "A", "B2", "J2")


def test_bootstrap_repeats_by_seed_and_surrounds_the_estimate() -> None:
    atoms = lab.make_bandit()
    rewards, scores = draw_pilot(atoms, 128, 8, 0)
    one, again = (lab.estimate_constants(rewards, scores, seed=5) for _ in range(2))
    other = lab.estimate_constants(rewards, scores, seed=6)
    assert one.boot is not None
    assert again.boot is not None
    assert other.boot is not None
    assert torch.equal(one.boot, again.boot)
    assert not torch.equal(one.boot, other.boot)
    assert one.boot.shape == (400, 5)
    for index, name in enumerate(NAMES):
        low, high = one.boot[:, index].quantile(torch.tensor([0.01, 0.99], dtype=torch.float64)).tolist()
        assert low < getattr(one, name) < high, name


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda r, s: lab.estimate_constants(r), "scores or gram must be given, one of them, got neither"),
        (lambda r, s: lab.estimate_constants(r, s, gram=lab.score_gram(s)), "got both"),
        (lambda r, s: lab.estimate_constants(r, gram=lab.score_gram(s)), r"must reach between prompts"),
        (lambda r, s: lab.estimate_constants(r[:, :3], s[:, :3]), "two groups of four scored responses, got 0"),
        (lambda r, s: lab.estimate_constants(r[0], s), "rewards must have 2 axes"),
        (lambda r, s: lab.estimate_constants(r, s[:4]), r"scores must have the shape \[5, 6\] of rewards"),
        (lambda r, s: lab.estimate_constants(r, s, mask=r[:2]), r"mask must have the shape"),
        (lambda r, s: lab.estimate_constants(r, gram=torch.zeros(7, 7)), r"gram must be of 5 x 6 scores"),
        (lambda r, s: lab.estimate_constants(r, s, cross="mean"), "cross must be one of mean_of_loo, zero"),
        (lambda r, s: lab.estimate_constants(r, s, n_boot=-1), "n_boot must be >= 0"),
    ],
)
def test_refusals(call: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        call(*pilot())


def test_a_sum_of_gradients_must_be_of_complete_groups() -> None:
    rewards, scores = pilot()
    rewards[0, :3] = torch.nan
    with pytest.raises(ValueError, match="loo_sum_sq must be of complete groups"):
        lab.estimate_constants(rewards, gram=lab.score_gram(scores), loo_sum_sq=1.0)


def test_what_is_no_array_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="rewards must be an array, got dict"):
        lab.estimate_constants({}, [[[1.0]]])
