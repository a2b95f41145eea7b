"""The scalar formulas of the losses: the one copy, run on torch tensors and, jitted, inside Triton kernels.

Each function is branch-free and uses arithmetic, comparisons and two names of `triton.language`, `exp` and `where`,
that `tl` below gives to torch. A value and its derivative come together, so that neither can drift from the other.
Limits that are switched off are `inf`. Where a factor of 0 meets an infinite value the result is selected, never
multiplied; a NaN input gives NaN (comparisons are written such that NaN falls through).
"""

from __future__ import annotations

from typing import Any

import torch


class TorchLanguage:
    """The part of `triton.language` that the formulas use, on tensors."""

    exp = staticmethod(torch.exp)
    where = staticmethod(torch.where)


tl: Any = TorchLanguage


def zero_safe_product(weight: Any, value: Any) -> Any:
    """weight * value, but exactly 0 where one of them is 0 and the other infinite."""
    nothing = ((weight == 0) & (value == value)) | ((value == 0) & (weight == weight))
    return tl.where(nothing, 0.0, weight * value)


def clipped_surrogate(ratio: Any, advantage: Any, lower: Any, upper: Any, delta: Any, dual_clip: Any) -> Any:
    """-min(min(r, delta) A, clip(r, lower, upper) A), for A < 0 at most -dual_clip A, and its slope in log r.

    PPO's clip (arXiv 1707.06347 eq. 7) with asymmetric bounds (DAPO, 2503.14476 eq. 8), the two-sided clip of
    INTELLECT-2 (`delta`, 2505.07291) and the dual clip (1912.09729 eq. 5). A ratio on a bound counts as inside it, as
    in torch.clamp.
    """
    unclipped = advantage * tl.where(ratio > delta, delta, ratio)
    clipped = advantage * tl.where(ratio < lower, lower, tl.where(ratio > upper, upper, ratio))
    use_clipped = clipped < unclipped
    loss = -tl.where(use_clipped, clipped, unclipped)
    ceiling = -dual_clip * advantage
    capped = (advantage < 0) & (loss > ceiling)
    loss = tl.where(capped, ceiling, loss)
    silent = (advantage == 0) & (ratio == ratio)
    outside = (ratio < lower) | (ratio > upper)
    flat = silent | capped | (use_clipped & outside) | ((ratio > delta) & (use_clipped == 0))
    return tl.where(silent, 0.0, loss), tl.where(flat, 0.0, -advantage * ratio)


def cispo_surrogate(ratio: Any, advantage: Any, logp: Any, cap: Any) -> Any:
    """-sg(min(r, cap)) A logp, and its slope in logp (CISPO, arXiv 2506.13585 eq. 4, no lower bound)."""
    weight = -zero_safe_product(advantage, tl.where(ratio > cap, cap, ratio))
    return zero_safe_product(weight, logp), weight


def kl_k1(d: Any) -> Any:
    """k1 = -d of d = ref - logp, and its slope in logp."""
    return -d, tl.where(d == d, 1.0, d)


def kl_k2(d: Any) -> Any:
    """k2 = d^2 / 2 of d = ref - logp, and its slope in logp."""
    return d * d * 0.5, -d


def kl_k3(d: Any) -> Any:
    """k3 = exp(d) - d - 1 of d = ref - logp, and its slope in logp, 1 - exp(d).

    Near 0 the difference cancels (at d = 1e-4 in float32 nothing of 5e-9 is left, and it can come out negative), so a
    Taylor polynomial, exact to 1e-17 relative for |d| < 1/4, stands in there.
    """
    tail = 1.0 / 39916800 + d * (1.0 / 479001600 + d * (1.0 / 6227020800 + d * (1.0 / 87178291200)))
    tail = 1.0 / 40320 + d * (1.0 / 362880 + d * (1.0 / 3628800 + d * tail))
    tail = 1.0 / 120 + d * (1.0 / 720 + d * (1.0 / 5040 + d * tail))
    series = d * d * (0.5 + d * (1.0 / 6 + d * (1.0 / 24 + d * tail)))
    near = (d > -0.25) & (d < 0.25)
    growth = tl.exp(d)
    return tl.where(near, series, growth - d - 1.0), tl.where(near, -(d + series), 1.0 - growth)


def token_terms(
    ratio: Any, advantage: Any, logp: Any, weight: Any, ref: Any, lower: Any, upper: Any, delta: Any, dual_clip: Any,
    beta: Any, cispo: Any, weighted: Any, kl: Any, corrected: Any, own_ratio: Any,
) -> Any:  # fmt: skip
    """(loss, slope in the log-ratio, slope in the token's own logp, KL) of a token: surrogate, weight, + beta KL.

    The last five arguments are known when a kernel is compiled: whether the surrogate is CISPO's, whether there is a
    weight, the KL estimator ("none", "k1", "k2", "k3"), whether the ratio multiplies it, and whether the ratio is the
    token's own, so that only the sum of the two slopes counts.
    """
    if cispo:
        loss, slope = cispo_surrogate(ratio, advantage, logp, upper)
    else:
        loss, slope = clipped_surrogate(ratio, advantage, lower, upper, delta, dual_clip)
    if weighted:
        loss = zero_safe_product(weight, loss)
        slope = zero_safe_product(weight, slope)
    own = tl.where(logp == logp, 0.0, logp)
    value = own
    if kl != "none":
        if kl == "k1":
            value, own = kl_k1(ref - logp)
        elif kl == "k2":
            value, own = kl_k2(ref - logp)
        else:
            value, own = kl_k3(ref - logp)
        if corrected:
            value = zero_safe_product(ratio, value)
            if own_ratio and kl == "k3":
                # of (exp(d) - d - 1) + (1 - exp(d)) nothing would be left at d = 20 in float32
                own = zero_safe_product(ratio, logp - ref)
            else:
                own = zero_safe_product(ratio, own)
                slope = slope + beta * value
        loss = loss + beta * value
        own = beta * own
    return loss, slope, own, value
