"""Every kernel compiled for every GPU target, without a GPU.

Nothing about a kernel's arguments is written twice: the ops of launch.py run for real, on tensors without storage and
under a driver that only names the target. Triton's hook hands over the launch as its cache would see it, signature,
constants and alignments, and stops it there.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any, Final, NamedTuple

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.driver import driver

from . import launch

VERSION: Final[str] = triton.__version__
TARGETS: Final = tuple(launch.TILES)
ROW_OPS: Final = ("row_stats", "row_grad")
LOSS_OPS: Final = ("loss_stats", "loss_grad_")
VOCAB: Final = 151_936  # Qwen's, a multiple of 16 as nearly all are


@dataclass(frozen=True)
class Case:
    """One variant of one kernel on one target: an op of launch.py and what it is compiled for."""

    op: str
    target: str
    dtype: str = "bfloat16"
    entropy: bool = False
    softcap: bool = False
    smallest: bool = False  # the tile of a device that is too small for the table's
    vocab: int = VOCAB
    length: int = 1000  # tokens of a row of the batch
    on_policy: bool = False
    weight: bool = False
    kl: str = "none"
    corrected: bool = False
    straight: bool = False
    kl_weighted: bool = False
    surrogate: str = "clip"
    rewards: bool = False
    out: str = ""  # of a gradient beside the logits: its dtype, if another

    @property
    def itemsize(self) -> int:
        """Bytes of a logit."""
        return torch_dtype(self.dtype).itemsize

    @property
    def name(self) -> str:
        """Its op, its dtype, and all that is not as usual."""
        usual = Case(self.op, self.target, self.dtype)
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        changed = {name: value for name, value in values.items() if value != getattr(usual, name)}
        words = [name if value is True else f"{name}={value}" for name, value in changed.items()]
        return " ".join([self.op, self.dtype, *words])


class Launch(NamedTuple):
    """A kernel's launch as Triton's cache sees it; two with the same key share one compiled kernel."""

    kernel: Any
    key: str
    signature: dict[str, str]
    constants: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], Any]
    options: dict[str, Any]


class Compiled(NamedTuple):
    """A compiled kernel and the seconds it took; `binary` is Triton's own record of it."""

    name: str
    binary: Any
    warp_size: int
    seconds: float


def torch_dtype(name: str) -> torch.dtype:
    """The dtype of a name, `"bfloat16"`."""
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def gpu_target(name: str) -> GPUTarget:
    """Triton's description of an entry of the launch tables."""
    if name.startswith("sm_"):
        return GPUTarget("cuda", int(name[3:]), 32)
    return GPUTarget("hip", name, 64)


class _NoDevice:
    """The part of a Triton driver that comes before a kernel is compiled."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> str:
        return f"{self._target.backend}:{self._target.arch}"  # Triton keeps one cache of kernels for each device

    def get_current_stream(self, _device: str) -> int:
        return 0


def launches(target: str, run: Callable[[], Any], *, smallest: bool = False) -> list[Launch]:
    """The launches that `run` makes when it calls ops of launch.py with `meta` tensors, as on this target.

    Raises:
        RuntimeError: in a process where Triton interprets its kernels.
    """
    if launch.INTERPRETED:
        raise RuntimeError("launches: TRITON_INTERPRET must be unset, got '1'. Compile in a process without it.")
    found: list[Launch] = []

    def record(*, key: str, fn: Any, compile: dict[str, Any], **_rest: Any) -> bool:  # noqa: A002  (Triton's name)
        options = {name: compile[name] for name in ("num_warps", "num_ctas", "num_stages", "enable_fp_fusion")}
        found.append(
            Launch(fn.jit_function, key, compile["signature"], compile["constants"], compile["configs"][0], options)
        )
        return True  # go no further

    gpu = gpu_target(target)
    tile = launch.SMALLEST if smallest else launch.TILES[target]
    with (
        launch.assuming(launch.Target(target, gpu.warp_size, gpu.backend == "cuda"), tile),
        _restored(driver, "_active", _NoDevice(gpu)),
        _restored(knobs.runtime, "jit_cache_hook", record),
    ):
        run()
    return found


@contextlib.contextmanager
def _restored(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def compile_launch(target: str, call: Launch) -> Compiled:
    """Compile one launch for a target; from Triton's cache if it is there."""
    source = ASTSource(call.kernel, call.signature, call.constants, call.attributes)
    gpu = gpu_target(target)
    started = time.perf_counter()
    binary = triton.compile(source, target=gpu, options=call.options)
    return Compiled(call.kernel.__name__, binary, gpu.warp_size, time.perf_counter() - started)


def compile_case(case: Case) -> Compiled:
    """Compile the one kernel that a case launches."""
    (call,) = launches(case.target, lambda: run_case(case), smallest=case.smallest)
    return compile_launch(case.target, call)


def run_case(case: Case) -> None:
    """Call the op of a case with tensors of no storage."""
    dtype = torch_dtype(case.dtype)
    stats = torch.float64 if dtype == torch.float64 else torch.float32
    logits = torch.empty(4, case.length, case.vocab, dtype=dtype, device="meta")
    targets = torch.empty(4, case.length, dtype=torch.int64, device="meta")
    row = torch.empty(4, case.length, dtype=stats, device="meta")
    one = torch.empty((), dtype=stats, device="meta")
    arguments = (logits, targets, one, 1.0, 30.0 if case.softcap else None)
    if case.op == "row_scale_":
        launch.row_scale_(logits, one)
    elif case.op == "row_stats":
        launch.row_stats(*arguments, case.entropy)
    elif case.op == "row_grad":
        grad = torch.empty(logits.shape, dtype=torch_dtype(case.out or case.dtype), device="meta")
        launch.row_grad_into(logits, grad, *arguments[1:], row, row, row, row, row, row if case.entropy else None)
    else:
        share = (row, one, one) if case.op == "loss_grad_" else ()
        launch.loss_stats(*arguments, case.entropy, *_loss_arguments(case, row), *share)


def _loss_arguments(case: Case, row: Tensor) -> tuple[Any, ...]:
    source = (row[:, 0], 4) if case.rewards else (row[:, :1], 0)
    old = None if case.on_policy else row
    ref = None if case.kl == "none" else row
    weight = row if case.weight else None
    kl = case.kl + "+" * (case.straight and case.kl != "none")
    limits = [0.8, 1.2, 4.0, 3.0, 1.0, 1.05, 20.0, 0.1, 20.0, 10.0]
    return (*source, old, ref, weight, limits, case.surrogate, kl, case.corrected, case.kl_weighted)


def usual_cases(target: str, dtypes: tuple[str, ...] = ("bfloat16", "float16", "float32")) -> list[Case]:
    """Every kernel over the vocabulary, with and without entropy and softcap; the loss with all that it can have."""
    everything: dict[str, Any] = {"weight": True, "kl": "k3", "corrected": True}
    return [
        Case(op, target, dtype, entropy, softcap, **(everything if op in LOSS_OPS else {}))
        for op, dtype, softcap, entropy in itertools.product(
            (*ROW_OPS, *LOSS_OPS), dtypes, (False, True), (False, True)
        )
    ]
