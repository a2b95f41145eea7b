"""What a run reports about itself: where its seconds went, its peak memory, the versions it ran with."""

from __future__ import annotations

import importlib.metadata
import platform
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import torch

_REPORTED = ("grpo-kernels", "torch", "transformers", "accelerate", "peft", "reasoning-gym")


def wait_for(device: torch.device) -> None:
    """Until the device has finished what it was given; on the CPU nothing is left to wait for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Stopwatch:
    """Adds up wall-clock seconds by name, over finished device work."""

    def __init__(self, device: torch.device) -> None:
        self.seconds: dict[str, float] = {}
        self._device = device

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time the block, under `name`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            wait_for(self._device)
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


def peak_memory_mb(device: torch.device) -> float:
    """The most memory held so far, in MiB: the allocator's on CUDA, else the process's resident set."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    if sys.platform == "win32":
        return float(psutil.Process().memory_info().peak_wset) / 2**20
    import resource

    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is in bytes there, in KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20


def versions() -> dict[str, str]:
    """Python's version and those of the installed packages that decide a run's numbers."""
    found = {"python": platform.python_version()}
    for package in _REPORTED:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found
