"""The scalar formulas of the losses: the one copy, run on torch tensors and, jitted, inside Triton kernels.

Each function is branch-free and uses arithmetic, comparisons and three names of `triton.language`, `exp`, `log` and
`where`, that `tl` below gives to torch. A value and its derivative come together, so neither drifts from the other.
Limits that are switched off are `inf`. Where a factor of 0 meets an infinite value the result is selected, never
multiplied; a NaN input gives NaN (comparisons are written such that NaN falls through).
"""

from __future__ import annotations

from typing import Any

import torch


class TorchLanguage:
    """The part of `triton.language` that the formulas use, on tensors."""

    exp = staticmethod(torch.exp)
    log = staticmethod(torch.log)

    @staticmethod
    def where(condition: torch.Tensor, a: Any, b: Any) -> torch.Tensor:
        """torch.where, which would first make a tensor of a number."""
        if isinstance(a, float) and isinstance(b, torch.Tensor) and b.shape == condition.shape:
            return b.masked_fill(condition, a)
        return torch.where(condition, a, b)


tl: Any = TorchLanguage


def zero_safe_product(weight: Any, value: Any) -> Any:
    """weight * value, but exactly 0 where one of them is 0 and the other infinite."""
    nothing = ((weight == 0) & (value == value)) | ((value == 0) & (weight == weight))
    return tl.where(nothing, 0.0, weight * value)


def bounded(value: Any, limit: Any) -> Any:
    """value, at most limit in size, and whether it was more: there torch.clamp passes no gradient."""
    above = value > limit
    below = value < -limit
    return tl.where(above, limit, tl.where(below, -limit, value)), above | below


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


def weighted_logp(weight: Any, logp: Any) -> Any:
    """weight * logp and its slope in logp: a policy gradient with a weight that has none."""
    return zero_safe_product(weight, logp), weight


def cispo_surrogate(ratio: Any, advantage: Any, logp: Any, lower: Any, cap: Any) -> Any:
    """-sg(clip(r, lower, cap)) A logp, and its slope in logp (CISPO, arXiv 2506.13585 eq. 4; lower 0: no bound)."""
    clipped = tl.where(ratio < lower, lower, tl.where(ratio > cap, cap, ratio))
    return weighted_logp(-zero_safe_product(advantage, clipped), logp)


def ratio_surrogate(ratio: Any, advantage: Any) -> Any:
    """-r A, and its slope in log r."""
    loss = -zero_safe_product(advantage, ratio)
    return loss, loss


def soft_surrogate(ratio: Any, advantage: Any, tau_pos: Any, tau_neg: Any) -> Any:
    """-(4 / tau) sigmoid(tau (r - 1)) A, tau by the sign of A, and its slope in log r (SAPO, arXiv 2511.20347)."""
    zero = tl.where(ratio == ratio, 0.0, ratio)  # of two bare numbers torch would make a float32
    tau = tl.where(advantage > 0, zero + tau_pos, zero + tau_neg)
    x = tau * (ratio - 1.0)
    decay = tl.exp(tl.where(x < 0, x, -x))  # the smaller of e^x and e^-x cannot overflow
    share = 1.0 / (1.0 + decay)
    gate = tl.where(x < 0, decay * share, share)
    slope = zero_safe_product(ratio, decay) * (share * share)
    return -advantage * (4.0 / tau * gate), -advantage * (4.0 * slope)


def dro_surrogate(log_ratio: Any, advantage: Any, logp: Any, beta: Any) -> Any:
    """-(A logp - beta / 2 (log r)^2), its slope in log r, and that in logp (DRO as verl 0.9.1 has it)."""
    loss, own = weighted_logp(-advantage, logp)
    return loss + 0.5 * beta * log_ratio * log_ratio, beta * log_ratio, own


def leaves_tv(gap: Any, advantage: Any, logp: Any, low: Any, high: Any) -> Any:
    """Whether an update would leave the total variation |pi - pi_old| of one token (DPPO, arXiv 2602.04879)."""
    change = tl.exp(logp) - tl.exp(logp - gap)
    return ((advantage > 0) & (change > high)) | ((advantage <= 0) & (change < -low))


