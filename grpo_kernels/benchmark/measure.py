"""One case: every provider checked against float64, then timed in turn with the others."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from .. import backends
from ..inspection.hardware import gpu_of
from .memory import peak_bytes
from .problems import Problem, Shape, dtype_of
from .providers import LINEAR, LOGITS, Loss, Provider
from .timing import Clock, DeviceClock, Make, Step, WallClock, interleaved, ratio, spread

PHASES: Final = ("forward", "backward", "both")
PACKAGES: Final = ("torch", "triton", "transformers", "trl", "liger-kernel", "cut-cross-entropy")
SAMPLE: Final = 2**20  # of a gradient's elements, for the median
ALLOWED: Final = {"float32": 1e-3, "bfloat16": 1e-1, "float16": 1e-2}  # beyond, a gradient is wrong and not imprecise


@dataclass(frozen=True)
class Case:
    """One shape, who is measured on it, and what of the step."""

    shape: Shape
    providers: tuple[str, ...]  # the first of them that has a phase is what the others are compared with there
    phases: tuple[str, ...] = ("both",)
    rounds: int = 11
    warm_up: int = 3  # rounds that count nowhere; 0 where a step is long, and the run that counts memory is enough
    repeat: int = 1  # steps in one measurement, where one is too short
    replay: bool = False  # on CUDA devices, also as a graph


def make_of(phase: str, problem: Problem, loss: Loss, *, bare: bool = False) -> Make:
    """What prepares a phase of a provider's step. The backward is timed by itself, its forward outside the window."""

    def make() -> Step:
        problem.fresh()
        if bare or phase == "forward":
            return loss
        if phase == "backward":
            return loss().backward
        return lambda: loss().backward()

    return make


