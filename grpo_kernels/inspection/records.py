"""Readings of compiled kernels as JSON, and as lines of a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .hardware import GPUS, bound
from .rivals import Rival, compile_rival

if TYPE_CHECKING:
    from ..backends.triton.compile import Case, Compiled
    from ..backends.triton.sass import Loop, Reading, Subject

COLUMNS = (
    "target", "kernel", "registers", "spills", "stack", "shared", "loop", "instr/el", "MUFU/el", "B/el",
    "loads", "stores", "barriers", "shuffles", "bound, % of HBM",
)  # fmt: skip


def measure(subjects: Iterable[Case | Rival], workers: int = 2, save: Path | None = None) -> list[dict[str, Any]]:
    """Compile and read; one record for each subject, with `error` alone where it does not compile."""
    from ..backends.triton.sass import read_all

    subjects = list(subjects)
    readings = read_all(subjects, workers, compiler=compiled, save=save)
    return [record(subject, readings[subject]) for subject in subjects]


def compiled(subject: Case | Rival) -> Compiled:
    """Compile one of ours or of theirs."""
    from ..backends.triton.compile import compile_case

    return compile_rival(subject) if isinstance(subject, Rival) else compile_case(subject)


def record(subject: Subject, reading: Reading | str) -> dict[str, Any]:
    """One compiled kernel: what its binary takes of a device, and its innermost loops per logit."""
    known: dict[str, Any] = {"name": subject.name, "target": subject.target}
    if isinstance(reading, str):
        return known | {"error": reading}
    return known | {
        "kernel": reading.kernel,
        "registers": reading.registers,
        "spills": reading.spills,
        "stack": reading.stack,
        "shared": reading.shared,
        "threads": reading.threads,
        "seconds": round(reading.seconds, 1),
        "loops": [_loop_record(loop, subject.target, loop in reading.bulk) for loop in reading.loops],
    }


def _loop_record(loop: Loop, target: str, bulk: bool) -> dict[str, Any]:
    found: dict[str, Any] = {
        "sweep": sweep_of(loop),
        "bulk": bulk,
        "elements": loop.elements,
        "instructions": loop.instructions,
        "special": loop.special,
        "bytes": round(loop.bytes_per_element * loop.elements),
        "loads": _widths(loop.loads),
        "stores": _widths(loop.stores),
        "barriers": loop.barriers,
        "shuffles": loop.shuffles,
    }
    if bulk:
        limits = {
            gpu.name: bound(gpu, loop.per_element, loop.special_per_element, loop.bytes_per_element)
            for gpu in GPUS
            if gpu.target == target
        }
        found["bounds"] = {name: [limit.unit, round(limit.share, 3)] for name, limit in limits.items()}
    return found


def sweep_of(loop: Loop) -> str:
    """What a loop does with logits: `forward` reads them, `backward` reads and writes, `zeros` writes alone."""
    return {(True, False): "forward", (True, True): "backward", (False, True): "zeros"}[loop.reads, loop.writes]


def _widths(bits: tuple[int, ...]) -> dict[str, int]:
    return {str(width): count for width, count in sorted(Counter(bits).items())}


def lines(records: list[dict[str, Any]]) -> list[list[str]]:
    """A line for each loop over the bulk of a row that reads logits, under the kernel that it belongs to."""
    return [line for entry in records for line in _lines_of(entry)]


def _lines_of(entry: dict[str, Any]) -> list[list[str]]:
    if "error" in entry:
        return [[entry["target"], entry["name"], f"does not compile: {entry['error'].splitlines()[0]}", *[""] * 12]]
    head = [entry["target"], entry["name"], *(str(entry[key]) for key in ("registers", "spills", "stack", "shared"))]
    loops = [loop for loop in entry["loops"] if loop["bulk"] and loop["sweep"] != "zeros"]
    alike = dict.fromkeys(tuple(_loop_cells(loop)) for loop in loops)  # a sweep goes on behind the target's block
    if not alike:
        return [[*head, "none", *[""] * 8]]
    return [[*(head if number == 0 else [""] * len(head)), *cells] for number, cells in enumerate(alike)]


def _loop_cells(loop: dict[str, Any]) -> list[str]:
    per_element = [f"{loop[key] / loop['elements']:.2f}" for key in ("instructions", "special", "bytes")]
    accesses = [" ".join(f"{count}×{width}" for width, count in loop[key].items()) for key in ("loads", "stores")]
    bounds = " · ".join(f"{gpu} {unit} {share:.0%}" for gpu, (unit, share) in loop["bounds"].items())
    return [loop["sweep"], *per_element, *accesses, str(loop["barriers"]), str(loop["shuffles"]), bounds]
