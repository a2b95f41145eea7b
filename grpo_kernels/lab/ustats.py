"""Unbiased estimates of E|h|^2, E|h1|^2 and |g|^2 of each group: complete U-statistics from inner products alone.

a2, a3, a4 average h_ab . h_cd over pairs that share two, one and no responses; the sums over all permutations collapse
to a few moments of the centred rewards and of the centred scores' Gram matrix.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from ..checks import complain
from .arrays import NotFiniteError, check_finite, check_shape, like, tensor64

_Array = TypeVar("_Array")
_UNSCORED = "Make the response's reward NaN, or its mask 0, to leave it out."


@dataclass(frozen=True, slots=True, eq=False)
class UStats(Generic[_Array]):
    """Statistics of P groups, float64 `[P]` each; NaN where fewer than four responses are scored."""

    a2: _Array
    """-> E|h|^2."""
    a3: _Array
    """-> E|h1|^2, h1 the projection of h on one response."""
    a4: _Array
    """-> |g|^2."""
    loo: _Array | None
    """`[P, d]`: the leave-one-out gradient of each group; None where only a Gram matrix was given."""
    count: _Array
    """Scored responses."""
    r2s2: _Array
    """-> E[r^2 |s|^2], which vanilla's error needs."""
    optimal: _Array
    """-> E[(r - b)^2 |s|^2] with b = sum r|s|^2 / sum |s|^2 plugged in: biased downward by O(1/G)."""
    off_centre: _Array
    """-> |E[s|x]|^2."""
    silent: _Array
    """Whether all scored rewards are equal."""

    @property
    def kept(self) -> Any:
        """Groups with enough scored responses."""
        counts: Any = self.count
        return counts >= 4


class Scored(NamedTuple):
    """The rewards of P groups `[P, G]`, 0 where there is none."""

    rewards: Tensor
    centred: Tensor
    """Less the group's mean; exactly 0 throughout a silent group."""
    live: Tensor
    """Which responses are scored."""
    silent: Tensor
    """`[P]`."""

    @property
    def responses(self) -> Tensor:
        """How many are scored of each group, float64."""
        return self.live.to(torch.float64).sum(1)

    @property
    def weights(self) -> Tensor:
        """What each score is multiplied by in its group's leave-one-out gradient."""
        return self.centred / (self.responses - 1).clamp(min=1).unsqueeze(1)


def scored(function: str, rewards: Any, mask: Any) -> Scored:
    """Which responses of `[P, G]` have a reward that counts, and the rewards; `group_ustats` says of what kind."""
    r = tensor64(function, "rewards", rewards, 2)
    if r.shape[1] == 0:
        raise ValueError(complain(function, "rewards", "must have responses", list(r.shape), "Sample four or more."))
    live = ~r.isnan()
    if mask is not None:
        kept = tensor64(function, "mask", mask, 2)
        check_shape(function, "mask", kept, tuple(r.shape), "rewards")
        live = live & (kept != 0)
    r = torch.where(live, r, 0.0)
    check_finite(function, "rewards", r, _UNSCORED)
    spread = torch.where(live, r, -torch.inf).amax(1) - torch.where(live, r, torch.inf).amin(1)
    silent = spread <= 0
    mean = r.sum(1) / live.sum(1).clamp(min=1)
    centred = torch.where(live & ~silent.unsqueeze(1), r - mean.unsqueeze(1), 0.0)
    return Scored(r, centred, live, silent)


def group_ustats(rewards: Any, scores: Any = None, mask: Any = None, *, gram: Any = None) -> UStats[Any]:
    """Complete U-statistics of each group, unbiased for four or more responses, whatever is added to r or s.

    Args:
        rewards: `[P, G]`. NaN is unscored, and its response left out. Groups may differ in size: fill up with NaN.
        scores: `[P, G, d]` gradient of log pi(y_i | x), or a sketch of it.
        mask: `[P, G]`, 0 where a response is to be left out.
        gram: `[P, G, G]` inner products of the scores, instead of them.

    Returns NumPy's arrays for NumPy's, else tensors. Raises ValueError when both or neither of scores and gram are
    given, shapes do not fit, or a scored response has an infinite reward or a score that is not finite.
    """
    name = "group_ustats"
    found = statistics(name, scored(name, rewards, mask), scores, gram)
    inputs = (rewards, scores, mask, gram)
    values = {field.name: getattr(found, field.name) for field in fields(found)}
    return UStats(**{key: None if value is None else like(value, *inputs) for key, value in values.items()})


