"""The gradient of row statistics: one read and one write of a row, split over the vocabulary, in place if wanted."""

import triton
import triton.language as tl

from .language import LN2, LOG2E, LOWEST, VANISHED, exponent, log1p, row_offset, soft_cap_parts, stored

DEAD = tl.constexpr(-1)


@triton.jit
def grad_of_block(
    x, k, m2, weight, entropy_weight, mean_gap,
    logit_scale: tl.constexpr, softcap: tl.constexpr, masked_below: tl.constexpr,
    ENTROPY: tl.constexpr, SOFTCAP: tl.constexpr, FUSED: tl.constexpr, NVIDIA: tl.constexpr,
):  # fmt: skip
    """-p * (g + g_H * (y + mean gap)) * slope for columns that are not the target; weight = -g * slope / S."""
    if SOFTCAP:
        x, q, r = soft_cap_parts(x, logit_scale, softcap, masked_below, NVIDIA)
    y = exponent(x, k, m2, FUSED)
    if ENTROPY:
        y = tl.maximum(y, VANISHED, propagate_nan=tl.PropagateNan.ALL)
        grad = tl.exp2(y) * (weight + entropy_weight * (y + mean_gap))
    else:
        grad = tl.exp2(y) * weight
    if SOFTCAP:
        # 1 - tanh^2 as 4 q / (1 + q)^2: the difference would cancel
        grad = grad * (4.0 * logit_scale) * (q * r) * r
    return grad


@triton.jit
def write_gradient(
    row, out_row, first, last, target, g, g_entropy, heat, entropy, row_max, total, others,
    logit_scale: tl.constexpr, softcap: tl.constexpr, masked_below: tl.constexpr, factor: tl.constexpr,
    ENTROPY: tl.constexpr, SOFTCAP: tl.constexpr, FLOAT: tl.constexpr, BLOCK: tl.constexpr, REVERSE: tl.constexpr,
    FUSED: tl.constexpr, NVIDIA: tl.constexpr,
):  # fmt: skip
    """Columns [first, last) of a row's gradient. Reads and writes them once; without gradient it only writes."""
    lane = tl.arange(0, BLOCK)
    count = (last - first) // BLOCK
    end = first + count * BLOCK
    inside = end + lane < last
    needed = g != 0
    if ENTROPY:
        needed = needed | (g_entropy != 0)
    if needed & (target != DEAD):
        slope = (1.0 / heat).to(FLOAT) * factor
        k = slope * LOG2E
        m2 = tl.maximum(row_max * k, LOWEST)
        weight = -g * slope / total
        entropy_weight = weight
        mean_gap = weight
        if ENTROPY:
            entropy_weight = -g_entropy * slope / total / LOG2E
            mean_gap = (entropy - tl.log(total)) * LOG2E
        # of a part of the vocabulary, and of that part's own programs, not every one holds the target
        here = (target >= first) & (target < last)
        x_target = tl.load(row + target, mask=here, other=0.0).to(FLOAT)
        tl.debug_barrier()  # in place, the sweep overwrites the target's logit
        if end < last:
            x = tl.load(row + end + lane, mask=inside, other=0.0).to(FLOAT)
            grad = grad_of_block(
                x, k, m2, weight, entropy_weight, mean_gap, logit_scale, softcap, masked_below,
                ENTROPY, SOFTCAP, FUSED, NVIDIA,
            )  # fmt: skip
            tl.store(out_row + end + lane, stored(grad, out_row.dtype.element_ty, FUSED), mask=inside)
        for step in tl.range(0, count, loop_unroll_factor=2):
            start = first + (count - 1 - step if REVERSE else step) * BLOCK
            x = tl.load(row + start + lane).to(FLOAT)
            grad = grad_of_block(
                x, k, m2, weight, entropy_weight, mean_gap, logit_scale, softcap, masked_below,
                ENTROPY, SOFTCAP, FUSED, NVIDIA,
            )  # fmt: skip
            tl.store(out_row + start + lane, stored(grad, out_row.dtype.element_ty, FUSED))
        if here:
            tl.debug_barrier()
            grad = target_grad(
                x_target, k, m2, g, g_entropy, slope, total, others, entropy, logit_scale, softcap, masked_below,
                ENTROPY, SOFTCAP, FUSED, NVIDIA,
            )  # fmt: skip
            tl.store(out_row + target, stored(grad, out_row.dtype.element_ty, FUSED))
    else:
        nothing = tl.zeros([BLOCK], out_row.dtype.element_ty)
        for step in range(0, count):
            tl.store(out_row + first + step * BLOCK + lane, nothing)
        if end < last:
            tl.store(out_row + end + lane, nothing, mask=inside)


