"""Do a sampler's log-probs and ours mean the same thing?"""

from __future__ import annotations

import warnings
from typing import NamedTuple

import torch
from torch import Tensor

from . import checks, checks_data

_TOLERANCE = (
    0.05  # bfloat16 engines differ by 0.01 to 0.03 nats a token on average; another temperature by 0.1 and more
)


class RolloutCheck(NamedTuple):
    """How a sampler's log-probs compare with recomputed ones, over live tokens that both have."""

    mean_ratio: float
    """mean exp(recomputed - engine): 1 when they agree."""
    mean_abs_difference: float
    """mean |recomputed - engine|, in nats."""
    max_abs_difference: float
    """max |recomputed - engine|, in nats."""
    missing: int
    """Live tokens without a finite log-prob on either side."""
    agree: bool
    """Whether no warning was given."""


def check_rollout_logps(engine: Tensor, recomputed: Tensor, mask: Tensor | None = None) -> RolloutCheck:
    """exp(recomputed - engine) over live tokens; warns, with its mean, when a sampler's log-probs mean something else.

    Args:
        engine: log-probs that the sampler reported, in nats, any shape; NaN or infinite: missing.
        recomputed: log-probs of the same tokens under the same weights: `per_token_logps` at the sampler's temperature.
        mask: like them; tokens with 0 are left out.

    The usual reasons for a warning: the engine reports log-probs before temperature (ask it for processed ones), it
    samples from a truncated distribution (top-p, top-k), or it did not report some tokens. Reads values: a host sync.

    Raises:
        ValueError: shapes or devices that differ. TypeError: not tensors of floats.
    """
    name = "check_rollout_logps"
    recomputed = checks.check_tensor(name, "recomputed", recomputed, checks.FLOATS, "floats")
    engine = checks.check_tensor(name, "engine", engine, checks.FLOATS, "floats")
    checks.check_token_tensor(name, "engine", engine, recomputed)
    mask = checks.check_mask(name, "mask", mask, "recomputed", recomputed)
    checks_data.check_mask_values(name, "mask", mask)
    checks.check_device(name, "recomputed", recomputed.device, {"engine": engine, "mask": mask})
    live = torch.ones_like(recomputed, dtype=torch.bool) if mask is None else mask != 0
    ours, theirs = recomputed.detach()[live].double(), engine.detach()[live].double()
    known = torch.isfinite(theirs) & torch.isfinite(ours)
    missing = int((~known).sum())
    difference = (ours - theirs)[known]
    if difference.numel() == 0:
        result = RolloutCheck(1.0, 0.0, 0.0, missing, missing == 0)
    else:
        ratio, size = difference.exp().mean().item(), difference.abs().mean().item()
        agree = missing == 0 and abs(ratio - 1) <= _TOLERANCE and size <= _TOLERANCE
        result = RolloutCheck(ratio, size, difference.abs().max().item(), missing, agree)
    if not result.agree:
        warnings.warn(
            f"{name}: engine and recomputed log-probs disagree: mean ratio {result.mean_ratio:.4f}, mean difference "
            f"{result.mean_abs_difference:.4f} nats, {missing} of {ours.numel()} values missing. Ask the engine for "
            "processed (tempered) log-probs, pass its temperature here, and sample without top-p or top-k.",
            stacklevel=2,
        )
    return result
