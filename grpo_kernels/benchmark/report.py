"""Measured cases as tables: on a terminal, and in Markdown. From JSON alone."""

from __future__ import annotations

from typing import Any

from .memory import largest

COLUMNS = ("provider", "logits", "ms", "quartiles", "× ours", "% of bound", "peak MiB", "max error", "median error")
Row = list[str]
BUDGET = 8 * 2**30  # bytes: what the largest T must fit


def rows(case: dict[str, Any], phase: str) -> list[Row]:
    """A line for each provider, in order of time; behind them those that are wrong, and those that could not run."""
    timed = sorted(case["phases"].get(phase, {}).items(), key=lambda item: item[1]["ms"])
    lines = [_line(case, name, result) for name, result in timed]
    lines += [_note(name, "WRONG, not timed: " + why) for name, why in case["wrong"].items()]
    return lines + [_note(name, why) for name, why in case["missing"].items()]


def _line(case: dict[str, Any], name: str, result: dict[str, Any]) -> Row:
    low, high = result["quartiles"]
    most, median = case["errors"].get(name, (None, None))
    share = result.get("of_bound")
    return [
        name,
        case["precision"].get(name, ""),
        f"{result['ms']:.3g}",
        f"{low:.3g} to {high:.3g}",
        f"{result['ratio']:.2f}",
        "" if share is None else _share(share, case),
        mebibytes(case["memory"].get(name)),
        "" if most is None else f"{most:.1e}",
        "" if median is None else f"{median:.1e}",
    ]


def _share(share: float, case: dict[str, Any]) -> str:
    """Above the maker's rate a time is not believed; below a rate that was measured beside it, it may be."""
    doubtful = share > 1.0 and case.get("kind") == "gpu"
    return f"{100 * share:.0f}" + (" (not believed)" if doubtful else "")


def _note(name: str, text: str) -> Row:
    return [name, text, *[""] * (len(COLUMNS) - 2)]


def mebibytes(size: float | None) -> str:
    """A size in MiB, with digits where it is small."""
    if size is None:
        return ""
    return f"{size / 2**20:.0f}" if size >= 10 * 2**20 else f"{size / 2**20:.2f}"


def markdown(columns: list[str], lines: list[Row]) -> str:
    """A table of Markdown."""
    head = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    return "\n".join([*head, *(f"| {' | '.join(line)} |" for line in lines)])


def largest_lengths(cases: list[dict[str, Any]], budget: int = BUDGET) -> list[Row]:
    """How many tokens fit the budget, by provider: the inputs that grow with them and the step's peak, on a line.

    Cases come in pairs that differ in their length; a provider whose peak does not grow between them fits any number
    that its inputs fit.
    """
    lines: list[Row] = []
    few = cases[: len(cases) // 2]
    for short, long in zip(few, cases[len(cases) // 2 :], strict=True):
        for name in short["memory"]:
            tokens = [case["shape"]["batch"] * case["shape"]["length"] for case in (short, long)]
            held = [input_bytes(case["shape"]) + case["memory"][name] for case in (short, long)]
            most = largest(budget, (tokens[0], held[0]), (tokens[1], held[1]))
            start = "hidden states" if short["shape"]["hidden"] else "logits"
            lines.append([f"{name} (from {start})", f"{held[0] / 2**20:.0f}", f"{held[1] / 2**20:.0f}", f"{most}"])
    return lines


def input_bytes(shape: dict[str, Any]) -> int:
    """Bytes of the logits, or of hidden states and weight."""
    size = 4 if shape["dtype"] == "float32" else 2
    tokens = shape["batch"] * shape["length"]
    if shape["hidden"]:
        return int(size * shape["hidden"] * (tokens + shape["vocabulary"]))
    return int(size * tokens * shape["vocabulary"])


def worst_loss(reports: list[dict[str, Any]]) -> tuple[str, str, str, str, float] | None:
    """(label, phase, ours, rival, ours / rival) where our best loses most time to a rival's; None if nowhere.

    Ours is the library's own loss: what a user puts together from its log-probs (a "+" in the name) is not.
    """
    found = []
    for case in (case for report in reports for case in report["cases"]):
        for phase, results in case["phases"].items():
            ours = {name: r["ms"] for name, r in results.items() if name.startswith("ours") and "+" not in name}
            rivals = {
                name: r["ms"] for name, r in results.items() if not name.startswith(("ours", "bare", "copy"))
            }  # fmt: skip
            if ours and rivals:
                own, rival = min(ours, key=ours.__getitem__), min(rivals, key=rivals.__getitem__)
                found.append((case["label"], phase, own, rival, ours[own] / rivals[rival]))
    worst = max(found, key=lambda entry: entry[-1], default=None)
    return worst if worst is not None and worst[-1] > 1 else None
