"""The committed studies hold their claims, the page shows their numbers, and their commands exist."""

from __future__ import annotations

import csv
import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from grpo_kernels import lab
from grpo_kernels.lab.selftest import checks

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "bench" / "results" / "lab"
STUDIES = sorted(path.stem for path in FOLDER.glob("*.csv"))


def record(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    return found


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_lab", ROOT / "bench" / "lab.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_all_studies_are_there(bench: ModuleType) -> None:
    assert sorted(bench.STUDIES) == STUDIES


@pytest.mark.parametrize("name", STUDIES)
def test_claims_hold_and_rows_are_those_of_the_csv(name: str) -> None:
    found = record(name)
    assert found["command"].startswith(f"grpo-kernels lab {found['study']}")
    assert [item["claim"] for item in found["claims"] if not item["holds"]] == []
    with open(FOLDER / f"{name}.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [list(row) for row in rows] == [list(row) for row in found["rows"]]
    assert [list(row.values()) for row in rows] == [[str(v) for v in row.values()] for row in found["rows"]]


@pytest.mark.parametrize("name", [name for name in STUDIES if name.startswith("mse-curve")])
def test_predictions_are_those_of_the_constants(name: str) -> None:
    found = record(name)
    constants = lab.GradConstants(**found["constants"])
    for row in found["rows"]:
        assert row["predicted"] == pytest.approx(lab.mse(constants, row["n"], row["G"], row["kind"]), rel=1e-12)
        assert row["n"] * row["G"] == found["settings"]["N"]


def test_the_same_best_size_at_three_budgets_is_the_predicted_one() -> None:
    found = record("budget-sweep-pair")
    constants = lab.GradConstants(**found["constants"])
    sizes = found["settings"]["groups"]
    cost = lab.fixed_budget(constants, sizes)
    assert set(found["best"]) == {"64", "256", "1024"}
    assert set(found["best"].values()) == {sizes[cost.index(min(cost))]}
    assert found["g_star"] == pytest.approx(lab.optimal_group_size(constants).g_cont)


def test_pilots_are_as_large_as_promised() -> None:
    for name in ("pilot-bandit", "pilot-pair"):
        settings = record(name)["settings"]
        assert (settings["n"], settings["G"], settings["seeds"]) == (512, 16, 40)


def test_the_training_sweep_is_as_large_as_promised() -> None:
    found = record("train-sweep-pair")
    settings = found["settings"]
    assert (settings["budgets"], settings["iterations"]) == ([64, 128, 256], [100, 200, 400])
    assert settings["seeds"] >= 8
    assert len(found["rows"]) == 3 * 3 * 6
    assert found["drift"][0]["g_star"][0] > 2 * found["drift"][0]["g_star"][-1]
    assert found["drift"][0]["g_cross"][0] is not None
    assert found["drift"][0]["g_cross"][1] is None


def test_what_the_heads_scores_cost() -> None:
    """The exact Gram under 1.3 while a group's tokens are not much above the width; the sketch always."""
    results = record("head-gram")["results"]
    short = [result for result in results if result["tokens_of_a_group_by_width"] <= 1.2]
    assert len(short) >= 5
    assert max(result["exact_ratio"] for result in short) <= 1.3
    assert max(result["sketch_ratio"] for result in results) <= 1.3
    assert max(result["tokens_of_a_group_by_width"] for result in results) >= 2


def test_the_page_is_made_of_the_records(bench: ModuleType) -> None:
    text = bench.PAGE.read_text()
    assert bench.page(text) == text
    pair = record("mse-curve-pair")["settings"]
    assert f"{pair['parameters']:,}".replace(",", " ") in text
    assert f"starts {100 * pair['J']:.0f} % right" in " ".join(text.split())
    for name in bench.FIGURES:
        assert (ROOT / "docs" / f"lab-{name}.png").stat().st_size < 150_000


def test_selftest_runs_within_its_limits() -> None:
    for what, error, limit in checks():
        assert error <= limit, what