def gradient_errors(problem: Problem, loss: Loss, truth: list[Tensor]) -> tuple[float, float]:
    """(largest error by the largest gradient, median relative error), each the worse of the leaves."""
    problem.fresh()
    loss().backward()
    grads = problem.gradients()
    if len(grads) != len(truth):
        raise RuntimeError(f"gradient_errors: {len(truth)} gradients must come back, got {len(grads)}.")
    found = []
    for grad, right in zip(grads, truth, strict=True):
        error, size = (grad.double() - right).abs(), right.abs()
        most = float(error.max() / size.max())
        step = -(-size.numel() // SAMPLE)  # a median of them all would take longer than the case
        error, size = (x.flatten()[::step] for x in (error, size))
        found.append((most, float((error[size > 0] / size[size > 0]).median())))
    return max(f[0] for f in found), max(f[1] for f in found)


def measure(
    case: Case, device: torch.device, providers: tuple[Provider, ...] | None = None, *, rounds: int | None = None
) -> dict[str, Any]:
    """Check and time a case.

    Args:
        case: what to measure.
        device: where.
        rounds: instead of the case's own.
        providers: whom `case.providers` names; LOGITS or LINEAR by default.

    Returns:
        For JSON: `errors`, `memory` (bytes) and `phases` by provider; `missing` and `wrong` hold reasons, no times.
    """
    known = {p.name: p for p in providers or (LINEAR if case.shape.hidden else LOGITS)}
    chosen = [known[name] for name in case.providers]
    case = replace(case, rounds=rounds or case.rounds)
    result: dict[str, Any] = {
        "label": case.shape.label, "kind": kind_of(device), "shape": case.shape.record(), "rounds": case.rounds,
        "base": case.providers[0], "precision": {p.name: p.precision for p in chosen}, "errors": {}, "wrong": {},
        "missing": {},
    }  # fmt: skip
    _check(case, chosen, device, result)
    ready = [p for p in chosen if p.name not in result["wrong"] | result["missing"]]
    torch.compiler.reset()  # compiled anew for this shape alone, and never past the limit of recompilations
    problem = Problem(case.shape, device)
    losses = {p.name: p.build(problem) for p in ready}

    def work(phase: str) -> dict[str, Make]:
        return {p.name: make_of(phase, problem, losses[p.name], bare=p.bare) for p in ready if p.has(phase)}

    result["memory"] = {}
    for name, make in work("both").items():
        try:
            if case.warm_up or "compiled" in name:  # else the run that counts memory is the first
                make()()
            result["memory"][name] = peak_bytes(make, device)
        except torch.OutOfMemoryError:
            result["missing"][name] = "the device has too little memory for it"
    ready = [p for p in ready if p.name in result["memory"]]
    clock = clock_of(device)
    times = {
        phase: interleaved(work(phase), clock, rounds=case.rounds, warm_up=case.warm_up, repeat=case.repeat)
        for phase in case.phases
    }
    if case.replay and isinstance(clock, DeviceClock):
        times["both, replayed"] = _replayed(work("both"), clock, case, result)
    yardsticks = times.get("both", {})
    if device.type != "cpu":
        result["clocks"] = clocks()  # while the device is warm
    result["phases"] = {phase: _timed(found, case, phase, device, yardsticks) for phase, found in times.items()}
    return result


def _check(case: Case, chosen: list[Provider], device: torch.device, result: dict[str, Any]) -> None:
    problem = Problem(case.shape.checked(), device, keep=True)
    truth = problem.truth()
    for provider in chosen:
        if (reason := provider.missing(device)) is not None:
            result["missing"][provider.name] = reason
            continue
        if provider.bare:
            continue
        try:
            most, median = gradient_errors(problem, provider.build(problem), truth)
        except Exception as error:  # noqa: BLE001  (whatever another project raises is why it is not measured)
            failing = "wrong" if provider.name.startswith("ours") else "missing"
            result[failing][provider.name] = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
            continue
        result["errors"][provider.name] = [most, median]
        if not most <= ALLOWED[case.shape.dtype]:  # nor NaN
            result["wrong"][provider.name] = f"gradient off by {most:.1e} of its largest value"


def _replayed(work: dict[str, Make], clock: DeviceClock, case: Case, result: dict[str, Any]) -> dict[str, list[float]]:
    graphs: dict[str, Make] = {}
    for name, make in work.items():
        try:
            graphs[name] = clock.replayed(make)
        except RuntimeError as error:
            result["missing"][f"{name}, replayed"] = str(error).partition("\n")[0][:200]
    return interleaved(graphs, clock, rounds=case.rounds, warm_up=case.warm_up) if graphs else {}


def _timed(
    times: dict[str, list[float]], case: Case, phase: str, device: torch.device, yardsticks: dict[str, list[float]]
) -> dict[str, Any]:
    limit = bound_seconds(case.shape, phase.partition(",")[0], device, yardsticks)
    base = next((times[name] for name in case.providers if name in times), [])
    found = {}
    for name, own in times.items():
        low, middle, high = spread(own)
        found[name] = {"ms": 1e3 * middle, "quartiles": [1e3 * low, 1e3 * high], "ratio": ratio(own, base)}
        if limit is not None:
            found[name]["of_bound"] = limit / middle
    return found


def bound_seconds(shape: Shape, phase: str, device: torch.device, times: dict[str, list[float]]) -> float | None:
    """The least time for the bytes of the logits, or for the products: at the data sheet's rate on a GPU of the table,
    elsewhere at that of a plain copy, or of the bare products, measured beside it. None where neither is known.
    """
    if shape.mixed:  # what must be read depends on the rows
        return None
    gpu = gpu_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    if shape.hidden:
        products = {"forward": 1, "backward": 1 if shape.frozen else 2, "both": 2 if shape.frozen else 3}
        flops = 2.0 * shape.tokens * shape.hidden * shape.vocabulary
        if gpu is not None:
            return products[phase] * flops / gpu.tensor
        bare = [spread(own)[1] for name, own in times.items() if name.startswith("bare products")]
        return min(bare) * products[phase] / products["both"] if bare else None
    sweeps = {"forward": 1, "backward": 2, "both": 2}[phase]  # one read, and one write of the gradient
    size = shape.tokens * shape.vocabulary * dtype_of(shape).itemsize
    if gpu is not None:
        return sweeps * size / gpu.memory
    return spread(times["copy"])[1] * sweeps / 2 if "copy" in times else None


def clock_of(device: torch.device) -> Clock:
    """The clock of a device."""
    if device.type == "cpu":
        return WallClock()
    gpu = gpu_of(torch.cuda.get_device_name(device))
    return DeviceClock(device, 4 * (128 * 2**20 if gpu is None else gpu.l2))


def machine(device: torch.device) -> dict[str, Any]:
    """What the numbers were taken with: device, clocks, versions."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "not installed"
    found: dict[str, Any] = {
        "kind": kind_of(device), "processor": _processor(), "cores": os.cpu_count(),
        "threads": torch.get_num_threads(), "python": platform.python_version(), "versions": versions,
        "implementations": backends.report(),
    }  # fmt: skip
    if device.type != "cpu":
        found |= {"device": torch.cuda.get_device_name(device), "clocks": clocks()}
    return found


def kind_of(device: torch.device) -> str:
    """`cpu` or `gpu`: numbers of the two never share a table or a plot."""
    return "cpu" if device.type == "cpu" else "gpu"


def _processor() -> str:
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def clocks() -> str:
    """Of the multiprocessors and the memory, now and at most, as nvidia-smi has them."""
    if shutil.which("nvidia-smi") is None:
        return "nvidia-smi is not here"
    query = "--query-gpu=clocks.sm,clocks.max.sm,clocks.mem,clocks.max.mem,power.draw"
    done = subprocess.run(["nvidia-smi", query, "--format=csv"], capture_output=True, text=True, check=False)
    return (done.stdout or done.stderr).strip()
