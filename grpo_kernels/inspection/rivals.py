"""Other projects' Triton kernels for the same work, compiled as their own code launches them."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from ..backends.triton.compile import Compiled

VOCAB = 151_936
TEMPERATURE = 0.9  # a constant of their kernels: at 1 the compiler leaves it out
KERNELS = {"liger": ("forward", "backward"), "trl": ("forward", "backward")}
MODULES = {"liger": "liger_kernel.ops.grpo_loss", "trl": "trl.kernels.logprob_entropy"}
PACKAGES = {"liger": "liger-kernel", "trl": "trl"}


@dataclass(frozen=True)
class Rival:
    """One kernel of another project on one target: Liger's GRPO loss, TRL's log-probs with entropy."""

    project: str
    sweep: str  # "forward" or "backward": the order of its launches
    target: str
    dtype: str = "bfloat16"

    @property
    def itemsize(self) -> int:
        """Bytes of a logit."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype.itemsize

    @property
    def name(self) -> str:
        """Its project, sweep and dtype."""
        return f"{self.project} {self.sweep} {self.dtype}"


def missing(project: str) -> str | None:
    """Why a project's kernels cannot be read here; None if they can."""
    module = MODULES[project]
    if importlib.util.find_spec(module.partition(".")[0]) is None:
        return f"{PACKAGES[project]} is not installed"
    try:
        found = importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of the package between the two
        found = False
    return None if found else f"the installed {PACKAGES[project]} has no {module}"


def rivals(targets: list[str], dtypes: list[str]) -> list[Rival]:
    """Every kernel of every project that is here, for every target."""
    return [
        Rival(project, sweep, target, dtype)
        for target in targets
        for project in KERNELS
        if missing(project) is None
        for sweep in KERNELS[project]
        for dtype in dtypes
    ]


def compile_rival(rival: Rival) -> Compiled:
    """Compile one kernel: its project's function runs on tensors without storage, up to each launch.

    Raises:
        RuntimeError: when the project launches another number of kernels than its version here was read with.
    """
    from ..backends.triton.compile import compile_launch, launches

    run = {"liger": _run_liger, "trl": _run_trl}[rival.project]
    found = launches(rival.target, lambda: run(getattr(torch, rival.dtype)))
    sweeps = KERNELS[rival.project]
    if len(found) != len(sweeps):
        names = [call.kernel.__name__ for call in found]
        raise RuntimeError(f"compile_rival: {rival.project} must launch {len(sweeps)} kernels, got {names}.")
    return compile_launch(rival.target, found[sweeps.index(rival.sweep)])


def _meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _run_liger(dtype: torch.dtype) -> None:
    from liger_kernel.ops.grpo_loss import GrpoLossFunction

    logits = _meta(4, 1001, VOCAB, dtype=dtype).requires_grad_()
    row, ids = _meta(4, 1000), _meta(4, 1000, dtype=torch.int64)
    arguments: tuple[Any, ...] = (logits, row, row, ids, _meta(4), row, TEMPERATURE, 0.04, 0.2, 0.28, False, "dapo")
    GrpoLossFunction.apply(*arguments)[0].backward()


def _run_trl(dtype: torch.dtype) -> None:
    from trl.kernels.logprob_entropy import selective_log_softmax_and_entropy

    logits = _meta(4, 1000, VOCAB, dtype=dtype).requires_grad_()
    logps, entropy = selective_log_softmax_and_entropy(logits, _meta(4, 1000, dtype=torch.int64), TEMPERATURE)
    (logps.sum() + entropy.sum()).backward()
