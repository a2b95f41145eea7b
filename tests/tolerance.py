"""The one error budget of the tests: no worse than plain torch in the same precision, plus one rounding."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def as_array(value: Any) -> np.ndarray[Any, Any]:
    """`value` as NumPy without losing precision; 16-bit tensors widen exactly."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        if value.dtype in (torch.bfloat16, torch.float16):
            value = value.float()
        return np.asarray(value.numpy())
    return np.asarray(value)


def assert_within_budget(
    ours: Any,
    ref: Any,
    truth: Any,
    dtype: torch.dtype,
    *,
    floor: Any = 1.0,
    compute: torch.dtype | None = None,
    name: str = "value",
) -> None:
    """Elementwise `|ours - truth| <= |ref - truth| + max(eps(dtype) |truth|, eps(compute) floor)`; NaN where truth is.

    `ref` is plain torch in the test's precision, `truth` the float64 (or longdouble) oracle on the same rounded inputs,
    `dtype` that of `ours` as returned, `compute` that of the arithmetic before the last rounding (default: `dtype`).
    `floor`, a number or an array like `truth`, is the scale below which errors are absolute: 1 for log-probabilities,
    and the oracle's `*_scale` for what is made of them. Infinities must agree exactly. Reports the worst index.
    """
    truth = as_array(truth).astype(np.longdouble)
    ours = as_array(ours).astype(np.longdouble)
    ref = np.broadcast_to(as_array(ref).astype(np.longdouble), truth.shape)
    if ours.shape != truth.shape:
        raise AssertionError(f"{name}: shape {ours.shape}, truth has {truth.shape}")
    if truth.size == 0:
        return
    stored, inner = torch.finfo(dtype), torch.finfo(compute or dtype)
    with np.errstate(all="ignore"):
        error = np.abs(ours - truth)
        budget = np.abs(ref - truth)
        budget = np.where(np.isfinite(budget), budget, 0) + stored.tiny * stored.eps
        budget = budget + np.maximum(stored.eps * np.abs(truth), inner.eps * np.asarray(floor, np.longdouble))
        special = ~np.isfinite(truth)
        same = (ours == truth) | (np.isnan(ours) & np.isnan(truth))
        excess = np.where(special, np.where(same, 0, np.inf), error / budget)
        excess = np.where(np.isnan(excess), np.inf, excess)
    worst = np.unravel_index(int(np.argmax(excess)), excess.shape)
    if excess[worst] > 1:
        at = tuple(int(i) for i in worst)
        raise AssertionError(
            f"{name}: {int((excess > 1).sum())} of {excess.size} beyond the budget; worst at {at}: ours {ours[worst]}, "
            f"plain torch {ref[worst]}, truth {truth[worst]}, error {error[worst]:.3e}, budget {budget[worst]:.3e}"
        )
