"""What each room of the package may import from outside it, wherever in a function the import stands.

The order of the layers among themselves is import-linter's contract in pyproject.toml.
"""

from __future__ import annotations

import sys

import grimp
import pytest

# These may use what their extras install; the rest of the library needs torch alone.
FREE = ("benchmark", "cli", "inspection", "integrations", "lab", "training")
TRITON = "grpo_kernels.backends.triton"


@pytest.fixture(scope="module")
def imports() -> set[tuple[str, str]]:
    """Every pair of a module of the package and a package outside it and the standard library that it imports."""
    graph = grimp.build_graph(
        "grpo_kernels", include_external_packages=True, exclude_type_checking_imports=True, cache_dir=None
    )
    ours = {module for module in graph.modules if module.partition(".")[0] == "grpo_kernels"}
    return {
        (module, package)
        for module in ours
        for package in graph.find_modules_directly_imported_by(module) - ours
        if package not in sys.stdlib_module_names
    }


def room(module: str) -> str:
    return [*module.split("."), ""][1]


def under(module: str, parent: str) -> bool:
    return f"{module}.".startswith(f"{parent}.")


def test_library_imports_torch_alone(imports: set[tuple[str, str]]) -> None:
    found = {(m, p) for m, p in imports if room(m) not in FREE and not under(m, TRITON)}
    assert {p for _, p in found} >= {"torch"}
    assert {(m, p) for m, p in found if p != "torch"} == set()


def test_triton_is_imported_by_its_backend_alone(imports: set[tuple[str, str]]) -> None:
    assert {m for m, p in imports if p == "triton" and not under(m, TRITON)} == set()


def test_triton_backend_imports_torch_and_triton_alone(imports: set[tuple[str, str]]) -> None:
    assert {(m, p) for m, p in imports if under(m, TRITON) and p not in {"torch", "triton"}} == set()
