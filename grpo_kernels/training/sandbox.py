"""Runs Python text that a model wrote against test cases, in a process of its own with limits.

Two kinds of tests. Input and output: the program is given standard input and what it prints is compared here; it never
sees what is expected. Test code (`assert add(1, 2) == 3`): the tests run in a second process and reach the answer's
functions through a pipe, over which only plain data comes back. So printing, exiting early, patching modules and
objects that equal everything cannot make a verdict.

Each process has a limit on wall-clock time, processor time, address space (not on macOS) and file size, an environment
without the caller's variables, a session of its own and a temporary folder that is removed. On Linux (x86-64, arm64,
riscv64) a seccomp filter also refuses new processes, other programs, signals and sockets, and root's capabilities are
given up; elsewhere RLIMIT_NPROC refuses new processes (on other Linux machines threads too), and root is turned away
because that limit does not bind root.

What this is not: a security boundary against hostile code. The program runs as the same user and can read and write
that user's files; off Linux it can use the network. Put training on models that you do not trust into a container or a
virtual machine.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import json
import math
import multiprocessing.connection
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NamedTuple

_BOOT = "import sys; sys.path[0] = sys.argv.pop(1); from sandbox_child.main import main; main()"
_HERE = str(Path(__file__).resolve().parent)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of one process."""

    time_s: float = 5.0  # wall clock; processor time is bounded by the same, rounded up to seconds
    memory_mb: int = 512  # address space, MiB; not enforced on macOS
    file_mb: int = 16  # size of any one file and of what is printed, MiB


class Case(NamedTuple):
    """One run of a program: what it reads and what it has to print."""

    stdin: str
    stdout: str


class Verdict(NamedTuple):
    """`passed` is None when the tests themselves cannot be run, whatever the answer."""

    passed: bool | None
    reason: str


def require_sandbox(limits: Limits) -> None:
    """Runs a program that must pass. Raises RuntimeError with the reason where the sandbox cannot work."""
    if os.name != "posix":
        raise RuntimeError(
            f"require_sandbox: the system must be Linux or macOS, got {sys.platform}. "
            "Resource limits and process groups need POSIX: train in WSL or a container."
        )
    verdict = check_output("print(input())", [Case("ready", "ready")], limits)
    if not verdict.passed:
        raise RuntimeError(
            f"require_sandbox: a program that prints one word must pass under {limits}, got {verdict.reason}. "
            "Raise the limits if they are tight; as root, run on Linux with seccomp."
        )


def check_output(source: str, cases: Sequence[Case], limits: Limits) -> Verdict:
    """Whether the program exits with 0 and prints what each case expects, white space at line ends aside.

    Stops at the first case that fails; `limits` hold for each case.
    """
    for number, case in enumerate(cases, start=1):
        with _folder(source) as folder, tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as stdout:
            stdin.write(case.stdin.encode())
            stdin.seek(0)
            deadline = time.monotonic() + limits.time_s
            with _process("program", folder, limits, stdin, stdout) as process:
                if problem := process.problem(deadline, limits):
                    return Verdict(False, f"case {number}: {problem}")
            stdout.seek(0)
            printed = stdout.read().decode(errors="replace")
        if _lines(printed) != _lines(case.stdout):
            return Verdict(False, f"case {number}: wrong output")
    return Verdict(True, "")


def check_assertions(source: str, test_code: str, limits: Limits) -> Verdict:
    """Whether the test code runs to its end without an exception; names it leaves undefined are the answer's.

    Values cross between the two processes as plain data (None, bool, numbers, str, bytes, list, tuple, set, frozenset,
    dict, and their subclasses as those). Any other object of the answer's stays there: tests may call it, read its
    attributes, index, iterate and measure it, but not compare it, use its truth value or catch it. Lists, dicts and
    sets that the answer changes in place are changed for the test too. Tests that pass functions or objects of their
    own to the answer give `passed = None`.
    """
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(_folder(source))
        tests, verdict_file = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(2))
        tests.write(test_code.encode())
        tests.seek(0)
        ends = (*os.pipe(), *os.pipe())
        request_reader, request_writer, reply_reader, reply_writer = ends
        close_ends = stack.enter_context(contextlib.ExitStack())
        for end in ends:
            close_ends.callback(os.close, end)
        deadline = time.monotonic() + limits.time_s
        stack.enter_context(_process("serve", folder, limits, pipe=(request_reader, reply_writer)))
        pipe = (reply_reader, request_writer)
        judge = stack.enter_context(_process("judge", folder, limits, tests, verdict_file, pipe))
        # Held here, the answer's ends would hide from the judge that the answer's process has ended.
        close_ends.close()
        if problem := judge.problem(deadline, limits):
            return Verdict(False, problem)
        verdict_file.seek(0)
        message = json.loads(verdict_file.read())
    return Verdict({"passed": True, "failed": False}.get(message["verdict"]), message["reason"])


