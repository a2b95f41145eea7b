"""Every test starts from the same seed and leaves torch as it found it.

With GRPO_KERNELS_BACKEND=triton the run is another one: a sample of the tests that know nothing of implementations, on
the Triton kernels in the interpreter (`make test` runs both).
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import itertools
import os
import re
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
import pytest
import torch
from interpreter import tamed

if "PYTEST_XDIST_WORKER" in os.environ:  # the workers share the cores
    torch.set_num_threads(1)


def has_accelerator() -> bool:
    return torch.cuda.is_available() or torch.xpu.is_available()


SAMPLED = os.environ.get("GRPO_KERNELS_BACKEND") == "triton"
if SAMPLED or not has_accelerator():
    # read when triton is first imported: kernels are then interpreted on the CPU, here and in child processes
    os.environ.setdefault("TRITON_INTERPRET", "1")

hypothesis.settings.register_profile("local", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, database=None, print_blob=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if SAMPLED:
        sample = list(sample_of(items))
        if importlib.util.find_spec("triton") is None:
            sample[0].add_marker(pytest.mark.skip(reason="triton is not installed"))
            sample = sample[:1]
        config.hook.pytest_deselected(items=[item for item in items if item not in sample])
        items[:] = sample
    if has_accelerator():
        return
    skip = pytest.mark.skip(reason="needs a CUDA, ROCm or XPU device; torch sees none here")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def torch_state() -> Iterator[None]:
    threads, dtype, grad = torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled()
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)
    torch.set_default_dtype(dtype)
    torch.set_grad_enabled(grad)


@pytest.fixture(scope="session", autouse=True)
def tamed_interpreter() -> Iterator[None]:
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if interpreted and importlib.util.find_spec("triton") is not None:
        importlib.import_module("grpo_kernels.backends.triton")  # before a test that takes the variable away
    with tamed() if interpreted else contextlib.nullcontext():
        yield


# The sample: a row costs the interpreter some 20 ms, so of every test function one or two cases run, and a call with
# more rows or columns than are affordable skips its test and says so.

PROMISES = re.compile(r"test_(field_\w+|golden|coefficients)\.py")
MOST_ROWS, MOST_LOGITS = 64, 400_000


def sample_of(items: list[pytest.Item]) -> Iterator[pytest.Item]:
    """The first case of each test of a promise and another, always the same, that the name of the test draws."""
    promises = [item for item in items if isinstance(item, pytest.Function) and PROMISES.fullmatch(item.path.name)]
    for function, group in itertools.groupby(promises, key=lambda item: (item.path.name, item.originalname)):
        cases = list(group)
        affordable = [case for case in cases if parameters(case).get("vocab", 0) <= 600] or cases[:1]
        drawn = affordable[zlib.crc32("/".join(function).encode()) % len(affordable)]
        yield affordable[0]
        if drawn is not affordable[0]:
            yield drawn


def parameters(case: pytest.Function) -> dict[str, Any]:
    return case.callspec.params if hasattr(case, "callspec") else {}


@pytest.fixture(autouse=SAMPLED)
def affordable_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    from grpo_kernels import checks

    check_logits: Callable[..., tuple[torch.Tensor, torch.Tensor]] = checks.check_logits
    check_hidden: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = checks.check_hidden

    def afford(ids: torch.Tensor, columns: int) -> None:
        rows = ids.numel()
        if rows > MOST_ROWS or rows * columns > MOST_LOGITS:
            pytest.skip(f"{rows} rows of {columns} logits take the interpreter too long")

    def logits(*arguments: Any) -> Any:
        checked = check_logits(*arguments)
        afford(checked[1], checked[0].shape[-1])
        return checked

    def hidden(*arguments: Any) -> Any:
        checked = check_hidden(*arguments)
        afford(checked[2], checked[1].shape[0])
        return checked

    monkeypatch.setattr(checks, "check_logits", logits)
    monkeypatch.setattr(checks, "check_hidden", hidden)