def leaves_kl(gap: Any, advantage: Any, logp: Any, low: Any, high: Any) -> Any:
    """The same by the KL of the two-way choice "this token or another" (DPPO; 1e-8 as in verl 0.9.1)."""
    p, old = tl.exp(logp), tl.exp(logp - gap)
    kl = (1.0 - old) * tl.log((1.0 - old + 1e-8) / (1.0 - p + 1e-8)) - zero_safe_product(old, gap)
    return ((advantage > 0) & (kl > high) & (p > old)) | ((advantage <= 0) & (kl > low) & (p < old))


def one_sided_log_ratio(log_ratio: Any, advantage: Any, lower: Any, upper: Any) -> Any:
    """log r, at most `upper` where A > 0 and at least `lower` elsewhere, and whether it was cut (GMPO, 2507.20673)."""
    above = (advantage > 0) & (log_ratio > upper)
    below = (advantage <= 0) & (log_ratio < lower)
    return tl.where(above, upper, tl.where(below, lower, log_ratio)), above | below


def gamma_weight(log_weight: Any, advantage: Any, k_pos: Any, lambda_pos: Any, k_neg: Any, lambda_neg: Any) -> Any:
    """exp(lambda + k W - lambda exp(W)) of a sequence's log-weight W, by the sign of A, 0 if not finite (VESPO)."""
    good = advantage >= 0
    zero = tl.where(log_weight == log_weight, 0.0, log_weight)
    k = tl.where(good, zero + k_pos, zero + k_neg)
    lam = tl.where(good, zero + lambda_pos, zero + lambda_neg)
    phi = tl.exp(lam + k * log_weight - lam * tl.exp(log_weight))
    return tl.where((phi == phi) & (phi < float("inf")), phi, 0.0)


def kl_k1(d: Any) -> Any:
    """k1 = -d of d = ref - logp, and its slope in logp."""
    return -d, tl.where(d == d, 1.0, d)


def kl_abs(d: Any) -> Any:
    """|d| of d = ref - logp, and its slope in logp."""
    return tl.where(d < 0, -d, d), tl.where(d > 0, -1.0, tl.where(d < 0, 1.0, d))


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


def policy_terms(
    surrogate: Any, ratio: Any, log_ratio: Any, gap: Any, advantage: Any, logp: Any,
    lower: Any, upper: Any, delta: Any, dual_clip: Any, first: Any, second: Any,
) -> Any:  # fmt: skip
    """(loss, slope in the log-ratio, slope in the token's own logp) of a token's policy term.

    `surrogate`, known when a kernel is compiled, names it; `first` and `second` are its own numbers. `gap` is
    logp - old, `log_ratio` what the ratio is the exponential of.
    """
    own = tl.where(logp == logp, 0.0, logp)
    slope = own
    if surrogate == "clip":
        loss, slope = clipped_surrogate(ratio, advantage, lower, upper, delta, dual_clip)
    elif surrogate == "cispo":
        loss, own = cispo_surrogate(ratio, advantage, logp, lower, upper)
    elif surrogate == "sapo":
        loss, slope = soft_surrogate(ratio, advantage, first, second)
    elif surrogate == "gpg":
        loss, own = weighted_logp(-advantage, logp)
    elif surrogate == "dro":
        loss, slope, own = dro_surrogate(log_ratio, advantage, logp, first)
    elif surrogate == "ratio":
        loss, slope = ratio_surrogate(ratio, advantage)
    else:
        if surrogate == "dppo_tv":
            leaves = leaves_tv(gap, advantage, logp, lower, upper)
        else:
            leaves = leaves_kl(gap, advantage, logp, lower, upper)
        loss, own = cispo_surrogate(ratio, advantage, logp, 0.0, first)
        loss, own = tl.where(leaves, 0.0, loss), tl.where(leaves, 0.0, own)
    return loss, slope, own


