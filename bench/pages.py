"""Write the numbers of README.md and docs/ from the JSON in bench/results, and draw its plots: measures nothing.

    python bench/pages.py

A number stands between `<!-- bench: NAME -->` and `<!-- end of bench -->`; the tests compare every one with the JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from grpo_kernels.benchmark import plots, report
from grpo_kernels.benchmark.suites import SUITES

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
PAGES = (ROOT / "README.md", ROOT / "docs" / "linear.md", ROOT / "docs" / "benchmarks.md")
MARKED = re.compile(r"(<!-- bench: ([\w-]+) -->\n).*?(<!-- end of bench -->)", re.DOTALL)
BASE = "bare products"
HEADLINE = {
    "logits": ("ours, in place", "ours", "eager", "compiled", "TRL"),
    "linear": ("ours, fast", "ours, lean", "eager", "TRL, chunked head", "Liger, one chunk", BASE),
}
NOTHING = "Not measured yet."


def read(name: str) -> dict[str, Any] | None:
    """A committed report; None if there is none."""
    file = RESULTS / f"{name}.json"
    return json.loads(file.read_text()) if file.exists() else None


def machine_of(found: dict[str, Any]) -> str:
    """Where it was measured, in a line."""
    machine = found["machine"]
    versions = ", ".join(f"{name} {v}" for name, v in machine["versions"].items() if v != "not installed")
    where = machine.get("device") or f"{machine['processor']}, {machine['threads']} threads"
    return f"{where}; {versions}."


def headline(suite: str) -> str:
    """A line for each case: our time and peak memory, then the others' times by ours, and their memory."""
    found = read(f"cpu-{suite}")
    if found is None:
        return NOTHING
    names = HEADLINE[suite]
    lines = []
    for case in found["cases"]:
        results = case["phases"]["both"]
        cells = [case["label"]]
        for name in names:
            if name not in results:
                cells.append("wrong" if name in case["wrong"] else "")
                continue
            time = f"{results[name]['ms']:.1f} ms" if name == case["base"] else f"{results[name]['ratio']:.2f} ×"
            cells.append(time + memory_of(case, name))
        lines.append(cells)
    return report.markdown(["", *names], lines) + f"\n\n{machine_of(found)}"


def memory_of(case: dict[str, Any], name: str) -> str:
    """A provider's peak, behind a time."""
    return f", {report.mebibytes(case['memory'][name])} MiB" if name in case["memory"] else ""


def worst() -> str:
    """Where we lose most, on the CPU."""
    reports = [found for suite in SUITES if (found := read(f"cpu-{suite}")) is not None]
    found = report.worst_loss(reports)
    if found is None:
        return "We lose nowhere in what is measured."
    label, phase, ours, rival, ratio = found
    what = {"both": "forward and backward"}.get(phase, phase)
    return f"Where we lose most: {label}, {what}: *{ours}* takes {ratio:.2f} times as long as *{rival}*."


def linear() -> str:
    """Time by that of the bare products of the same shape, and peak memory."""
    found = read("cpu-linear")
    if found is None:
        return NOTHING
    cases = found["cases"]
    names = list(dict.fromkeys(name for case in cases for name in case["phases"]["both"]))
    lines = [[name, *(_by_products(case, name) for case in cases)] for name in names]
    return report.markdown(["", *(case["label"] for case in cases)], lines) + f"\n\n{machine_of(found)}"


def _by_products(case: dict[str, Any], name: str) -> str:
    results = case["phases"]["both"]
    if name not in results:
        return ""
    products = [results[bare]["ratio"] for bare in results if bare.startswith(BASE)]
    return f"{results[name]['ratio'] / min(products):.2f}{memory_of(case, name)}"


def suite(name: str) -> str:
    """Every table of a report, and its plot."""
    found = read(name)
    if found is None:
        return NOTHING
    if name.endswith("memory"):
        columns = ["", "MiB", "MiB at twice the tokens", "tokens in 8 GiB"]
        table = report.markdown(columns, report.largest_lengths(found["cases"]))
        return f"{table}\n\n{machine_of(found)}"
    parts = [f"![{name}](../bench/results/{name}.png)"] if (RESULTS / f"{name}.png").exists() else []
    for case in found["cases"]:
        for phase in case["phases"]:
            title = f"**{case['label']}, {'forward and backward' if phase == 'both' else phase}**"
            parts.append(f"{title}\n\n{report.markdown(list(report.COLUMNS), report.rows(case, phase))}")
    return "\n\n".join([*parts, machine_of(found)])


SECTIONS: dict[str, Callable[[], str]] = {
    "headline-logits": lambda: headline("logits"),
    "headline-linear": lambda: headline("linear"),
    "worst": worst,
    "linear-by-products": linear,
}


def page(text: str) -> str:
    """A page with all that stands between marks made anew."""

    def made(match: re.Match[str]) -> str:
        name = match[2]
        section = SECTIONS[name]() if name in SECTIONS else suite(name)
        return f"{match[1]}{section}\n{match[3]}"

    return MARKED.sub(made, text)


if __name__ == "__main__":
    plots.draw_folder(RESULTS)
    for file in PAGES:
        file.write_text(page(file.read_text()))
