"""Mean squared errors of policy-gradient estimators, exact for every group size, and the five numbers they need.

n prompts, G responses each, g = (1/n) sum_x (1/G) sum_i (r_i - C_i) s_i with s_i the gradient of log pi(y_i | x). For
the leave-one-out mean as C_i (GRPO without std, RLOO) the estimator is a U-statistic of second order with kernel
h(u, u') = (r - r')(s - s') / 2 (arXiv 2603.01162, lemma 1), whose Hoeffding decomposition gives, without remainder,

    MSE = (1/n) [ Vb + A/G + B2 / (G (G - 1)) ].
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..checks import check_choice, complain
from .arrays import array, check_finite, check_shape, like, tensor64

KINDS = ("loo", "oracle", "vanilla", "mean", "optimal")


@dataclass(frozen=True, slots=True, kw_only=True)
class GradConstants:
    """What decides the error of a gradient, in the square of the gradient's unit.

    Estimated constants also say what they were estimated from, and how far to trust them.
    """

    Vb: float
    """Between prompts: E|g(x)|^2 - |grad J|^2."""
    A: float
    """First order, the oracle's: E[rho^2 |s|^2] - |g(x)|^2, rho = r - V(x)."""
    B2: float
    """Second order, the price of an estimated baseline: E[var(r|x) E[|s|^2|x] + |g(x)|^2]."""
    J2: float
    """|grad J|^2."""
    A0: float | None = None
    """As A without a baseline: E[r^2 |s|^2] - |g(x)|^2."""
    Aopt: float | None = None
    """As A with the best baseline b(x) = E[r |s|^2] / E|s|^2; estimated by plugging in, biased by O(1/G)."""
    n: int | None = None
    """Prompts of the pilot."""
    G: float | None = None
    """Its mean number of scored responses per prompt."""
    silent: float | None = None
    """Share of its groups whose rewards are all equal."""
    off_centre: float | None = None
    """How many standard errors the scores' mean, E[s|x], is away from 0."""
    boot: Tensor | None = field(default=None, compare=False)
    """`[n_boot, 5]`: Vb, A, B2, J2, A0 of pilots drawn again, prompt by prompt. No part of
    `==`, which a tensor has no single answer to."""


def exact_constants(P: Any, R: Any, S: Any, w: Any = None) -> GradConstants:
    """Vb, A, B2, |grad J|^2, A0 and Aopt of M prompts with K possible responses each, by summation.

    Args:
        P: `[M, K]` probability of each response; rows sum to 1. A random reward is several atoms of one response.
        R: `[M, K]` reward of each.
        S: `[M, K, d]` score of each, the gradient of log P; NumPy or torch. Its mean given the prompt is taken off
            first: the leave-one-out estimator does not see it (the oracle and vanilla, as they are used, do).
        w: `[M]` probability of each prompt; None: equal.

    Raises ValueError for shapes that do not fit, probabilities that do not sum to 1, values that are not finite.
    """
    name = "exact_constants"
    p, r, scores = check_atoms(name, P, R, S)
    share = torch.full((len(p),), 1 / len(p), dtype=torch.float64) if w is None else tensor64(name, "w", w, 1)
    check_shape(name, "w", share, (len(p),), "P's prompts")
    _check_probabilities(name, "w", share)
    rho = r - (p * r).sum(1, keepdim=True)
    gradient = torch.zeros(scores.shape[2], dtype=torch.float64, device=p.device)
    totals = torch.zeros(5, dtype=torch.float64, device=p.device)  # |g|^2, A, B2, A0, Aopt
    for x, row in enumerate(p):  # a prompt at a time: the scores of a small language model fill the memory once
        s = scores[x].to(torch.float64)
        s = s - row @ s
        g = (row * rho[x]) @ s
        norm, size = g.square().sum(), s.square().sum(1)
        tau = row @ size
        best = (row * r[x]) @ size / tau if tau > 0 else tau
        own, none, optimal = (((row * (r[x] - b) ** 2) @ size) - norm for b in (row @ r[x], 0.0, best))
        second = (row @ rho[x] ** 2) * tau + norm
        gradient += share[x] * g
        totals += share[x] * torch.stack([norm, own, second, none, optimal])
    norm, first, second, none, optimal = totals.tolist()
    square = gradient.square().sum().item()
    return GradConstants(Vb=norm - square, A=first, B2=second, J2=square, A0=none, Aopt=optimal)


