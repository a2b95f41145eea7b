"""Monte-Carlo references: groups drawn from finite atoms, estimators and pilots made from the same draws."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..checks import check_choice, complain
from .arrays import check_whole, seeded
from .bandit import Atoms
from .constants import KINDS, check_atoms

_ELEMENTS = 1 << 22  # of estimates, or of indices, at a time


class Simulated(NamedTuple):
    """Mean squared error over the repetitions, and its standard error."""

    mse: float
    error: float


def draw(P: Tensor, prompts: Tensor, G: int, generator: torch.Generator) -> Tensor:
    """Indices of G responses of each prompt `[...]` -> `[..., G]`, from the rows of P `[M, K]`."""
    cumulative = P.cumsum(1)
    cumulative = (cumulative / cumulative[:, -1:])[prompts.reshape(-1)]
    uniform = torch.rand(len(cumulative), G, generator=generator, dtype=torch.float64)
    found = torch.searchsorted(cumulative, uniform, right=True).clamp_(max=P.shape[1] - 1)
    return found.view(*prompts.shape, G)


def simulate_mse(
    P: Any, R: Any, S: Any, n: int, G: int, kinds: Iterable[str] = ("loo", "oracle", "vanilla"), *,
    reps: int = 2500, seed: int = 0, progress: Callable[[int], Any] | None = None,
) -> dict[str, Simulated]:  # fmt: skip
    """E|estimate - grad J|^2 of n prompts x G responses by simulation; the kinds share their draws.

    Args:
        P, R, S: atoms, as `exact_constants` takes them; S may be float32, and is then summed in it.
        kinds: some of those of `mse`.
        progress: told how many repetitions were added.
    """
    name = "simulate_mse"
    if isinstance(kinds, str) or not isinstance(kinds, Iterable):
        raise TypeError(complain(name, "kinds", "must be several words", repr(kinds), "Pass a list."))
    kinds = list(dict.fromkeys(kinds))
    if not kinds:
        raise ValueError(complain(name, "kinds", "must name an estimator", kinds, f"Choose of {', '.join(KINDS)}."))
    for kind in kinds:
        check_choice(name, "kinds", kind, KINDS)
    n, G, reps = (
        check_whole(name, argument, value, least, "Raise it.")
        for argument, value, least in (("n", n, 1), ("G", G, 2), ("reps", reps, 2))
    )
    generator = seeded(name, seed)
    p, r, scores = check_atoms(name, P, R, S)
    M, K = p.shape
    flat = scores.reshape(M * K, -1)
    value = (p * r).sum(1)
    truth = ((p * (r - value.unsqueeze(1))).reshape(-1).to(flat.dtype) @ flat) / M
    best = _best_baseline(p, r, scores) if "optimal" in kinds else value
    step = max(1, min(reps, _ELEMENTS // (len(kinds) * max(n * G * K, flat.shape[1]))))
    squares: list[Tensor] = []
    for start in range(0, reps, step):
        some = min(step, reps - start)
        prompts = torch.randint(M, (some, n), generator=generator)
        chosen = draw(p, prompts, G, generator)
        index = (prompts.unsqueeze(2) * K + chosen).view(some, n * G)
        reward = r.reshape(-1)[index].view(some, n, G)
        weights = [_advantages(kind, reward, value[prompts], best[prompts]).view(some, n * G) for kind in kinds]
        sums = [F.embedding_bag(index, flat, per_sample_weights=w.to(flat.dtype), mode="sum") for w in weights]
        errors = torch.stack(sums, 1) / (n * G) - truth  # [some, kinds, d]
        squares.append(errors.to(torch.float64).square().sum(2))
        if progress is not None:
            progress(some)
    squared = torch.cat(squares)  # [reps, kinds]
    means, spread = squared.mean(0), squared.std(0) / reps**0.5
    return {kind: Simulated(means[i].item(), spread[i].item()) for i, kind in enumerate(kinds)}


def draw_pilot(atoms: Atoms, n: int, G: int, seed: int) -> tuple[Tensor, Tensor]:
    """Rewards `[n, G]` and scores `[n, G, d]` of a pilot: n prompts drawn, G responses each."""
    name = "draw_pilot"
    n, G = (check_whole(name, argument, value, 1, "Raise it.") for argument, value in (("n", n), ("G", G)))
    generator = seeded(name, seed)
    prompts = torch.randint(len(atoms.P), (n,), generator=generator)
    chosen = draw(atoms.P, prompts, G, generator)
    rows = prompts.unsqueeze(1)
    return atoms.R[rows, chosen], atoms.S[rows, chosen]


def _advantages(kind: str, reward: Tensor, value: Tensor, best: Tensor) -> Tensor:
    G = reward.shape[2]
    if kind == "vanilla":
        return reward
    if kind == "oracle":
        return reward - value.unsqueeze(2)
    if kind == "optimal":
        return reward - best.unsqueeze(2)
    centred = reward - reward.mean(2, keepdim=True)
    return centred * (G / (G - 1)) if kind == "loo" else centred


def _best_baseline(p: Tensor, r: Tensor, scores: Tensor) -> Tensor:
    sizes = torch.stack([s.to(torch.float64).square().sum(1) for s in scores])
    return (p * r * sizes).sum(1) / (p * sizes).sum(1).clamp(min=torch.finfo(torch.float64).tiny)
