"""Unbiased estimates of E|h|^2, E|h1|^2 and |g|^2 of each group: complete U-statistics from inner products alone.

a2, a3, a4 average h_ab . h_cd over pairs that share two, one and no responses; the sums over all permutations collapse
to a few moments of the centred rewards and of the centred scores' Gram matrix.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..checks import complain
from .arrays import check_shape, tensor64


@dataclass(frozen=True, slots=True)
class UStats:
    """Statistics of P groups, float64 `[P]` each; NaN where fewer than four responses are scored."""

    a2: Tensor
    """-> E|h|^2."""
    a3: Tensor
    """-> E|h1|^2, h1 the projection of h on one response."""
    a4: Tensor
    """-> |g|^2."""
    loo: Tensor | None
    """`[P, d]`: the leave-one-out gradient of each group; None where only a Gram matrix was given."""
    count: Tensor
    """Scored responses."""
    r2s2: Tensor
    """-> E[r^2 |s|^2], which vanilla's error needs."""
    optimal: Tensor
    """-> E[(r - b)^2 |s|^2] with b = sum r|s|^2 / sum |s|^2 plugged in: biased downward by O(1/G)."""
    off_centre: Tensor
    """-> |E[s|x]|^2."""
    silent: Tensor
    """Whether all scored rewards are equal."""

    @property
    def kept(self) -> Tensor:
        """Groups with enough scored responses."""
        return self.count >= 4


def group_ustats(rewards: Any, scores: Any = None, mask: Any = None, *, gram: Any = None) -> UStats:
    """Complete U-statistics of each group, unbiased for four or more responses, whatever is added to r or s.

    Args:
        rewards: `[P, G]`. One that is not finite is unscored, and its response left out. Groups may differ in size:
            fill up with NaN.
        scores: `[P, G, d]` gradient of log pi(y_i | x), or a sketch of it.
        mask: `[P, G]`, 0 where a response is to be left out.
        gram: `[P, G, G]` inner products of the scores, instead of them.

    Raises ValueError when both or neither of scores and gram are given, or shapes do not fit.
    """
    name = "group_ustats"
    r = tensor64(name, "rewards", rewards, 2)
    if (scores is None) == (gram is None):
        got = "neither" if scores is None else "both"
        raise ValueError(complain(name, "scores or gram", "must be given, one of them", got, "Pass scores=, or gram=."))
    live = r.isfinite()
    if mask is not None:
        kept = tensor64(name, "mask", mask, 2)
        check_shape(name, "mask", kept, tuple(r.shape), "rewards")
        live = live & (kept != 0)
    on = live.to(torch.float64)
    r = torch.where(live, r, 0.0)
    vectors = None
    if scores is not None:
        vectors = tensor64(name, "scores", scores, 3)
        check_shape(name, "scores", vectors[:, :, 0], tuple(r.shape), "rewards")
        vectors = torch.where(live.unsqueeze(2), vectors, 0.0)
        inner = vectors @ vectors.mT
    else:
        inner = tensor64(name, "gram", gram, 3)
        check_shape(name, "gram", inner, (*r.shape, r.shape[1]), "rewards")
        inner = torch.where(live.unsqueeze(2) & live.unsqueeze(1), inner, 0.0)
    G = on.sum(1)
    some = G.clamp(min=1)
    rho = (r - (r.sum(1) / some).unsqueeze(1)) * on
    return _statistics(r, rho, on, inner, vectors, G)


def _statistics(r: Tensor, rho: Tensor, on: Tensor, inner: Tensor, vectors: Tensor | None, G: Tensor) -> UStats:
    some = G.clamp(min=1)
    # K of the centred scores: H K H with H = I - 1/G on the scored ones
    means = inner.sum(2) / some.unsqueeze(1)
    grand = means.sum(1) / some
    centred = inner - means.unsqueeze(1) - means.unsqueeze(2) + grand.view(-1, 1, 1)
    centred = centred * on.unsqueeze(1) * on.unsqueeze(2)
    sizes = centred.diagonal(dim1=1, dim2=2)
    r2, s2 = rho.square().sum(1), sizes.sum(1)
    both = (rho.square() * sizes).sum(1)
    total = torch.einsum("pa,pab,pb->p", rho, centred, rho)  # |C|^2, C = sum r s
    pairs, triples = G * (G - 1), G * (G - 1) * (G - 2)
    q2 = (G.square() * both + 3 * G * total) / 4  # sum_a |q_a|^2, q_a = sum_b h_ab
    a2 = (2 * G * both + 2 * r2 * s2 + 4 * total) / (4 * pairs)
    a3 = (q2 - pairs * a2) / triples
    a4 = (G.square() * total - 4 * triples * a3 - 2 * pairs * a2) / (triples * (G - 3))
    raw = inner.diagonal(dim1=1, dim2=2)
    best = (r * raw).sum(1) / raw.sum(1).clamp(min=torch.finfo(torch.float64).tiny)
    spread = torch.where(on > 0, r, -torch.inf).amax(1) - torch.where(on > 0, r, torch.inf).amin(1)
    few = G < 4
    loo = None
    if vectors is not None:
        loo = torch.einsum("pa,pad->pd", rho, vectors) / (G - 1).clamp(min=1).unsqueeze(1)
    return UStats(
        a2=a2.masked_fill(few, torch.nan),
        a3=a3.masked_fill(few, torch.nan),
        a4=a4.masked_fill(few, torch.nan),
        loo=loo,
        count=G,
        r2s2=((r.square() * raw).sum(1) / some).masked_fill(few, torch.nan),
        optimal=(((r - best.unsqueeze(1)).square() * raw * on).sum(1) / some).masked_fill(few, torch.nan),
        off_centre=((inner.sum((1, 2)) - raw.sum(1)) / pairs).masked_fill(few, torch.nan),
        silent=spread <= 0,
    )
