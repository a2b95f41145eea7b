"""What must hold on a device, at full size where there is one, and the script that a GPU is given once."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
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


@pytest.mark.parametrize("name", CHECKS)
def test_it_holds_on_the_cpu(name: str) -> None:
    holds, text = CHECKS[name](torch.device("cpu"), True)
    if holds is None:
        pytest.skip(text)
    assert holds, text


@pytest.mark.gpu
@pytest.mark.parametrize("name", CHECKS)
def test_it_holds_on_a_gpu_at_full_size(name: str) -> None:
    holds, text = CHECKS[name](torch.device("cuda"), False)
    assert holds, text


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


def session(folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    if shutil.which("bash") is None:
        pytest.skip("bash is not here")
    environment = os.environ | {"OUT": str(folder), "GPU_SESSION_DEVICE": "cpu", "PYTHON": sys.executable} | variables
    return subprocess.run(["bash", str(SCRIPT)], capture_output=True, text=True, check=False, env=environment)


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


def test_a_session_without_a_folder_says_so(tmp_path: Path) -> None:
    done = session(tmp_path, OUT="")
    assert done.returncode != 0
    assert "OUT must name the folder" in done.stderr
