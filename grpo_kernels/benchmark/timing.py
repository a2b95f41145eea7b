"""How long a step takes: one harness, with a clock for the CPU and one for CUDA devices.

Faults of the field that it keeps out: a missing synchronisation, one in every iteration, the first use of memory and
compilation inside the window, an L2 cache that still holds the inputs, a backward told as a difference of two times.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

Step = Callable[[], Any]
Make = Callable[[], Step]  # prepares a step, outside its time


class Clock(Protocol):
    """Measures steps."""

    def seconds(self, make: Make, repeat: int = 1) -> float:
        """Seconds of one step; with `repeat`, of several in a row, by their number."""


class WallClock:
    """The CPU's clock."""

    def seconds(self, make: Make, repeat: int = 1) -> float:
        """See Clock."""
        steps = [make() for _ in range(repeat)]
        start = time.perf_counter()
        for step in steps:
            step()
        return (time.perf_counter() - start) / repeat


class DeviceClock:
    """CUDA events around the steps, after the L2 cache has been overwritten, and one synchronisation at the end.

    Args:
        device: the device whose current stream the steps run on.
        flush: bytes to overwrite, several times its L2 cache.
        cuda: the module that gives events and graphs, `torch.cuda` if it is not a test's.
    """

    def __init__(self, device: torch.device, flush: int, cuda: Any = torch.cuda) -> None:
        self._cuda = cuda
        self._scratch = torch.empty(flush, dtype=torch.int8, device=device)

    def seconds(self, make: Make, repeat: int = 1) -> float:
        """See Clock."""
        steps = [make() for _ in range(repeat)]
        start, end = (self._cuda.Event(enable_timing=True) for _ in range(2))
        self._scratch.zero_()
        start.record()
        for step in steps:
            step()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3 / repeat

    def replayed(self, make: Make) -> Make:
        """The step as a CUDA graph: what it takes without the cost of its launches.

        Raises:
            RuntimeError: when the step cannot be captured, because it waits for the device, say.
        """
        stream = self._cuda.Stream()
        stream.wait_stream(self._cuda.current_stream())
        with self._cuda.stream(stream):
            for _ in range(3):
                make()()
        self._cuda.current_stream().wait_stream(stream)
        step, graph = make(), self._cuda.CUDAGraph()
        with self._cuda.graph(graph):
            step()
        return lambda: graph.replay


def interleaved(
    work: Mapping[str, Make], clock: Clock, *, rounds: int, warm_up: int, repeat: int = 1
) -> dict[str, list[float]]:
    """Seconds of every round. A round measures each once, in a new order, always the same from run to run.

    Args:
        work: what prepares each step, by name.
        clock: measures it.
        rounds: measurements of each.
        warm_up: rounds before, which count nowhere: they compile, and touch memory that no process had yet.
        repeat: steps in a measurement.
    """
    names = list(work)
    times: dict[str, list[float]] = {name: [] for name in names}
    shuffle = random.Random(0)
    for number in range(warm_up + rounds):
        shuffle.shuffle(names)
        for name in names:
            seconds = clock.seconds(work[name], repeat)
            if number >= warm_up:
                times[name].append(seconds)
    return times


def spread(values: list[float]) -> tuple[float, float, float]:
    """Quartiles: the median between them."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def ratio(values: list[float], base: list[float]) -> float:
    """The median over rounds of the ratio within a round, which what slows a machine for a while leaves alone."""
    return statistics.median(own / other for own, other in zip(values, base, strict=True))
