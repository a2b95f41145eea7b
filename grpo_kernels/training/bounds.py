"""What a setting may be, and the error that says so."""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence


class ConfigError(ValueError):
    """A setting that is unknown, of the wrong type, or out of range; the text says what to do."""


def one_of(key: str, value: str, allowed: Sequence[str]) -> None:
    """ConfigError unless `value` is one of a few words."""
    if value not in allowed:
        close = difflib.get_close_matches(value, allowed, n=1)
        hint = f'Did you mean "{close[0]}"?' if close else "Choose one of them."
        raise ConfigError(f"TrainConfig: {key} must be one of {', '.join(allowed)}, got {value!r}. {hint}")


def at_least(key: str, value: float, low: float) -> None:
    """ConfigError unless `value` is finite and not below `low`."""
    if not (value >= low and math.isfinite(value)):
        raise ConfigError(f"TrainConfig: {key} must be at least {low}, got {value}. Raise it.")


def positive(key: str, value: float) -> None:
    """ConfigError unless `value` is finite and above 0."""
    if not (value > 0 and math.isfinite(value)):
        raise ConfigError(f"TrainConfig: {key} must be > 0 and finite, got {value}. Raise it.")
