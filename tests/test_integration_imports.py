"""Trainers are imported by the integrations alone, each by its own, and by nothing until it is asked for."""

from __future__ import annotations

import subprocess
import sys

import grimp
import pytest

PACKAGE = "grpo_kernels.integrations"
MAY_IMPORT = {
    "fused_forward": {"transformers"},
    "given_logps": set(),
    "head_check": {"transformers"},
    "hf": set(),
    "liger": set(),
    "lm_head": {"transformers"},
    "openrlhf": set(),
    "trl": {"packaging", "transformers", "trl"},
    "trl_loss": set(),
    "trl_options": {"transformers"},
    "verl": {"verl"},
}
"""Beside torch: what each module imports itself."""
TRAINERS = {"liger_kernel", "openrlhf", "trl", "verl"}


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    return grimp.build_graph("grpo_kernels", include_external_packages=True, cache_dir=None)


def external(graph: grimp.ImportGraph, module: str) -> set[str]:
    found = {name.partition(".")[0] for name in graph.find_modules_directly_imported_by(module)}
    return found - {"grpo_kernels", "torch"} - set(sys.stdlib_module_names)


def test_each_integration_imports_its_own_project(graph: grimp.ImportGraph) -> None:
    assert graph.find_children(PACKAGE) == {f"{PACKAGE}.{name}" for name in MAY_IMPORT}
    for name, allowed in MAY_IMPORT.items():
        assert external(graph, f"{PACKAGE}.{name}") == allowed, name


def test_nothing_else_imports_a_trainer_or_an_integration(graph: grimp.ImportGraph) -> None:
    comparing = graph.find_descendants("grpo_kernels.benchmark") | graph.find_descendants("grpo_kernels.inspection")
    for module in graph.find_descendants("grpo_kernels") - graph.find_descendants(PACKAGE):
        assert not external(graph, module) & TRAINERS or module in comparing, module
        assert not any(name.startswith(PACKAGE) for name in graph.find_modules_directly_imported_by(module)), module


@pytest.mark.parametrize("module", ["grpo_kernels", PACKAGE, f"{PACKAGE}.liger", f"{PACKAGE}.openrlhf"])
def test_what_needs_no_trainer_imports_none(module: str) -> None:
    code = f"import sys, {module}; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert module in loaded
    assert not (TRAINERS | {"transformers"}) & set(loaded)


def test_the_package_hands_over_its_submodules() -> None:
    code = "from grpo_kernels import integrations, lab; import grpo_kernels as gk; print(gk.integrations.__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "grpo_kernels.integrations"
