"""Which implementation runs: the only place that looks at a device."""

from __future__ import annotations

import difflib
import functools
import importlib
import os
import warnings
from collections.abc import Callable
from typing import Any, Final, ParamSpec, TypeVar

import torch
from torch import Tensor

from .. import ops  # noqa: F401  (registers the ops)
from ..config import GRPOLossConfig
from ..objective import whole_field
from ..ops.schema import NAMESPACE, last_used, record
from . import cpp

__all__ = [
    "has_cpp", "last_used", "loss_op", "multiplies_into_wider", "one_kernel_op", "only_overload", "panel_rows",
    "reads_are_free", "record", "report", "resolve", "row_op", "screen_op", "slab_bytes", "slab_rows", "weigh_op",
    "whole_loss_op",
]  # fmt: skip

_P = ParamSpec("_P")
_R = TypeVar("_R")
ENVIRONMENT: Final = "GRPO_KERNELS_BACKEND"
_IMPLS: Final = ("auto", "triton", "cpp", "torch")
_ACCELERATORS: Final = ("cuda", "xpu")
_RECORDED: Final = {"row_stats": "cpp", "row_weights_": "cpp", "loss": "cpp one-pass", "loss_": "cpp one-kernel"}
_warned: set[str] = set()


def report() -> dict[str, str]:
    """For each implementation: "available" (and where), or why it is not."""
    reason = _triton_missing()
    if reason is None:
        reason = "available on CUDA, ROCm and XPU tensors (compiled and interpreted, not yet run on one)"
        if _interpreted():
            reason += ", interpreted on CPU tensors"
    return {"triton": reason, "cpp": _cpp_missing() or "available on CPU tensors", "torch": "available"}


def _constant(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """torch.compiler.assume_constant_result without its import: what is traced takes the answer, not the way to it."""
    setattr(function, "_dynamo_marked_constant", True)  # noqa: B010  (no attribute that a type knows)
    return function


@_constant
def _triton_missing() -> str | None:
    """Why the Triton kernels cannot run at all; None when they can."""
    return _look_for_triton()


@functools.lru_cache
def _look_for_triton() -> str | None:
    try:
        importlib.import_module(".triton", __name__)
    except Exception as error:  # noqa: BLE001  (whatever a missing, broken or foreign triton raises is the reason)
        if isinstance(error, ModuleNotFoundError) and error.name == "triton":
            return "triton is not installed (it comes with the CUDA and ROCm builds of torch)"
        return f"triton cannot be used: {type(error).__name__}: {error}"
    return None


@_constant
def _cpp_missing() -> str | None:
    """Why the C++ kernels cannot run at all; None when they can. The first call loads them."""
    return cpp.load()


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def _unavailable(name: str, device: torch.device) -> str | None:
    """Why an implementation cannot run on this device; None when it can."""
    if name == "torch":
        return None
    if name == "cpp":
        if device.type != "cpu":
            return f"the C++ kernels are for CPU tensors, not for {device.type}"
        return _cpp_missing()
    missing = _triton_missing()
    if missing is not None:
        return missing
    if device.type in _ACCELERATORS:
        return _too_old(device)
    if device.type == "cpu" and _interpreted():
        return None
    return (
        f"Triton compiles for GPUs, not for {device.type} (TRITON_INTERPRET=1, set at start, interprets it on the CPU)"
    )


@_constant
def _too_old(device: torch.device) -> str | None:
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    capability = torch.cuda.get_device_capability(device)
    if capability >= (8, 0):
        return None
    return f"the kernels need compute capability 8.0, this device has {capability[0]}.{capability[1]}"


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
    if asked != "auto":
        reason = _unavailable(asked, device)
        if reason is not None:
            raise RuntimeError(f"{function}: {source}={asked!r} is not available: {reason}. Use impl='torch'.")
        return asked
    if device.type == "cpu" and _cpp_missing() is None:
        return "cpp"
    if device.type not in _ACCELERATORS:
        return "torch"
    reason = _unavailable("triton", device)
    if reason is None:
        return "triton"
    if not torch.compiler.is_compiling():
        _warn_once(f"{function}: runs the torch implementation on {device.type}: {reason}.")
    return "torch"


def _warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, stacklevel=4)


