"""Compile every Triton kernel for every GPU target, read the machine code, and write docs/sass.md and its JSON.

`python bench/sass.py` takes some minutes and no GPU; with `--page` it writes the page from the JSON that is there.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results" / "sass.json"
PAGE = ROOT / "docs" / "sass.md"
LARGE = 500_000
FEATURES = ((False, False), (True, False), (False, True), (True, True))  # (entropy, softcap)


def measured() -> dict[str, Any]:
    """Readings of the usual cases: all dtypes on sm_90, bfloat16 elsewhere."""
    import triton

    from grpo_kernels.backends.triton import compile as compiling
    from grpo_kernels.backends.triton import sass

    cases = [compiling.Case(op, "sm_90", vocab=LARGE) for op in compiling.ROW_OPS]
    for target in compiling.TARGETS:
        cases += [case for case in compiling.usual_cases(target) if target == "sm_90" or case.dtype == "bfloat16"]
    kernels = []
    for case, reading in sass.read_all(cases).items():
        if isinstance(reading, str):
            raise SystemExit(f"{case} does not compile: {reading}")
        kernels.append({"case": asdict(case), "reading": asdict(reading) | {"seconds": round(reading.seconds, 1)}})
    return {"triton": triton.__version__, "kernels": kernels}


def page(results: dict[str, Any]) -> str:
    """The document that shows the results."""
    readings, seconds = {}, 0.0
    for entry in results["kernels"]:
        case, reading = entry["case"], entry["reading"]
        if case["vocab"] == LARGE:
            seconds += reading["seconds"]
        else:
            readings[case["target"], case["op"], case["dtype"], (case["entropy"], case["softcap"])] = reading
    lines = [INTRODUCTION.format(triton=results["triton"], seconds=seconds, large=f"{LARGE:,}".replace(",", " "))]
    for target in dict.fromkeys(key[0] for key in readings):
        lines += [f"## {target}\n", "| " + " | ".join(COLUMNS) + " |", "|---" * len(COLUMNS) + "|"]
        for op, dtype in dict.fromkeys(key[1:3] for key in readings if key[0] == target):
            lines.append(row(op, dtype, [readings[target, op, dtype, feature] for feature in FEATURES]))
        lines.append("")
    return "\n".join(lines)


def row(op: str, dtype: str, readings: list[dict[str, Any]]) -> str:
    """One line of a table."""
    bodies = [[loop for loop in reading["loops"] if not loop["masked"]] for reading in readings]
    loops = [loop for body in bodies for loop in body]
    cells = [
        f"`{op}`",
        dtype,
        in_turn(per_logit(body, "instructions", writes=False) for body in bodies),
        in_turn(per_logit(body, "instructions", writes=True) for body in bodies),
        in_turn(max(per_logit(body, "exponentials", writes=writes) for writes in (False, True)) for body in bodies),
        " · ".join(str(reading["registers"]) for reading in readings),
        str(max(reading["shared"] for reading in readings)),
        str(min(loop["narrowest"] for loop in loops)),
        str(sum(loop["barriers"] + loop["shuffles"] for loop in loops)),
        str(sum(reading["spills"] + reading["stack"] for reading in readings)),
    ]
    return "| " + " | ".join(cells) + " |"


def per_logit(loops: list[dict[str, Any]], what: str, *, writes: bool) -> float:
    """The most that a loop needs which reads logits, and writes them or not; 0 without such a loop."""
    chosen = [loop for loop in loops if loop["reads"] and loop["writes"] == writes]
    return max((loop[what] / loop["elements"] for loop in chosen), default=0.0)


def in_turn(values: Iterable[float]) -> str:
    """Values for each of the features; nothing for a kernel without such loops."""
    numbers = list(values)
    return " · ".join(f"{number:.1f}" for number in numbers) if any(numbers) else ""


COLUMNS = (
    "op", "dtype", "forward", "backward", "special", "registers", "shared", "narrowest", "waits", "spills",
)  # fmt: skip
INTRODUCTION = """\
# What the compilers make of the Triton kernels

Read from machine code that was compiled without a GPU, by Triton {triton}. Nothing here was timed on one.
`python bench/sass.py` writes this page and `bench/results/sass.json`, which holds every loop; the tests compare both
with the kernels, and hold them to budgets on sm_90.

A cell with four numbers: plain · with entropy · with a softcap · with both. *Forward* and *backward* are instructions
a logit in the loops over whole blocks of a row. Forward reads a row once, backward reads and writes it; `loss_grad_`
does one after the other in one launch. *Special* of them need the special function unit (exponentials, reciprocals).
*Shared* is in bytes a program of 4 warps. *Narrowest* is the narrowest access of these loops, in bits; *waits* are
their barriers and shuffles; *spills* are spilled registers and bytes of stack of the whole kernel. The loss here has
importance weights and a bias-corrected k3.

An H200 at full bandwidth has room for some 12 instructions beside each 16-bit logit that is read, and for 24 beside one
that is read and written; its special function units, for 1.7 and 3.4.

Forward and backward of the log-probs at V = {large} compile in {seconds:.1f} s together, from nothing. Neither V nor a
length is a constant of a kernel: over a hundred lengths none compiles more than four variants.
"""

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--page", action="store_true", help="write the page alone, from the JSON that is there")
    if not parser.parse_args().page:
        text = json.dumps(measured(), separators=(",", ":"))
        RESULTS.write_text(text.replace('{"case"', '\n{"case"') + "\n")
    PAGE.write_text(page(json.loads(RESULTS.read_text())))