def statistics(function: str, given: Scored, scores: Any, gram: Any) -> UStats[Tensor]:
    """`group_ustats` of rewards that were looked at, in the name of `function`."""
    if (scores is None) == (gram is None):
        got = "neither" if scores is None else "both"
        advice = "Pass scores=, or gram=."
        raise ValueError(complain(function, "scores or gram", "must be given, one of them", got, advice))
    live, on, some = given.live, given.live.to(torch.float64), given.responses.clamp(min=1)
    shape = tuple(live.shape)
    if scores is not None:
        vectors = tensor64(function, "scores", scores, 3)
        if tuple(vectors.shape[:2]) != shape or vectors.shape[2] == 0:
            wanted = f"must have the shape {list(shape)} of rewards and d >= 1"
            raise ValueError(complain(function, "scores", wanted, list(vectors.shape), "Line the arrays up."))
        vectors = torch.where(live.unsqueeze(2), vectors, 0.0)
        check_finite(function, "scores", vectors, _UNSCORED)
        sizes, total = vectors.square().sum(2), vectors.sum(1).square().sum(1)
        # centred before they are multiplied: a large common part would leave no digits to the difference
        vectors = (vectors - (vectors.sum(1) / some.unsqueeze(1)).unsqueeze(1)) * on.unsqueeze(2)
        loo = torch.einsum("pa,pad->pd", given.weights, vectors)
        found = _statistics(given, sizes, total, vectors @ vectors.mT, loo)
    else:
        inner = tensor64(function, "gram", gram, 3)
        check_shape(function, "gram", inner, (*shape, shape[1]), "rewards")
        inner = torch.where(live.unsqueeze(2) & live.unsqueeze(1), inner, 0.0)
        check_finite(function, "gram", inner, _UNSCORED)
        # H K H with H = I - 1/G on the scored ones
        means = inner.sum(2) / some.unsqueeze(1)
        centred = inner - means.unsqueeze(1) - means.unsqueeze(2) + (means.sum(1) / some).view(-1, 1, 1)
        centred = centred * on.unsqueeze(1) * on.unsqueeze(2)
        found = _statistics(given, inner.diagonal(dim1=1, dim2=2), inner.sum((1, 2)), centred, None)
    parts = (found.a2, found.a3, found.a4, found.r2s2, found.optimal, found.off_centre)
    if not all(part[found.kept].isfinite().all() for part in parts):
        what = "gram" if scores is None else "scores"
        advice = "Divide the scores, or the rewards, by a constant."
        raise NotFiniteError(complain(function, what, "must have squares that float64 holds", "an overflow", advice))
    return found


def _statistics(given: Scored, raw: Tensor, total_raw: Tensor, centred: Tensor, loo: Tensor | None) -> UStats[Tensor]:
    """From |s|^2 `[P, G]`, |sum s|^2 `[P]` and the Gram matrix `[P, G, G]` of the centred scores."""
    G, rho, on = given.responses, given.centred, given.live.to(torch.float64)
    some = G.clamp(min=1)
    sizes = centred.diagonal(dim1=1, dim2=2)
    r2, s2 = rho.square().sum(1), sizes.sum(1)
    both = (rho.square() * sizes).sum(1)
    total = torch.einsum("pa,pab,pb->p", rho, centred, rho)  # |C|^2, C = sum r s
    pairs, triples = G * (G - 1), G * (G - 1) * (G - 2)
    q2 = (G.square() * both + 3 * G * total) / 4  # sum_a |q_a|^2, q_a = sum_b h_ab
    a2 = (2 * G * both + 2 * r2 * s2 + 4 * total) / (4 * pairs)
    a3 = (q2 - pairs * a2) / triples
    a4 = (G.square() * total - 4 * triples * a3 - 2 * pairs * a2) / (triples * (G - 3))
    best = (rho * raw).sum(1) / raw.sum(1).clamp(min=torch.finfo(torch.float64).tiny)  # less the mean reward
    few = G < 4
    return UStats(
        a2=a2.masked_fill(few, torch.nan),
        a3=a3.masked_fill(few, torch.nan),
        a4=a4.masked_fill(few, torch.nan),
        loo=loo,
        count=G,
        r2s2=((given.rewards.square() * raw).sum(1) / some).masked_fill(few, torch.nan),
        optimal=(((rho - best.unsqueeze(1)).square() * raw * on).sum(1) / some).masked_fill(few, torch.nan),
        off_centre=((total_raw - raw.sum(1)) / pairs).masked_fill(few, torch.nan),
        silent=given.silent,
    )
