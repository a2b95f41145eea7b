"""`make mutants`: every mutant of the loss mathematics is noticed by the check that its line in mutants.py names.

A mutant lives in a process of its own, in memory: the package is imported there with one changed module. Exit status 1
where a mutant survives, where its text is gone from the file, or where a check fails without a mutant.
"""

from __future__ import annotations

import ast
import importlib.abc
import importlib.machinery
import importlib.util
import multiprocessing
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, ModuleType

import torch  # before the processes part: they share it
from mutants import MUTANTS, Mutant

PACKAGE = Path(__file__).parents[2] / "grpo_kernels"


class Changed(importlib.abc.MetaPathFinder, importlib.machinery.SourceFileLoader):
    """Imports one module of the package from a changed source."""

    def __init__(self, module: str, source: str) -> None:
        super().__init__(f"grpo_kernels.{module}", str(PACKAGE / f"{module}.py"))
        self.source = source

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        return importlib.util.spec_from_loader(fullname, self) if fullname == self.name else None

    def get_code(self, fullname: str) -> CodeType:
        return compile(self.source, self.path, "exec")


def mutate(module: str, mutant: Mutant) -> str:
    """The changed source; ValueError if the text is not there exactly once, or the change is not Python."""
    source = (PACKAGE / f"{module}.py").read_text()
    found = source.count(mutant.old)
    if found != 1:
        raise ValueError(f"its text is there {found} times")
    changed = source.replace(mutant.old, mutant.new)
    try:
        ast.parse(changed)
    except SyntaxError as error:
        raise ValueError(f"it is not Python: {error}") from error
    return changed


def fate(job: tuple[str, Mutant | None]) -> str:
    """ "" for a mutant that its check notices, and where all is well without one; else what went wrong."""
    module, mutant = job
    if mutant is not None:
        try:
            source = mutate(module, mutant)
        except ValueError as error:
            return str(error)
        sys.meta_path.insert(0, Changed(module, source))
    import sum_checks  # noqa: F401  (they register themselves)
    from checks import CHECKS

    if mutant is None:
        for name, check in CHECKS.items():
            try:
                check()
            except AssertionError as error:
                return f"{name} fails without a mutant: {error}"
        return ""
    try:
        CHECKS[mutant.check]()
    except AssertionError:
        return ""
    return f"survives {mutant.check}"


def main() -> int:
    begin = time.monotonic()
    jobs: list[tuple[str, Mutant | None]] = [("", None)]
    jobs += [(module, mutant) for module, group in MUTANTS.items() for mutant in group]
    torch.set_num_threads(1)
    sys.path.insert(0, str(PACKAGE.parent))
    context = multiprocessing.get_context("fork")
    with context.Pool(min(len(os.sched_getaffinity(0)), 8), maxtasksperchild=1) as pool:
        fates = pool.map(fate, jobs, chunksize=1)
    for (module, mutant), what in zip(jobs, fates, strict=True):
        if what:
            print(f"{module}: {what}" if mutant is None else f"{module}: {mutant.old!r} -> {mutant.new!r}: {what}")
    bad = sum(map(bool, fates))
    counts = ", ".join(f"{len(group)} of {module}" for module, group in MUTANTS.items())
    print(f"{len(jobs) - 1} mutants ({counts}), faults: {bad}, {time.monotonic() - begin:.0f} s")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
