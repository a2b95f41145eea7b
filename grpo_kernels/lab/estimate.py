"""The constants from a pilot: rewards and scores of P prompts with four or more responses each, resampled by prompt."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..checks import check_choice, check_count, complain
from .arrays import check_shape, tensor64
from .constants import GradConstants
from .ustats import UStats, group_ustats


class TooFewGroupsError(ValueError):
    """Fewer than two groups have four scored responses."""


def estimate_constants(
    rewards: Any,
    scores: Any = None,
    *,
    gram: Any = None,
    loo_gram: Any = None,
    loo_sum_sq: float | None = None,
    mask: Any = None,
    cross: str = "mean_of_loo",
    n_boot: int = 400,
    seed: int = 0,
) -> GradConstants:
    """Vb, A, B2, |grad J|^2 and A0, unbiased, and Aopt, biased by O(1/G), of a pilot.

    Per prompt A = 4 (a3 - a4) and B2 = 2 (a2 - a4) - 4 (a3 - a4); Vb = mean a4 - |grad J|^2, the last from pairs of
    different prompts. Groups with fewer than four scored responses are left out.

    Args:
        rewards, scores, mask: see `group_ustats`. Prompts must be independent draws.
        gram: instead of scores, `[P, G, P, G]` or `[P G, P G]` inner products of all of them, or `[P, G, G]` within
            the groups; the last says nothing between prompts, and needs one of the next two, or cross="zero".
        loo_gram: `[P, P]` inner products of the groups' leave-one-out gradients.
        loo_sum_sq: |sum of them|^2, e.g. of the head's weight gradient; no interval then.
        cross: "mean_of_loo", or "zero": take |grad J| for 0. Vb is then too large by it, and the advised G too small.
        n_boot: bootstrap pilots, drawn over prompts (0: none).

    Raises TooFewGroupsError (a ValueError) when fewer than two groups are complete, ValueError when inner products
    between prompts are missing.
    """
    name = "estimate_constants"
    check_choice(name, "cross", cross, ("mean_of_loo", "zero"))
    check_count(name, "n_boot", n_boot, 0, "0 draws none.")
    reward = tensor64(name, "rewards", rewards, 2)
    if gram is not None:
        gram, between = _parts(name, tensor64(name, "gram", gram), reward, mask)
        loo_gram = between if loo_gram is None else loo_gram
    stats = group_ustats(reward, scores, mask, gram=gram)
    kept = stats.kept
    count = int(kept.sum())
    if count < 2:
        advice = "Sample at least four responses of each of at least two prompts."
        raise TooFewGroupsError(
            complain(name, "rewards", "must have two groups of four scored responses", count, advice)
        )
    if stats.loo is not None:
        loo_gram = stats.loo @ stats.loo.T
    if cross == "mean_of_loo" and loo_gram is None and loo_sum_sq is None:
        advice = "Give loo_gram or loo_sum_sq, the whole [P, G, P, G], or cross='zero'."
        raise ValueError(complain(name, "gram", "must reach between prompts", "[P, G, G] alone", advice))
    terms = torch.stack([stats.a2, stats.a3, stats.a4, stats.r2s2, stats.optimal], 1)[kept]
    weights = torch.ones(1, count, dtype=torch.float64, device=terms.device)
    pairs: Tensor | None = None
    if cross == "zero":
        pairs = torch.zeros(count, count, dtype=torch.float64, device=terms.device)
    elif loo_gram is not None:
        pairs = tensor64(name, "loo_gram", loo_gram, 2)
        check_shape(name, "loo_gram", pairs, (len(kept), len(kept)), "the prompts")
        pairs = pairs[kept][:, kept]
    if pairs is None:
        square = _square_from_sum(name, float(loo_sum_sq or 0.0), stats, gram, reward, mask)
        point, boot = _combine(weights, terms, square.reshape(1))[0], None
    else:
        point = _combine(weights, terms, _between(weights, pairs))[0]
        boot = _bootstrap(terms, pairs, n_boot, seed) if n_boot else None
    vb, first, second, square, none = point.tolist()
    norm = (terms[:, 2]).mean().item()
    away = stats.off_centre[kept]
    error = away.std().item() / count**0.5
    return GradConstants(
        Vb=vb, A=first, B2=second, J2=square, A0=none, Aopt=terms[:, 4].mean().item() - norm, n=count,
        G=stats.count[kept].mean().item(), silent=stats.silent[kept].double().mean().item(),
        off_centre=away.mean().item() / error if error > 0 else 0.0, boot=boot,
    )  # fmt: skip


def _parts(function: str, gram: Tensor, rewards: Tensor, mask: Any) -> tuple[Tensor, Tensor | None]:
    """Inner products within the groups, and those of the leave-one-out gradients if the matrix is whole."""
    P, G = rewards.shape
    if gram.ndim == 3:
        return gram, None
    if tuple(gram.shape) not in ((P, G, P, G), (P * G, P * G)):
        advice = "Give [P, G, P, G], [P G, P G] or [P, G, G]."
        raise ValueError(complain(function, "gram", f"must be of {P} x {G} scores", list(gram.shape), advice))
    whole = gram.reshape(P, G, P, G)
    weights = _loo_weights(rewards, mask)
    whole = torch.where((weights != 0).view(P, G, 1, 1) & (weights != 0).view(1, 1, P, G), whole, 0.0)
    between = torch.einsum("pa,paqb,qb->pq", weights, whole, weights)
    index = torch.arange(P, device=gram.device)
    return gram.reshape(P, G, P, G)[index, :, index], between


def _loo_weights(rewards: Tensor, mask: Any) -> Tensor:
    """What each score is multiplied by in its group's leave-one-out gradient."""
    live = rewards.isfinite()
    if mask is not None:
        live = live & (torch.as_tensor(mask, device=rewards.device) != 0)
    count = live.sum(1, keepdim=True)
    mean = torch.where(live, rewards, 0.0).sum(1, keepdim=True) / count.clamp(min=1)
    return torch.where(live, rewards - mean, 0.0) / (count - 1).clamp(min=1)


