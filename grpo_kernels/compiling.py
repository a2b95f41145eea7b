"""What must not be traced by torch.compile."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

_P = ParamSpec("_P")
_R = TypeVar("_R")


def outside_compile(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """torch.compiler.disable, whose import costs a second, on the first compiled call."""

    @functools.wraps(function)
    def run(*arguments: _P.args, **options: _P.kwargs) -> _R:
        if not torch.compiler.is_compiling():
            return function(*arguments, **options)
        eager: Callable[_P, _R] = torch.compiler.disable(function)
        return eager(*arguments, **options)

    return run
