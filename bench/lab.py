"""All the studies behind docs/group-size.md: records, figures, and the numbers in the page.

    python bench/lab.py --run              # about six minutes on one core; or name some: --run gap pilot-bandit
    python bench/lab.py --figures --page   # from the committed records alone

Each record holds the command line that makes it alone.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpo_kernels import cli, lab
from grpo_kernels.lab.plots import save_figure

ROOT = Path(__file__).parents[1]
RECORDS = ROOT / "bench" / "results" / "lab"
PAGE = ROOT / "docs" / "group-size.md"
STUDIES = {
    "mse-curve-pair": ["mse-curve", "--task", "pair"],
    "mse-curve-sum_bonus": ["mse-curve", "--task", "sum_bonus"],
    "budget-sweep-pair": ["budget-sweep", "--task", "pair"],
    "train-sweep-pair": ["train-sweep", "--task", "pair"],
    "pilot-bandit": ["pilot", "--task", "bandit"],
    "pilot-pair": ["pilot", "--task", "pair"],
    "gap": ["gap"],
}
FIGURES = ("mse-curve-pair", "budget-sweep-pair", "train-sweep-pair")


def load(name: str) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((RECORDS / f"{name}.json").read_text())
    return record


def run(names: list[str]) -> int:
    code = 0
    for name in names:
        arguments = ["lab", *STUDIES[name], "--out", str(RECORDS.relative_to(ROOT)), "--no-plot"]
        sys.argv[1:] = arguments  # what the record will call its command
        print(f"grpo-kernels {' '.join(arguments)}", flush=True)
        code = max(code, cli.main(arguments))
    return code


def table(rows: list[list[str]]) -> str:
    head, *rest = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([head, "|---" * len(rows[0]) + "|", *rest])


def claims(*names: str) -> str:
    rows = [["study", "claim", "found"]]
    for name in names:
        for item in load(name)["claims"]:
            held = "" if item["holds"] else " **(fails)**"
            rows.append([name, item["claim"], f"{item['value']:.3g}{held}"])
    return table(rows)


def drift(record: Mapping[str, Any]) -> str:
    head = [
        "N",
        "updates",
        "J",
        "G*, all parameters",
        "G*, the head's alone",
        "what the head's advice costs",
        "g_cross",
    ]
    rows = [head]
    for line in record["drift"]:
        for i, done in enumerate(line["iterations"]):
            cross = line["g_cross"][i]
            rows.append(
                [
                    str(line["N"]), str(done), f"{line['J'][i]:.3f}", f"{line['g_star'][i]:.1f}",
                    f"{line['g_star_head'][i]:.1f}", f"{100 * line['head_regret'][i]:.1f}%",
                    "never" if cross is None else f"{cross:.0f}",
                ]
            )  # fmt: skip
    return table(rows)


def trained(record: Mapping[str, Any]) -> str:
    groups = record["settings"]["groups"]
    rows = [["N", "updates", *(f"G = {G}" for G in groups)]]
    cells: dict[tuple[int, int], dict[int, Mapping[str, Any]]] = {}
    for row in record["rows"]:
        cells.setdefault((row["N"], row["iterations"]), {})[row["G"]] = row
    for (N, done), row in cells.items():
        rows.append([str(N), str(done), *(f"{row[G]['J']:.3f} ± {row[G]['error']:.3f}" for G in groups)])
    return table(rows)


def head_gram() -> str:
    rows = [["P × G × T", "H", "V", "G T / H", "exact Gram", "sketch"]]
    for result in load("head-gram")["results"]:
        shape = result["shape"]
        rows.append(
            [
                " × ".join(str(shape[axis]) for axis in "PGT"), str(shape["H"]), f"{shape['V']:,}",
                f"{result['tokens_of_a_group_by_width']:.2f}", f"{result['exact_ratio']:.2f}",
                f"{result['sketch_ratio']:.2f}",
            ]
        )  # fmt: skip
    return table(rows)


def weights() -> str:
    schemes = {
        "loo": "leave-one-out, no std", "mean": "mean, no std", "std0": "std, ddof 0", "std1": "std, ddof 1",
        "maxrl": "mean, divided by the mean",
    }  # fmt: skip
    sizes, rates = (2, 8, 64), (0.05, 0.5)
    rows = [["advantage", *(f"G = {G}, p = {p}" for G in sizes for p in rates)]]
    for scheme, name in schemes.items():
        rows.append([name, *(f"{lab.binary_weight(scheme, G, p):.2f}" for G in sizes for p in rates)])
    return table(rows)


def sections() -> dict[str, str]:
    sweep = load("train-sweep-pair")
    return {
        "claims": claims(*STUDIES),
        "drift": drift(sweep),
        "trained": trained(sweep),
        "head": head_gram(),
        "weights": weights(),
    }


def page(text: str) -> str:
    """The page with the tables between its marks made anew from the committed records."""
    for name, body in sections().items():
        start, end = f"<!-- {name} -->\n", f"\n<!-- end of {name} -->"
        before, rest = text.split(start, maxsplit=1)
        text = before + start + body + end + rest.split(end, maxsplit=1)[1]
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", nargs="*", choices=STUDIES, metavar="STUDY", help="run studies (none named: all)")
    parser.add_argument("--figures", action="store_true", help="draw docs/lab-*.png from the records")
    parser.add_argument("--page", action="store_true", help="write the tables of docs/group-size.md from the records")
    options = parser.parse_args()
    code = 0 if options.run is None else run(options.run or list(STUDIES))
    if options.figures:
        for name in FIGURES:
            save_figure(load(name), ROOT / "docs" / f"lab-{name}.png")
    if options.page:
        PAGE.write_text(page(PAGE.read_text()))
    return code


if __name__ == "__main__":
    sys.exit(main())
