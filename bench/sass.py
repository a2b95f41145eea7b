"""Compile every kernel for every GPU target, read the machine code, and write docs/sass.md and its JSON.

`python bench/sass.py` takes some minutes and no GPU; with `--page` it writes the page from the JSON that is there.
What it compiles and how it reads is `grpo-kernels inspect`'s own.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from grpo_kernels.inspection.hardware import GPUS

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results" / "sass.json"
PAGE = ROOT / "docs" / "sass.md"
LARGE = 500_000
NAMES = {"liger": "Liger", "trl": "TRL"}
FEATURES = ((False, False), (True, False), (False, True), (True, True))  # (entropy, softcap)


def measured() -> dict[str, Any]:
    """Readings of the usual cases, all dtypes on sm_90 and bfloat16 elsewhere, and of the rivals on sm_90."""
    from grpo_kernels.backends.triton import compile as compiling
    from grpo_kernels.inspection import records, rivals
    from grpo_kernels.inspection.command import report

    subjects: list[Any] = [compiling.Case(op, "sm_90", vocab=LARGE) for op in compiling.ROW_OPS]
    for target in compiling.TARGETS:
        subjects += [case for case in compiling.usual_cases(target) if target == "sm_90" or case.dtype == "bfloat16"]
    subjects += rivals.rivals(["sm_90"], ["bfloat16", "float32"])
    found = records.measure(subjects)
    if errors := [entry for entry in found if "error" in entry]:
        raise SystemExit(f"{errors[0]['name']} on {errors[0]['target']} does not compile: {errors[0]['error']}")
    return report(found)


def page(results: dict[str, Any]) -> str:
    """The document that shows the results."""
    ours: dict[tuple[Any, ...], dict[str, Any]] = {}
    rivals: dict[tuple[str, str], list[dict[str, Any]]] = {}
    seconds = 0.0
    for entry in results["kernels"]:
        words = entry["name"].split()
        if f"vocab={LARGE}" in words:
            seconds += entry["seconds"]
        elif words[0] in results["rivals"]:
            rivals.setdefault((entry["target"], f"{words[0]} {words[2]}"), []).append(entry)
        else:
            op, dtype = words[:2]
            ours[entry["target"], op, dtype, ("entropy" in words, "softcap" in words)] = entry
    versions = " and ".join(f"{NAMES[name]} {version}" for name, version in results["rivals"].items())
    large = f"{LARGE:,}".replace(",", " ")
    lines = [INTRODUCTION.format(triton=results["triton"], seconds=seconds, large=large, rivals=versions)]
    for target in dict.fromkeys(key[0] for key in ours):
        lines += [f"## {target}\n", "| " + " | ".join(COLUMNS) + " |", "|---" * len(COLUMNS) + "|"]
        for op, dtype in dict.fromkeys(key[1:3] for key in ours if key[0] == target):
            lines.append(row(f"`{op}`", dtype, [ours[target, op, dtype, feature] for feature in FEATURES]))
        for (where, name), entries in rivals.items():
            if where == target:
                lines += [row(f"{NAMES[name.split()[0]]} `{e['kernel']}`", name.split()[1], [e]) for e in entries]
        lines.append("")
    return "\n".join(lines)


def row(name: str, dtype: str, entries: list[dict[str, Any]]) -> str:
    """One line of a table."""
    bodies = [[loop for loop in entry["loops"] if loop["bulk"]] for entry in entries]
    loops = [loop for body in bodies for loop in body]
    widths = [int(width) for loop in loops for kind in ("loads", "stores") for width in loop[kind]]
    cells = [
        name,
        dtype,
        in_turn(per_logit(body, "instructions", "forward") for body in bodies),
        in_turn(per_logit(body, "instructions", "backward") for body in bodies),
        in_turn(max(per_logit(body, "special", sweep) for sweep in ("forward", "backward")) for body in bodies),
        limits(bodies),
        " · ".join(str(entry["registers"]) for entry in entries),
        str(max(entry["shared"] for entry in entries)),
        str(min(widths, default="")),
        str(sum(loop["barriers"] + loop["shuffles"] for loop in loops)),
        str(sum(entry["spills"] + entry["stack"] for entry in entries)),
    ]
    return "| " + " | ".join(cells) + " |"


def per_logit(loops: list[dict[str, Any]], what: str, sweep: str) -> float:
    """The most that a loop of this sweep needs; 0 without such a loop."""
    return max((loop[what] / loop["elements"] for loop in loops if loop["sweep"] == sweep), default=0.0)


def limits(bodies: list[list[dict[str, Any]]]) -> str:
    """What bounds the sweep that leaves least of the memory's rate, on the fastest GPU of a target."""
    cells, name = [], ""
    for body in bodies:
        sweeps = [loop["bounds"] for loop in body if loop["sweep"] != "zeros" and loop["bounds"]]
        if not sweeps:
            return ""
        name = max(sweeps[0], key=[gpu.name for gpu in GPUS].index)
        share, unit = min((bounds[name][1], bounds[name][0]) for bounds in sweeps)
        cells.append(unit if unit == "HBM" else f"{unit} {share:.0%}")
    return f"{name}: {' · '.join(cells)}"


def in_turn(values: Iterable[float]) -> str:
    """Values for each of the features; nothing for a kernel without such loops."""
    numbers = list(values)
    return " · ".join(f"{number:.1f}" for number in numbers) if any(numbers) else ""


COLUMNS = (
    "kernel", "dtype", "forward", "backward", "special", "bound", "registers", "shared", "narrowest", "waits", "spills",
)  # fmt: skip
INTRODUCTION = """\
# What the compilers make of the Triton kernels

Read from machine code that was compiled without a GPU, by Triton {triton}. Nothing here was timed on one.
`python bench/sass.py` writes this page and `bench/results/sass.json`, which holds every loop; the tests compare both
with the kernels, hold them to budgets on sm_90, and count hand-made kernels whose loops are known.
`grpo-kernels inspect --rivals` shows the same for any target, kernel and dtype, and `--save DIR` keeps the binaries.

A cell with four numbers: plain · with entropy · with a softcap · with both. *Forward* and *backward* are instructions
a logit in the loops over whole blocks of a row. Forward reads a row once, backward reads and writes it; `loss_grad_`
does one after the other in one launch. *Special* of them need the special function unit (exponentials, reciprocals).
*Bound* is the unit that such a loop waits for at the maker's peak rates: HBM, instruction issue, or the special
function unit (MUFU), and then the share of the memory's rate that is left. *Shared* is in bytes a program. *Narrowest*
is the narrowest access of these loops, in bits; *waits* are their barriers and shuffles; *spills* are spilled registers
and bytes of stack of the whole kernel. The loss here has importance weights and a bias-corrected k3.
{rivals} are compiled as they launch themselves, at temperature 0.9, which is a constant of theirs;
TRL's backward has no loop, and its forward gives the entropy too.

Forward and backward of the log-probs at V = {large} compile in {seconds:.1f} s together, from nothing; V is no constant
of a kernel, and neither is a length.
"""

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--page", action="store_true", help="write the page alone, from the JSON that is there")
    if not parser.parse_args().page:
        text = json.dumps(measured(), separators=(",", ":"))
        RESULTS.write_text(text.replace('{"name"', '\n{"name"') + "\n")
    PAGE.write_text(page(json.loads(RESULTS.read_text())))
