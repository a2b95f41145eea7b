"""The steps of `grpo-kernels bench` under pytest-benchmark: `pytest bench/ --benchmark-only`.

    pytest bench/ --benchmark-only -k "linear and both"
    pytest bench/ --benchmark-only --full --bench-device cuda --benchmark-json steps.json

Every provider meets float64 before it is timed. Each runs alone here, one after the other: for ratios between them, and
for every number in README.md, `grpo-kernels bench` takes them in turn.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from grpo_kernels.benchmark.measure import ALLOWED, Case, gradient_errors, make_of
from grpo_kernels.benchmark.problems import Problem, Shape
from grpo_kernels.benchmark.providers import LINEAR, LOGITS, Provider
from grpo_kernels.benchmark.suites import Suites, cpu_suites, gpu_suites, tiny
from grpo_kernels.diagnostics import default_device

pytest.importorskip("pytest_benchmark")
SUITES = ("logits", "linear", "ablation", "mix", "sweep", "calls")
pytestmark = pytest.mark.filterwarnings("default")  # rivals warn as they like
ROUNDS = 5


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    device = torch.device(metafunc.config.getoption("--bench-device") or default_device())
    known: Suites = cpu_suites() if device.type == "cpu" else gpu_suites()
    suites = known if metafunc.config.getoption("--full") else tiny(known)
    cases = [
        pytest.param(case, name, phase, id=f"{suite}-{case.shape.label}-{name}-{phase}".replace(" ", "_"))
        for suite in SUITES
        for case in suites[suite]
        for name in case.providers
        for phase in case.phases
        if provider_of(case, name).has(phase)
    ]
    metafunc.parametrize(("case", "name", "phase"), cases)


def provider_of(case: Case, name: str) -> Provider:
    return next(provider for provider in (LINEAR if case.shape.hidden else LOGITS) if provider.name == name)


@functools.lru_cache(maxsize=2)
def problem_of(shape: Shape, device: torch.device) -> Problem:
    return Problem(shape, device)


@functools.lru_cache(maxsize=2)
def checked_of(shape: Shape, device: torch.device) -> tuple[Problem, list[torch.Tensor]]:
    problem = Problem(shape.checked(), device, keep=True)
    return problem, problem.truth()


def test_step(case: Case, name: str, phase: str, device: torch.device, benchmark: Any) -> None:
    provider = provider_of(case, name)
    if (reason := provider.missing(device)) is not None:
        pytest.skip(reason)
    if not provider.bare:
        checked, truth = checked_of(case.shape, device)
        most, median = gradient_errors(checked, provider.build(checked), truth)
        benchmark.extra_info.update(max_error=most, median_error=median, logits=provider.precision)
        assert most <= ALLOWED[case.shape.dtype], f"gradient off by {most:.1e} of its largest value"
    problem = problem_of(case.shape, device)
    make = make_of(phase, problem, provider.build(problem), bare=provider.bare)

    def synchronised(step: Any) -> None:
        step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # once a round

    benchmark.group = f"{case.shape.label}, {phase}"
    benchmark.pedantic(synchronised, setup=lambda: ((make(),), {}), rounds=ROUNDS, warmup_rounds=2)
