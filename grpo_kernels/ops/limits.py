"""Numbers that the torch row ops share."""

from __future__ import annotations

import torch

BLOCK = 512  # columns of one partial sum; two levels keep a float32 sum over 10^5 columns within an ulp or two


def masked_below(dtype: torch.dtype) -> float:
    """Logits at or under this stand for -inf: finfo.min of the dtype, or of bfloat16 where the dtype is wider."""
    return torch.finfo(torch.float16 if dtype == torch.float16 else torch.bfloat16).min


def exp_is_zero_below(dtype: torch.dtype) -> float:
    """Exponents under this are exactly 0 as powers of e."""
    return -750.0 if dtype == torch.float64 else -150.0
