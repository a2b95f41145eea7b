"""What the benchmark prints, writes and draws; and the published numbers are those of the committed results."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_kernels import cli
from grpo_kernels.benchmark import plots, report
from grpo_kernels.benchmark.command import rounded
from grpo_kernels.benchmark.problems import Shape

ROOT = Path(__file__).parents[1]


def case_of(label: str, times: dict[str, float], kind: str = "cpu") -> dict[str, Any]:
    results = {n: {"ms": t, "quartiles": [t, t], "ratio": t, "of_bound": 2.0 / t} for n, t in times.items()}
    return {
        "label": label, "kind": kind, "phases": {"both": results}, "memory": {}, "errors": {}, "wrong": {},
        "missing": {}, "precision": {},
    }  # fmt: skip


def test_a_gpu_faster_than_its_memory_is_not_believed() -> None:
    shares = {kind: report.rows(case_of("", {"ours": 1.0}, kind), "both")[0][5] for kind in ("cpu", "gpu")}
    assert shares == {"cpu": "200", "gpu": "200 (not believed)"}


def test_the_row_where_we_lose_most_is_found() -> None:
    won = case_of("won", {"ours": 1.0, "ours, in place": 0.5, "eager": 0.9, "copy": 0.1})
    lost = case_of(
        "lost",
        {
            "ours": 3.0,
            "ours, lean": 4.0,
            "ours, log-probs + eager objective": 2.1,
            "eager": 2.0,
            "TRL": 2.5,
            "bare products": 0.1,
        },
    )
    assert report.worst_loss([{"cases": [won]}, {"cases": [lost]}]) == ("lost", "both", "ours", "eager", 1.5)
    assert report.worst_loss([{"cases": [won]}]) is None


def test_the_largest_batch_counts_inputs_that_grow() -> None:
    mebibyte = 2**20

    def case(length: int, held: int) -> dict[str, Any]:
        shape = Shape(1, length, 2**18, "float32").record()  # a mebibyte of logits a token
        return {"shape": shape, "memory": {"ours": held * mebibyte}}

    assert report.largest_lengths([case(10, 7), case(20, 27)], 117 * mebibyte) == [
        ["ours (from logits)", "17", "47", "43"]  # 3 a token, -13 without one
    ]


def test_bench_writes_json_that_can_be_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["bench", "sweep", "memory", "--tiny", "--device", "cpu", "--rounds", "3", "--output", str(tmp_path)]
    assert cli.main(command) == 0
    assert "sweep, both: bfloat16 N=16 V=500" in capsys.readouterr().out
    found = json.loads((tmp_path / "cpu-sweep.json").read_text())
    assert found["machine"]["versions"]["torch"] == torch.__version__
    assert found["machine"]["kind"] == "cpu"
    assert len(found["cases"]) == 6
    for case in found["cases"]:
        assert case["rounds"] == 3
        assert case["wrong"] == {}
        assert case["memory"]["ours, in place"] < case["memory"]["ours"] < case["memory"]["eager"]
        assert case["phases"]["both"]["ours, in place"]["ratio"] == 1.0
    assert cli.main(["bench", "--plots", str(tmp_path)]) == 0
    assert sorted(p.name for p in tmp_path.glob("*.png")) == ["cpu-sweep.png"]
    assert (tmp_path / "cpu-sweep.png").read_bytes().startswith(b"\x89PNG")


def test_the_mix_runs_from_the_command_line_with_every_rival(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "grpo_kernels.cli", "bench", "mix", "--tiny", "--device", "cpu"]
    done = subprocess.run(
        [*command, "--output", str(tmp_path)], capture_output=True, text=True, check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    logits, linear = json.loads((tmp_path / "cpu-mix.json").read_text())["cases"]
    assert {"ours", "ours, in place", "eager", "compiled"} <= set(logits["phases"]["both"])
    assert {"ours, fast", "ours, lean", "eager"} <= set(linear["phases"]["both"])


def test_what_is_not_there_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, text in (
        (["logit"], "SUITE must be among logits, linear"),
        (["logits", "--device", "meta"], "--device must be a CPU or a CUDA device, got meta"),
        (["--plots", str(tmp_path)], "--plots must be a folder with JSON"),
    ):
        assert cli.main(["bench", *arguments]) == 2
        assert text in capsys.readouterr().err


def test_numbers_are_rounded_to_what_they_tell() -> None:
    assert rounded({"a": [1.23456789, 7, "x", None], "b": 123456.7}) == {"a": [1.235, 7, "x", None], "b": 123500.0}


@pytest.fixture(scope="module")
def pages() -> Any:
    """bench/pages.py as a module."""
    spec = importlib.util.spec_from_file_location("bench_pages", ROOT / "bench" / "pages.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_published_numbers_are_those_of_the_committed_results(pages: Any) -> None:
    for file in pages.PAGES:
        text = file.read_text()
        assert pages.page(text) == text, f"{file.name}: run python bench/pages.py"
        assert "<!-- bench: " in text
        assert text.count("<!-- bench: ") == text.count("<!-- end of bench -->")
    readme = pages.PAGES[0].read_text()
    assert readme.count("MiB |") > 10
    assert "We lose" in readme or "Where we lose most" in readme


def test_every_published_time_has_its_memory_and_its_error_beside_it(pages: Any) -> None:
    """Memory saved and time lost belong in one table, for each shape and rival."""
    files = sorted(pages.RESULTS.glob("[cg]pu-*.json"))
    assert files
    for case in (case for file in files for case in json.loads(file.read_text())["cases"]):
        timed = {name for results in case["phases"].values() for name in results}
        assert timed <= set(case["memory"]), case["label"]
        assert {name for name in timed if not name.startswith(("bare", "copy"))} <= set(case["errors"]), case["label"]
        assert case["base"] in timed


def test_a_page_changes_with_its_results(pages: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "before <!-- bench: headline-logits -->\nold\n<!-- end of bench --> after"
    monkeypatch.setattr(pages, "RESULTS", tmp_path)
    assert pages.page(text) == text.replace("old", "Not measured yet.")
    case = case_of("a shape", {"ours, in place": 2.0, "eager": 3.0}) | {"base": "ours, in place"}
    case["wrong"] = {"TRL": "off"}
    case["memory"] = {"eager": 30 * 2**20}
    machine = {"processor": "a chip", "threads": 2, "versions": {"torch": "9", "trl": "not installed"}}
    (tmp_path / "cpu-logits.json").write_text(json.dumps({"machine": machine, "cases": [case]}))
    made = pages.page(text)
    assert "| a shape | 2.0 ms |  | 3.00 ×, 30 MiB |  | wrong |" in made
    assert "a chip, 2 threads; torch 9." in made


def test_a_cpu_and_a_gpu_share_no_plot(tmp_path: Path) -> None:
    for kind in ("cpu", "gpu"):
        machine = {"kind": kind, "processor": "chip", "versions": {"torch": "9"}}
        found = {"suite": "x", "machine": machine, "cases": [case_of("a", {"ours": 1.0, "eager": 2.0})]}
        (tmp_path / f"{kind}-x.json").write_text(json.dumps(found))
        plots.draw(found, tmp_path / f"{kind}-x.png")
    assert (tmp_path / "cpu-x.png").stat().st_size > 1000 < (tmp_path / "gpu-x.png").stat().st_size


def test_the_steps_run_under_pytest_benchmark(tmp_path: Path) -> None:
    pytest.importorskip("pytest_benchmark")
    file = tmp_path / "steps.json"
    command = [sys.executable, "-m", "pytest", "bench", "--benchmark-only", "-p", "no:cacheprovider", "-k", "calls"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    environment["PYTHONPATH"] = str(ROOT)
    done = subprocess.run(
        [*command, f"--benchmark-json={file}", "--bench-device=cpu"], capture_output=True, text=True, check=False,
        cwd=ROOT, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    found = json.loads(file.read_text())["benchmarks"]
    assert {entry["extra_info"]["logits"] for entry in found} == {"float32"}
    assert all(entry["extra_info"]["max_error"] < 1e-5 and entry["stats"]["rounds"] == 5 for entry in found)
    assert len(found) == 3


def test_the_page_of_the_integrations_has_the_numbers_of_its_record() -> None:
    found = json.loads((ROOT / "bench" / "results" / "trl-step-cpu.json").read_text())["results"]
    page = " ".join((ROOT / "docs" / "integrations.md").read_text().split())
    ours, theirs = (
        f"{found[name]['median_s']:.2f} s and {found[name]['peak_mib']:.0f} MiB" for name in ("grpo_kernels", "TRL")
    )
    assert f"{ours} with ours, {theirs} with TRL's own" in page
