"""The lab's formulas are identities: against brute force over permutations, groups and outcomes, in float64."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels import lab
from grpo_kernels.lab.selftest import enumeration_error, integer_rule_misses

RATES = [0.05, 0.1, 0.25, 0.5]


def groups(P: int = 3, G: int = 6, d: int = 5, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Rewards and scores with means far from 0."""
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.randn(P, G, generator=generator, dtype=torch.float64) + 3
    scores = torch.randn(P, G, d, generator=generator, dtype=torch.float64) - 2
    return rewards, scores


def kernel(r: Tensor, s: Tensor, a: int, b: int) -> Tensor:
    return 0.5 * (r[a] - r[b]) * (s[a] - s[b])


def test_leave_one_out_is_the_u_statistic_and_the_sample_covariance() -> None:
    rewards, scores = groups()
    ours = lab.group_ustats(rewards, scores).loo
    assert ours is not None
    for r, s, found in zip(rewards, scores, ours, strict=True):
        G = len(r)
        others = (r.sum() - r) / (G - 1)
        by_definition = ((r - others).unsqueeze(1) * s).mean(0)
        pairs = [kernel(r, s, a, b) for a, b in itertools.combinations(range(G), 2)]
        u_statistic = torch.stack(pairs).mean(0)
        covariance = torch.cov(torch.cat([r.unsqueeze(0), s.T]), correction=1)[0, 1:]
        for other in (by_definition, u_statistic, covariance):
            torch.testing.assert_close(found, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("G", [4, 5, 6])
def test_fast_u_statistics_are_the_sums_over_all_permutations(G: int) -> None:
    rewards, scores = groups(G=G)
    ours = lab.group_ustats(rewards, scores)
    for x, (r, s) in enumerate(zip(rewards, scores, strict=True)):
        h = {(a, b): kernel(r, s, a, b) for a, b in itertools.permutations(range(G), 2)}
        a2 = torch.stack([v @ v for v in h.values()]).mean()
        a3 = torch.stack([h[a, b] @ h[a, c] for a, b, c in itertools.permutations(range(G), 3)]).mean()
        a4 = torch.stack([h[a, b] @ h[c, d] for a, b, c, d in itertools.permutations(range(G), 4)]).mean()
        for found, brute in ((ours.a2, a2), (ours.a3, a3), (ours.a4, a4)):
            torch.testing.assert_close(found[x], brute, rtol=1e-10, atol=1e-10)


def test_u_statistics_of_four_responses_by_hand() -> None:
    scores = [[[1.0, 0.0], [0.0, 1.0], [2.0, 0.0], [0.0, -1.0]]]
    found = lab.group_ustats([[1.0, 0.0, 1.0, 0.0]], scores)
    assert [found.a2.item(), found.a3.item(), found.a4.item()] == pytest.approx([7 / 12, 3 / 16, 1 / 6], abs=1e-14)
    assert found.loo is not None
    assert found.loo.tolist() == [[0.5, 0.0]]
    a = 4 * (found.a3 - found.a4)
    assert a.item() == pytest.approx(1 / 12)
    assert (2 * (found.a2 - found.a4) - a).item() == pytest.approx(0.75)


def test_statistics_do_not_see_shifts() -> None:
    rewards, scores = groups()
    one, other = lab.group_ustats(rewards, scores), lab.group_ustats(rewards + 7, scores + 11)
    for name in ("a2", "a3", "a4", "loo"):
        torch.testing.assert_close(getattr(one, name), getattr(other, name), rtol=1e-10, atol=1e-9)


def test_exact_error_is_the_sum_over_all_groups() -> None:
    assert enumeration_error() < 1e-12


@pytest.mark.parametrize("G", [2, 3])
def test_exact_covariance_matrix_is_the_sum_over_all_groups(G: int) -> None:
    """(1/G)(E[rho^2 s s'] - g g') + (1/(G(G-1)))(sigma^2 F + g g')."""
    atoms = lab.make_bandit(seed=5, M=1, K=2, d=3)
    p, r, s = atoms.P[0], atoms.R[0], atoms.S[0]
    rho = r - p @ r
    g = (p * rho) @ s
    outer = torch.outer(g, g)
    formula = ((s.T * (p * rho**2)) @ s - outer) / G
    formula += ((p @ rho**2) * (s.T * p) @ s + outer) / (G * (G - 1))
    brute = -outer
    for group in itertools.product(range(len(p)), repeat=G):
        index = torch.tensor(group)
        reward = r[index]
        estimate = (reward - reward.mean()) @ s[index] / (G - 1)
        brute = brute + p[index].prod() * torch.outer(estimate, estimate)
    torch.testing.assert_close(formula, brute, rtol=0, atol=1e-12)
    constants = lab.exact_constants(atoms.P, atoms.R, atoms.S)
    assert brute.trace().item() == pytest.approx(lab.mse(constants, 1, G) - constants.Vb, rel=1e-12)


def test_integer_rule_is_the_search() -> None:
    assert integer_rule_misses(2000, seed=1) == 0


@pytest.mark.parametrize(
    ("scheme", "row"),
    [
        ("none", (1, 1, 1, 1)),
        ("loo", (1, 1, 1, 1)),
        ("mean", (0.875, 0.875, 0.875, 0.875)),
        ("std0", (2.47306, 2.32769, 2.02612, 1.85566)),
        ("std1", (2.31334, 2.17735, 1.89526, 1.73581)),
        ("maxrl", (6.03325, 5.21703, 3.46606, 1.98437)),
        ("maxrl_raw", (6.73159, 5.69533, 3.59955, 1.99219)),
    ],
)
def test_weight_of_a_success_rate(scheme: str, row: tuple[float, ...]) -> None:
    assert lab.binary_weight(scheme, 8, torch.tensor(RATES)).tolist() == pytest.approx(row, abs=1e-5)


def test_limits_of_the_weight() -> None:
    for G in (4, 8, 16, 64):
        assert lab.binary_weight("std0", G, 1e-9) == pytest.approx(math.sqrt(G - 1), rel=1e-6)
        assert lab.binary_weight("std0", G, 0.2) == pytest.approx(lab.binary_weight("std0", G, 0.8), rel=1e-12)
    for p in RATES:
        assert lab.binary_weight("std0", 2, p) == pytest.approx(1, rel=1e-12)
        assert lab.binary_weight("std1", 2, p) == pytest.approx(math.sqrt(0.5), rel=1e-12)
        assert lab.binary_weight("maxrl", 8, p) == pytest.approx((1 - (1 - p) ** 7) / p, rel=1e-12)


@pytest.mark.parametrize("scheme", ["none", "loo", "mean", "std0", "std1", "maxrl", "maxrl_raw"])
def test_binary_moments_are_sums_over_all_groups(scheme: str) -> None:
    G, eps = 3, 0.25 if scheme.startswith("std") else 0.0
    p = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    r = torch.tensor([1.0, 0.0, 1.0, 0.0], dtype=torch.float64)
    logits = p.log()
    s = torch.eye(4, dtype=torch.float64) - p
    rate = (p @ r).item()
    g = (p * r) @ s
    m1, m0 = (((p * (r == c)) @ s.square().sum(1)) / (p @ (r == c).double()) for c in (1.0, 0.0))
    plus, minus = lab.binary_advantages(scheme, G, eps)
    first, second = torch.zeros(4, dtype=torch.float64), 0.0
    for group in itertools.product(range(4), repeat=G):
        index = torch.tensor(group)
        k = int(r[index].sum())
        estimate = torch.where(r[index] == 1, plus[k], minus[k]) @ s[index] / G
        chance = logits[index].sum().exp()
        first += chance * estimate
        second += (chance * estimate @ estimate).item()
    torch.testing.assert_close(first, lab.binary_weight(scheme, G, rate, eps) * g, rtol=0, atol=1e-12)
    ours = lab.binary_second_moment(scheme, G, rate, (g @ g).item(), m1.item(), m0.item(), eps)
    assert ours == pytest.approx(second, rel=1e-12)


def test_silent_groups() -> None:
    table = {0.05: (0.905, 0.8145, 0.66342, 0.44013, 0.19371, 0.03752), 0.1: (0.82, 0.6562, 0.43047, 0.18530, 0.03434)}
    for p, row in table.items():
        sizes = torch.tensor([2, 4, 8, 16, 32, 64])[: len(row)]
        assert lab.silent_rate(p, sizes).tolist() == pytest.approx(row, abs=2e-5)


def test_resampling_silent_groups_scales_the_gradient_and_no_more() -> None:
    """Pairs of a prompt and a group, drawn again while silent: the mean is grad J / P(not silent)."""
    G = 3
    atoms = lab.make_bandit(seed=2, M=2, K=2, d=3)
    total, heard = torch.zeros(3, dtype=torch.float64), 0.0
    for x, group in itertools.product(range(2), itertools.product(range(4), repeat=G)):
        index = torch.tensor(group)
        r, s = atoms.R[x, index], atoms.S[x, index]
        chance = atoms.P[x, index].prod() / 2
        if r.min() != r.max():
            heard += chance.item()
            total += chance * ((r - r.mean()) @ s / (G - 1))
    truth = torch.einsum("mk,mk,mkd->d", atoms.P, atoms.R, atoms.S) / 2
    assert 0.2 < heard < 0.9
    torch.testing.assert_close(total / heard, truth / heard, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("rewards", "mean", "loo", "std1"),
    [
        ([1, 0], [0.5, -0.5], [1, -1], [0.707107, -0.707107]),
        ([1, 0, 0, 0], [0.75, -0.25], [1, -1 / 3], [1.5, -0.5]),
        ([1, 1, 1, 0], [0.25, 0.25], [1 / 3, 1 / 3], [0.5, 0.5]),
        ([1, 0, 0, 0, 0, 0, 0, 0], [0.875, -0.125], [1, -0.142857], [2.474874, -0.353553]),
        ([0.2, 0.5, 0.9, 1.0], [-0.45, -0.15], [-0.6, -0.2], [-1.217254, -0.405751]),
        ([0.1] * 7, [0, 0], [0, 0], [0, 0]),
    ],
)
def test_advantages_of_the_library_are_those_of_the_theory(
    rewards: list[float], mean: list[float], loo: list[float], std1: list[float]
) -> None:
    given = torch.tensor(rewards, dtype=torch.float32)
    for expected, baseline, scale in ((mean, "mean", "none"), (loo, "leave_one_out", "none"), (std1, "mean", "group")):
        ours = gk.group_advantages(given, baseline=baseline, scale=scale, eps=0.0)
        assert ours[:2].tolist() == pytest.approx(expected, abs=1e-6)
    if len(set(rewards)) == 2:
        k, G = int(sum(rewards)), len(rewards)
        for ours, scheme in ((mean, "mean"), (loo, "loo"), (std1, "std1")):
            assert ours[0] == pytest.approx(lab.binary_advantages(scheme, G)[0][k].item(), abs=1e-6)


def test_what_each_kl_estimator_pulls_towards() -> None:
    """Expected gradients of the loss's KL term on-policy, over all five actions, against those of both KLs."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, generator=generator, dtype=torch.float64, requires_grad=True)
    reference = torch.randn(5, generator=generator, dtype=torch.float64).log_softmax(0)
    logp = logits.log_softmax(0)
    reverse = torch.autograd.grad((logp.exp() * (logp - reference)).sum(), logits, retain_graph=True)[0]
    forward = torch.autograd.grad((reference.exp() * (reference - logp)).sum(), logits)[0]

    def expected(**options: object) -> Tensor:
        rows = logits.detach().expand(5, 1, 5).clone().requires_grad_()
        config = gk.GRPOLossConfig(loss_type="grpo", beta=1.0, **options)  # type: ignore[arg-type]
        out = gk.grpo_loss(
            rows, torch.arange(5).unsqueeze(1), config=config, advantages=torch.zeros(5),
            ref_per_token_logps=reference.unsqueeze(1), normalizer=1.0,
        )  # fmt: skip
        out.loss.backward()
        assert rows.grad is not None
        return (logits.detach().softmax(0).unsqueeze(1) * rows.grad[:, 0]).sum(0)

    assert (forward - reverse).abs().max() > 0.05
    for found, right in (
        (expected(kl_estimator="k1"), torch.zeros(5, dtype=torch.float64)),
        (expected(kl_estimator="k2"), reverse),
        (expected(kl_estimator="k3"), forward),
        (expected(kl_estimator="k3", use_bias_correction_kl=True), reverse),
    ):
        torch.testing.assert_close(found, right, rtol=0, atol=1e-6)