def _square_from_sum(function: str, whole: float, stats: UStats, gram: Tensor, rewards: Tensor, mask: Any) -> Tensor:
    """|grad J|^2 from |sum of the gradients|^2: the own squares taken off."""
    count = len(stats.kept)
    if not stats.kept.all():
        advice = "Give loo_gram, which can be cut to the complete groups."
        raise ValueError(complain(function, "loo_sum_sq", "must be of complete groups", "a group below four", advice))
    weights = _loo_weights(rewards, mask)
    own = torch.einsum("pa,pab,pb->", weights, torch.where(weights.unsqueeze(1) != 0, gram, 0.0), weights)
    return (whole - own) / (count * (count - 1))


def _between(weights: Tensor, pairs: Tensor) -> Tensor:
    """|grad J|^2 of weighted prompts `[B, P]`, over pairs of different prompts."""
    squares = weights.square()
    among = ((weights @ pairs) * weights).sum(1) - squares @ pairs.diagonal()
    return among / (weights.sum(1).square() - squares.sum(1))


def _combine(weights: Tensor, terms: Tensor, square: Tensor) -> Tensor:
    """Vb, A, B2, |grad J|^2, A0 for each row of weights `[B, P]`."""
    a2, a3, a4, r2s2, _ = (weights @ terms / weights.sum(1, keepdim=True)).unbind(1)
    first = 4 * (a3 - a4)
    return torch.stack([a4 - square, first, 2 * (a2 - a4) - first, square, r2s2 - a4], 1)


def _bootstrap(terms: Tensor, pairs: Tensor, n_boot: int, seed: int) -> Tensor:
    """The constants of `n_boot` pilots whose prompts are drawn from this one's."""
    count = len(terms)
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(count, (n_boot, count), generator=generator)
    weights = torch.zeros(n_boot, count, dtype=torch.float64)
    weights.scatter_add_(1, drawn, torch.ones_like(weights))
    weights = weights[weights.amax(1) < count].to(terms.device)  # all of one prompt has no pairs
    return _combine(weights, terms, _between(weights, pairs))
