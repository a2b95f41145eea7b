"""What the kernels share: the loss formulas as jitted functions, and exponent arithmetic.

A formula is the Python function of `formulas.py` with `triton.language` in place of its torch shim: one source, two
compilers. The exponents are base 2, `y = x * k - m2` in one fused multiply-add, where `k = log2(e) * factor /
temperature` and `m2 = max * k`, rounded: forward and backward round it alike, so a row's terms stay consistent near
-1000 too.
"""

import types
from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

from ... import formulas


def _jitted(function: Callable[..., Any], **names: Any) -> Any:
    # Triton looks up annotations as it does other names
    copy = types.FunctionType(function.__code__, {"tl": tl, "Any": tl.constexpr(None), **names}, function.__name__)
    copy.__module__, copy.__qualname__ = function.__module__, function.__qualname__
    return triton.jit(copy)


def _formulas(*names: str, **known: Any) -> dict[str, Any]:
    """Formulas by name, each with those before it in reach."""
    for name in names:
        known[name] = _jitted(getattr(formulas, name), **known)
    return known


token_terms = _formulas(
    "zero_safe_product", "bounded", "clipped_surrogate", "weighted_logp", "cispo_surrogate", "ratio_surrogate",
    "soft_surrogate", "dro_surrogate", "leaves_tv", "leaves_kl", "kl_k1", "kl_abs", "kl_k2", "kl_k3", "policy_terms",
    "penalised_terms", "token_terms",
)["token_terms"]  # fmt: skip

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-(2.0**100))  # floor of max * k, exact in every dtype: after -inf, -inf - -inf would follow
VANISHED = tl.constexpr(-1100.0)  # exponents floored here are exactly 0 as powers of 2, in float64 too, and finite


@triton.jit
def row_offset(n, T, batch_stride, token_stride, ALIGNED: tl.constexpr):
    """Where row n begins, in elements; int64 since n is. ALIGNED: on 16 elements, so that accesses can be 128 bits."""
    offset = (n // T) * batch_stride + (n % T) * token_stride
    return tl.multiple_of(offset, 16) if ALIGNED else offset


@triton.jit
def exponent(x, k, m2, FUSED: tl.constexpr):
    """x * k - m2, rounded once. The interpreter has no fused multiply-add: float64 stands in for it there."""
    if FUSED:
        return tl.fma(x, k, -m2)
    elif x.dtype == tl.float64:
        return exact_product_minus(x, k, m2)
    else:
        return (x.to(tl.float64) * k - m2).to(x.dtype)


@triton.jit
def exact_product_minus(x, k, m2):
    """x * k - m2 in float64 without a fused multiply-add: what the product lost in rounding is added again (Dekker)."""
    product = x * k
    x_wide = x * 134217729.0
    x_high = x_wide - (x_wide - x)
    k_wide = k * 134217729.0
    k_high = k_wide - (k_wide - k)
    x_low = x - x_high
    k_low = k - k_high
    lost = ((x_high * k_high - product) + x_high * k_low + x_low * k_high) + x_low * k_low
    return (product - m2) + tl.where(lost == lost, lost, 0.0)  # NaN: of infinities and of what overflows


@triton.jit
def stored(x, dtype: tl.constexpr, FUSED: tl.constexpr):
    """x in the output's dtype, rounded to nearest even; the interpreter would truncate to bfloat16."""
    if FUSED or dtype != tl.bfloat16:
        return x.to(dtype)
    else:  # what follows a return is compiled all the same, and a float64 has no 32 bits
        bits = x.to(tl.int32, bitcast=True)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).to(tl.float32, bitcast=True)
        return tl.where(x == x, rounded, x).to(dtype)


@triton.jit
def reciprocal(x, NVIDIA: tl.constexpr):
    """1 / x to 1 ulp in one instruction where there is one."""
    if NVIDIA:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return 1.0 / x


@triton.jit
def log1p(r):
    """log(1 + r) for r in [0, 1]: the rounding of 1 + r is divided out again (Kahan)."""
    u = 1.0 + r
    return tl.where(u == 1.0, r, tl.log(u) * (r / tl.where(u == 1.0, 1.0, u - 1.0)))


@triton.jit
def soft_cap(x, logit_scale: tl.constexpr, softcap: tl.constexpr, masked_below: tl.constexpr, NVIDIA: tl.constexpr):
    """softcap * tanh(logit_scale * x / softcap), to softcap * 2^-22; infinities and finfo.min survive it."""
    r = reciprocal(1.0 + tl.exp2(x * (2.0 * logit_scale / softcap * LOG2E)), NVIDIA)
    return keep_infinite(softcap - 2.0 * softcap * r, x, masked_below)


@triton.jit
def keep_infinite(capped, x, masked_below: tl.constexpr):
    """The tiny share of x is lost in rounding, but for infinities and finfo.min, which it carries through the cap.

    finfo.min, -3.4e38, comes out at -34000; a mask of -1e30 as the cap leaves it.
    """
    if masked_below > -1e30:  # float16 has no number that large
        capped = tl.where(x > masked_below, capped, float("-inf"))
    return x * 1e-34 + capped


@triton.jit
def soft_cap_parts(
    x, logit_scale: tl.constexpr, softcap: tl.constexpr, masked_below: tl.constexpr, NVIDIA: tl.constexpr
):  # fmt: skip
    """soft_cap(x), the same bits, with q and r of its derivative 4 * logit_scale * q * r^2."""
    q = tl.exp2(x * (2.0 * logit_scale / softcap * LOG2E))
    r = reciprocal(1.0 + q, NVIDIA)
    capped = keep_infinite(softcap - 2.0 * softcap * r, x, masked_below)
    return capped, tl.where(q < 1e18, q, 0.0), r  # beyond, the derivative is 0 and q * r would be inf * 0
