"""`grpo-kernels inspect`: compile every kernel for every GPU target and read the machine code."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import rivals
from .records import COLUMNS, lines, measure
from .tables import show

if TYPE_CHECKING:
    from ..backends.triton.compile import Case

DTYPES = ("bfloat16", "float16", "float32", "float64")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give `parser` the options of `grpo-kernels inspect`."""
    parser.add_argument("--targets", nargs="+", metavar="TARGET", help="of the launch tables (default: all of them)")
    parser.add_argument(
        "--kernels", nargs="+", metavar="WORD", default=[""], help="those with one of these in the name"
    )
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["bfloat16"], help="of the logits")
    parser.add_argument("--rivals", action="store_true", help="also the kernels of Liger and TRL, if installed")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--save", type=Path, metavar="DIR", help="write the binaries there, named by what they are")
    parser.add_argument("--workers", type=int, default=2, help="processes (default: %(default)s)")


def run(options: argparse.Namespace) -> int:
    """Inspect; 0 when everything compiled, 1 when something did not, 2 when nothing can be inspected here."""
    if options.workers < 1:
        print(f"grpo-kernels inspect: --workers must be at least 1, got {options.workers}.", file=sys.stderr)
        return 2
    try:
        subjects, notes = _subjects(options)
    except (RuntimeError, ValueError) as error:
        print(f"grpo-kernels inspect: {error}", file=sys.stderr)
        return 2
    if options.save is not None:
        options.save.mkdir(parents=True, exist_ok=True)
    records = measure(subjects, options.workers, options.save)
    if options.json:
        print(json.dumps(report(records), indent=1))
    else:
        show(f"{len(records)} kernels, compiled and read; not timed", COLUMNS, lines(records))
    for note in notes:
        print(note, file=sys.stderr)
    return int(any("error" in entry for entry in records))


def report(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Records with the versions of what made them."""
    from ..backends.triton.compile import VERSION

    projects = [project for project in rivals.KERNELS if rivals.missing(project) is None]
    versions = {project: metadata.version(rivals.PACKAGES[project]) for project in projects}
    return {"triton": VERSION, "rivals": versions, "kernels": records}


def _subjects(options: argparse.Namespace) -> tuple[list[Case | rivals.Rival], list[str]]:
    """What to compile, and what could not be.

    Raises:
        RuntimeError: when there is no Triton, no disassembler, or Triton interprets its kernels.
        ValueError: for a target that is in no table, or words that no kernel's name contains.
    """
    if importlib.util.find_spec("triton") is None:
        raise RuntimeError("Triton is not installed. It comes with torch for CUDA, or: pip install triton")
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise RuntimeError("TRITON_INTERPRET is 1, and interpreted kernels cannot be compiled. Unset it.")
    from ..backends.triton import sass
    from ..backends.triton.compile import TARGETS, Case, usual_cases

    targets: Sequence[str] = options.targets or TARGETS
    unknown = [target for target in targets if target not in TARGETS]
    if unknown:
        raise ValueError(f"--targets must be among {', '.join(TARGETS)}, got {unknown[0]!r}.")
    if (reason := sass.missing_tools(targets)) is not None:
        raise RuntimeError(f"{reason}. Without it, --targets gfx942 alone can be inspected.")
    found: list[Case | rivals.Rival] = []
    for target in targets:
        found += usual_cases(target, tuple(options.dtypes))
        found += [Case("row_scale_", target, dtype) for dtype in options.dtypes]
    notes: list[str] = []
    if options.rivals:
        found += rivals.rivals(list(targets), [dtype for dtype in options.dtypes if dtype != "float64"])
        notes = [f"{project}: {reason}" for project in rivals.KERNELS if (reason := rivals.missing(project))]
    chosen = [subject for subject in found if any(word in subject.name for word in options.kernels)]
    if not chosen:
        raise ValueError(f"--kernels must be parts of names such as {found[0].name!r}, got {options.kernels}.")
    return chosen, notes
