"""The figures of the studies, from their records alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from ..extras import import_extra
from ..plotting import BLUE, GREEN, GREY, ORANGE, STYLE, new_figure, save_png
from .constants import GradConstants, mse

_NAMES = {"loo": "leave-one-out (GRPO)", "oracle": "oracle", "vanilla": "no baseline"}
_COLOURS = {"loo": BLUE, "oracle": GREEN, "vanilla": ORANGE}
_SHADES = (BLUE, ORANGE, GREEN, GREY)


def find(name: str) -> ModuleType:
    """A module of the `lab` extra."""
    return import_extra(name, "lab", "the lab's figures")


def save_figure(record: Mapping[str, Any], path: Path) -> bool:
    """Draws the record's figure as a PNG; False if its study has none."""
    draw = {"mse-curve": _mse_curve, "budget-sweep": _budget_sweep, "train-sweep": _train_sweep, "gap": _gap}.get(
        record["study"]
    )
    if draw is None:
        return False
    matplotlib = find("matplotlib")
    with matplotlib.rc_context(STYLE):
        panels = 1 if record["study"] == "gap" else 2
        if record["study"] == "train-sweep":
            panels = len(record["settings"]["budgets"]) + 1
        figure, canvas = new_figure(find, 3.6 * panels + 0.4, 3.2)
        draw(figure.subplots(1, panels, squeeze=False)[0], record)
        canvas.draw()
    save_png(find, canvas, path)
    return True


def _group_axis(axes: Any, groups: list[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(groups, [str(G) for G in groups])
    axes.minorticks_off()
    axes.set_xlabel("responses per prompt G")


def _mse_curve(panels: Any, record: Mapping[str, Any]) -> None:
    groups, N = record["settings"]["groups"], record["settings"]["N"]
    left, right = panels
    sizes = _between(groups)
    for kind, name in _NAMES.items():
        rows = [row for row in record["rows"] if row["kind"] == kind]
        single = mse(GradConstants(**record["constants"]), 1, sizes, kind)
        left.plot(sizes, single, color=_COLOURS[kind])
        right.plot(sizes, single * sizes / N, color=_COLOURS[kind])
        for axes, weights in ((left, [row["n"] for row in rows]), (right, [1] * len(rows))):
            values, errors = (
                [weight * row[key] for weight, row in zip(weights, rows, strict=True)] for key in ("simulated", "error")
            )
            axes.errorbar(
                [row["G"] for row in rows], values, yerr=[2 * error for error in errors], fmt="o", markersize=4,
                color=_COLOURS[kind], label=name,
            )  # fmt: skip
    left.set_title("MSE of one prompt")
    left.set_yscale("log")
    right.set_title(f"MSE at N = {N} responses")
    right.set_ylim(bottom=0)
    cross = record["g_cross"]
    for axes in panels:
        _group_axis(axes, groups)
        if cross is not None and cross <= groups[-1]:
            axes.axvline(cross, color=GREY, linestyle=":", linewidth=1, label="crossing with no baseline")
    left.legend()


def _budget_sweep(panels: Any, record: Mapping[str, Any]) -> None:
    groups = record["settings"]["groups"]
    sizes = _between(groups)
    curve = mse(GradConstants(**record["constants"]), 1, sizes) * sizes
    left, right = panels
    right.plot(sizes, curve, color=GREY, zorder=0, label="formula")
    for colour, N in zip(_SHADES, record["settings"]["budgets"], strict=False):
        rows = [row for row in record["rows"] if row["N"] == N]
        left.plot(sizes, curve / N, color=colour)
        for axes, unit in ((left, N), (right, 1)):
            axes.errorbar(
                [row["G"] for row in rows], [row["simulated"] / unit for row in rows],
                yerr=[2 * row["error"] / unit for row in rows], fmt="o", markersize=4, color=colour, label=f"N = {N}",
            )  # fmt: skip
    left.set_yscale("log")
    left.set_title("MSE at fixed budgets")
    right.set_title("N × MSE: one curve")
    for axes in panels:
        _group_axis(axes, groups)
        axes.axvline(record["g_star"], color=GREY, linestyle=":", linewidth=1, label=f"G* = {record['g_star']:.1f}")
    right.legend(loc="upper center")


def _between(groups: list[int]) -> torch.Tensor:
    """Sizes from the first to the last, close enough for a smooth line."""
    ends = torch.tensor([groups[0], groups[-1]], dtype=torch.float64).log2()
    return torch.linspace(ends[0].item(), ends[1].item(), 100, dtype=torch.float64).exp2()


def _train_sweep(panels: Any, record: Mapping[str, Any]) -> None:
    settings = record["settings"]
    for axes, N in zip(panels, settings["budgets"], strict=False):
        for colour, done in zip(_SHADES, settings["iterations"], strict=False):
            rows = [row for row in record["rows"] if row["N"] == N and row["iterations"] == done]
            axes.errorbar([row["G"] for row in rows], [row["J"] for row in rows],
                          yerr=[2 * row["error"] for row in rows], fmt="o-", markersize=4, color=colour,
                          label=f"after {done} updates")  # fmt: skip
        axes.set_title(f"J, N = {N}")
        axes.set_ylim(0, 1.05)
        _group_axis(axes, settings["groups"])
    panels[0].legend()
    for colour, line in zip(_SHADES, record["drift"], strict=False):
        panels[-1].plot(line["iterations"], line["g_star"], "o-", markersize=4, color=colour, label=f"N = {line['N']}")
    panels[-1].set_title("G*(θ) on the way")
    panels[-1].set_xlabel("updates")
    panels[-1].set_ylim(bottom=0)
    panels[-1].legend()


def _gap(panels: Any, record: Mapping[str, Any]) -> None:
    (axes,) = panels
    for colour, (n, G) in zip(_SHADES, record["settings"]["cells"], strict=False):
        rows = [row for row in record["rows"] if (row["n"], row["G"]) == (n, G)]
        axes.plot([row["predicted"] for row in rows], [row["simulated"] for row in rows], "o", markersize=5,
                  color=colour, label=f"{n} prompts × {G}")  # fmt: skip
    top = max(row["predicted"] for row in record["rows"])
    axes.plot([0, top], [0, top], color=GREY, linewidth=1, zorder=0)
    axes.set_title("Gap J* − J: mean and quantiles")
    axes.set_xlabel("predicted")
    axes.set_ylabel("simulated")
    axes.legend()
