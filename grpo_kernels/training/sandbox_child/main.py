"""Entry point of a sandbox process: `ROLE SETTINGS`, SETTINGS a JSON object written by grpo_kernels.training.sandbox.

`program` runs answer.py as a script; `serve` runs it as a module and answers requests for what it defines; `judge` runs
test code, read from standard input, against a process that serves.
"""

from __future__ import annotations

import json
import os
import sys
import types

from .answer import serve
from .confine import confine
from .judge import judge

CANNOT_CONFINE = 70


def main() -> None:
    role, settings = sys.argv[1], json.loads(sys.argv[2])
    sys.argv[:] = ["answer.py"]
    if role == "judge":
        # The answer can write modules into the working folder, which the tests must not import.
        del sys.path[0]
    else:
        sys.path[0] = os.getcwd()
    try:
        confine(**settings["limits"], trusted=role == "judge")
    except OSError as error:
        print(f"the sandbox cannot be set up: {error}", file=sys.stderr)
        sys.exit(CANNOT_CONFINE)
    if role == "program":
        run_answer("__main__")
    elif role == "serve":
        with os.fdopen(settings["reader"], "rb") as requests, os.fdopen(settings["writer"], "wb") as replies:
            serve(lambda: run_answer("answer"), requests, replies)
    else:
        with os.fdopen(settings["reader"], "rb") as replies, os.fdopen(settings["writer"], "wb") as requests:
            judge(replies, requests)


def run_answer(name: str) -> types.ModuleType:
    """Executes answer.py as the module `name`."""
    with open("answer.py", encoding="utf-8") as file:
        source = file.read()
    module = types.ModuleType(name)
    module.__file__ = "answer.py"
    sys.modules[name] = module
    exec(compile(source, "answer.py", "exec"), module.__dict__)
    return module
