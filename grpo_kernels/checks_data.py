"""Checks that look at what tensors hold: on the CPU always, elsewhere where GRPO_KERNELS_CHECK=1 asks for a sync."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from . import checks
from .checks import complain
from .config_checks import MOST_SCALE


def check_temperature_values(function: str, temperature: Tensor) -> None:
    """Finite and > 0 throughout."""
    if not checks.reads_data(temperature):
        return
    bad = ~((temperature >= 1 / MOST_SCALE) & (temperature <= MOST_SCALE))
    if bool(bad.any()):
        value = temperature[bad].reshape(-1)[0].item()
        wanted = f"must be finite and > 0, from {1 / MOST_SCALE:g} to {MOST_SCALE:g}"
        raise ValueError(complain(function, "temperature", wanted, value, "Use the sampler's."))


def check_normalizer_value(function: str, argument: str, value: Tensor) -> None:
    """Finite and > 0, in the dtype in which it divides."""
    if not checks.reads_data(value):
        return
    number = value.item()
    if not torch.finfo(value.dtype).tiny <= number < math.inf:
        advice = "Give the global count divided by the number of processes."
        raise ValueError(complain(function, argument, "must be finite and > 0, in float32 too", number, advice))


def check_mask_values(function: str, argument: str, mask: Tensor | None) -> None:
    """Finite and not negative."""
    if mask is None or mask.dtype == torch.bool or mask.numel() == 0 or not checks.reads_data(mask):
        return
    if mask.is_floating_point():
        if not bool(((mask >= 0) & (mask < torch.inf)).all()):
            advice = "This is a loss mask: 1 counts, 0 does not. An additive attention mask is another thing."
            raise ValueError(complain(function, argument, "must be finite and >= 0", "other values", advice))
    elif int(mask.amin()) < 0:
        advice = "This is a mask: 1 counts, 0 does not. Labels with -100 belong into the ids."
        raise ValueError(complain(function, argument, "must be >= 0", int(mask.amin()), advice))


def check_ids_below(function: str, argument: str, ids: Tensor, mask: Tensor | None, vocabulary: int) -> None:
    """Live ids below V; negative ids mean dead."""
    if not checks.reads_data(ids) or ids.numel() == 0 or int(ids.amax()) < vocabulary:
        return
    bad = ids >= vocabulary
    if mask is not None:
        bad = bad & (mask != 0)
    if bool(bad.any()):
        got = f"{int(ids[bad].reshape(-1)[0])} with V = {vocabulary}"
        advice = "Mask such tokens out, or give them a negative id."
        raise ValueError(complain(function, argument, "must hold ids below V where they count", got, advice))


def check_live_finite(function: str, argument: str, values: Tensor | None, live: Tensor) -> None:
    """Log-probabilities that count are finite."""
    if values is None or not checks.reads_data(values) or values.numel() == 0:
        return
    if math.isfinite(values.detach().sum()):  # then each is; where one is not, or the sum overflows, each is looked at
        return
    bad = live & ~torch.isfinite(values)
    if bool(bad.any()):
        where = bad.nonzero()[0].tolist()
        got = f"{values[bad].reshape(-1)[0].item()} at {where}"
        raise ValueError(
            complain(function, argument, "must be finite at live tokens", got, "Mask the token or mend it.")
        )
