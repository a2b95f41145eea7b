"""Training the enumerable transformer with each group size at the same number of responses per update; J is exact.

The seeds of a group size train side by side, as one batch of models. Plain SGD with the leave-one-out mean, so that the
update is the estimator that the theory is about.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..checks import complain
from .advice import optimal_group_size
from .arrays import check_whole
from .constants import exact_constants, fixed_budget
from .transformer import PROMPTS, Parameters, exact_atoms, expected_reward, log_probabilities, rewards


@dataclass(frozen=True, slots=True)
class Cell:
    """One budget after so many updates: J for each group size."""

    N: int
    iterations: int
    J: dict[int, tuple[float, float]]
    """G -> mean over the seeds, its standard error."""

    def best(self) -> int:
        """The G of the largest mean."""
        return max(self.J, key=lambda size: self.J[size][0])

    def deficit(self, G: int) -> float:
        """How many combined standard errors G lies below the best; 0 for the best."""
        top, error = self.J[self.best()]
        mean, own = self.J[G]
        together = (error**2 + own**2) ** 0.5
        return (top - mean) / together if top > mean else 0.0


def train_group(
    start: Parameters, task: str, *, N: int, G: int, learning_rate: float, iterations: Sequence[int],
    seeds: Sequence[int], progress: Callable[[int], Any] | None = None,
) -> tuple[Tensor, list[Parameters]]:  # fmt: skip
    """J after each of `iterations` for each seed, `[iterations, seeds]`, and the first seed's parameters there.

    start: the parameters that all begin with. N responses per update, G per prompt, N a multiple of G.
    """
    G = check_whole("train_group", "G", G, 2, "A leave-one-out mean needs two responses.")
    if N < G or N % G:
        raise ValueError(complain("train_group", "N", f"must be a multiple of G = {G}", N, "Choose another budget."))
    right = rewards(task).to(torch.float32)
    size, n = len(seeds), N // G
    values = {name: value.expand(size, *value.shape).clone().requires_grad_() for name, value in start.items()}
    generators = [torch.Generator().manual_seed(1_000_003 * seed + 1009 * G + N) for seed in seeds]
    marks = sorted(set(iterations))
    results, path = [], []
    batched = torch.func.vmap(log_probabilities)
    for done in range(1, marks[-1] + 1):
        chosen = torch.stack([torch.randint(len(PROMPTS), (n,), generator=g) for g in generators])  # [seeds, n]
        logps = batched(values, PROMPTS[chosen])  # [seeds, n, 100]
        uniform = torch.stack([torch.rand(n, G, generator=g) for g in generators])  # [seeds, n, G]
        chance = logps.detach().exp().cumsum(-1)
        answers = torch.searchsorted(chance / chance[..., -1:], uniform, right=True).clamp_(max=99)
        reward = right[chosen].gather(2, answers)
        advantages = (reward - reward.mean(2, keepdim=True)) * (G / (G - 1))
        weights = torch.zeros_like(logps).scatter_add_(2, answers, advantages) / N
        grads = torch.autograd.grad((weights * logps).sum(), list(values.values()))
        with torch.no_grad():
            for value, grad in zip(values.values(), grads, strict=True):
                value.add_(grad, alpha=learning_rate)
        if done in marks:
            with torch.no_grad():
                results.append(torch.func.vmap(expected_reward, in_dims=(0, None))(values, right))
            path.append({name: value[0].detach().clone() for name, value in values.items()})
        if progress is not None:
            progress(1)
    return torch.stack(results), path


def train_sweep(
    start: Parameters, task: str, *, budgets: Sequence[int], groups: Sequence[int], iterations: Sequence[int],
    learning_rate: float, seeds: Sequence[int], progress: Callable[[int], Any] | None = None,
) -> tuple[list[Cell], dict[tuple[int, int], list[Parameters]]]:  # fmt: skip
    """All cells, and the first seed's parameters along the way of each (N, G)."""
    marks = sorted(set(iterations))
    cells, paths = [], {}
    for N in budgets:
        means = {}
        for G in groups:
            values, paths[N, G] = train_group(
                start, task, N=N, G=G, learning_rate=learning_rate, iterations=marks, seeds=seeds, progress=progress
            )
            means[G] = values.to(torch.float64)
        for row, done in enumerate(marks):
            at = {G: (v[row].mean().item(), v[row].std().item() / len(seeds) ** 0.5) for G, v in means.items()}
            cells.append(Cell(N, done, at))
    return cells, paths


class Along(NamedTuple):
    """What exact constants advise at one point of the way."""

    J: float
    g_cross: float | None
    """None where subtracting nothing has the smaller error than the group mean at every G."""
    g_star: float
    g_star_head: float
    """From the head's part of the scores alone."""
    head_regret: float
    """What the integer of the head's advice costs, as a share of the best error."""


def advice_at(parameters: Parameters, task: str) -> Along:
    """G*(theta) from all parameters and from the head's, which come last."""
    atoms = exact_atoms(parameters, task)
    whole = exact_constants(atoms.P, atoms.R, atoms.S)
    head = exact_constants(atoms.P, atoms.R, atoms.S[..., -parameters["head"].numel() :])
    best, proxy = optimal_group_size(whole), optimal_group_size(head)
    cross = best.g_cross if math.isfinite(best.g_cross) else None
    value = (atoms.P * atoms.R).sum(1).mean().item()
    if best.g_int is None or proxy.g_int is None:  # all prompts alike: exact constants of a policy that is done
        return Along(value, cross, best.g_cont, proxy.g_cont, math.nan)
    ours, least = fixed_budget(whole, [proxy.g_int, best.g_int])
    return Along(value, cross, best.g_cont, proxy.g_cont, ours / least - 1)
