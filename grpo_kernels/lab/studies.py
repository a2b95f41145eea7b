"""The studies: each returns one record of plain numbers, with the claims that it checks and whether they hold.

A record has `settings`, what was computed, `rows` (a list of flat tables' lines, for the CSV) and `claims`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..checks import check_choice, complain
from .advice import optimal_group_size
from .arrays import check_whole
from .bandit import Atoms, make_bandit
from .constants import GradConstants, crossing, exact_constants, fixed_budget, mse
from .estimate import estimate_constants
from .gap_law import QUANTILES, make_table, stationary_gap
from .simulate import Simulated, draw_pilot, simulate_mse
from .training_study import Along, advice_at, train_sweep
from .transformer import TASKS, count_parameters, exact_atoms, expected_reward, rewards, warm_up

Record = dict[str, Any]
Progress = Callable[[int], Any] | None
GROUPS = (2, 4, 8, 16, 32, 64)
KINDS = ("loo", "oracle", "vanilla")


def atoms_of(task: str, *, sft_steps: int = 360) -> tuple[Atoms, Record]:
    """The atoms of "bandit", or of a transformer task after its supervised start, and what there is to say of them."""
    check_choice("atoms_of", "task", task, ("bandit", *TASKS))
    if task == "bandit":
        return make_bandit(), {"task": task}
    start = warm_up(task, steps=sft_steps)
    return exact_atoms(start, task), {
        "task": task,
        "sft_steps": sft_steps,
        "parameters": count_parameters(start),
        "J": expected_reward(start, rewards(task)).item(),
    }


def numbers(constants: GradConstants) -> dict[str, float]:
    """The constants as a plain table."""
    names = ("Vb", "A", "B2", "J2", "A0", "Aopt")
    return {name: getattr(constants, name) for name in names if getattr(constants, name) is not None}


def claim(text: str, value: float, holds: bool) -> Record:
    """One claim, the number it rests on, and whether it holds."""
    return {"claim": text, "value": value, "holds": bool(holds)}


def mse_curve(
    task: str = "pair", *, groups: Sequence[int] = GROUPS, N: int = 128, reps: int = 2500, seed: int = 0,
    sft_steps: int = 360, progress: Progress = None,
) -> Record:  # fmt: skip
    """MSE of vanilla, leave-one-out and oracle against G at N responses: formula and simulation."""
    _check_sizes("mse_curve", groups, [N])
    _check_counts("mse_curve", reps=(reps, 2), sft_steps=(sft_steps, 0))
    atoms, about = atoms_of(task, sft_steps=sft_steps)
    constants = exact_constants(atoms.P, atoms.R, atoms.S)
    rows: list[Record] = []
    for G in groups:
        n = N // G
        found = simulate_mse(atoms.P, atoms.R, atoms.S, n, G, KINDS, reps=reps, seed=seed + G, progress=progress)
        rows += [_compared(kind, G, n, float(mse(constants, n, G, kind)), found[kind]) for kind in KINDS]
    cross = crossing(constants)
    return {
        "study": "mse-curve",
        "settings": {**about, "groups": list(groups), "N": N, "reps": reps, "seed": seed},
        "constants": numbers(constants),
        "g_cross": cross if math.isfinite(cross) else None,
        "rows": rows,
        "claims": _curve_claims(constants, rows, cross),
    }


def _compared(kind: str, G: int, n: int, predicted: float, found: Simulated) -> Record:
    return {
        "kind": kind,
        "G": G,
        "n": n,
        "predicted": predicted,
        "simulated": found.mse,
        "error": found.error,
        "z": (found.mse - predicted) / found.error,
    }


def _curve_claims(constants: GradConstants, rows: list[Record], cross: float) -> list[Record]:
    at = {(row["kind"], row["G"]): row for row in rows}
    groups = sorted({row["G"] for row in rows})
    off = max(abs(row["simulated"] / row["predicted"] - 1) for row in rows)
    far = max(abs(row["z"]) for row in rows)
    claims = [
        claim("simulation within 5 % of the formula, all estimators, all G", off, off <= 0.05),
        claim("and within 4 standard errors", far, far < 4),
    ]
    for G, limit in ((32, 1.05), (64, 1.03)):
        if G in groups:
            ratio = at["loo", G]["predicted"] / at["oracle", G]["predicted"]
            claims.append(claim(f"leave-one-out / oracle at most {limit} at G = {G}", ratio, ratio <= limit))
    given_x = []
    for G in groups:
        loo, oracle = (at[kind, G]["n"] * at[kind, G]["simulated"] - constants.Vb for kind in ("loo", "oracle"))
        given_x.append(abs(loo / oracle / (1 + constants.B2 / constants.A / (G - 1)) - 1))
    worst = max(given_x)
    claims.append(claim("given the prompts, that ratio is 1 + (B2/A)/(G - 1), within 3 %", worst, worst <= 0.03))
    above = [G for G in groups if cross < G]
    for source in ("predicted", "simulated"):
        ordered = [at["oracle", G][source] < at["loo", G][source] < at["vanilla", G][source] for G in above]
        text = f"oracle < leave-one-out < vanilla for every G above the crossing ({cross:.2f}), {source}"
        if above:
            claims.append(claim(text, sum(ordered), all(ordered)))
    return claims


def budget_sweep(
    task: str = "pair", *, budgets: Sequence[int] = (64, 256, 1024), groups: Sequence[int] = GROUPS, reps: int = 2500,
    seed: int = 0, sft_steps: int = 360, progress: Progress = None,
) -> Record:  # fmt: skip
    """N MSE of the leave-one-out estimator against G for several N: the best G is the same, and the predicted one."""
    _check_sizes("budget_sweep", groups, budgets, whole=False)
    _check_counts("budget_sweep", reps=(reps, 2), sft_steps=(sft_steps, 0))
    atoms, about = atoms_of(task, sft_steps=sft_steps)
    constants = exact_constants(atoms.P, atoms.R, atoms.S)
    predicted = dict(zip(groups, fixed_budget(constants, groups), strict=True))
    rows: list[Record] = []
    best = {}
    for N in budgets:
        values = {}
        for G in groups:
            if G <= N:
                n = N // G
                found = simulate_mse(
                    atoms.P, atoms.R, atoms.S, n, G, ("loo",), reps=reps, seed=seed + 1000 * N + G, progress=progress
                )["loo"]
                values[G] = N * found.mse
                rows.append(
                    {"N": N, "G": G, "predicted": predicted[G], "simulated": N * found.mse, "error": N * found.error}
                )
        best[N] = min(values, key=lambda size: values[size])
    wanted = min(predicted, key=lambda size: predicted[size])
    return {
        "study": "budget-sweep",
        "settings": {**about, "budgets": list(budgets), "groups": list(groups), "reps": reps, "seed": seed},
        "constants": numbers(constants),
        "g_star": optimal_group_size(constants).g_cont,
        "best": {str(N): G for N, G in best.items()},
        "rows": rows,
        "claims": [
            claim(f"the best G is {wanted}, the predicted one, at N = {N}", G, wanted == G) for N, G in best.items()
        ],
    }


def training_sweep(
    task: str = "pair", *, budgets: Sequence[int] = (64, 128, 256), groups: Sequence[int] = GROUPS,
    iterations: Sequence[int] = (100, 200, 400), learning_rate: float = 0.25, seeds: int = 8, first_seed: int = 100,
    sft_steps: int = 360, champion: int = 4, progress: Progress = None,
) -> Record:  # fmt: skip
    """J after training with each G at each budget, judged by two combined standard errors; G*(theta) on the way.

    champion: the G that is claimed to be as good as any, chosen beforehand, on other seeds.
    """
    check_choice("training_sweep", "task", task, TASKS)
    _check_sizes("training_sweep", groups, budgets)
    _check_counts("training_sweep", seeds=(seeds, 2), sft_steps=(sft_steps, 0), iterations=(min(iterations), 1))
    if champion not in groups:
        advice = "It is one of the sizes that are trained."
        raise ValueError(complain("training_sweep", "champion", f"must be one of {list(groups)}", champion, advice))
    start = warm_up(task, steps=sft_steps)
    cells, paths = train_sweep(
        start, task, budgets=budgets, groups=groups, iterations=iterations, learning_rate=learning_rate,
        seeds=range(first_seed, first_seed + seeds), progress=progress,
    )  # fmt: skip
    rows = [
        {"N": cell.N, "iterations": cell.iterations, "G": G, "J": mean, "error": error, "deficit": cell.deficit(G)}
        for cell in cells
        for G, (mean, error) in cell.J.items()
    ]
    marks = [0, *sorted(set(iterations))]
    begin = advice_at(start, task)
    drift = []
    for N in budgets:
        along = [begin, *(advice_at(point, task) for point in paths[N, champion])]
        columns = {name: [getattr(point, name) for point in along] for name in Along._fields}
        drift.append({"N": N, "G": champion, "iterations": marks, **columns})
    misses = sum(cell.deficit(champion) > 2 for cell in cells)
    claims = [
        claim(f"G = {champion} within 2 standard errors of the best, in all cells but one of nine", misses,
              misses <= len(cells) / 9)
    ]  # fmt: skip
    for G in (32, 64):
        if G in groups:
            smallest = min(budgets)
            least = min(cell.deficit(G) for cell in cells if smallest == cell.N)
            claims.append(claim(f"G = {G} worse by 3 standard errors at N = {smallest}", least, least > 3))
    return {
        "study": "train-sweep",
        "settings": {
            "task": task, "sft_steps": sft_steps, "budgets": list(budgets), "groups": list(groups),
            "iterations": list(iterations), "learning_rate": learning_rate, "seeds": seeds, "first_seed": first_seed,
            "champion": champion, "J_start": expected_reward(start, rewards(task)).item(),
        },
        "best": [{"N": cell.N, "iterations": cell.iterations, "G": cell.best()} for cell in cells],
        "drift": drift,
        "rows": rows,
        "claims": claims,
    }  # fmt: skip


def pilot_study(
    task: str = "bandit", *, n: int = 512, G: int = 16, seeds: int = 40, n_boot: int = 400, sft_steps: int = 360,
    progress: Progress = None,
) -> Record:  # fmt: skip
    """What a pilot's advice costs against the true constants, and how often its interval holds the true G*."""
    _check_counts("pilot_study", n=(n, 2), G=(G, 4), seeds=(seeds, 1), n_boot=(n_boot, 0), sft_steps=(sft_steps, 0))
    atoms, about = atoms_of(task, sft_steps=sft_steps)
    truth = exact_constants(atoms.P, atoms.R, atoms.S)
    exact = optimal_group_size(truth)
    least = fixed_budget(truth, [exact.g_int or 2])[0]
    rows: list[Record] = []
    for seed in range(seeds):
        reward, scores = draw_pilot(atoms, n, G, seed)
        advice = optimal_group_size(estimate_constants(reward, scores, n_boot=n_boot, seed=seed))
        low, high = advice.ci if advice.ci is not None else (math.nan, math.nan)
        rows.append(
            {
                "seed": seed,
                "g_star": advice.g_cont,
                "advised": advice.g_int,
                "regret": fixed_budget(truth, [advice.g_int])[0] / least - 1 if advice.g_int else math.inf,
                "covered": low <= exact.g_cont <= high,
                "flags": " ".join(advice.flags),
            }
        )
        if progress is not None:
            progress(1)
    good = sum(row["regret"] <= 0.03 for row in rows) / seeds
    covered = sum(row["covered"] for row in rows) / seeds
    return {
        "study": "pilot",
        "settings": {**about, "n": n, "G": G, "seeds": seeds, "n_boot": n_boot},
        "constants": numbers(truth),
        "g_star": exact.g_cont,
        "rows": rows,
        "claims": [
            claim("regret at most 3 % in 95 % of the seeds", good, good >= 0.95),
            claim("the interval holds the true G* in 75 % of the seeds", covered, covered >= 0.75),
        ],
    }


