"""Compile every Triton kernel for every GPU target, read the machine code, and write docs/sass.md and its JSON.

    python bench/sass.py            # a few minutes on two cores; needs no GPU
    python bench/sass.py --page     # the page again, from the JSON
"""

from __future__ import annotations

import argparse
import json
import platform
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results" / "sass.json"
PAGE = ROOT / "docs" / "sass.md"
LARGE = 500_000
FEATURES = [(False, False), (True, False), (False, True), (True, True)]  # (entropy, softcap)


def measured() -> dict[str, Any]:
    """Readings of the usual cases: all dtypes on sm_90, bfloat16 elsewhere."""
    import triton

    from grpo_kernels.backends.triton import compile as compiling
    from grpo_kernels.backends.triton import sass

    cases = [compiling.Case(op, "sm_90", vocab=LARGE) for op in ("row_stats", "row_grad")]
    for target in compiling.TARGETS:
        cases += compiling.usual_cases(target, *([] if target == "sm_90" else [("bfloat16",)]))
    entries = []
    for case, reading in sass.read_all(cases).items():
        if isinstance(reading, str):
            raise SystemExit(f"{case} does not compile: {reading}")
        seconds = round(reading.seconds, 2)
        entries.append({"case": asdict(case), "reading": asdict(reading) | {"seconds": seconds}})
    return {"triton": triton.__version__, "machine": platform.machine(), "kernels": entries}


def page(results: dict[str, Any]) -> str:
    """The document that shows the results."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    large = 0.0
    for entry in results["kernels"]:
        case, reading = entry["case"], entry["reading"]
        if case["vocab"] == LARGE:
            large += reading["seconds"]
        else:
            found[case["target"], case["op"], case["dtype"], case["entropy"], case["softcap"]] = reading
    targets = list(dict.fromkeys(key[0] for key in found))
    tables = [table(target, {key[1:]: value for key, value in found.items() if key[0] == target}) for target in targets]
    return TEXT.format(triton=results["triton"], seconds=large, large=f"{LARGE:,}".replace(",", " ")) + "".join(tables)


def table(target: str, found: dict[tuple[Any, ...], dict[str, Any]]) -> str:
    """One line for each op and dtype; in a cell plain, entropy, softcap, both."""
    lines = [f"\n## {target}\n", HEADER]
    for op, dtype in dict.fromkeys(key[:2] for key in found):
        readings = [found[op, dtype, *feature] for feature in FEATURES]
        loops = [[loop for loop in reading["loops"] if not loop["masked"]] for reading in readings]
        flat = [loop for body in loops for loop in body]
        cells = [
            op,
            dtype,
            joined(per_logit(body, "instructions", writes=False) for body in loops),
            joined(per_logit(body, "instructions", writes=True) for body in loops),
            joined(max(per_logit(body, "exponentials", writes=writes) for writes in (False, True)) for body in loops),
            " · ".join(str(reading["registers"]) for reading in readings),
            str(max(reading["shared"] for reading in readings)),
            str(min(loop["narrowest"] for loop in flat)),
            str(sum(loop["barriers"] + loop["shuffles"] for loop in flat)),
            str(sum(reading["spills"] + reading["stack"] for reading in readings)),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def per_logit(loops: list[dict[str, Any]], what: str, *, writes: bool) -> float:
    """The most of the loops that read logits, and write them or not; 0 without such a loop."""
    chosen = [loop for loop in loops if loop["reads"] and loop["writes"] == writes]
    return max((loop[what] / loop["elements"] for loop in chosen), default=0.0)


def joined(values: Any) -> str:
    numbers = list(values)
    return " · ".join(f"{number:.1f}" for number in numbers) if any(numbers) else ""


HEADER = """\
| op | dtype | instructions a logit, forward | instructions a logit, backward | special | registers | shared | narrowest | waits | spills |
|---|---|---|---|---|---|---|---|---|---|"""

TEXT = """\
# What the compilers make of the Triton kernels

Read from machine code that was compiled without a GPU, by Triton {triton}; nothing here was timed. `python bench/sass.py`
writes this page and `bench/results/sass.json`, which has every loop. The tests compare both with the kernels.

In a cell: plain · with entropy · with softcap · with both. *Instructions a logit* are those of the main loops, over whole
blocks of a row, divided by the logits that they handle; forward reads a row once, backward reads and writes it, and
`loss_grad_` does one after the other in one launch. *Special* are those among them that need the special function unit
(exponentials, reciprocals), 16 a clock and multiprocessor. *Shared* is in bytes a program. *Narrowest* is the narrowest access
of a main loop, in bits. *Waits* counts barriers and shuffles in main loops, *spills* spilled registers and bytes of stack.
The loss is compiled with importance weights and a bias-corrected k3, 4 warps a program.

On an H200 at full bandwidth some 12 instructions a 16-bit logit fit beside the memory accesses of forward, and 24 beside
those of backward. Forward and backward of log-probs at V = {large} compile in {seconds:.1f} s together; V is no constant
of a kernel, so neither lengths nor vocabularies recompile anything but by their divisibility by 16.
"""

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", action="store_true", help="write the page from the JSON that is there")
    if not parser.parse_args().page:
        RESULTS.write_text(json.dumps(measured(), separators=(",", ":")).replace('{"case"', '\n{"case"') + "\n")
    PAGE.write_text(page(json.loads(RESULTS.read_text())))