@triton.jit
def row_grad_bwd_kernel(
    logits, out, targets, temperature, entropy, row_max, sum_exp, sum_others, grad_logps, grad_entropy,
    T, V, batch_stride, token_stride, out_batch_stride, out_token_stride, temperature_stride,
    logit_scale: tl.constexpr, softcap: tl.constexpr, masked_below: tl.constexpr,
    factor: tl.constexpr, ENTROPY: tl.constexpr, SOFTCAP: tl.constexpr, FLOAT: tl.constexpr, LANES: tl.constexpr,
    VEC: tl.constexpr, BLOCKS: tl.constexpr, ALIGNED: tl.constexpr, FUSED: tl.constexpr, NVIDIA: tl.constexpr,
):  # fmt: skip
    """This program handles BLOCKS blocks of row n. Reads and writes that part of V, or only writes zeros."""
    BLOCK: tl.constexpr = LANES * VEC
    n = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * (BLOCKS * BLOCK)
    g = tl.load(grad_logps + n)
    g_entropy = g
    spread = g
    if ENTROPY:
        g_entropy = tl.load(grad_entropy + n)
        spread = tl.load(entropy + n)
    write_gradient(
        logits + row_offset(n, T, batch_stride, token_stride, ALIGNED),
        out + row_offset(n, T, out_batch_stride, out_token_stride, ALIGNED),
        first, tl.minimum(first + BLOCKS * BLOCK, V), tl.load(targets + n).to(tl.int32), g, g_entropy,
        tl.load(temperature + n * temperature_stride), spread, tl.load(row_max + n), tl.load(sum_exp + n),
        tl.load(sum_others + n), logit_scale, softcap, masked_below, factor,
        ENTROPY, SOFTCAP, FLOAT, BLOCK, False, FUSED, NVIDIA,
    )  # fmt: skip


@triton.jit
def target_grad(
    x, k, m2, g, g_entropy, slope, total, others, entropy,
    logit_scale: tl.constexpr, softcap: tl.constexpr, masked_below: tl.constexpr,
    ENTROPY: tl.constexpr, SOFTCAP: tl.constexpr, FUSED: tl.constexpr, NVIDIA: tl.constexpr,
):  # fmt: skip
    """g * R / S at the target, never g * (1 - p); 0 where the target's logit stands for -inf."""
    raw = x
    derivative = 1.0
    if SOFTCAP:
        x, q, r = soft_cap_parts(x, logit_scale, softcap, masked_below, NVIDIA)
        derivative = (4.0 * logit_scale) * (q * r) * r
    y = exponent(x, k, m2, FUSED)
    e_target = tl.exp2(y)
    grad = g * (others / total)
    if ENTROPY:
        y = tl.maximum(y, VANISHED, propagate_nan=tl.PropagateNan.ALL)
        likely = e_target >= others
        certain = -log1p(tl.where(likely, others / tl.where(likely, e_target, 1.0), 0.0))
        logp = tl.where(likely, certain, y * LN2 - tl.log(total))
        grad = grad - g_entropy * (e_target / total) * (logp + entropy)
    gone = (e_target == 0.0) & (raw <= masked_below) & (others == others)  # NaN: the whole row is
    return tl.where(gone, 0.0, grad * slope * derivative)


@triton.jit
def scale_kernel(logits, factor, T, V, batch_stride, token_stride, BLOCK: tl.constexpr, FUSED: tl.constexpr):
    """This program multiplies one block of row n by an upstream gradient; by 1, the usual one, it touches nothing."""
    by = tl.load(factor)
    if by != 1.0:
        n = tl.program_id(0).to(tl.int64)
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        at = logits + row_offset(n, T, batch_stride, token_stride, False) + column
        x = tl.load(at, mask=column < V, other=0.0).to(by.dtype)
        # what has no gradient keeps none, whatever comes from above
        tl.store(at, stored(tl.where(x == 0.0, x, x * by), logits.dtype.element_ty, FUSED), mask=column < V)
