"""Work for a process in which Triton compiles its kernels: in one that interprets them they cannot be compiled.

A test file that needs one is also a program. It prints the result of the work that its argument names.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpo_kernels as gk


def printed_by(file: str, work: str) -> Any:
    """What `answer` prints in a new process that runs a test file as a program."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    places = [str(Path(gk.__file__).parents[1]), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, places))
    done = subprocess.run([sys.executable, file, work], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def answer(*works: Callable[[], Any]) -> None:
    """Print what the function that the command line names returns."""
    print(json.dumps({work.__name__: work for work in works}[sys.argv[1]]()))
