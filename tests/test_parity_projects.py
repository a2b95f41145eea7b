"""The projects that the parity tests compare with are there, are the right releases, and leave nothing behind."""

from __future__ import annotations

import dataclasses
import importlib
import re
import sys
from pathlib import Path

import pytest
from parity_projects import ABSENT, ALL_HERE, VERSIONS, StandIn, why_missing

import grpo_kernels as gk

ROOT = Path(__file__).parents[1]
PROJECTS = ("trl", "liger", "verl", "openrlhf")


@pytest.mark.skipif(not ALL_HERE, reason="OpenRLHF's wheel is for Python 3.11 on x86-64 Linux alone")
def test_none_of_them_is_skipped_where_all_can_be_installed() -> None:
    assert {project: why_missing(project) for project in VERSIONS} == dict.fromkeys(VERSIONS)
    for module in ("parity_trl", "parity_verl", "parity_openrlhf", "test_parity_liger"):
        importlib.import_module(module)  # raises Skipped where a project is missing


def test_the_list_that_is_installed_names_their_releases() -> None:
    lines = (ROOT / "parity.txt").read_text() + (ROOT / "constraints.txt").read_text()
    for project, version in VERSIONS.items():
        assert re.search(rf"^{project}(?:$|[=;])", (ROOT / "parity.txt").read_text(), re.MULTILINE), project
        assert re.search(rf"^{project}=={re.escape(version)}(?:$|;)", lines, re.MULTILINE), project


def test_every_option_is_drawn_or_nobody_has_it() -> None:
    """Each field of the config is in a project's test, or docs/conventions.md says that none of the four has it."""
    drawn = "".join((ROOT / "tests" / f"test_parity_{name}.py").read_text() for name in PROJECTS)
    _, _, nobody = (ROOT / "docs" / "conventions.md").read_text().partition("## What no tested project has")
    fields = {field.name for field in dataclasses.fields(gk.GRPOLossConfig)}
    here = {name for name in fields if re.search(rf"\b{name}\b", drawn)}
    absent = set(re.findall(r"`(\w+)[`=]", nobody)) & fields
    assert fields - here - absent == set()


@pytest.mark.parametrize("project", ["verl", "openrlhf"])
def test_the_stand_ins_are_gone_after_the_import(project: str) -> None:
    reason = why_missing(project)
    if reason is not None:
        pytest.skip(reason)
    importlib.import_module(f"parity_{project}")
    left = [name for name in sys.modules if name.partition(".")[0] in ABSENT]
    assert not [name for name in left if isinstance(sys.modules[name], StandIn)]
