"""What is inside a time that the benchmark takes, and inside a peak of memory."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_kernels import cli
from grpo_kernels.benchmark import memory, timing
from grpo_kernels.benchmark.measure import make_of
from grpo_kernels.benchmark.problems import Problem, Shape

CPU = torch.device("cpu")
SMALL = Shape(4, 3, 37)


class FakeClock:
    """Seconds that a test lets pass."""

    def __init__(self) -> None:
        self.now = 0.0

    def passing(self, seconds: float) -> Callable[[], None]:
        def step() -> None:
            self.now += seconds

        return step


def test_preparation_is_outside_the_time_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock()
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock.now)

    def make() -> timing.Step:
        clock.now += 100.0
        return clock.passing(3.0)

    assert timing.WallClock().seconds(make) == 3.0
    assert timing.WallClock().seconds(make, repeat=4) == 3.0


class FakeCuda:
    """What a device clock asks of torch.cuda; everything it does is in `log`."""

    def __init__(self) -> None:
        self.log: list[str] = []
        cuda = self

        class Event:
            def __init__(self, *, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                cuda.log.append("record")

            def synchronize(self) -> None:
                cuda.log.append("synchronize")

            def elapsed_time(self, _end: Any) -> float:
                return 8.0  # milliseconds

        class Graph:
            def replay(self) -> None:
                cuda.log.append("replay")

        class Stream:
            def wait_stream(self, _other: Any) -> None:
                cuda.log.append("wait")

        self.Event, self.CUDAGraph, self.Stream = Event, Graph, Stream

    def current_stream(self) -> Any:
        return self.Stream()

    @contextmanager
    def stream(self, _stream: Any) -> Iterator[None]:
        yield

    @contextmanager
    def graph(self, _graph: Any) -> Iterator[None]:
        self.log.append("capture")
        yield
        self.log.append("captured")


@pytest.fixture
def device_clock(monkeypatch: pytest.MonkeyPatch) -> tuple[timing.DeviceClock, list[str]]:
    cuda = FakeCuda()
    clock = timing.DeviceClock(CPU, 64, cuda)
    zero = torch.Tensor.zero_

    def flush(tensor: Tensor) -> Tensor:
        cuda.log.append("flush")
        return zero(tensor)

    monkeypatch.setattr(torch.Tensor, "zero_", flush)
    return clock, cuda.log


def logged(log: list[str]) -> timing.Make:
    def make() -> timing.Step:
        log.append("prepare")
        return lambda: log.append("step")

    return make


def test_a_device_is_timed_by_events_after_a_flush_with_one_synchronisation(
    device_clock: tuple[timing.DeviceClock, list[str]],
) -> None:
    clock, log = device_clock
    assert clock.seconds(logged(log), repeat=2) == 0.004
    assert log == ["prepare", "prepare", "flush", "record", "step", "step", "record", "synchronize"]


def test_a_graph_is_captured_warm_and_then_only_replayed(
    device_clock: tuple[timing.DeviceClock, list[str]],
) -> None:
    clock, log = device_clock
    make = clock.replayed(logged(log))
    assert log[-4:] == ["prepare", "capture", "step", "captured"]
    assert log[: log.index("capture")].count("step") == 3
    log.clear()
    clock.seconds(make)
    assert log == ["flush", "record", "replay", "record", "synchronize"]


class Counting:
    """A clock that says how often it was asked, and for what."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def seconds(self, make: timing.Make, repeat: int = 1) -> float:
        self.asked.append(make()())
        return float(len(self.asked)) / repeat


def test_rounds_take_everyone_in_a_new_order_after_the_warm_up() -> None:
    clock, names = Counting(), ["a", "b", "c", "d"]
    work = {name: (lambda name=name: lambda: name) for name in names}
    times = timing.interleaved(work, clock, rounds=6, warm_up=2)
    rounds = [clock.asked[at : at + 4] for at in range(0, 32, 4)]
    assert all(sorted(order) == names for order in rounds)
    assert len({tuple(order) for order in rounds}) > 3
    assert {name: len(own) for name, own in times.items()} == dict.fromkeys(names, 6)
    assert min(min(own) for own in times.values()) == 2 * 4 + 1  # the first eight count nowhere
    again = Counting()
    timing.interleaved(work, again, rounds=6, warm_up=2)
    assert again.asked == clock.asked


def test_ratios_are_taken_within_a_round() -> None:
    draw = random.Random(0)
    slow = [draw.uniform(1, 9) for _ in range(11)]  # a machine that slows both for a while
    assert timing.ratio([2 * s for s in slow], slow) == pytest.approx(2.0)
    assert timing.spread([4.0, 1.0, 2.0, 5.0, 3.0]) == (2.0, 3.0, 4.0)
    assert timing.spread([7.0]) == (7.0, 7.0, 7.0)


def test_the_backward_is_timed_without_its_forward() -> None:
    log: list[str] = []

    class Noted:
        def backward(self) -> None:
            log.append("backward")

    def loss() -> Any:
        log.append("forward")
        return Noted()

    problem = Problem(SMALL)
    for phase, prepared, timed in (
        ("forward", [], ["forward"]),
        ("backward", ["forward"], ["backward"]),
        ("both", [], ["forward", "backward"]),
    ):
        log.clear()
        problem.buffer.zero_()
        step = make_of(phase, problem, loss)()
        assert log == prepared
        assert torch.equal(problem.buffer, problem.source)  # as it was before a step that consumed it
        step()
        assert log == prepared + timed


def test_peak_memory_is_what_is_held_at_once() -> None:
    mebibyte = 2**18  # float32 elements

    def step() -> None:
        first = torch.empty(4 * mebibyte)
        del first
        second, third = torch.empty(2 * mebibyte), torch.empty(3 * mebibyte)
        del second, third

    assert memory.peak_bytes(lambda: step, CPU) == 5 * 2**20
    assert memory.largest(1000, (10, 300), (20, 500)) == 45


@pytest.mark.parametrize(
    ("command", "option"),
    [
        ("bench calls --tiny --rounds 0", "--rounds must be at least 1"),
        ("bench calls --tiny --threads -1", "--threads must be at least 1"),
        ("bench calls --tiny --device nope", "--device nope is not here"),
        ("inspect --workers 0", "--workers must be at least 1"),
    ],
)
def test_options_that_cannot_be_are_one_line(command: str, option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(command.split()) == 2
    assert option in capsys.readouterr().err


def test_the_step_of_a_trainer_can_be_timed() -> None:
    pytest.importorskip("trl")
    root = Path(__file__).parents[1]
    small = ["--vocabulary", "2000", "--hidden", "32", "--length", "16", "--rounds", "1"]
    done = subprocess.run(
        [sys.executable, str(root / "bench" / "trl_step.py"), *small], capture_output=True, text=True, check=False,
        cwd=root, env=os.environ | {"PYTHONPATH": str(root)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout[done.stdout.index("{") :])
    assert '"grpo_kernels"' in json.dumps(found) and '"TRL"' in json.dumps(found)
