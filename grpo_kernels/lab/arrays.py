"""Arrays in and out: NumPy's and torch's alike, float64 inside."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..checks import complain


def tensor(value: Any) -> Tensor:
    """`value` as a detached tensor of its own dtype; Python's numbers are float64, as they are in Python."""
    typed = isinstance(value, Tensor) or type(value).__module__ == "numpy"
    return torch.as_tensor(value, dtype=None if typed else torch.float64).detach()


def tensor64(function: str, argument: str, value: Any, axes: int | None = None) -> Tensor:
    """`value` as a detached float64 tensor, on its own device where that has float64."""
    try:
        found = tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        advice = f"Pass numbers. {error}"
        raise TypeError(complain(function, argument, "must be an array", type(value).__name__, advice)) from error
    if axes is not None and found.ndim != axes:
        wanted = f"must have {axes} axes"
        raise ValueError(complain(function, argument, wanted, list(found.shape), "Reshape it."))
    return (found.cpu() if found.device.type == "mps" else found).to(torch.float64)


def like(result: Tensor, *inputs: Any) -> Any:
    """`result` in the kind of the inputs: torch if one is a tensor, else NumPy if one is its array, else numbers."""
    if any(isinstance(value, Tensor) for value in inputs):
        return result
    if any(_is_numpy(value) for value in inputs):
        return result.cpu().numpy()
    return result.item() if result.ndim == 0 else result


def _is_numpy(value: Any) -> bool:
    # by name: NumPy need not be installed
    return type(value).__module__ == "numpy" and getattr(value, "ndim", 0) > 0


def check_shape(function: str, argument: str, value: Tensor, shape: tuple[int, ...], whose: str) -> None:
    """ValueError unless `value` has this shape, that of `whose`."""
    if tuple(value.shape) != shape:
        wanted = f"must have the shape {list(shape)} of {whose}"
        raise ValueError(complain(function, argument, wanted, list(value.shape), "Line the arrays up."))
