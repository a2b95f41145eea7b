"""Imports of packages that only the `train` extra installs, at the moment they are needed."""

from __future__ import annotations

from types import ModuleType

from .. import extras


def import_extra(name: str) -> ModuleType:
    """The module `name`. Raises ModuleNotFoundError with the command that installs it when its package is missing."""
    return extras.import_extra(name, "train", "training")
