"""What a run shows while it trains and when it ends: a live table on a terminal, a line per step anywhere else."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

from .extras import import_extra

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from typing_extensions import Self

_ROWS_SHOWN = 10


class _Column(NamedTuple):
    key: str
    title: str
    width: int
    text: Callable[[float], str]


_COLUMNS = (
    _Column("step", "step", 5, "{:.0f}".format),
    _Column("reward", "reward", 7, "{:.3f}".format),
    _Column("solve_rate", "solved", 7, "{:.1%}".format),
    _Column("kl", "kl", 7, "{:.4f}".format),
    _Column("entropy", "entropy", 7, "{:.3f}".format),
    _Column("clip", "clip", 6, "{:.1%}".format),
    _Column("tokens_per_second", "tokens/s", 8, "{:,.0f}".format),
    _Column("memory_mb", "MiB", 7, "{:,.0f}".format),
    _Column("loss", "loss", 8, "{:+.4f}".format),
)


def format_row(row: Mapping[str, float]) -> list[str]:
    """The cells of a step, in the table's order; "-" for what is missing or NaN."""
    values = [row.get(column.key, math.nan) for column in _COLUMNS]
    cells = zip(_COLUMNS, values, strict=True)
    return ["-" if math.isnan(value) else column.text(value) for column, value in cells]


class LiveTable:
    """Shows each step that `update` is given; a context manager.

    On a terminal: the last ten steps and a progress bar, redrawn in place. Elsewhere (a file, a pipe, CI): a header,
    then one aligned line per step.
    """

    def __init__(self, total_steps: int, console: Console | None = None) -> None:
        self._console = console or import_extra("rich.console").Console()
        self._rows: deque[list[str]] = deque(maxlen=_ROWS_SHOWN)
        self._live: Any = None
        self._note: tuple[str, list[str]] | None = None
        if self._console.is_terminal:
            progress = import_extra("rich.progress")
            columns = [progress.BarColumn(None), progress.MofNCompleteColumn(), progress.TimeRemainingColumn()]
            self._progress = progress.Progress(*columns, console=self._console, expand=True)
            self._bar = self._progress.add_task("steps", total=total_steps)
            self._live = import_extra("rich.live").Live(self._render(), console=self._console)

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        else:
            self._write_line([column.title for column in _COLUMNS])
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def update(self, row: Mapping[str, float]) -> None:
        """Shows a step; `row["step"]` counts from 1."""
        self._rows.append(format_row(row))
        if self._live is not None:
            self._progress.update(self._bar, completed=row["step"])
            self._live.update(self._render(), refresh=True)
        else:
            self._write_line(self._rows[-1])

    def note(self, title: str, lines: list[str]) -> None:
        """Shows lines that stay until the next note: a panel on a terminal, the lines themselves elsewhere."""
        if self._live is None:
            for line in lines:
                self._console.file.write(f"{title}: {line}\n")
            self._console.file.flush()
        else:
            self._note = (title, lines)

    def _write_line(self, cells: list[str]) -> None:
        line = "  ".join(cell.rjust(column.width) for cell, column in zip(cells, _COLUMNS, strict=True))
        self._console.file.write(line + "\n")
        self._console.file.flush()

    def _render(self) -> RenderableType:
        table = import_extra("rich.table").Table(box=import_extra("rich.box").SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for column in _COLUMNS:
            table.add_column(column.title, justify="right", min_width=column.width, no_wrap=True)
        for index, cells in enumerate(self._rows):
            table.add_row(*cells, style="bold" if index == len(self._rows) - 1 else "dim")
        parts: list[RenderableType] = [table]
        if self._note is not None:
            title, lines = self._note
            parts.append(import_extra("rich.panel").Panel("\n".join(lines), title=title, title_align="left"))
        group: RenderableType = import_extra("rich.console").Group(*parts, self._progress)
        return group


def print_summary(summary: Mapping[str, Any]) -> None:
    """Prints what `train` returned: the held-out solve rate before and after, then where time and memory went."""
    rich_console, rich_table = import_extra("rich.console"), import_extra("rich.table")
    console: Console = rich_console.Console()
    grid = rich_table.Table.grid(padding=(0, 2))
    for name, text in summary_lines(summary):
        grid.add_row(name, text)
    console.print()
    console.print(grid, highlight=False)


def summary_lines(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(what, text) of each line that `print_summary` prints."""
    before, after = summary["solve_rate_before"], summary["solve_rate_after"]
    seconds = summary["seconds"]
    parts = ", ".join(f"{name.replace('_', '-')} {_duration(value)}" for name, value in seconds.items())
    output_dir = summary["settings"]["output_dir"]
    loss_step = summary["loss_step"]
    loss_lines = [] if loss_step is None else [("loss step", _loss_step_text(**loss_step))]
    gain = f"{100 * (after - before):+.1f} points, {summary['held_out_prompts']} prompts, greedy"
    return [
        ("held-out solved", f"{before:.1%} -> {after:.1%} ({gain})"),
        ("run", f"{summary['task']}, {summary['steps']} steps, seed {summary['seed']}"),
        ("model", f"{summary['parameters'] / 1e6:.1f} M parameters on {summary['device']}"),
        ("time", f"{_duration(sum(seconds.values()))}: {parts}"),
        *loss_lines,
        ("peak memory", f"{summary['peak_memory_mb']:,} MiB"),
        ("files", f"{output_dir}: curves.png, summary.json, history.jsonl, model/"),
    ]


def _loss_step_text(*, ours_ms: float, eager_ms: float, ran: str, tokens: int, vocabulary: int) -> str:
    times = f"{ours_ms:.2f} ms ({ran}), eager torch {eager_ms:.2f} ms"
    return f"{times}; {tokens:,} tokens, V = {vocabulary:,}, with gradients"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"
