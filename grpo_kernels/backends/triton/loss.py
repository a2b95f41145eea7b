"""The whole token-level loss in one pass over the logits: statistics, ratio, clip, KL, loss and slopes of a row."""

import triton
import triton.language as tl

from .gradient import write_gradient
from .language import row_offset, token_terms
from .statistics import row_statistics


@triton.jit
def group_advantage(rewards, sequence, group_size, eps, GROUP: tl.constexpr):
    """(r - mean) / (std + eps) of one response within its group of consecutive ones, ddof 1. Reads group_size rewards.

    NaN rewards are not scored; one scored reward, or equal ones, give exactly 0. Differences from the group's largest
    reward come first, so that a common offset loses no digits, in units of their range, so that no square overflows.
    """
    member = tl.arange(0, GROUP)
    inside = member < group_size
    r = tl.load(rewards + sequence // group_size * group_size + member, mask=inside, other=float("nan"))
    scored = r == r
    count = tl.sum(scored.to(tl.float32), axis=0)
    top = tl.max(tl.where(scored, r, float("-inf")), axis=0)
    bottom = tl.min(tl.where(scored, r, float("inf")), axis=0)
    unit = tl.where(top > bottom, top - bottom, 1.0)
    gap = tl.where(scored, (r - top) / unit, 0.0)
    mean = tl.sum(gap, axis=0) / tl.maximum(count, 1.0)
    residual = tl.where(scored, gap - mean, 0.0)
    deviation = tl.sqrt(tl.sum(residual * residual, axis=0) / tl.maximum(count - 1.0, 1.0))
    own = tl.load(rewards + sequence)
    silent = (own != own) | (top == bottom) | (count <= 1.0)
    return tl.where(silent, 0.0, ((own - top) / unit - mean) / (deviation + eps / unit))


# what steps and layouts of a run change: none of it may compile a kernel anew
_STRIDES = [
    f"{name}_{axis}_stride" for name in ("advantages", "old", "ref", "weight", "share") for axis in ("batch", "token")
]
_ANYWHERE = ["targets", "temperature", "advantages", "old", "ref", "weight", "share", "scale", "entropy_scale"]


@triton.jit(do_not_specialize=["group_size", *_STRIDES], do_not_specialize_on_alignment=_ANYWHERE)
def grpo_loss_fwd_kernel(
    logits, targets, temperature, advantages, old, ref, weight, scalars, share, scale, entropy_scale,
    logps, entropy, row_max, sum_exp, sum_others, ratios, losses, slopes, own_slopes, kls, advantages_out,
    T, V, batch_stride, token_stride, temperature_stride, group_size,
    advantages_batch_stride, advantages_token_stride, old_batch_stride, old_token_stride,
    ref_batch_stride, ref_token_stride, weight_batch_stride, weight_token_stride,
    share_batch_stride, share_token_stride,
    ON_POLICY: tl.constexpr, SURROGATE: tl.constexpr, WEIGHTED: tl.constexpr, KL: tl.constexpr,
    STRAIGHT: tl.constexpr, CORRECTED: tl.constexpr, KL_WEIGHTED: tl.constexpr, GROUP: tl.constexpr,
    GRADIENT: tl.constexpr,
    logit_scale: tl.constexpr, softcap: tl.constexpr, masked_below: tl.constexpr,
    factor: tl.constexpr, ENTROPY: tl.constexpr, SOFTCAP: tl.constexpr, FLOAT: tl.constexpr, LANES: tl.constexpr,
    VEC: tl.constexpr, ALIGNED: tl.constexpr, PAIRED: tl.constexpr, FUSED: tl.constexpr, NVIDIA: tl.constexpr,
):  # fmt: skip
    """This program handles token row n. Reads V logits and its side inputs; a dead row reads nothing and writes 0.

    GRADIENT: `share`, c_i, and `scale`, 1 / Z, are known, so a second sweep, in reverse since the end is still in the
    cache, writes d loss / d logits over the logits.
    """
    n = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + n).to(tl.int32)
    if target < 0:
        tl.store(logps + n, 0.0)
        if ENTROPY:
            tl.store(entropy + n, 0.0)
        tl.store(row_max + n, 0.0)
        tl.store(sum_exp + n, 0.0)
        tl.store(sum_others + n, 0.0)
        tl.store(ratios + n, 1.0)
        tl.store(losses + n, 0.0)
        tl.store(slopes + n, 0.0)
        tl.store(own_slopes + n, 0.0)
        tl.store(kls + n, 0.0)
        tl.store(advantages_out + n, 0.0)
        if GRADIENT:
            nothing = tl.load(scalars) * 0.0
            write_gradient(
                logits + row_offset(n, T, batch_stride, token_stride, ALIGNED),
                logits + row_offset(n, T, batch_stride, token_stride, ALIGNED), 0, V, target, nothing, nothing,
                nothing, nothing, nothing, nothing, nothing, logit_scale, softcap, masked_below, factor,
                ENTROPY, SOFTCAP, FLOAT, LANES * VEC, True, FUSED, NVIDIA,
            )  # fmt: skip
    else:
        row = logits + row_offset(n, T, batch_stride, token_stride, ALIGNED)
        heat = tl.load(temperature + n * temperature_stride)
        logp, spread, _, top, total, others = row_statistics(
            row, target, V, heat, logit_scale, softcap, masked_below, factor,
            ENTROPY, SOFTCAP, FLOAT, LANES, VEC, PAIRED, ALIGNED, FUSED, NVIDIA,
        )  # fmt: skip
        tl.store(logps + n, logp)
        if ENTROPY:
            tl.store(entropy + n, spread)
        tl.store(row_max + n, top)
        tl.store(sum_exp + n, total)
        tl.store(sum_others + n, others)

        sequence = n // T
        token = n % T
        if GROUP > 0:
            advantage = group_advantage(advantages, sequence, group_size, tl.load(scalars + 10), GROUP).to(FLOAT)
        else:
            advantage = tl.load(advantages + sequence * advantages_batch_stride + token * advantages_token_stride)
        gap = tl.where(logp == logp, 0.0, logp)
        if not ON_POLICY:
            gap = logp - tl.load(old + sequence * old_batch_stride + token * old_token_stride)
        rollout = gap
        if WEIGHTED:
            rollout = tl.load(weight + sequence * weight_batch_stride + token * weight_token_stride)
        anchor = logp
        if KL != "none":
            anchor = tl.load(ref + sequence * ref_batch_stride + token * ref_token_stride)
        ratio, loss, slope, own_slope, kl = token_terms(
            gap, advantage, logp, rollout, anchor, tl.load(scalars), tl.load(scalars + 1), tl.load(scalars + 2),
            tl.load(scalars + 3), tl.load(scalars + 4), tl.load(scalars + 5), tl.load(scalars + 6),
            tl.load(scalars + 7), tl.load(scalars + 8), tl.load(scalars + 9),
            SURROGATE, True, WEIGHTED, KL, STRAIGHT, True, CORRECTED, KL_WEIGHTED,
        )  # fmt: skip
        tl.store(ratios + n, ratio)
        tl.store(losses + n, loss)
        tl.store(slopes + n, slope)
        tl.store(own_slopes + n, own_slope)
        tl.store(kls + n, kl)
        tl.store(advantages_out + n, advantage)
        if GRADIENT:
            tl.debug_barrier()  # every lane has read its logits
            part = tl.load(share + sequence * share_batch_stride + token * share_token_stride)
            coef = part * (slope + own_slope) * tl.load(scale)
            entropy_coef = coef
            if ENTROPY:
                entropy_coef = tl.load(entropy_scale)
            write_gradient(
                row, row, 0, V, target, coef, entropy_coef, heat, spread, top, total, others,
                logit_scale, softcap, masked_below, factor,
                ENTROPY, SOFTCAP, FLOAT, LANES * VEC, True, FUSED, NVIDIA,
            )  # fmt: skip