def row_op(kind: str, impl: str) -> Callable[..., Any]:
    """The op `row_stats`, `row_grad` or `row_grad_` of one implementation (ops/schema.py)."""
    stem, suffix = (kind[:-1], "_") if kind.endswith("_") else (kind, "")
    if impl == "cpp" and kind in _RECORDED and not torch.compiler.is_compiling():
        record(_RECORDED[kind])  # the ops of other implementations do it themselves; these hold no Python
    op: Callable[..., Any] = getattr(getattr(torch.ops, NAMESPACE), f"{stem}_{impl}{suffix}")
    return op


def has_cpp() -> bool:
    """Whether the C++ kernels can run."""
    return _cpp_missing() is None


def only_overload(kind: str) -> Callable[..., Any]:
    """A C++ op for whoever keeps it, and records its runs: spares the look at what it is called with."""
    op: Callable[..., Any] = row_op(kind, "cpp").default  # type: ignore[attr-defined]
    return op


def loss_op(config: GRPOLossConfig, impl: str, on_policy: bool) -> Callable[..., Any] | None:
    """The op that makes statistics and token terms in one pass, if one claims this config; None: the general route.

    It takes the rewards of consecutive groups as well as advantages.
    """
    if impl != "triton" or whole_field(config, on_policy) is not None:
        return None
    return row_op("loss_stats", impl)


def one_kernel_op(logits: Tensor, impl: str) -> Callable[..., Any] | None:
    """The op that also leaves the gradient over the logits in the same launch, for a `loss_op`; None: two launches."""
    return row_op("loss_grad_", impl) if _may_hold_gradient(logits) else None


def whole_loss_op(
    config: GRPOLossConfig, impl: str, on_policy: bool, logits: Tensor, inplace: bool
) -> tuple[Callable[..., Any] | None, bool]:
    """The op that makes the loss and its metrics too, if one claims this config; and whether it is the one that leaves
    the gradient over the logits."""
    if impl != "cpp" or whole_field(config, on_policy) is not None:
        return None, False
    over = inplace and _may_hold_gradient(logits)
    return row_op("loss_" if over else "loss", impl), over


def _may_hold_gradient(logits: Tensor) -> bool:
    """Before the upstream gradient is known. With 1/Z inside, most of a float16 gradient would flush to zero before a
    loss scale reaches it."""
    return logits.dtype != torch.float16 and not torch.compiler.is_compiling()


def screen_op(impl: str) -> Callable[..., Any] | None:
    """The op that looks at the tokens of a call in one go, for `screening.live_targets`; None: torch does."""
    return row_op("live_targets", impl) if impl == "cpp" else None


def weigh_op(impl: str, device: torch.device, softcap: float | None) -> Callable[..., Any] | None:
    """row_weights_ of one implementation, where it has one that can serve; else None.

    On the CPU alone: what follows adds at the targets, which elsewhere takes atomics.
    """
    if impl not in ("torch", "cpp") or device.type != "cpu" or softcap is not None:
        return None
    return row_op("row_weights_", impl)


def reads_are_free(device: torch.device) -> bool:
    """Whether Python may look at a tensor's values without waiting for a device."""
    return device.type == "cpu"


def multiplies_into_wider(device: torch.device) -> bool:
    """Whether a matrix product of 16-bit operands can come out in float32; elsewhere the operands are widened first."""
    return device.type == "cuda"


def panel_rows(device: torch.device) -> int:
    """Rows of one forward product of the fused linear form: always as many, so that a row's bits are its own."""
    return 128 if device.type == "cpu" else 512


def slab_rows(device: torch.device, vocabulary: int) -> int:
    """Rows whose logits exist together when nobody says: more do not make the products faster. On a GPU the gradient of
    the weight, which every slab adds to, wants more of them than on a CPU, whose fresh pages cost as well; with a small
    vocabulary what a slab costs besides its products decides."""
    return max(256, min(4096, 2**21 // vocabulary)) if device.type == "cpu" else 2048


def slab_bytes(device: torch.device) -> int:
    """What the logits of a chunk, and their gradient, may take when nobody says: those rows at V = 152 000."""
    return 1 << 28 if device.type == "cpu" else 1 << 31