def gap_study(
    *, cells: Sequence[tuple[int, int]] = ((2, 2), (2, 4), (1, 8)), eta: float = 0.2, beta: float = 0.5, seed: int = 0,
    chains: int = 4000, progress: Progress = None,
) -> Record:  # fmt: skip
    """J* - J at a constant step: predicted mean and chi-square quantiles against chains of updates."""
    table = make_table(seed, beta=beta)
    rows: list[Record] = []
    claims = []
    for n, G in cells:
        law = stationary_gap(table, n=n, G=G, eta=eta, chains=chains, seed=seed)
        pairs = [("mean", law.mean, law.simulated_mean)]
        pairs += [
            (f"quantile {level}", predicted, found)
            for level, predicted, found in zip(QUANTILES, law.quantiles, law.simulated_quantiles, strict=True)
        ]
        rows += [
            {"n": n, "G": G, "rank": law.rank, "what": what, "predicted": predicted, "simulated": found}
            for what, predicted, found in pairs
        ]
        off = max(abs(found / predicted - 1) for _, predicted, found in pairs)
        claims.append(claim(f"gap and quantiles within 5 % at {n} prompts x {G} responses", off, off <= 0.05))
        if progress is not None:
            progress(1)
    return {
        "study": "gap",
        "settings": {
            "cells": [list(cell) for cell in cells], "eta": eta, "beta": beta, "seed": seed, "chains": chains,
        },
        "rows": rows,
        "claims": claims,
    }  # fmt: skip


