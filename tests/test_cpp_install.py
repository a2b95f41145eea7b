"""How the C++ kernels come to be built or not: torch, a compiler, GRPO_KERNELS_BUILD_CPP; and what they link to."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest
from cpp_support import needs_cpp
from test_install import COMPUTE, build, copy_tree, run_python, wheel_in

from grpo_kernels.backends import cpp

NO_COMPILER = {"CC": "false", "CXX": "false"}
HERE = "--no-build-isolation"


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_tree(tmp_path_factory.mktemp("tree"))


@pytest.fixture(scope="module")
def compiled(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("c++") is None:
        pytest.skip("there is no C++ compiler here")
    out = tmp_path_factory.mktemp("wheel")
    return wheel_in(out, build(tree, out, HERE, GRPO_KERNELS_BUILD_CPP="1"))


def test_a_build_beside_torch_is_one_wheel_for_every_python(compiled: Path, tmp_path: Path) -> None:
    assert "-cp310-abi3-" in compiled.name
    with zipfile.ZipFile(compiled) as archive:
        names = archive.namelist()
        archive.extractall(tmp_path / "site")
    (library,) = (name for name in names if name.endswith((".so", ".pyd")))
    assert library.startswith("grpo_kernels/_cpp.abi3.") or library.endswith(".pyd")
    program = COMPUTE + "print(gk.backends.last_used(), gk.backends.report()['cpp'])"
    file, loss, *used, report = run_python(program, cwd=tmp_path, tree=tmp_path / "site").split(maxsplit=4)
    assert Path(file).is_relative_to(tmp_path)
    assert float(loss) == pytest.approx(-0.5, abs=1e-6)
    assert used == ["cpp", "one-pass"] and report.startswith("available on CPU tensors")


def test_nothing_but_the_stable_interface_of_torch_is_linked(compiled: Path, tmp_path: Path) -> None:
    """C functions of the shim, and none of Python's: one build serves later versions of both."""
    if shutil.which("nm") is None:
        pytest.skip("there is no nm here")
    with zipfile.ZipFile(compiled) as archive:
        (library,) = (name for name in archive.namelist() if name.endswith(".so"))
        archive.extract(library, tmp_path)
    listing = subprocess.run(["nm", "-D", str(tmp_path / library)], capture_output=True, text=True, check=True).stdout
    wanted = {line.split()[-1].partition("@")[0] for line in listing.splitlines() if " U " in line}
    of_torch = {name for name in wanted if "torch" in name or "c10" in name or name.startswith("_ZN2at")}
    assert of_torch and all(name.startswith(("aoti_torch_", "torch_")) for name in of_torch), of_torch
    assert not {name for name in wanted if name.startswith(("Py", "_Py"))}
    defined = {line.split()[-1] for line in listing.splitlines() if line.split()[-2] == "T"}
    assert {name for name in defined if "grpo_kernels" in name} == {"grpo_kernels_formulas"}


def test_the_wheel_keeps_what_its_abi3_tag_says(compiled: Path) -> None:
    command = [sys.executable, "-m", "abi3audit", "--strict", "--report", str(compiled)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "_cpp.abi3" in done.stdout


@pytest.mark.parametrize(
    "environment", [{"GRPO_KERNELS_BUILD_CPP": "0"}, NO_COMPILER], ids=["not wanted", "no compiler"]
)
def test_without_them_the_wheel_is_pure(environment: dict[str, str], tree: Path, tmp_path: Path) -> None:
    built = wheel_in(tmp_path, build(tree, tmp_path, HERE, **environment))
    assert built.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(built) as archive:
        assert [name for name in archive.namelist() if name.endswith((".so", ".pyd"))] == []
        archive.extractall(tmp_path / "site")
    program = COMPUTE + "print(gk.backends.last_used(), gk.backends.report()['cpp'])"
    _, _, used, report = run_python(program, cwd=tmp_path, tree=tmp_path / "site").split(maxsplit=3)
    assert used == "torch" and "not built" in report and "--no-build-isolation" in report


def test_a_source_that_does_not_compile_is_left_out_unless_insisted_on(tmp_path: Path) -> None:
    broken, out = copy_tree(tmp_path / "tree"), tmp_path / "wheel"
    (broken / "csrc" / "kernels_avx2.cpp").write_text("#error on purpose\n")
    for source in ("ops.cpp", "loss_ops.cpp", "kernels_avx512.cpp", "kernels_baseline.cpp"):
        (broken / "csrc" / source).write_text("\n")  # takes no time
    assert wheel_in(out, build(broken, out, HERE)).name.endswith("-py3-none-any.whl")
    insisted = build(broken, out, HERE, GRPO_KERNELS_BUILD_CPP="1")
    assert insisted.returncode != 0 and "on purpose" in insisted.stdout + insisted.stderr


@pytest.mark.parametrize(
    ("environment", "reason"),
    [({"GRPO_KERNELS_BUILD_CPP": "1"} | NO_COMPILER, "false"), ({"GRPO_KERNELS_BUILD_CPP": "yes"}, "auto, 0 or 1")],
    ids=["no compiler", "unknown value"],
)
def test_what_was_asked_for_and_cannot_be_is_an_error(environment: dict[str, str], reason: str, tmp_path: Path) -> None:
    done = build(copy_tree(tmp_path / "tree"), tmp_path / "wheel", HERE, **environment)
    assert done.returncode != 0 and reason in done.stdout + done.stderr


def test_insisting_in_an_isolated_build_says_how(tree: Path, tmp_path: Path) -> None:
    done = build(tree, tmp_path, GRPO_KERNELS_BUILD_CPP="1")
    assert done.returncode != 0
    assert "needs torch to build against" in done.stdout + done.stderr
    assert "--no-build-isolation" in done.stdout + done.stderr


# Loading


def test_importing_loads_no_library(tmp_path: Path) -> None:
    program = "import torch, grpo_kernels; print(*torch.ops.loaded_libraries)"
    assert "_cpp" not in run_python(program, cwd=tmp_path)


def test_a_library_of_something_else_is_reported_not_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / f"_cpp{EXTENSION_SUFFIXES[0]}").write_bytes(b"not a library")
    monkeypatch.setattr(cpp, "PACKAGE", tmp_path)
    assert "cannot be loaded" in (cpp.load.__wrapped__() or "")


@needs_cpp
@pytest.mark.parametrize("value", ["sse2", "AVX2"])
def test_an_unknown_instruction_set_is_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setenv("GRPO_KERNELS_CPU", value)
    with pytest.raises(RuntimeError, match=f"GRPO_KERNELS_CPU must be avx512, avx2 or baseline, got {value}"):
        torch.ops.grpo_kernels.row_stats_cpp(torch.zeros(1, 2), torch.zeros(1).long(), torch.ones(()), 1.0, None, False)
