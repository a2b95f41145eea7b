"""Every test starts from the same seed and leaves torch as it found it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import hypothesis
import pytest
import torch

# read when triton is first imported: its kernels are then interpreted, on the CPU, here and in child processes
os.environ.setdefault("TRITON_INTERPRET", "1")

hypothesis.settings.register_profile("local", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, database=None, print_blob=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")


if "PYTEST_XDIST_WORKER" in os.environ:  # the workers share the cores
    torch.set_num_threads(1)


def has_accelerator() -> bool:
    return torch.cuda.is_available() or torch.xpu.is_available()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
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
