"""`grpo-kernels lab`: advice from a pilot's files, and the studies.

Exit codes: 0; 1 when a claim of a study or of the selftest does not hold; 2 when advice carries a flag; 64, sysexits'
EX_USAGE, when options, files or extras do not fit, and nothing was computed.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ..checks import complain
from ..extras import import_extra

if TYPE_CHECKING:
    from .studies import Progress, Record

_EXAMPLE = "example: grpo-kernels lab mse-curve --task bandit --groups 2,4,8,16"
_USAGE = 64  # as sysexits.h has it: argparse's own 2 means flagged advice here
_UNUSABLE = (OSError, TypeError, ValueError, ModuleNotFoundError)
_TASKS = ("bandit", "pair", "sum", "sum_bonus")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give `parser` the commands of `grpo-kernels lab` and an example."""
    parser.epilog = f"{_EXAMPLE}. Exit codes: 1 a claim fails, 2 the advice carries a flag, 64 nothing was computed."
    _own_code(parser)
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def add(name: str, text: str, example: str, run: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
        command = commands.add_parser(
            name, help=text, description=text, epilog=f"example: grpo-kernels lab {example}", allow_abbrev=False
        )
        command.set_defaults(parser=command, run=run)
        _own_code(command)
        return command

    advise = add(
        "advise", "Best number of responses per prompt from a pilot; exit code 2 when the advice carries a flag.",
        "advise --rewards r.npy --scores s.npy --budget 1024 --cprompt 4", _advise,
    )  # fmt: skip
    advise.add_argument("--rewards", required=True, metavar="FILE", help="[P, G] .npy, NaN where unscored")
    advise.add_argument("--scores", metavar="FILE", help="[P, G, d] .npy: gradients of log pi, or sketches of them")
    advise.add_argument("--gram", metavar="FILE", help="[P, G, P, G] or [P G, P G] .npy; [P, G, G] with --loo-sum-sq")
    advise.add_argument("--loo-sum-sq", type=float, help="|sum of the groups' leave-one-out gradients|^2")
    advise.add_argument("--budget", type=int, metavar="N", help="responses per update")
    advise.add_argument("--cprompt", type=float, default=0.0, help="cost of one more prompt (default: 0)")
    advise.add_argument("--cresp", type=float, default=1.0, help="cost of one more response (default: 1)")
    advise.add_argument("--g-min", type=int, default=2, help="least G (default: 2)")
    advise.add_argument("--g-max", type=int, help="largest G")
    advise.add_argument("--multiple-of", type=int, default=1, help="G must be a multiple of it (default: 1)")
    advise.add_argument("--n-boot", type=_any, default=400, help="bootstrap pilots for the interval (default: 400)")
    advise.add_argument("--seed", type=int, default=0, help="of the bootstrap (default: 0)")
    advise.add_argument("--json", action="store_true", help="print JSON")

    curve = add(
        "mse-curve", "Error of three estimators against G, formula and simulation.",
        "mse-curve --task bandit --groups 2,4,8,16", _study("mse_curve", "task groups N reps seed sft_steps"),
    )  # fmt: skip
    _of_task(curve, "pair")
    curve.add_argument("--N", type=_count, default=128, help="responses per update (default: 128)")
    _of_simulation(curve)

    budget = add(
        "budget-sweep", "The best G at several budgets, by simulation, against the predicted one.",
        "budget-sweep --budgets 64,256,1024", _study("budget_sweep", "task budgets groups reps seed sft_steps"),
    )  # fmt: skip
    _of_task(budget, "pair")
    budget.add_argument("--budgets", type=_integers, default=(64, 256, 1024), help="default: 64,256,1024")
    _of_simulation(budget)

    train = add(
        "train-sweep", "Train the enumerable transformer with each G at each budget.",
        "train-sweep --task pair --N 64,128 --iters 100,200",
        _study("training_sweep", "task budgets groups iterations learning_rate seeds first_seed champion sft_steps"),
    )  # fmt: skip
    _of_task(train, "pair", _TASKS[1:])
    train.add_argument("--N", dest="budgets", type=_integers, default=(64, 128, 256), help="default: 64,128,256")
    train.add_argument("--G", dest="groups", type=_groups, default=(2, 4, 8, 16, 32, 64), help="default: 2,4,...,64")
    train.add_argument(
        "--iters", dest="iterations", type=_integers, default=(100, 200, 400), help="default: 100,200,400"
    )
    train.add_argument("--lr", dest="learning_rate", type=float, default=0.25, help="of plain SGD (default: 0.25)")
    train.add_argument("--seeds", type=_two, default=8, help="runs of each cell (default: 8)")
    train.add_argument("--first-seed", type=_any, default=100, help="default: 100")
    train.add_argument("--champion", type=_two, default=4, help="the G claimed to be as good as any (default: 4)")

    pilot = add(
        "pilot", "What the advice of pilots costs against the truth, over many seeds.",
        "pilot --task bandit --n 512 --G 16", _study("pilot_study", "task n G seeds n_boot sft_steps"),
    )  # fmt: skip
    _of_task(pilot, "bandit")
    pilot.add_argument("--n", type=_two, default=512, help="prompts of a pilot (default: 512)")
    pilot.add_argument("--G", type=int, default=16, help="responses per prompt (default: 16)")
    pilot.add_argument("--seeds", type=_count, default=40, help="pilots (default: 40)")
    pilot.add_argument("--n-boot", type=_any, default=400, help="bootstrap pilots of each (default: 400)")

    gap = add("gap", "Where training settles at a constant step: the predicted law against simulated runs.",
              "gap --eta 0.2", _study("gap_study", "cells eta beta seed chains"))  # fmt: skip
    gap.add_argument("--cells", type=_cells, default=((2, 2), (2, 4), (1, 8)), help="prompts x responses: 2x2,2x4,1x8")
    gap.add_argument("--eta", type=float, default=0.2, help="step size (default: 0.2)")
    gap.add_argument("--beta", type=float, default=0.5, help="weight of the KL (default: 0.5)")
    gap.add_argument("--chains", type=_two, default=4000, help="runs (default: 4000)")
    gap.add_argument("--seed", type=int, default=0, help="default: 0")
    _of_files(gap)

    add("selftest", "The lab's arithmetic against numbers worked out by hand; exit code 1 on a miss.", "selftest",
        _selftest)  # fmt: skip


def _own_code(parser: argparse.ArgumentParser) -> None:
    """Let this parser's errors end with the code of this module."""

    def fail(message: str) -> NoReturn:
        parser.print_usage(sys.stderr)
        parser.exit(_USAGE, f"{parser.prog}: error: {message}\n")

    parser.error = fail  # type: ignore[method-assign]


def _of_task(parser: argparse.ArgumentParser, default: str, tasks: tuple[str, ...] = _TASKS) -> None:
    parser.add_argument("--task", choices=tasks, default=default, help=f"default: {default}")
    parser.add_argument("--sft-steps", type=_any, default=360, help="supervised steps of the start (default: 360)")
    _of_files(parser)


def _of_simulation(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--groups", type=_groups, default=(2, 4, 8, 16, 32, 64), help="default: 2,4,...,64")
    parser.add_argument("--reps", type=_two, default=2500, help="simulated batches of each cell (default: 2500)")
    parser.add_argument("--seed", type=int, default=0, help="default: 0")


def _of_files(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", default="runs/lab", metavar="DIR", help="folder of the files (default: runs/lab)")
    parser.add_argument("--no-plot", action="store_true", help="JSON and CSV, no PNG")


def _integers(text: str, least: int = 1) -> tuple[int, ...]:
    try:
        values = tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        values = ()
    if not values or values[0] < least:
        raise argparse.ArgumentTypeError(f"must be counts of at least {least} such as 2,4,8, got {text!r}")
    return values


_groups = functools.partial(_integers, least=2)


def _count(text: str, least: int = 1) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < least:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least {least}, got {text!r}")
    return int(text)


_two, _any = functools.partial(_count, least=2), functools.partial(_count, least=0)


def _cells(text: str) -> tuple[tuple[int, int], ...]:
    try:
        pairs = [tuple(int(number) for number in part.split("x")) for part in text.split(",")]
        cells = tuple((n, G) for n, G in pairs)
    except ValueError:
        cells = ()
    if not cells or any(n < 1 or G < 2 for n, G in cells):
        raise argparse.ArgumentTypeError(f"must be prompts x 2 or more responses, like 2x2,1x8, got {text!r}")
    return cells


def _study(function: str, names: str) -> Callable[[argparse.Namespace], int]:
    """Runs a study with the options of these names, writes its files, prints its claims."""

    def run(options: argparse.Namespace) -> int:
        from . import studies

        settings = {name: getattr(options, name) for name in names.split()}
        make: Callable[..., Record] = getattr(studies, function)
        try:
            _check_folder(options)
            with _progress(function.replace("_", " "), _steps(function, settings)) as progress:
                if not options.no_plot and function != "pilot_study":
                    import_extra("matplotlib", "lab", "the lab's figures")
                record = make(**settings, progress=progress)
            _write(record, options)
        except _UNUSABLE as error:
            return _unusable(error)
        for line in _lines(record):
            print(line)
        return int(not all(item["holds"] for item in record["claims"]))

    return run


def _unusable(error: Exception) -> int:
    print(f"grpo-kernels lab: {error}", file=sys.stderr)
    return _USAGE


def _check_folder(options: argparse.Namespace) -> None:
    """Make the folder of the files, and try it, before a study of minutes."""
    folder = Path(options.out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        advice = f"{error.strerror}. Name another with --out."
        raise ValueError(complain("lab", "--out", "must be a folder to write to", options.out, advice)) from error


def _steps(function: str, settings: dict[str, Any]) -> int:
    """How many steps a study will report."""
    if function == "mse_curve":
        return int(settings["reps"]) * len(settings["groups"])
    if function == "budget_sweep":
        pairs = len([G for N in settings["budgets"] for G in settings["groups"] if G <= N])
        return int(settings["reps"]) * pairs
    if function == "training_sweep":
        longest: int = max(settings["iterations"])
        return longest * len(settings["budgets"]) * len(settings["groups"])
    if function == "gap_study":
        return len(settings["cells"])
    return int(settings["seeds"])


@contextmanager
def _progress(title: str, total: int) -> Iterator[Progress]:
    """A bar on standard error, where that is a terminal."""
    console = import_extra("rich.console", "lab", "the lab's progress bars").Console(stderr=True)
    rich = import_extra("rich.progress", "lab", "the lab's progress bars")
    with rich.Progress(console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task(title, total=total)
        yield lambda steps: bar.advance(task, steps)


def _write(record: Record, options: argparse.Namespace) -> None:
    """STUDY.json, .csv and .png in the folder, named after the task too where there is one."""
    import csv

    from .plots import save_figure
    from .studies import versions

    folder = Path(options.out)
    name = "-".join([record["study"], *filter(None, [record["settings"].get("task")])])
    whole = {"command": _command(), **record, "versions": versions()}
    (folder / f"{name}.json").write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    with open(folder / f"{name}.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(record["rows"][0]))
        writer.writeheader()
        writer.writerows(record["rows"])
    kinds = "json, csv"
    if not options.no_plot and save_figure(record, folder / f"{name}.png"):
        kinds += ", png"
    print(f"{folder / name}: {kinds}")


def _command() -> str:
    """The command line that is running, from its first word on."""
    return " ".join(["grpo-kernels", *sys.argv[1:]])


def _lines(record: Record) -> Iterator[str]:
    """What a reader wants to know of a record."""
    for name, value in record.get("constants", {}).items():
        yield f"{name:<6} {value:.6g}"
    if record.get("g_star") is not None:
        yield f"G*     {record['g_star']:.2f}"
    for line in record.get("drift", []):
        along = ", ".join(f"{at}: {size:.1f}" for at, size in zip(line["iterations"], line["g_star"], strict=True))
        yield f"G*(theta) on the way at N = {line['N']}, trained with G = {line['G']}, by updates: {along}"
    for item in record["claims"]:
        yield f"{'ok  ' if item['holds'] else 'FAIL'}  {item['claim']}: {item['value']:.4g}"


def _advise(options: argparse.Namespace) -> int:
    from .advice import optimal_group_size
    from .estimate import estimate_constants
    from .studies import advice_table, numbers

    try:
        numpy = import_extra("numpy", "lab", "reading .npy files")
        files = {name: getattr(options, name) for name in ("rewards", "scores", "gram")}
        arrays = {name: _load(numpy, name, path) for name, path in files.items() if path is not None}
        rewards = arrays.pop("rewards")
        constants = estimate_constants(
            rewards, **arrays, loo_sum_sq=options.loo_sum_sq, n_boot=options.n_boot, seed=options.seed
        )
        advice = optimal_group_size(
            constants, N=options.budget, c_prompt=options.cprompt, c_response=options.cresp, g_min=options.g_min,
            g_max=options.g_max, multiple_of=options.multiple_of,
        )  # fmt: skip
    except _UNUSABLE as error:
        return _unusable(error)
    if options.json:
        about = {**numbers(constants), "n": constants.n, "G": constants.G, "silent": constants.silent}
        print(json.dumps({"advice": advice_table(advice), "constants": about}, indent=1))
    else:
        print("\n".join(advice.why()))
        print("\n".join(f"{name:<6} {value:.6g}" for name, value in numbers(constants).items()))
    return 2 if advice.flags else 0


def _load(numpy: Any, name: str, path: str) -> Any:
    """The array in a .npy file."""
    try:
        found = numpy.load(path, allow_pickle=False)
    except (OSError, EOFError, ValueError) as error:
        advice = f"{error} Write it with numpy.save."
        raise ValueError(complain("lab advise", f"--{name}", "must be a .npy file", path, advice)) from error
    if not isinstance(found, numpy.ndarray):
        advice = "Save each array by itself with numpy.save."
        raise ValueError(complain("lab advise", f"--{name}", "must be a .npy file", f"{path}, an archive", advice))
    return found


def _selftest(_options: argparse.Namespace) -> int:
    from .selftest import checks

    misses = 0
    for what, error, limit in checks():
        misses += not error <= limit
        print(f"{'ok  ' if error <= limit else 'FAIL'}  {what}: {error:.2g}, at most {limit:.2g}", flush=True)
    return int(misses > 0)
