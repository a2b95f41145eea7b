"""The constants from a pilot: rewards and scores of P prompts with four or more responses each, resampled by prompt."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..checks import check_choice, complain
from .arrays import NotFiniteError, check_finite, check_shape, check_whole, seeded, tensor64
from .constants import GradConstants
from .ustats import Scored, scored, statistics


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
            the groups; only the last, which says nothing between prompts, goes with one of the next two, or
            cross="zero".
        loo_gram: `[P, P]` inner products of the groups' leave-one-out gradients.
        loo_sum_sq: |sum of them|^2, e.g. of the head's weight gradient; no interval then.
        cross: "mean_of_loo", or "zero": take |grad J| for 0. Vb is then too large by it, and the advised G too small.
        n_boot: bootstrap pilots, drawn over prompts (0: none).

    Raises TooFewGroupsError (a ValueError) when fewer than two groups are complete, NotFiniteError (another) for NaN or
    infinity where a response is scored, ValueError when inner products between prompts are missing or given twice.
    """
    name = "estimate_constants"
    check_choice(name, "cross", cross, ("mean_of_loo", "zero"))
    n_boot = check_whole(name, "n_boot", n_boot, 0, "0 draws none.")
    generator = seeded(name, seed)
    given = scored(name, rewards, mask)
    whole = None
    if gram is not None:
        gram, whole = _parts(name, tensor64(name, "gram", gram), given)
    _check_sources(name, cross, scores, gram, whole, loo_gram, loo_sum_sq)
    stats = statistics(name, given, scores, gram)
    kept = stats.count >= 4
    complete = int(kept.sum())
    if complete < 2:
        advice = "Sample at least four responses of each of at least two prompts."
        raise TooFewGroupsError(
            complain(name, "rewards", "must have two groups of four scored responses", complete, advice)
        )
    terms = torch.stack([stats.a2, stats.a3, stats.a4, stats.r2s2, stats.optimal], 1)[kept]
    weights = torch.ones(1, complete, dtype=torch.float64, device=terms.device)
    pairs: Tensor | None = None
    if cross == "zero":
        pairs = torch.zeros(complete, complete, dtype=torch.float64, device=terms.device)
    elif stats.loo is not None:
        pairs = stats.loo @ stats.loo.T
    elif whole is not None:
        pairs = torch.einsum("pa,paqb,qb->pq", given.weights, whole, given.weights)
    elif loo_gram is not None:
        pairs = tensor64(name, "loo_gram", loo_gram, 2)
        check_shape(name, "loo_gram", pairs, (len(kept), len(kept)), "the prompts")
    if pairs is not None and cross != "zero":
        pairs = pairs[kept][:, kept]
        check_finite(name, "loo_gram", pairs, "Give the products of complete groups.")
    if pairs is None:
        square = _square_from_sum(name, loo_sum_sq, kept, gram, given)
        point, boot = _combine(weights, terms, square.reshape(1))[0], None
    else:
        point = _combine(weights, terms, _between(weights, pairs))[0]
        boot = _bootstrap(terms, pairs, n_boot, generator) if n_boot else None
    if not point.isfinite().all() or (boot is not None and not boot.isfinite().all()):
        advice = "Divide the scores, or the rewards, by a constant."
        raise NotFiniteError(complain(name, "scores", "must have products that float64 holds", "an overflow", advice))
    vb, first, second, square, none = point.tolist()
    norm = (terms[:, 2]).mean().item()
    away = stats.off_centre[kept]
    error = away.std().item() / complete**0.5
    return GradConstants(
        Vb=vb, A=first, B2=second, J2=square, A0=none, Aopt=terms[:, 4].mean().item() - norm, n=complete,
        G=stats.count[kept].mean().item(), silent=stats.silent[kept].double().mean().item(),
        off_centre=away.mean().item() / error if error > 0 else 0.0, boot=boot,
    )  # fmt: skip


def _check_sources(
    function: str, cross: str, scores: Any, gram: Tensor | None, whole: Tensor | None, loo_gram: Any, loo_sum_sq: Any
) -> None:
    """ValueError unless one argument says what the products between prompts are."""
    extra = [name for name, value in (("loo_gram", loo_gram), ("loo_sum_sq", loo_sum_sq)) if value is not None]
    if extra and cross == "zero":
        advice = "Leave it out, or take cross='mean_of_loo'."
        raise ValueError(complain(function, extra[0], "must be None with cross='zero'", "a value", advice))
    if extra and (scores is not None or whole is not None):
        by = "scores" if scores is not None else "a whole gram"
        advice = f"Leave it out: {by} says it."
        raise ValueError(complain(function, extra[0], f"must be None with {by}", "a value", advice))
    if len(extra) == 2:
        raise ValueError(complain(function, "loo_sum_sq", "must be None with loo_gram", "a value", "Give one of them."))
    if gram is not None and scores is None and whole is None and not extra and cross != "zero":
        advice = "Give loo_gram or loo_sum_sq, the whole [P, G, P, G], or cross='zero'."
        raise ValueError(complain(function, "gram", "must reach between prompts", "[P, G, G] alone", advice))


def _parts(function: str, gram: Tensor, given: Scored) -> tuple[Tensor, Tensor | None]:
    """Inner products within the groups, and the whole `[P, G, P, G]` if it is given, 0 where unscored."""
    P, G = given.live.shape
    if gram.ndim == 3:
        return gram, None
    if tuple(gram.shape) not in ((P, G, P, G), (P * G, P * G)):
        advice = "Give [P, G, P, G], [P G, P G] or [P, G, G]."
        raise ValueError(complain(function, "gram", f"must be of {P} x {G} scores", list(gram.shape), advice))
    both = given.live.view(P, G, 1, 1) & given.live.view(1, 1, P, G)
    whole = torch.where(both, gram.reshape(P, G, P, G), 0.0)
    check_finite(function, "gram", whole, "Make the response's reward NaN, or its mask 0, to leave it out.")
    index = torch.arange(P, device=gram.device)
    return whole[index, :, index], whole


def _square_from_sum(function: str, total: Any, kept: Tensor, gram: Tensor, given: Scored) -> Tensor:
    """|grad J|^2 from |sum of the gradients|^2: the own squares taken off."""
    square = tensor64(function, "loo_sum_sq", total, 0)
    if not (square.isfinite() and square >= 0):
        advice = "It is the square of a norm."
        raise ValueError(complain(function, "loo_sum_sq", "must be finite and at least 0", square.item(), advice))
    if not kept.all():
        advice = "Give loo_gram, which can be cut to the complete groups."
        raise ValueError(complain(function, "loo_sum_sq", "must be of complete groups", "a group below four", advice))
    both = given.live.unsqueeze(1) & given.live.unsqueeze(2)
    own = torch.einsum("pa,pab,pb->", given.weights, torch.where(both, gram, 0.0), given.weights)
    return (square.to(own.device) - own) / (len(kept) * (len(kept) - 1))


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


def _bootstrap(terms: Tensor, pairs: Tensor, n_boot: int, generator: torch.Generator) -> Tensor:
    """The constants of `n_boot` pilots whose prompts are drawn from this one's."""
    size = len(terms)
    drawn = torch.randint(size, (n_boot, size), generator=generator)
    weights = torch.zeros(n_boot, size, dtype=torch.float64)
    weights.scatter_add_(1, drawn, torch.ones_like(weights))
    weights = weights[weights.amax(1) < size].to(terms.device)  # all of one prompt has no pairs
    return _combine(weights, terms, _between(weights, pairs))
