"""How figures look, and how they become small PNGs; matplotlib is imported by whoever draws."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

BLUE, ORANGE, GREEN, GREY = "#2f6db5", "#d9762b", "#1f7a4c", "#5b6470"
STYLE = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 8,
    "axes.edgecolor": "#b8bec6",
    "axes.labelcolor": GREY,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e9ed",
    "xtick.color": GREY,
    "ytick.color": GREY,
    "legend.edgecolor": "none",
    "legend.framealpha": 0.85,
    "legend.labelcolor": GREY,
}


class Importer(Protocol):
    """Finds an optional module by name."""

    def __call__(self, name: str) -> ModuleType:
        """The module, or ModuleNotFoundError with what to install."""


def new_figure(find: Importer, width: float, height: float) -> tuple[Any, Any]:
    """A figure of this size in inches, and its canvas; draw under `matplotlib.rc_context(STYLE)`."""
    figure = find("matplotlib.figure").Figure(figsize=(width, height), dpi=140)
    canvas = find("matplotlib.backends.backend_agg").FigureCanvasAgg(figure)
    figure.set_layout_engine("constrained", w_pad=0.12, h_pad=0.1)
    return figure, canvas


def save_png(find: Importer, canvas: Any, path: Path) -> None:
    """Writes what the canvas holds."""
    # A palette is all that a few lines and their edges need, at a third of the bytes.
    drawn = find("PIL.Image").frombuffer("RGBA", canvas.get_width_height(), canvas.buffer_rgba())
    drawn.convert("RGB").quantize(256).save(path, format="PNG", optimize=True)
