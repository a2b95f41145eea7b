"""The lab's arithmetic against numbers that were worked out by hand: what `grpo-kernels lab selftest` runs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from ..advantages import group_advantages
from .advice import optimal_group_size
from .bandit import make_bandit
from .binary import binary_weight, silent_rate
from .constants import GradConstants, exact_constants, mse
from .ustats import group_ustats

# rewards -> the first response's advantage: mean, leave-one-out, std with ddof 1
_ADVANTAGES = (
    ([1.0, 0.0], 0.5, 1.0, math.sqrt(0.5)),
    ([1.0, 0.0, 0.0, 0.0], 0.75, 1.0, 1.5),
    ([1.0, 1.0, 0.0, 0.0], 0.5, 2 / 3, math.sqrt(0.75)),
    ([0.1] * 7, 0.0, 0.0, 0.0),
)
# scheme -> w_G(p) at G = 8 for p = .05, .1, .25, .5
_WEIGHTS = {
    "loo": (1.0, 1.0, 1.0, 1.0),
    "mean": (0.875, 0.875, 0.875, 0.875),
    "std0": (2.47306, 2.32769, 2.02612, 1.85566),
    "std1": (2.31334, 2.17735, 1.89526, 1.73581),
    "maxrl": (6.03325, 5.21703, 3.46606, 1.98437),
    "maxrl_raw": (6.73159, 5.69533, 3.59955, 1.99219),
}
_RATES = (0.05, 0.1, 0.25, 0.5)
_SILENT = {(0.05, 8): 0.66342, (0.05, 32): 0.19371, (0.1, 4): 0.6562, (0.5, 8): 0.0078125}


def checks() -> Iterator[tuple[str, float, float]]:
    """(what, largest error, what it may be) of each."""
    yield "advantages of small groups", _advantage_error(), 1e-6
    yield (
        "w_G(p) of six normalisations at G = 8",
        max(
            abs(ours - right)
            for scheme, row in _WEIGHTS.items()
            for ours, right in zip([binary_weight(scheme, 8, p) for p in _RATES], row, strict=True)
        ),
        1e-5,
    )
    yield (
        "std with ddof 0 weighs all p alike at G = 2",
        max(abs(binary_weight("std0", 2, p) - 1) for p in _RATES),
        1e-12,
    )
    yield (
        "silent groups",
        max(abs(silent_rate(p, G) - right) for (p, G), right in _SILENT.items()),
        1e-5,
    )
    stats = group_ustats([[1.0, 0.0, 1.0, 0.0]], [[[1.0, 0.0], [0.0, 1.0], [2.0, 0.0], [0.0, -1.0]]])
    found = torch.stack([stats.a2[0], stats.a3[0], stats.a4[0]])
    right = torch.tensor([7 / 12, 3 / 16, 1 / 6], dtype=torch.float64)
    yield "U-statistics of four responses", (found - right).abs().max().item(), 1e-12
    yield "the exact error against all groups of 2 and 3", enumeration_error(), 1e-12
    yield "the integer rule against a search, 500 ratios", float(integer_rule_misses(500)), 0.0


def _advantage_error() -> float:
    errors = []
    for rewards, *right in _ADVANTAGES:
        given = torch.tensor(rewards)
        options = (("mean", "none"), ("leave_one_out", "none"), ("mean", "group"))
        ours = [group_advantages(given, baseline=b, scale=s, eps=0.0)[0].item() for b, s in options]
        errors += [abs(a - b) for a, b in zip(ours, right, strict=True)]
    return max(errors)


def enumeration_error(G_max: int = 3) -> float:
    """Largest relative error of `mse` with n = 1 against the sum over all groups of a small bandit."""
    atoms = make_bandit(seed=3, M=2, K=2, d=3)
    constants = exact_constants(atoms.P, atoms.R, atoms.S)
    truth = torch.einsum("mk,mk,mkd->d", atoms.P, atoms.R, atoms.S) / len(atoms.P)
    worst = 0.0
    for G in range(2, G_max + 1):
        for kind in ("loo", "oracle", "vanilla", "mean"):
            total = sum(_expected_square(atoms.P[x], atoms.R[x], atoms.S[x], truth, G, kind) for x in range(2)) / 2
            worst = max(worst, abs(total / float(mse(constants, 1, G, kind)) - 1))
    return worst


def _expected_square(p: Tensor, r: Tensor, s: Tensor, truth: Tensor, G: int, kind: str) -> float:
    total = 0.0
    for group in itertools.product(range(len(p)), repeat=G):
        index = torch.tensor(group)
        reward = r[index]
        baseline = {
            "loo": (reward.sum() - reward) / (G - 1),
            "oracle": p @ r,
            "vanilla": torch.zeros(()),
            "mean": reward.mean(),
        }[kind]
        estimate = (reward - baseline) @ s[index] / G
        total += p[index].prod().item() * (estimate - truth).square().sum().item()
    return total


def integer_rule_misses(ratios: int, seed: int = 0) -> int:
    """For how many random B2 / Vb the advised integer differs from a search, and from ceil(1/2 + sqrt(1/4 + B2/Vb))."""
    generator = torch.Generator().manual_seed(seed)
    drawn = (10 ** (6 * torch.rand(ratios, generator=generator, dtype=torch.float64) - 2)).tolist()
    misses = 0
    for ratio in drawn:
        constants = GradConstants(Vb=1.0, A=3.0, B2=ratio, J2=0.0)
        searched = min(range(2, int(math.sqrt(ratio)) + 5), key=lambda G: G + ratio / (G - 1))
        rule = max(2, math.ceil(0.5 + math.sqrt(0.25 + ratio)))
        misses += not (optimal_group_size(constants).g_int == searched == rule)
    return misses
