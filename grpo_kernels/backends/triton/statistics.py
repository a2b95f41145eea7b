"""Row statistics: the log-prob of a target, entropy and normaliser of one row, in one read of its logits."""

import triton
import triton.language as tl

from .language import LN2, LOG2E, LOWEST, VANISHED, exponent, log1p, row_offset, soft_cap


@triton.jit
def fold(x, LANES: tl.constexpr, WIDTH: tl.constexpr):
    """Neighbours added: (LANES, WIDTH) to (LANES, WIDTH / 2)."""
    a, b = tl.split(tl.reshape(x, [LANES, WIDTH // 2, 2]))
    return a + b


@triton.jit
def lane_sum(x, LANES: tl.constexpr, WIDTH: tl.constexpr):
    """Sum of each lane, (LANES, WIDTH) to (LANES). In a tree of its own: that of tl.sum depends on how wide loads are,
    and so would a row's bits on its strides."""
    if WIDTH == 8:
        x = fold(x, LANES, 8)
    if WIDTH >= 4:
        x = fold(x, LANES, 4)
    if WIDTH >= 2:
        x = fold(x, LANES, 2)
    return tl.reshape(x, [LANES])


@triton.jit
def across_lanes(x, LANES: tl.constexpr):
    """Sum of all lanes, in a tree of its own."""
    x = tl.reshape(x, [1, LANES])
    for level in tl.static_range(12):
        if (LANES >> level) > 1:
            x = fold(x, 1, LANES >> level)
    return tl.sum(tl.reshape(x, [1]), axis=0)


@triton.jit
def load_tiles(
    block, column, pair_column, TILE: tl.constexpr, FLOAT: tl.constexpr, PAIRED: tl.constexpr, ALIGNED: tl.constexpr
):  # fmt: skip
    """Four tiles of a block whose order does not matter: two loads of 128 bits a lane, or four.

    PAIRED: bfloat16 by even and odd columns, since a shift and a mask of 32 bits are cheaper than two conversions.
    """
    if PAIRED and ALIGNED:
        words = block.to(tl.pointer_type(tl.int32)) + pair_column
        first = tl.load(words)
        second = tl.load(words + TILE // 2)
        a = (first << 16).to(tl.float32, bitcast=True)
        b = (first & -65536).to(tl.float32, bitcast=True)
        c = (second << 16).to(tl.float32, bitcast=True)
        d = (second & -65536).to(tl.float32, bitcast=True)
    elif PAIRED:
        a = tl.load(block + 2 * pair_column).to(FLOAT)
        b = tl.load(block + 2 * pair_column + 1).to(FLOAT)
        c = tl.load(block + TILE + 2 * pair_column).to(FLOAT)
        d = tl.load(block + TILE + 2 * pair_column + 1).to(FLOAT)
    else:
        a = tl.load(block + column).to(FLOAT)
        b = tl.load(block + TILE + column).to(FLOAT)
        c = a
        d = b
    return a, b, c, d


@triton.jit
def absorb(
    m, m2, s, e, a, b, c, d, k,
    ENTROPY: tl.constexpr, FOUR: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr, FUSED: tl.constexpr,
):  # fmt: skip
    """Add two or four tiles to each lane's max m, m2 = m * k, sum s and sum of p * y, e. No lane looks at another."""
    top = tl.maximum(a, b)
    if FOUR:
        top = tl.maximum(top, tl.maximum(c, d))
    m = tl.maximum(m, tl.max(top, axis=1))
    new = tl.maximum(m * k, LOWEST)
    shift = m2 - new
    if ENTROPY:
        shift = tl.maximum(shift, VANISHED)
    p, py = pair(a, b, k, new, ENTROPY, FUSED)
    if FOUR:
        p_more, py_more = pair(c, d, k, new, ENTROPY, FUSED)
        p += p_more
        if ENTROPY:
            py += py_more
    if ENTROPY:
        e = (e + shift * s) * tl.exp2(shift) + lane_sum(py, LANES, WIDTH)
    s = s * tl.exp2(shift) + lane_sum(p, LANES, WIDTH)
    return m, new, s, e


@triton.jit
def pair(a, b, k, m2, ENTROPY: tl.constexpr, FUSED: tl.constexpr):
    """2^y of two tiles, added, and p * y likewise."""
    y_a = exponent(a, k, m2[:, None], FUSED)
    y_b = exponent(b, k, m2[:, None], FUSED)
    if ENTROPY:
        y_a = tl.maximum(y_a, VANISHED, propagate_nan=tl.PropagateNan.ALL)
        y_b = tl.maximum(y_b, VANISHED, propagate_nan=tl.PropagateNan.ALL)
    p_a = tl.exp2(y_a)
    p_b = tl.exp2(y_b)
    return p_a + p_b, p_a * y_a + p_b * y_b


@triton.jit
def row_statistics(
    row, target, V, temperature, logit_scale: tl.constexpr, softcap: tl.constexpr, masked_below: tl.constexpr,
    factor: tl.constexpr, ENTROPY: tl.constexpr, SOFTCAP: tl.constexpr, FLOAT: tl.constexpr, LANES: tl.constexpr,
    VEC: tl.constexpr, PAIRED: tl.constexpr, ALIGNED: tl.constexpr, FUSED: tl.constexpr, NVIDIA: tl.constexpr,
):  # fmt: skip
    """(logp, entropy, lse, max, S, R) of one row. Reads V. The target stands apart, so R is exact without it."""
    TILE: tl.constexpr = LANES * VEC
    BLOCK: tl.constexpr = 2 * TILE
    column = tl.arange(0, LANES)[:, None] * VEC + tl.arange(0, VEC)[None, :]
    k = (1.0 / temperature).to(FLOAT) * factor * LOG2E
    m = tl.full([LANES], float("-inf"), FLOAT)
    m2 = tl.full([LANES], LOWEST, FLOAT)
    s = tl.zeros([LANES], FLOAT)
    e = tl.zeros([LANES], FLOAT)

    whole = V // BLOCK
    apart = target // BLOCK
    WIDTH: tl.constexpr = VEC // 2 if PAIRED else VEC
    pair_column = tl.arange(0, LANES)[:, None] * (VEC // 2) + tl.arange(0, VEC // 2)[None, :]
    for part in tl.static_range(2):  # before and after the target's block
        for step in range(0 if part == 0 else apart + 1, tl.minimum(apart, whole) if part == 0 else whole):
            a, b, c, d = load_tiles(row + step * BLOCK, column, pair_column, TILE, FLOAT, PAIRED, ALIGNED)
            if SOFTCAP:
                a = soft_cap(a, logit_scale, softcap, masked_below, NVIDIA)
                b = soft_cap(b, logit_scale, softcap, masked_below, NVIDIA)
                if PAIRED:
                    c = soft_cap(c, logit_scale, softcap, masked_below, NVIDIA)
                    d = soft_cap(d, logit_scale, softcap, masked_below, NVIDIA)
            m, m2, s, e = absorb(m, m2, s, e, a, b, c, d, k, ENTROPY, PAIRED, LANES, WIDTH, FUSED)
    # with a mask: the target's block without the target, and what is left behind the last whole block
    tail = (whole * BLOCK < V) & (apart < whole)
    for step in range(0, 1 + tail.to(tl.int32)):
        at_a = tl.where(step == 0, apart, whole) * BLOCK + column
        at_b = at_a + TILE
        a = tl.load(row + at_a, mask=(at_a < V) & (at_a != target), other=float("-inf")).to(FLOAT)
        b = tl.load(row + at_b, mask=(at_b < V) & (at_b != target), other=float("-inf")).to(FLOAT)
        if SOFTCAP:
            a = soft_cap(a, logit_scale, softcap, masked_below, NVIDIA)
            b = soft_cap(b, logit_scale, softcap, masked_below, NVIDIA)
        m, m2, s, e = absorb(m, m2, s, e, a, b, a, b, k, ENTROPY, False, LANES, VEC, FUSED)

    x_target = tl.load(row + target).to(FLOAT)
    if SOFTCAP:
        x_target = soft_cap(x_target, logit_scale, softcap, masked_below, NVIDIA)
    top = tl.maximum(tl.max(m, axis=0), x_target)
    top_m2 = tl.maximum(top * k, LOWEST)
    shift = tl.maximum(m2 - top_m2, VANISHED)
    others = across_lanes(s * tl.exp2(shift), LANES)
    y_target = exponent(x_target, k, top_m2, FUSED)
    e_target = tl.exp2(y_target)
    total = others + e_target
    likely = e_target >= others
    ratio = tl.where(likely, others / tl.where(likely, e_target, 1.0), 0.0)
    log_total = tl.where(likely, log1p(ratio) + y_target * LN2, tl.log(total))
    # the target's own distance from the max, rounded once; `residue` is what rounding max * k left
    residue = exponent(top, k, top_m2, FUSED) * LN2
    gap = (x_target - top) * factor / temperature
    logp = tl.where(likely, -log1p(ratio), gap - (log_total - residue))
    entropy = logp
    if ENTROPY:
        y_floored = tl.maximum(y_target, VANISHED, propagate_nan=tl.PropagateNan.ALL)
        energy = across_lanes((e + shift * s) * tl.exp2(shift), LANES)
        # a likely target's own y stands in log S and in the energy: taken out of both, since it is a rounding residue
        entropy = tl.where(
            likely,
            log1p(ratio) + (y_floored * others - energy) / total * LN2,
            log_total - (energy + e_target * y_floored) / total * LN2,
        )
        entropy = tl.maximum(entropy, 0.0, propagate_nan=tl.PropagateNan.ALL)
    lse = top * factor / temperature + (log_total - residue)
    # -inf everywhere is no distribution
    if SOFTCAP:
        hopeless = tl.where(top > -2.0 * softcap, 0.0, float("nan"))
    else:
        hopeless = tl.where(top > masked_below, 0.0, float("nan"))
    return logp + hopeless, entropy + hopeless, lse + hopeless, top, total, others + hopeless


@triton.jit
def row_stats_fwd_kernel(
    logits, targets, temperature, logps, entropy, lse, row_max, sum_exp, sum_others,
    T, V, batch_stride, token_stride, temperature_stride,
    logit_scale: tl.constexpr, softcap: tl.constexpr, masked_below: tl.constexpr,
    factor: tl.constexpr, ENTROPY: tl.constexpr, SOFTCAP: tl.constexpr, FLOAT: tl.constexpr, LANES: tl.constexpr,
    VEC: tl.constexpr, ALIGNED: tl.constexpr, PAIRED: tl.constexpr, FUSED: tl.constexpr, NVIDIA: tl.constexpr,
):  # fmt: skip
    """This program handles row n. Reads V logits, writes 6 statistics; a dead row reads nothing and writes 0."""
    n = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + n).to(tl.int32)
    if target < 0:
        tl.store(logps + n, 0.0)
        if ENTROPY:
            tl.store(entropy + n, 0.0)
        tl.store(lse + n, 0.0)
        tl.store(row_max + n, 0.0)
        tl.store(sum_exp + n, 0.0)
        tl.store(sum_others + n, 0.0)
    else:
        row = logits + row_offset(n, T, batch_stride, token_stride, ALIGNED)
        heat = tl.load(temperature + n * temperature_stride)
        logp, spread, log_sum, top, total, others = row_statistics(
            row, target, V, heat, logit_scale, softcap, masked_below, factor,
            ENTROPY, SOFTCAP, FLOAT, LANES, VEC, PAIRED, ALIGNED, FUSED, NVIDIA,
        )  # fmt: skip
        tl.store(logps + n, logp)
        if ENTROPY:
            tl.store(entropy + n, spread)
        tl.store(lse + n, log_sum)
        tl.store(row_max + n, top)
        tl.store(sum_exp + n, total)
        tl.store(sum_others + n, others)