def versions() -> dict[str, Any]:
    """What decides a record's numbers besides its settings."""
    return {"torch": torch.__version__, "threads": torch.get_num_threads()}


def _check_sizes(function: str, groups: Sequence[int], budgets: Sequence[int], *, whole: bool = True) -> None:
    """ValueError, before any work, unless each budget is a multiple of each G; whole=False: of each that fits in."""
    if not groups or not budgets:
        argument = "budgets" if groups else "groups"
        raise ValueError(complain(function, argument, "must hold a number", "none", "Try powers of two."))
    for G in groups:
        check_whole(function, "groups", G, 2, "A leave-one-out mean needs two responses.")
    for N in budgets:
        fitting = [G for G in groups if whole or G <= N]
        if not fitting:
            advice = "Raise it, or try smaller groups."
            raise ValueError(complain(function, "N", f"must be at least the least G, {min(groups)}", N, advice))
        for G in fitting:
            if N < G or N % G:
                raise ValueError(complain(function, "N", f"must be a multiple of G = {G}", N, "Choose powers of two."))


def _check_counts(function: str, **counts: tuple[int, int]) -> None:
    """Errors, before any work, unless each is at least its second number."""
    for argument, (value, least) in counts.items():
        check_whole(function, argument, value, least, "Raise it.")


def advice_table(advice: Any) -> Record:
    """An `Advice` as JSON types; infinity and NaN as None."""

    def plain(value: Any) -> Any:
        if isinstance(value, float):
            return value if math.isfinite(value) else None
        return [plain(item) for item in value] if isinstance(value, tuple) else value

    return {key: plain(value) for key, value in dataclasses.asdict(advice).items()}
