"""What must hold on a device, at full size where there is one, and the script that a GPU is given once."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "bench" / "gpu_session.sh"


def loaded() -> Any:
    spec = importlib.util.spec_from_file_location("device_checks", ROOT / "bench" / "device_checks.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


CHECKS = loaded().CHECKS


def assert_holds(name: str, device: str, *, tiny: bool) -> None:
    """One of the checks; skips where it says why it shows nothing."""
    holds, text = CHECKS[name](torch.device(device), tiny)
    if holds is None:
        pytest.skip(text)
    assert holds, text


@pytest.mark.parametrize("name", CHECKS)
def test_it_holds_on_the_cpu(name: str) -> None:
    assert_holds(name, "cpu", tiny=True)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CHECKS)
def test_it_holds_on_a_gpu_at_full_size(name: str) -> None:
    assert_holds(name, "cuda", tiny=False)


def test_a_check_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    module = loaded()
    right = module.gk.per_token_logps

    def depends_on_its_company(logits: torch.Tensor, ids: torch.Tensor) -> Any:
        out = right(logits, ids)
        return out._replace(logps=out.logps + 1e-6 * (ids.numel() > 1))

    monkeypatch.setattr(module.gk, "per_token_logps", depends_on_its_company)
    holds, text = module.rows_beyond_32_bits(torch.device("cpu"), True)
    assert not holds
    assert "differs from the same row alone" in text

    def broken(*_: Any) -> Any:
        raise RuntimeError("illegal memory access")

    monkeypatch.setattr(module, "CHECKS", {"one": broken, "two": lambda *_: (None, "no device")})
    findings = list(module.found(torch.device("cpu"), True))
    assert [(f["verdict"], f["text"]) for f in findings] == [
        ("FAIL", "RuntimeError: illegal memory access"),
        ("skip", "no device"),
    ]


def test_a_device_that_is_lost_fails_every_check_and_loses_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """After an illegal access each call of CUDA raises, that which empties the cache too."""
    module = loaded()

    def lost(*_: Any) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "empty_cache", lost)
    monkeypatch.setattr(module, "CHECKS", {"one": lost, "two": lost})
    findings = list(module.found(SimpleNamespace(type="cuda"), True))
    assert [(f["check"], f["verdict"]) for f in findings] == [("one", "FAIL"), ("two", "FAIL")]
    assert all("illegal memory access" in f["text"] for f in findings)


def test_what_was_found_is_written_before_the_next_check(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    module, output = loaded(), tmp_path / "cases.json"

    def stopped(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "CHECKS", {"one": lambda *_: (True, "fine"), "two": stopped})
    monkeypatch.setattr(sys, "argv", ["device_checks", "--device", "cpu", "--output", str(output)])
    with pytest.raises(KeyboardInterrupt):
        module.main()
    assert [f["text"] for f in json.loads(output.read_text())["findings"]] == ["fine"]


def test_a_process_that_fails_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    module, script = loaded(), tmp_path / "fails.py"
    script.write_text("raise SystemExit('the reason: out of memory')")
    monkeypatch.setattr(module, "__file__", str(script))
    assert module.fresh_processes_agree(torch.device("cpu"), True) == (
        False, "a process ended with exit code 1: the reason: out of memory",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("kernels", "times", "holds"),
    [
        ([["row_stats_kernel", "add"]] * 2, 1.1, True),
        ([["row_stats_kernel", "add"]] * 2, 1.4, False),
        ([["row_stats_kernel"] * 4] * 2, 1.1, False),
        ([["row_stats_kernel"], ["row_stats_kernel"] * 2], 1.1, False),
        ([["row_stats_kernel"], ["add"]], 1.1, False),
        ([[], []], 1.1, None),
        ([["add"], ["add"]], 1.1, None),
        ([[], []], 1.4, False),
    ],
)
def test_launches_that_no_one_saw_prove_nothing(kernels: list[list[str]], times: float, holds: bool | None) -> None:
    found, text = loaded().judged(kernels, times)
    assert found is holds
    assert ("shows none of our kernels" in text) == (holds is None)


def test_the_memory_of_plain_torch_on_a_cpu_is_no_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRPO_KERNELS_BACKEND", "torch")
    holds, text = CHECKS["memory"](torch.device("cpu"), True)
    assert holds is None
    assert "plain torch" in text


def session(folder: Path | str, cwd: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    if shutil.which("bash") is None:
        pytest.skip("bash is not here")
    environment = os.environ | {"OUT": str(folder), "GPU_SESSION_DEVICE": "cpu", "PYTHON": sys.executable} | variables
    return subprocess.run(
        ["bash", str(SCRIPT)], capture_output=True, text=True, check=False, env=environment, cwd=cwd
    )  # fmt: skip


def test_the_session_runs_from_end_to_end_on_a_cpu(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "out"
    done = session(folder)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr
    summary = (folder / "summary.txt").read_text()
    for step in ("check", "cases", "tests", "bench"):
        assert f"{step}: exit code 0" in summary
    assert len(json.loads((folder / "cpu-session.json").read_text())["cases"]) == 5
    findings = json.loads((folder / "cases.json").read_text())["findings"]
    assert [finding["check"] for finding in findings] == list(CHECKS)
    assert {path.name for path in folder.iterdir()} == {
        "summary.txt", "check.log", "cases.log", "cases.json", "tests.log", "bench.log", "cpu-session.json",
    }  # fmt: skip


def test_a_session_whose_steps_fail_goes_on_and_fails(tmp_path: Path) -> None:
    done = session(tmp_path, PYTHON="false")
    assert done.returncode == 1
    summary = (tmp_path / "summary.txt").read_text()
    assert "check: exit code 1" in summary
    assert "tests: not run" in summary
    assert "bench: exit code 1" in summary


def test_paths_are_those_of_the_caller(tmp_path: Path) -> None:
    interpreter = tmp_path / "python"
    interpreter.write_text("#!/bin/sh\nexit 3\n")
    interpreter.chmod(0o755)
    done = session("new/out", cwd=tmp_path, PYTHON="./python")
    assert done.returncode == 1
    assert "check: exit code 3" in (tmp_path / "new" / "out" / "summary.txt").read_text()


def test_a_session_whose_folder_cannot_be_made_does_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = session("file/out", cwd=tmp_path, PYTHON="false")
    assert done.returncode == 1
    assert done.stdout == ""


def test_a_session_without_a_folder_says_so(tmp_path: Path) -> None:
    done = session(tmp_path, OUT="")
    assert done.returncode != 0
    assert "OUT must name the folder" in done.stderr
