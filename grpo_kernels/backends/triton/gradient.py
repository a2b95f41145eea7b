"""The gradient of row statistics: one read and one write of a row, split over the vocabulary, in place if wanted."""

import triton
import triton.language as tl

from .language import LOG2E, LOWEST, VANISHED, exponent, row_offset, soft_cap_parts, stored


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
def row_grad_bwd_kernel(
    logits, out, targets, temperature, entropy, row_max, sum_exp, sum_others, grad_logps, grad_entropy,
    T, V, batch_stride, token_stride, out_batch_stride, out_token_stride, temperature_stride,
    logit_scale: tl.constexpr, softcap: tl.constexpr, masked_below: tl.constexpr,
    factor: tl.constexpr, ENTROPY: tl.constexpr, SOFTCAP: tl.constexpr, FLOAT: tl.constexpr, LANES: tl.constexpr,
    VEC: tl.constexpr, BLOCKS: tl.constexpr, ALIGNED: tl.constexpr, FUSED: tl.constexpr, NVIDIA: tl.constexpr,
):  # fmt: skip
    """This program handles BLOCKS blocks of row n. Reads and writes that part of V; a row without gradient only writes."""
    BLOCK: tl.constexpr = LANES * VEC
    n = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * (BLOCKS * BLOCK)
    last = tl.minimum(first + BLOCKS * BLOCK, V)
    whole = first + (last - first) // BLOCK * BLOCK
    row = logits + row_offset(n, T, batch_stride, token_stride, ALIGNED)
    out_row = out + row_offset(n, T, out_batch_stride, out_token_stride, ALIGNED)
    lane = tl.arange(0, BLOCK)

    target = tl.load(targets + n).to(tl.int32)
    g = tl.load(grad_logps + n)
    needed = g != 0
    g_entropy = g * 0.0
    if ENTROPY:
        g_entropy = tl.load(grad_entropy + n)
        needed = needed | (g_entropy != 0)
    if needed & (target >= 0):
        heat = tl.load(temperature + n * temperature_stride)
        slope = (1.0 / heat).to(FLOAT) * factor
        k = slope * LOG2E
        m2 = tl.maximum(tl.load(row_max + n) * k, LOWEST)
        total = tl.load(sum_exp + n)
        weight = -g * slope / total
        entropy_weight = weight
        mean_gap = weight
        # in place, the loop overwrites the target's logit
        x_target = tl.load(row + tl.maximum(target, 0)).to(FLOAT)
        tl.debug_barrier()
        if ENTROPY:
            entropy_weight = -g_entropy * slope / total / LOG2E
            mean_gap = (tl.load(entropy + n) - tl.log(total)) * LOG2E
        for start in tl.range(first, whole, BLOCK, loop_unroll_factor=2):
            x = tl.load(row + start + lane).to(FLOAT)
            grad = grad_of_block(
                x, k, m2, weight, entropy_weight, mean_gap, logit_scale, softcap, masked_below,
                ENTROPY, SOFTCAP, FUSED, NVIDIA,
            )  # fmt: skip
            tl.store(out_row + start + lane, stored(grad, out.dtype.element_ty, FUSED))
        if whole < last:
            inside = whole + lane < last
            x = tl.load(row + whole + lane, mask=inside, other=0.0).to(FLOAT)
            grad = grad_of_block(
                x, k, m2, weight, entropy_weight, mean_gap, logit_scale, softcap, masked_below,
                ENTROPY, SOFTCAP, FUSED, NVIDIA,
            )  # fmt: skip
            tl.store(out_row + whole + lane, stored(grad, out.dtype.element_ty, FUSED), mask=inside)
        if (target >= first) & (target < last):
            tl.debug_barrier()
            grad = target_grad(
                x_target, k, m2, g, g_entropy, slope, total, tl.load(sum_others + n), mean_gap, logit_scale, softcap,
                masked_below, ENTROPY, SOFTCAP, FUSED, NVIDIA,
            )  # fmt: skip
            tl.store(out_row + target, stored(grad, out.dtype.element_ty, FUSED))
    else:
        for start in range(first, whole, BLOCK):
            tl.store(out_row + start + lane, tl.zeros([BLOCK], out.dtype.element_ty))
        if whole < last:
            inside = whole + lane < last
            tl.store(out_row + whole + lane, tl.zeros([BLOCK], out.dtype.element_ty), mask=inside)


@triton.jit
def target_grad(
    x, k, m2, g, g_entropy, slope, total, others, mean_gap,
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
        grad = grad - g_entropy * (e_target / total) * ((y + mean_gap) / LOG2E)
    gone = (e_target == 0.0) & (raw <= masked_below)
    return tl.where(gone, 0.0, grad * slope * derivative)
