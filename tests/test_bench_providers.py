"""Who is compared computes the same loss, or is called wrong; and what bounds a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from grpo_kernels import reference
from grpo_kernels.benchmark import measure as measuring
from grpo_kernels.benchmark import providers, report, suites
from grpo_kernels.benchmark.measure import Case, bound_seconds, measure
from grpo_kernels.benchmark.problems import BETA, EPSILON, EPSILON_HIGH, Problem, Shape
from grpo_kernels.benchmark.providers import LINEAR, LOGITS, Provider
from grpo_kernels.config import GRPOLossConfig

CPU = torch.device("cpu")
SMALL = Shape(4, 3, 37)
LONG = Shape(4, 20, 37)  # more rows than are compared with float64


@pytest.mark.parametrize("shape", [SMALL, replace(SMALL, hidden=5), replace(SMALL, batch=10, mixed=True)], ids=str)
def test_the_truth_is_the_gradient_of_the_loss_in_float64(shape: Shape) -> None:
    problem = Problem(shape)
    config = GRPOLossConfig(epsilon=EPSILON, epsilon_high=EPSILON_HIGH, beta=0.0 if shape.mixed else BETA)
    leaves = [problem.hidden, problem.weight] if shape.hidden else [problem.source]
    leaves = [leaf.double().requires_grad_() for leaf in leaves]
    logits = leaves[0] @ leaves[1].t() if shape.hidden else leaves[0]
    loss = reference.grpo_loss(
        logits, problem.ids, config=config, advantages=problem.advantages.double(), completion_mask=problem.mask,
        old_per_token_logps=problem.old.double(), ref_per_token_logps=problem.ref.double(),
    )  # fmt: skip
    for ours, right in zip(problem.truth(), torch.autograd.grad(loss, leaves), strict=True):
        assert right.abs().max() > 1e-3
        torch.testing.assert_close(ours, right, rtol=1e-12, atol=1e-15)


def test_the_mix_is_what_it_says() -> None:
    problem = Problem(Shape(20, 40, 11, mixed=True))
    assert problem.mask.mean().item() == pytest.approx(0.7, abs=0.02)
    silent = (problem.advantages.reshape(-1, 2) == 0).all(1)
    assert silent.float().mean().item() == pytest.approx(0.4)
    every = Problem(Shape(20, 40, 11))
    assert (every.mask == 1).all() and (every.advantages != 0).all()


def scaled(by: float) -> Callable[[Problem], providers.Loss]:
    eager = next(p for p in LOGITS if p.name == "eager")

    def build(problem: Problem) -> providers.Loss:
        loss = eager.build(problem)
        return lambda: loss() * by

    return build


def raising(_problem: Problem) -> providers.Loss:
    raise NotImplementedError("no such option\nat all")


def exhausting(problem: Problem) -> providers.Loss:
    """Right where rows are few."""
    right = scaled(1.0)(problem)

    def loss() -> torch.Tensor:
        if problem.shape == LONG:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return right()

    return loss


def test_a_wrong_provider_is_shown_as_wrong_and_not_timed() -> None:
    known = (
        Provider("right", scaled(1.0)),
        Provider("wrong", scaled(1.01)),
        Provider("nothing", scaled(float("nan"))),
        Provider("broken", raising),
        Provider("ours, broken", raising),
        Provider("too large", exhausting),
        Provider("absent", scaled(1.0), needs="no_such_package"),
        Provider("elsewhere", scaled(1.0), cuda=True),
        Provider("older torch", scaled(1.0), needs="F.no_such_function"),
    )
    result = measure(Case(LONG, tuple(p.name for p in known), measuring.PHASES, rounds=2, warm_up=0), CPU, known)
    assert [set(result["phases"][phase]) for phase in measuring.PHASES] == [{"right"}] * 3
    assert result["errors"]["right"][0] < 1e-5
    assert result["errors"]["wrong"][0] == pytest.approx(0.01, rel=0.01)
    assert result["errors"]["wrong"][1] == pytest.approx(0.01, rel=0.01)
    assert result["wrong"] == {
        "wrong": "gradient off by 1.0e-02 of its largest value",
        "nothing": "gradient off by nan of its largest value",
        "ours, broken": "NotImplementedError: no such option",
    }
    assert result["missing"] == {
        "broken": "NotImplementedError: no such option",
        "absent": "no_such_package is not installed",
        "elsewhere": "runs on CUDA devices alone",
        "older torch": f"torch {torch.__version__} has no F.no_such_function",
        "too large": "the device has too little memory for it",
    }
    lines = {line[0]: line for line in report.rows(result, "both")}
    assert lines["wrong"][1] == "WRONG, not timed: gradient off by 1.0e-02 of its largest value"
    assert lines["right"][3].count(" to ") == 1
    assert {len(line) for line in lines.values()} == {len(report.COLUMNS)}


RUNNING = [
    pytest.param(provider, id=f"{provider.name}, from {start}")
    for start, known in (("logits", LOGITS), ("hidden states", LINEAR))
    for provider in known
    if "compiled" not in provider.name and not provider.bare
]


@pytest.mark.parametrize("provider", RUNNING)
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.filterwarnings("default")  # rivals warn as they like
def test_every_provider_that_runs_here_computes_the_loss(provider: Provider, mixed: bool) -> None:
    if (reason := provider.missing(CPU)) is not None:
        pytest.skip(reason)
    shape = Shape(10, 3, 41, hidden=8 if provider in LINEAR else 0, mixed=mixed)
    problem = Problem(shape, keep=True)
    most, median = measuring.gradient_errors(problem, provider.build(problem), problem.truth())
    assert most < 1e-5
    assert median < 1e-4


def test_suites_name_providers_that_exist_and_begin_with_ours() -> None:
    for known in (suites.cpu_suites(), suites.gpu_suites(), suites.tiny(suites.gpu_suites())):
        assert set(suites.SUITES) <= set(known)
        for case in (case for cases in known.values() for case in cases):
            names = {p.name for p in (LINEAR if case.shape.hidden else LOGITS)}
            assert set(case.providers) <= names
            assert case.providers[0].startswith("ours")
            assert max(Counter(case.providers).values()) == 1
    assert len(suites.gpu_suites()["session"]) == 5


def test_the_bound_is_a_copy_or_bare_products_on_a_cpu() -> None:
    logits, linear = Shape(2, 3, 100), Shape(2, 3, 100, hidden=7)
    copy = {"copy": [3.0, 1.0, 2.0]}
    assert [bound_seconds(logits, phase, CPU, copy) for phase in measuring.PHASES] == [1.0, 2.0, 2.0]
    products = {"bare products": [9.0], "bare products, input dtype": [6.0]}
    assert [bound_seconds(linear, phase, CPU, products) for phase in measuring.PHASES] == [2.0, 4.0, 6.0]
    frozen = replace(linear, frozen=True)
    assert [bound_seconds(frozen, phase, CPU, products) for phase in measuring.PHASES] == [3.0, 3.0, 6.0]
    assert bound_seconds(logits, "both", CPU, {}) is None
    assert bound_seconds(replace(logits, mixed=True), "both", CPU, copy) is None


def test_the_bound_is_the_data_sheet_on_a_known_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "NVIDIA H200")
    logits = Shape(4, 1000, 48_000, "bfloat16")  # 384 MB at 4.8 TB/s: 80 us
    assert bound_seconds(logits, "forward", device, {}) == pytest.approx(80e-6)
    assert bound_seconds(logits, "both", device, {}) == pytest.approx(160e-6)
    linear = Shape(4, 250, 989_000, "bfloat16", hidden=500)  # a product: 989 GFLOP
    assert bound_seconds(linear, "forward", device, {}) == pytest.approx(1e-3)
    assert bound_seconds(linear, "both", device, {}) == pytest.approx(3e-3)