def check_atoms(function: str, P: Any, R: Any, S: Any) -> tuple[Tensor, Tensor, Tensor]:
    """P and R in float64 and S in its own dtype, as `exact_constants` takes them; ValueError if they do not fit."""
    p, r, scores = tensor64(function, "P", P, 2), tensor64(function, "R", R, 2), array(function, "S", S)
    if p.numel() == 0:
        advice = "Give one prompt and one response at least."
        raise ValueError(complain(function, "P", "must have M, K >= 1", list(p.shape), advice))
    check_shape(function, "R", r, tuple(p.shape), "P")
    if scores.ndim != 3 or scores.shape[:2] != p.shape or scores.shape[2] == 0:
        wanted = f"must be {list(p.shape)} and d >= 1"
        raise ValueError(complain(function, "S", wanted, list(scores.shape), "Line them up."))
    _check_probabilities(function, "P", p)
    check_finite(function, "R", r, "Give every response a reward.")
    check_finite(function, "S", scores, "Give every response a score.")
    return p, r, scores


def _check_probabilities(function: str, argument: str, values: Tensor) -> None:
    sums = values.sum(-1)
    if (values < 0).any() or not torch.allclose(sums, torch.ones_like(sums), atol=1e-6):
        raise ValueError(complain(function, argument, "must be probabilities", values, "Divide by their sum."))


def mse(constants: GradConstants, n: Any, G: Any, kind: str = "loo") -> Any:
    """E|estimate - grad J|^2 of n prompts with G responses each.

    Args:
        n, G: numbers or arrays, which broadcast; the result is of their kind.
        kind: the baseline. "loo": the mean of the other responses, (Vb + A/G + B2/(G(G-1)))/n. "oracle": V(x),
            (Vb + A/G)/n. "vanilla": none, A0 for A. "optimal": b*(x), Aopt for A. "mean": the mean of all responses
            (Dr. GRPO), ((G-1)/G)^2 of "loo" plus |grad J|^2/G^2: its steps are shorter, so compare it after the
            learning rate was raised by G/(G-1).

    Raises ValueError for an unknown kind, n < 1, G < 1 (G < 2 for "loo"), or a constant that the pilot lacks.
    """
    name = "mse"
    check_choice(name, "kind", kind, KINDS)
    prompts, size = tensor64(name, "n", n), tensor64(name, "G", G)
    least = 2 if kind == "loo" else 1
    for argument, values, low in (("n", prompts, 1), ("G", size, least)):
        if not (values >= low).all():
            advice = "A mean of the other responses needs another." if low == 2 else "Count from 1."
            raise ValueError(complain(name, argument, f"must be at least {low}", values.min().item(), advice))
    part = {"vanilla": "A0", "optimal": "Aopt"}.get(kind, "A")
    first: float | None = getattr(constants, part)
    if first is None:
        raise ValueError(complain(name, "constants", f"must have {part} for kind={kind!r}", None, "Estimate it."))
    result = constants.Vb + first / size
    if kind == "loo":
        result = result + constants.B2 / (size * (size - 1))
    elif kind == "mean":  # multiplied out, so that G = 1, where the estimate is 0, is no 0 * inf
        result = ((size - 1) / size) ** 2 * result + (size - 1) / size**3 * constants.B2
    result = result / prompts
    if kind == "mean":
        result = result + constants.J2 / size**2
    return like(result, n, G)


def crossing(constants: GradConstants) -> float:
    """The G above which the group mean beats no baseline at all: 1 + B2 / (A0 - A); inf where A0 <= A, NaN from NaN.

    Raises ValueError without A0.
    """
    if constants.A0 is None:
        raise ValueError(complain("crossing", "constants", "must have A0", None, "Estimate it from scores or rewards."))
    gain = constants.A0 - constants.A
    if math.isnan(gain) or math.isnan(constants.B2):
        return math.nan
    return 1 + constants.B2 / gain if gain > 0 else math.inf


def fixed_budget(constants: GradConstants, G: Sequence[int], kind: str = "loo") -> list[float]:
    """N MSE at N = nG responses in all, for each G: what a budget buys, whatever it is."""
    return [size * float(mse(constants, 1, size, kind)) for size in G]
