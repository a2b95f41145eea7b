"""Triton's interpreter, quiet and somewhat faster."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import inspect
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest


@contextlib.contextmanager
def tamed() -> Iterator[None]:
    """No warnings of numpy, and the search for Triton's builtins once instead of in every call of a jitted function."""
    if importlib.util.find_spec("triton") is None:
        yield
        return
    interpreter = importlib.import_module("triton.runtime.interpreter")
    is_builtin = interpreter.tl.core.is_builtin

    @functools.cache
    def builtins_of(package: Any) -> list[str]:
        return [name for name, member in inspect.getmembers(package) if is_builtin(member)]

    def patch_builtins(package: Any, builder: Any, scope: Any) -> None:
        for name in builtins_of(package):
            if is_builtin(member := getattr(package, name)):  # not patched yet
                interpreter._patch_attr(package, name, member, builder, scope)

    executor = interpreter.GridExecutor
    with pytest.MonkeyPatch.context() as patch:
        # the kernels mean their infinities; a warning filter would not reach into pytest.warns
        patch.setattr(executor, "__call__", np.errstate(all="ignore")(executor.__call__))
        patch.setattr(interpreter, "_patch_builtin", patch_builtins)
        yield
