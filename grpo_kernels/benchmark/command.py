"""`grpo-kernels bench`: measure suites, print tables, and write their JSON and plots."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

from ..diagnostics import default_device
from ..inspection.tables import show
from . import plots, report
from .measure import kind_of, machine, measure
from .suites import SUITES, Suites, cpu_suites, gpu_suites, tiny


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give `parser` the options of `grpo-kernels bench`."""
    names = f"{', '.join(SUITES)}; on a GPU also session"
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=f"{names} (default: all but session)")
    parser.add_argument("--device", default=None, help="torch device (default: the accelerator, else cpu)")
    parser.add_argument("--threads", type=int, default=None, help="of the CPU (default: torch's)")
    parser.add_argument("--rounds", type=int, default=None, help="of every case (default: what suits it)")
    parser.add_argument("--tiny", action="store_true", help="sizes that take no time, to try the harness")
    parser.add_argument("--output", type=Path, metavar="DIR", help="write a JSON for each suite there")
    parser.add_argument("--plots", type=Path, metavar="DIR", help="draw the JSON of this folder, measure nothing")


def run(options: argparse.Namespace) -> int:
    """Measure; 0 when every provider that ran was right, 1 when one was not, 2 when a name or a device is not there."""
    if options.plots is not None:
        return _draw(options.plots)
    for option in ("rounds", "threads"):
        number = getattr(options, option)
        if number is not None and number < 1:
            print(f"grpo-kernels bench: --{option} must be at least 1, got {number}.", file=sys.stderr)
            return 2
    try:
        device = torch.device(options.device or default_device())
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        print(f"grpo-kernels bench: --device {options.device} is not here: {error}".splitlines()[0], file=sys.stderr)
        return 2
    known: Suites = cpu_suites() if device.type == "cpu" else gpu_suites()
    if options.tiny:
        known = tiny(gpu_suites() | known)
    unknown = [name for name in options.suites if name not in known]
    if unknown:
        print(f"grpo-kernels bench: SUITE must be among {', '.join(known)}, got {unknown[0]!r}.", file=sys.stderr)
        return 2
    if device.type not in ("cpu", "cuda"):
        print(f"grpo-kernels bench: --device must be a CPU or a CUDA device, got {device}.", file=sys.stderr)
        return 2
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler that counts memory tells of itself
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    chosen = options.suites or [name for name in known if name in SUITES]
    wrong = 0
    for name in chosen:
        started = time.perf_counter()
        found: dict[str, Any] = {"suite": name, "machine": machine(device), "cases": []}
        for case in known[name]:
            found["cases"].append(measure(case, device, rounds=options.rounds))
            found["seconds"] = round(time.perf_counter() - started, 1)
            _show(name, found["cases"][-1])
            wrong += len(found["cases"][-1]["wrong"])
            if options.output is not None:  # after every case: a run that is cut short leaves what it has
                options.output.mkdir(parents=True, exist_ok=True)
                file = options.output / f"{kind_of(device)}-{name}.json"
                file.write_text(json.dumps(rounded(found), indent=1) + "\n")
    return int(wrong > 0)


def rounded(value: Any) -> Any:
    """JSON with four significant digits, so that committed numbers pretend no more."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, list) else value


def _show(suite: str, case: dict[str, Any]) -> None:
    for phase in case["phases"]:
        show(f"{suite}, {phase}: {case['label']}", report.COLUMNS, report.rows(case, phase))
    sys.stdout.flush()


def _draw(folder: Path) -> int:
    drawn = plots.draw_folder(folder)
    if not drawn:
        print(f"grpo-kernels bench: --plots must be a folder with JSON of this command, got {folder}", file=sys.stderr)
        return 2
    print("\n".join(str(file) for file in drawn))
    return 0
