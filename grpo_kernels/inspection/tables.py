"""A table on a terminal: rich's where it is installed, else aligned columns."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table; a line of its own for the title."""
    if importlib.util.find_spec("rich") is None:
        print(plain(title, columns, rows))
        return
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not console.is_terminal:  # a file or a pipe is no 80 columns wide
        console.width = max([0, *(len(line) for line in plain(title, columns, rows).splitlines())]) + 4 * len(columns)
    table = Table(*columns, title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for row in rows:
        table.add_row(*row)
    console.print(table, markup=False)


def plain(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The table as text, two blanks between its columns."""
    lines = [columns, *rows]
    widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
    texts = ("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines)
    return "\n".join([title, *texts])
