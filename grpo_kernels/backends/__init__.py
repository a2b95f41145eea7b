"""Which implementation runs: the only place that looks at a device."""

from __future__ import annotations

import difflib
import os
import warnings
from collections.abc import Callable
from typing import Any, Final

import torch

from .. import ops  # noqa: F401  (registers the ops)
from ..ops.schema import NAMESPACE, last_used

__all__ = ["last_used", "report", "resolve", "row_op"]

ENVIRONMENT: Final = "GRPO_KERNELS_BACKEND"
_IMPLS: Final = ("auto", "triton", "cpp", "torch")
_MISSING: Final = {
    "triton": "the Triton kernels are not built yet in this version",
    "cpp": "the C++ kernels are not built yet in this version",
}
_warned: set[str] = set()


def report() -> dict[str, str]:
    """For each implementation: "available", or why it is not."""
    return {name: _MISSING.get(name, "available") for name in _IMPLS[1:]}


def resolve(function: str, impl: str, device: torch.device) -> str:
    """The implementation that `impl` means on this device: "triton", "cpp" or "torch".

    Raises:
        ValueError: an unknown name.
        RuntimeError: an implementation asked for by name that is not there, with the reason. "auto" never raises.
    """
    asked, source = impl, "impl"
    if impl == "auto":
        asked, source = os.environ.get(ENVIRONMENT) or "auto", ENVIRONMENT
    if asked not in _IMPLS:
        close = difflib.get_close_matches(str(asked), _IMPLS, n=1)
        hint = f"Did you mean {close[0]!r}?" if close else "Choose one of these."
        raise ValueError(f"{function}: {source} must be one of {', '.join(_IMPLS)}, got {asked!r}. {hint}")
    if asked in _MISSING:
        raise RuntimeError(f"{function}: {source}={asked!r} is not available: {_MISSING[asked]}. Use impl='torch'.")
    if asked == "auto" and device.type in ("cuda", "xpu") and not torch.compiler.is_compiling():
        _warn_once(f"{function}: runs the torch implementation on {device.type}: {_MISSING['triton']}.")
    return "torch"


def _warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, stacklevel=4)


def row_op(kind: str, impl: str) -> Callable[..., Any]:
    """The op `row_stats`, `row_grad` or `row_grad_` of one implementation (ops/schema.py)."""
    stem, suffix = (kind[:-1], "_") if kind.endswith("_") else (kind, "")
    op: Callable[..., Any] = getattr(getattr(torch.ops, NAMESPACE), f"{stem}_{impl}{suffix}")
    return op
