"""The short way of a call on few rows, where every check and every tensor costs as much as the rows themselves: numbers
are checked once and remembered, tensors are looked at by the op that reads them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import backends, checks


class QuickCall(NamedTuple):
    """What a call of `per_token_logps` has besides its tensors."""

    logps: Callable[..., Any]
    gradient: Callable[..., Any]
    temperature: float
    logit_scale: float
    softcap: float | None
    entropy: bool


class Unfit(Exception):  # noqa: N818  (no error of its own: the full checks say what is wrong)
    """The op found something about its tensors."""


def quick_call(
    logits: object, targets: object, mask: object, impl: object, inplace: object, *numbers: object
) -> QuickCall | None:
    """The short way of a call, if it may have one; None: it goes through all checks.

    Args:
        numbers: temperature, logit_scale, softcap, entropy.

    Raises:
        ValueError: as the full checks do of the numbers.
    """
    # tensors alone: what else there may be (of a subclass, of a trace) wants a closer look
    plain = type(logits) is Tensor and type(targets) is Tensor and logits.is_cpu
    plain = plain and (mask is None or (type(mask) is Tensor and not mask.requires_grad))
    if not plain or inplace is not False or isinstance(numbers[0], Tensor) or torch.compiler.is_compiling():
        return None
    if not (impl == "auto" or impl == "cpp") or not backends.has_cpp():  # noqa: PLR1714  (a Tensor is in no tuple)
        return None
    try:
        return _remembered(*numbers)
    except TypeError:  # of something that cannot be remembered, or is no number: the full checks say it in their words
        return None


@functools.lru_cache(maxsize=64, typed=True)  # typed: True is not a number, nor 1 a flag
def _remembered(temperature: object, logit_scale: object, softcap: object, entropy: object) -> QuickCall:
    name = "per_token_logps"
    checks.check_flag(name, "entropy", entropy)
    return QuickCall(
        backends.only_overload("logps"), backends.only_overload("logps_grad"),
        checks.check_scale(name, "temperature", temperature), checks.check_scale(name, "logit_scale", logit_scale),
        None if softcap is None else checks.check_scale(name, "softcap", softcap), bool(entropy),
    )  # fmt: skip
