"""The README and the docs are true: their Python runs, their commands exist, their links lead somewhere."""

from __future__ import annotations

import contextlib
import re
import warnings
from pathlib import Path

import pytest
from parity_projects import stand_ins

from grpo_kernels import cli

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCKS = [
    pytest.param(block, id=f"{page.name}-{number}")
    for page in PAGES
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
]


@pytest.mark.parametrize("block", BLOCKS)
def test_python_runs(block: str) -> None:
    """As it stands; a block whose first line says what it needs skips where that is not installed."""
    needs = re.match(r"# needs: (\w+)", block)
    with contextlib.ExitStack() as around:
        if needs is not None:
            around.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")  # of other projects
            if needs[1] == "verl":
                around.enter_context(stand_ins())
            pytest.importorskip(needs[1], reason=f"{needs[1]} is not installed")
        exec(compile(block, "docs", "exec"), {"__name__": "docs"})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)|src=\"([^\"]+)\"", page.read_text()):
        link = "".join(target)
        if not link.startswith("http"):
            assert (page.parent / link).exists(), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_make_targets_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"^make ([a-z]+)", page.read_text(), re.MULTILINE)) <= targets


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_exist(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in set(re.findall(r"grpo-kernels ([a-z]+)", page.read_text())):
        with pytest.raises(SystemExit) as stop:
            cli.main([command, "--help"])
        assert stop.value.code == 0
        assert f"example: grpo-kernels {command}" in " ".join(capsys.readouterr().out.split())


def test_every_environment_variable_is_documented() -> None:
    code = "".join(path.read_text() for path in (ROOT / "grpo_kernels").rglob("*.py"))
    documented = (ROOT / "docs" / "environment.md").read_text()
    for variable in set(re.findall(r"GRPO_KERNELS_[A-Z_]+", code)):
        assert f"`{variable}`" in documented, variable
