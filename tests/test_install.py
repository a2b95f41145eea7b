"""What is installed and imported: a pure wheel built without torch, and torch as all that the library needs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
BUILD_INPUTS = [
    "pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md", "Makefile",
    "constraints.txt", "grpo_kernels", "csrc", "tests",
]  # fmt: skip
OPTIONAL = [
    "accelerate", "cut_cross_entropy", "datasets", "flash_attn", "liger_kernel", "math_verify", "matplotlib", "peft",
    "reasoning_gym", "rich", "tokenizers", "tomli", "trackio", "transformers", "triton", "trl",
]  # fmt: skip

BLOCK_OPTIONAL = f"""
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {OPTIONAL!r}:
            raise ModuleNotFoundError("absent: " + name, name=name)
sys.meta_path.insert(0, Absent())
"""

# On-policy, so the ratio is 1; three live tokens: loss = -(1 + 1 - 0.5) / 3.
COMPUTE = """
import torch
import grpo_kernels as gk
out = gk.grpo_loss(torch.zeros(2, 2, 4), torch.tensor([[0, 1], [2, 3]]), advantages=torch.tensor([1.0, -0.5]),
                   completion_mask=torch.tensor([[1, 1], [1, 0]]))
print(gk.__file__, out.loss.item())
"""


def clean_environment() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "GRPO_KERNELS"))}


def run_python(program: str, *, cwd: Path, tree: Path = ROOT) -> str:
    """Standard output of `program` in a new interpreter that takes the package from `tree`."""
    env = clean_environment() | {"PYTHONPATH": str(tree)}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def copy_tree(tree: Path) -> Path:
    """What a build takes, without what earlier builds left."""
    tree.mkdir(exist_ok=True)
    for name in BUILD_INPUTS:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tree / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        elif source.exists():
            shutil.copy(source, tree / name)
    return tree


def build(tree: Path, out: Path, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """`pip wheel` of a tree, into `out`."""
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-cache-dir", "--wheel-dir", str(out), *options]
    env = clean_environment() | environment
    return subprocess.run([*command, str(tree)], cwd=tree, env=env, capture_output=True, text=True, check=False)


def wheel_in(out: Path, done: subprocess.CompletedProcess[str]) -> Path:
    """The one wheel of a build that succeeded."""
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = out.iterdir()
    return built


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that `pip install .` builds from a clean copy of the tree, in an environment without torch."""
    out = tmp_path_factory.mktemp("wheel")
    return wheel_in(out, build(copy_tree(tmp_path_factory.mktemp("tree")), out))


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode())


def requirements(metadata: Message, extra: str | None = None) -> set[str]:
    """Names required by the base install, or by `extra` beyond it, on any platform and Python."""
    found = set()
    for line in metadata.get_all("Requires-Dist", []):
        requirement = Requirement(line)
        of_extra = re.findall(r"extra == ['\"]([\w-]+)['\"]", str(requirement.marker))
        if of_extra == ([] if extra is None else [extra]):
            found.add(requirement.name)
    return found


def test_wheel_of_an_isolated_build_is_pure_and_has_the_package_alone(wheel: Path) -> None:
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    outside = [n for n in names if not re.match(r"grpo_kernels/|grpo_kernels-[^/]+\.dist-info/", n)]
    assert outside == []
    assert "grpo_kernels/py.typed" in names
    assert any(n.endswith("/licenses/LICENSE") for n in names)
    assert [n for n in names if n.endswith((".so", ".pyd", ".dylib", ".pyc"))] == []
    missing = [
        str(path.relative_to(ROOT))
        for path in (ROOT / "grpo_kernels").rglob("*.py")
        if str(path.relative_to(ROOT).as_posix()) not in names
    ]
    assert missing == []


def test_wheel_of_an_isolated_build_computes(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    program = COMPUTE + "print(gk.__version__)"
    file, loss, version = run_python(program, cwd=tmp_path, tree=tmp_path / "site").split()
    assert Path(file).is_relative_to(tmp_path)
    assert version == wheel.name.split("-")[1]
    assert float(loss) == pytest.approx(-0.5, abs=1e-6)


def test_base_requirement_is_torch_alone(metadata: Message) -> None:
    assert requirements(metadata) == {"torch"}


def test_flash_attention_is_required_by_its_own_extra_only(metadata: Message) -> None:
    extras = metadata.get_all("Provides-Extra", [])
    assert {"train", "tracking", "flash", "trl", "bench", "dev"} <= set(extras)
    assert [extra for extra in extras if "flash-attn" in requirements(metadata, extra)] == ["flash"]


def test_triton_is_required_by_the_tests_alone(metadata: Message) -> None:
    lines = [line for line in metadata.get_all("Requires-Dist", []) if Requirement(line).name == "triton"]
    assert [line for line in lines if 'extra == "dev"' not in line] == []


def test_no_requirement_has_an_upper_bound(metadata: Message) -> None:
    bounded = [
        line
        for line in metadata.get_all("Requires-Dist", [])
        if {s.operator for s in Requirement(line).specifier} - {">=", "!="}
    ]
    assert bounded == []


def test_computes_where_torch_is_all_there_is(tmp_path: Path) -> None:
    _, loss = run_python(BLOCK_OPTIONAL + COMPUTE, cwd=tmp_path).split()
    assert float(loss) == pytest.approx(-0.5, abs=1e-6)


def test_command_line_tells_what_runs_where_torch_is_all_there_is(tmp_path: Path) -> None:
    program = "\nfrom grpo_kernels.cli import main; sys.argv[1:] = ['info']; sys.exit(main())"
    assert "torch" in run_python(BLOCK_OPTIONAL + program, cwd=tmp_path)


def test_import_brings_no_package_that_torch_does_not(tmp_path: Path) -> None:
    listing = "\nimport sys; print(*sorted({m.partition('.')[0] for m in sys.modules} - set(sys.stdlib_module_names)))"
    torch_alone = set(run_python("import torch" + listing, cwd=tmp_path).split())
    ours = set(run_python("import grpo_kernels" + listing, cwd=tmp_path).split())
    assert {name for name in ours - torch_alone if not name.startswith("__editable__")} == {"grpo_kernels"}
