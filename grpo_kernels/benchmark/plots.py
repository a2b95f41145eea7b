"""Bars of a report's times, one picture for each report: a CPU's numbers and a GPU's never share one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def draw_folder(folder: Path) -> list[Path]:
    """Draw every report of a folder that is about time; the pictures lie beside them."""
    drawn = []
    for kind in ("cpu", "gpu"):
        for file in sorted(folder.glob(f"{kind}-*.json")):
            report = json.loads(file.read_text())
            if report["suite"] != "memory":
                draw(report, file.with_suffix(".png"))
                drawn.append(file.with_suffix(".png"))
    return drawn


def draw(report: dict[str, Any], file: Path) -> None:
    """Write a PNG of the whole steps, each case beside the others of its suite.

    Raises:
        ImportError: without matplotlib.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    cases = [case for case in report["cases"] if case["phases"].get("both")]
    figure = Figure(figsize=(8, 0.6 + sum(0.5 + 0.24 * len(case["phases"]["both"]) for case in cases)), dpi=110)
    FigureCanvasAgg(figure)
    machine = report["machine"]
    where = machine.get("device", machine["processor"])
    figure.suptitle(f"{report['suite']}: {where}, torch {machine['versions']['torch']}", fontsize=10)
    heights = [len(case["phases"]["both"]) + 1.5 for case in cases]
    grid = figure.subplots(len(cases), 1, squeeze=False, gridspec_kw={"height_ratios": heights})
    for axes, case in zip(grid[:, 0], cases, strict=True):
        ordered = sorted(case["phases"]["both"].items(), key=lambda item: -item[1]["ms"])
        names, results = [name for name, _ in ordered], [result for _, result in ordered]
        medians = [result["ms"] for result in results]
        spread = [
            [result["ms"] - result["quartiles"][0] for result in results],
            [result["quartiles"][1] - result["ms"] for result in results],
        ]
        colours = ["tab:blue" if name.startswith("ours") else "tab:gray" for name in names]
        axes.barh(names, medians, xerr=spread, color=colours, error_kw={"linewidth": 0.8})
        axes.set_title(case["label"], fontsize=8, loc="left")
        axes.set_xlabel("ms, forward and backward: median and quartiles", fontsize=7)
        axes.tick_params(labelsize=7)
    figure.tight_layout()
    figure.savefig(file)