def check_test_code(test_code: str) -> None:
    """Raises ValueError for test code that is not Python, or that uses a standard module without importing it.

    A module that the tests leave undefined is looked up in the answer, which could then supply its own `math.isclose`.
    """
    try:
        tree = ast.parse(test_code)
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"check_test_code: test_code must be Python, got {error}. Correct the data set.") from None
    nodes = list(ast.walk(tree))
    bound = {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    bound |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    bound |= {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))}
    bound |= {
        (alias.asname or alias.name).partition(".")[0]
        for node in nodes
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
    }
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            name = node.value.id
            if name in sys.stdlib_module_names and name not in bound and not hasattr(builtins, name):
                raise ValueError(
                    f"check_test_code: test_code must import the modules it uses, got {name}.{node.attr} without "
                    f"`import {name}`. Add the import to the test code."
                )


@contextlib.contextmanager
def _folder(source: str) -> Iterator[str]:
    """A temporary working folder that holds answer.py."""
    folder = tempfile.mkdtemp(prefix="grpo-answer-")
    try:
        Path(folder, "answer.py").write_bytes(source.encode(errors="replace"))
        yield folder
    finally:
        try:
            shutil.rmtree(folder)
        except (OSError, RecursionError):
            # Folders nested by the thousand or without permissions: what the library cannot remove, rm can.
            subprocess.run(["chmod", "-R", "u+rwx", folder], check=False, stderr=subprocess.DEVNULL)
            subprocess.run(["rm", "-rf", folder], check=True)


@dataclass(frozen=True, slots=True)
class _Process:
    """A running sandbox process; `ended` becomes readable when it no longer holds the other end of that pipe."""

    popen: subprocess.Popen[bytes]
    stderr: IO[bytes]
    ended: int

    def problem(self, deadline: float, limits: Limits) -> str:
        """Waits for the end; what went wrong, or nothing after an exit with 0."""
        multiprocessing.connection.wait([self.ended], max(deadline - time.monotonic(), 0.0))
        try:
            returncode = self.popen.wait(max(deadline - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:
            return f"ran longer than {limits.time_s:g} s"
        if returncode < 0:
            return f"ended by signal {-returncode}"
        if returncode == 0:
            return ""
        self.stderr.seek(max(self.stderr.seek(0, os.SEEK_END) - 500, 0))
        lines = self.stderr.read().decode(errors="replace").strip().splitlines()
        return f"exit code {returncode}" + (f": {lines[-1]}" if lines else "")


@contextlib.contextmanager
def _process(
    role: str,
    folder: str,
    limits: Limits,
    stdin: IO[bytes] | int = subprocess.DEVNULL,
    stdout: IO[bytes] | int = subprocess.DEVNULL,
    pipe: tuple[int, int] | None = None,
) -> Iterator[_Process]:
    """A sandbox process; it and its whole process group are gone when the block ends."""
    settings = {
        "limits": {
            "parent": os.getpid(),
            "cpu_seconds": math.ceil(limits.time_s),
            "memory_bytes": limits.memory_mb << 20,
            "file_bytes": limits.file_mb << 20,
        },
        "reader": pipe[0] if pipe else None,
        "writer": pipe[1] if pipe else None,
    }
    environment = {
        "PATH": os.defpath,
        "LANG": "C.UTF-8",
        "HOME": folder,
        "TMPDIR": folder,
        "PYTHONHASHSEED": "0",
        "PYTHONUTF8": "1",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
    ended, held = os.pipe()
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, ended)
        stderr = stack.enter_context(tempfile.TemporaryFile())
        try:
            popen = subprocess.Popen(
                [sys.executable, "-s", "-B", "-c", _BOOT, _HERE, role, json.dumps(settings)],
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                cwd=folder,
                env=environment,
                pass_fds=(held, *(pipe or ())),
                start_new_session=True,
            )
        finally:
            os.close(held)
        try:
            yield _Process(popen, stderr, ended)
        finally:
            # A group that is empty already, and on macOS one of zombies, cannot be signalled.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(popen.pid, signal.SIGKILL)
            popen.wait()


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]
