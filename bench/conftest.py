"""Options of `pytest bench/ --benchmark-only`."""

from __future__ import annotations

import pytest
import torch

from grpo_kernels.diagnostics import default_device


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("grpo_kernels")
    group.addoption("--full", action="store_true", help="the sizes of `grpo-kernels bench` instead of tiny ones")
    group.addoption("--bench-device", default=None, help="torch device (default: the accelerator, else cpu)")


@pytest.fixture(scope="session")
def device(pytestconfig: pytest.Config) -> torch.device:
    return torch.device(pytestconfig.getoption("--bench-device") or default_device())
