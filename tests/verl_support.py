"""What the tests of the integration with verl share: verl's own losses, and ours registered beside them."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest
from parity_projects import stand_ins


@pytest.fixture(scope="module")
def verl() -> ModuleType:
    """verl's own losses on plain tensors; skips where verl is missing."""
    return importlib.import_module("parity_verl")


@pytest.fixture(scope="module")
def ours(verl: ModuleType) -> ModuleType:
    """The integration, which registers itself with verl."""
    with stand_ins():
        return importlib.import_module("grpo_kernels.integrations.verl")
