"""Arrays and numbers in and out: NumPy's and torch's alike, float64 inside."""

from __future__ import annotations

import math
import numbers
import operator
from typing import Any

import torch
from torch import Tensor

from ..checks import complain


class NotFiniteError(ValueError):
    """What was measured holds NaN or infinity, or is too large to be squared."""


def array(function: str, argument: str, value: Any, axes: int | None = None) -> Tensor:
    """`value` as a detached real tensor of its own dtype; Python's numbers are float64, as they are in Python."""
    try:
        found = _tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        advice = f"Pass numbers. {error}"
        raise TypeError(complain(function, argument, "must be an array", type(value).__name__, advice)) from error
    if found.is_complex():
        raise TypeError(complain(function, argument, "must be real", found.dtype, "Stack the parts as coordinates."))
    if axes is not None and found.ndim != axes:
        wanted = f"must have {axes} axes"
        raise ValueError(complain(function, argument, wanted, list(found.shape), "Reshape it."))
    return found


def tensor64(function: str, argument: str, value: Any, axes: int | None = None) -> Tensor:
    """`value` as a detached float64 tensor, on its own device where that has float64."""
    found = array(function, argument, value, axes)
    return (found.cpu() if found.device.type == "mps" else found).to(torch.float64)


def _tensor(value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach()
    if type(value).__module__.partition(".")[0] != "numpy":
        return torch.as_tensor(value, dtype=torch.float64)
    if hasattr(value, "mask"):
        raise TypeError("Of a masked array give .filled(nan): its mask would be lost.")
    # torch takes neither another byte order nor negative strides, and warns of what may not be written
    native = value.astype(value.dtype.newbyteorder("="), order="C", copy=not value.flags.writeable)
    return torch.as_tensor(native)


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


def check_finite(function: str, argument: str, values: Tensor, advice: str) -> None:
    """NotFiniteError where a value is NaN or infinite."""
    bad = ~values.isfinite()
    if bad.any():
        where = bad.nonzero()[0].tolist()
        got = f"{values[tuple(where)].item()} at {where}"
        raise NotFiniteError(complain(function, argument, "must be finite", got, advice))


def check_whole(function: str, argument: str, value: Any, least: int, advice: str) -> int:
    """A whole number, Python's or NumPy's, of at least this much."""
    found = _index(function, argument, value, advice)
    if found < least:
        raise ValueError(complain(function, argument, f"must be >= {least}", found, advice))
    return found


def seeded(function: str, seed: Any) -> torch.Generator:
    """A CPU generator that starts from `seed`."""
    found = _index(function, "seed", seed, "Pass a whole number.")
    if not -(1 << 63) <= found < 1 << 64:
        raise ValueError(complain(function, "seed", "must have at most 64 bits", found, "Pass a smaller one."))
    return torch.Generator().manual_seed(found)


def _index(function: str, argument: str, value: Any, advice: str) -> int:
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except (TypeError, ValueError, RuntimeError):
        pass  # said below
    raise TypeError(complain(function, argument, "must be an int", type(value).__name__, advice))


def check_number(function: str, argument: str, value: Any, advice: str, *, least: float = -math.inf) -> float:
    """A finite real number of at least this much."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(complain(function, argument, "must be a number", type(value).__name__, advice))
    found = float(value)
    if not (math.isfinite(found) and found >= least):
        wanted = "must be finite" if least == -math.inf else f"must be at least {least:g}"
        raise ValueError(complain(function, argument, wanted, value, advice))
    return found
