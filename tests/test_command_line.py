"""`grpo-kernels info` and `check` say what is true here, and the exit code of a failed check is 1."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from support import default_impl

from grpo_kernels import cli, diagnostics


def test_info_names_versions_implementations_and_environment(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["info"]) == 0
    lines = dict(line.split(None, 1) for line in capsys.readouterr().out.splitlines() if not line.startswith("impl"))
    assert lines["torch"] == torch.__version__
    assert "GRPO_KERNELS_BACKEND" in lines
    assert "GRPO_KERNELS_CHECK" in lines


def test_check_passes_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert out.count("ok    ") == 15
    assert "FAIL" not in out
    assert f"cpu, implementation {default_impl()}: all within budget" in out


@pytest.mark.parametrize("fault", [1e-4, float("nan")])
def test_check_fails_with_a_fault(
    fault: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = diagnostics.per_token_logps

    def wrong(*tensors: torch.Tensor, **options: object) -> object:
        out = right(*tensors, **options)  # type: ignore[arg-type]
        return out._replace(logps=out.logps + fault)

    monkeypatch.setattr(diagnostics, "per_token_logps", wrong)
    assert cli.main(["check", "--device", "cpu"]) == 1
    assert "FAIL  log-probs at V = 151936, torch.float32" in capsys.readouterr().out


def test_check_of_a_missing_implementation_gives_the_reason() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "grpo_kernels.cli", "check", "--device", "cpu", "--impl", "triton"],
        capture_output=True, text=True, check=False, env=os.environ | {"TRITON_INTERPRET": "0"},
    )  # fmt: skip
    assert run.returncode == 2
    assert "not available" in run.stderr
    assert "Traceback" not in run.stderr


def test_an_unknown_command_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["chekc"])
    assert stop.value.code == 2
    assert "chekc" in capsys.readouterr().err
