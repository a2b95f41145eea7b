"""Imports of packages that only an extra installs, at the moment they are needed."""

from __future__ import annotations

import importlib
from types import ModuleType


def import_extra(name: str, extra: str, purpose: str) -> ModuleType:
    """The module `name`. Raises ModuleNotFoundError with the command that installs it when its package is missing."""
    package = name.partition(".")[0]
    try:
        importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise ModuleNotFoundError(
            f"import_extra: {package} must be installed for {purpose}, got no such package. "
            f"Run: pip install 'grpo-kernels[{extra}]'",
            name=package,
        ) from None
    return importlib.import_module(name)