def penalised_terms(
    loss: Any, slope: Any, own: Any, ratio: Any, moving: Any, logp: Any, weight: Any, ref: Any, beta: Any,
    most_gap: Any, most_kl: Any, weighted: Any, kl: Any, straight: Any, kl_bounded: Any, corrected: Any,
    kl_weighted: Any, own_ratio: Any,
) -> Any:  # fmt: skip
    """(loss, slope, own slope, KL): a policy term times the weight of the rollout, + beta KL of d = ref - logp.

    The last seven arguments are known when a kernel is compiled: whether there is a weight, the KL estimator ("none",
    "k1", "abs", "k2", "k3"), whether its gradient is that of k2 instead, whether |d| and the value have bounds
    (`most_gap`, `most_kl`, without gradient beyond; a straight gradient has none), whether the ratio multiplies the
    KL, whether the weight does, and whether the ratio's gradient is the token's own, `moving` where it has one: then
    the KL's slope is in `own` alone.
    """
    if weighted:
        loss = zero_safe_product(weight, loss)
        slope = zero_safe_product(weight, slope)
        own = zero_safe_product(weight, own)
    value = tl.where(logp == logp, 0.0, logp)
    if kl != "none":
        d = ref - logp
        held = d
        cut = d != d
        if kl_bounded:
            held, cut = bounded(d, most_gap)
        if kl == "k1":
            value, kl_slope = kl_k1(held)
        elif kl == "abs":
            value, kl_slope = kl_abs(held)
        elif kl == "k2":
            value, kl_slope = kl_k2(held)
        else:
            value, kl_slope = kl_k3(held)
        if kl_bounded:
            value, over = bounded(value, most_kl)
            cut = cut | over
            kl_slope = tl.where(cut, 0.0, kl_slope)
        if straight:
            kl_slope = -d
        through_ratio = value
        if corrected:
            if own_ratio:
                both = kl_slope + value
                if kl == "k3" and not straight:
                    # of (exp(d) - d - 1) + (1 - exp(d)) nothing would be left at d = 20 in float32
                    both = tl.where(cut, value, -d)
                kl_slope = tl.where(moving, both, kl_slope)
            value = zero_safe_product(ratio, value)
            kl_slope = zero_safe_product(ratio, kl_slope)
            through_ratio = value
        if kl_weighted:
            value = zero_safe_product(weight, value)
            kl_slope = zero_safe_product(weight, kl_slope)
            through_ratio = value
        if corrected and not own_ratio:
            slope = slope + beta * through_ratio
        loss = loss + beta * value
        own = own + beta * kl_slope
    return loss, slope, own, value


def token_terms(
    gap: Any, advantage: Any, logp: Any, weight: Any, ref: Any,
    lower: Any, upper: Any, delta: Any, dual_clip: Any, first: Any, second: Any, most_log_ratio: Any,
    beta: Any, most_gap: Any, most_kl: Any,
    surrogate: Any, ratio_bounded: Any, weighted: Any, kl: Any, straight: Any, kl_bounded: Any, corrected: Any,
    kl_weighted: Any,
) -> Any:  # fmt: skip
    """(ratio, loss, slope in the log-ratio, slope in the token's own logp, KL) of a token with its own ratio.

    The ratio is exp(gap) of gap = logp - old, if `ratio_bounded` of a gap of at most `most_log_ratio`, beyond which it
    has no gradient. The coefficient of the token's logp is the sum of both slopes.
    """
    log_ratio = gap
    moving = gap == gap
    if ratio_bounded:
        log_ratio, stuck = bounded(gap, most_log_ratio)
        moving = stuck == 0
    ratio = tl.exp(log_ratio)
    loss, slope, own = policy_terms(
        surrogate, ratio, log_ratio, gap, advantage, logp, lower, upper, delta, dual_clip, first, second
    )
    loss, slope, own, value = penalised_terms(
        loss, slope, own, ratio, moving, logp, weight, ref, beta, most_gap, most_kl,
        weighted, kl, straight, kl_bounded, corrected, kl_weighted, True,
    )  # fmt: skip
    if ratio_bounded:
        slope = tl.where(moving, slope, 0.0)
    return ratio, loss, slope, own, value


def held_back(
    bounds: Any, surrogate: Any, ratio: Any, gap: Any, advantage: Any, logp: Any, lower: Any, upper: Any, delta: Any,
    limited: Any,
) -> Any:  # fmt: skip
    """Whether the clip of a loss holds a token back for falling below its bounds, and for rising above them.

    `bounds` says what they bound (see `loss_types.LossType`); `limited`: whether there is a `delta`. A cap has no low.
    """
    good = advantage > 0
    if bounds == "divergence":
        if surrogate == "dppo_tv":
            out = leaves_tv(gap, advantage, logp, lower, upper)
        else:
            out = leaves_kl(gap, advantage, logp, lower, upper)
        low, high = out & (advantage <= 0), out & good
    else:
        used = ratio
        if bounds == "log_ratio":
            used = gap
        if limited:
            used = tl.where(used > delta, delta, used)
        low, high = (used < lower) & (advantage < 0), (used > upper) & good
    return low, high
