"""The curves of a run as one PNG."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..plotting import BLUE, GREEN, GREY, ORANGE, STYLE, new_figure, save_png
from .extras import import_extra


def save_curves(history: Sequence[Mapping[str, float]], summary: Mapping[str, Any], path: Path) -> None:
    """Draws reward and solve rate, entropy and KL, and the clipped share over the steps, as a PNG of less than 100 kB.

    The first panel marks the held-out greedy solve rate before and after training. Thin lines are single steps, thick
    ones the mean over the neighbouring steps. A KL that is 0 in every step is left out.
    """
    matplotlib = import_extra("matplotlib")
    with matplotlib.rc_context(STYLE):
        figure, canvas = new_figure(import_extra, 10.5, 3.2)
        solved, exploration, clipped = figure.subplots(1, 3, width_ratios=(1.5, 1, 1))
        _draw_solved(solved, history, summary)
        _draw_exploration(exploration, history)
        _draw_clipped(clipped, history)
        margin = 0.03 * len(history)
        for axes in (solved, exploration, clipped):
            axes.set_xlabel("step")
            axes.set_xlim(history[0]["step"] - 1 - margin, history[-1]["step"] + margin)
            axes.xaxis.set_major_locator(
                import_extra("matplotlib.ticker").MaxNLocator(6, integer=True, steps=[1, 2, 5, 10])
            )
        canvas.draw()
    save_png(import_extra, canvas, path)


def _draw_solved(axes: Any, history: Sequence[Mapping[str, float]], summary: Mapping[str, Any]) -> None:
    axes.set_title("Reward and solve rate")
    # Wide and pale below the other: the two coincide where a reward is 1 or 0.
    _draw(axes, history, "reward", ORANGE, "mean reward", width=6, alpha=0.4)
    _draw(axes, history, "solve_rate", BLUE, "solve rate, sampled")
    ends = (history[0]["step"] - 1, history[-1]["step"])
    before, after = summary["solve_rate_before"], summary["solve_rate_after"]
    label = f"held-out, greedy: {before:.1%} → {after:.1%}"
    axes.plot(ends, (before, after), "o", color=GREEN, markersize=8, markeredgecolor="white", label=label, zorder=5)
    axes.margins(y=0.1)
    axes.legend()


def _draw_exploration(axes: Any, history: Sequence[Mapping[str, float]]) -> None:
    _draw(axes, history, "entropy", BLUE, "entropy")
    axes.set_ylim(bottom=0)
    if all(row.get("kl", 0.0) == 0.0 for row in history):
        axes.set_title("Entropy [nats]")
        return
    axes.set_title("Entropy and KL [nats]")
    right = axes.twinx()
    right.grid(visible=False)
    _draw(right, history, "kl", ORANGE, "KL")
    right.set_ylim(bottom=0)
    for side, color, text in ((axes, BLUE, "entropy"), (right, ORANGE, "KL to the reference")):
        side.tick_params(axis="y", colors=color)
        side.set_ylabel(text, color=color)


def _draw_clipped(axes: Any, history: Sequence[Mapping[str, float]]) -> None:
    axes.set_title("Clipped share")
    axes.yaxis.set_major_formatter(lambda share, _: f"{100 * share:g}%")
    _draw(axes, history, "clip", BLUE, "clipped")
    axes.set_ylim(bottom=0)
    if all(row.get("clip", 0.0) == 0.0 for row in history):
        axes.set_ylim(0, 1)
        axes.set_yticks([0])
        axes.text(0.5, 0.5, "0 in every step", transform=axes.transAxes, ha="center", color=GREY)


def _draw(
    axes: Any,
    history: Sequence[Mapping[str, float]],
    key: str,
    color: str,
    label: str,
    width: float = 2,
    alpha: float = 1,
) -> None:
    steps = [row["step"] for row in history]
    values = [row.get(key, math.nan) for row in history]
    marker = "o" if len(history) < 3 else ""
    axes.plot(steps, values, color=color, alpha=0.3 * alpha, linewidth=1)
    axes.plot(
        steps,
        smooth(values),
        marker=marker,
        color=color,
        alpha=alpha,
        linewidth=width,
        markersize=2 * width,
        label=label,
    )


def smooth(values: Sequence[float]) -> list[float]:
    """Mean of each value and its neighbours within a thirtieth of the run on both sides, NaN left out."""
    reach = len(values) // 30
    means = []
    for index in range(len(values)):
        window = [v for v in values[max(0, index - reach) : index + reach + 1] if not math.isnan(v)]
        means.append(sum(window) / len(window) if window else math.nan)
    return means
