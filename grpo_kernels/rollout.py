"""The weight that corrects for a sampler whose log-probs are not those of the old policy: w = exp(old - rollout)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .config import GRPOLossConfig
from .layout import Layout


def logp_difference(old: Tensor, rollout: Tensor, live: Tensor) -> tuple[Tensor, Tensor]:
    """old - rollout where a token is live and the sampler gave its log-prob, else 0; and where that is."""
    known = live & (rollout == rollout)  # NaN: missing
    return torch.where(known, old - rollout, 0.0), known


def correction(config: GRPOLossConfig, old: Tensor, rollout: Tensor, live: Tensor, layout: Layout) -> Tensor:
    """The weight of each token, like `old`: of the token or of its sequence, truncated or 0 outside its bounds.

    A weight of a sequence is the product of its tokens', or their geometric mean over its live tokens.
    """
    log_weight, _ = logp_difference(old, rollout, live)
    vetoed = None
    if config.rollout_veto is not None:
        below = live & (log_weight < math.log(config.rollout_veto))
        vetoed = layout.spread(layout.sum(below.to(old.dtype))) > 0
    if config.rollout_correction.startswith("sequence"):
        total = layout.sum(log_weight)
        if config.rollout_sequence_mean == "geometric":
            total = total / layout.sum(live.to(old.dtype)).clamp(min=1)
        log_weight = layout.spread(total).expand_as(old)
    weight = torch.exp(log_weight)
    low, high = config.rollout_clip_min, config.rollout_clip_max
    if config.rollout_correction.endswith("truncate"):
        if low is not None or high is not None:
            weight = weight.clamp(min=low, max=high)
    else:
        outside = weight < (0.0 if low is None else low)
        if high is not None:
            outside = outside | (weight > high)
        weight = torch.where(outside, 0.0, weight)
    return weight if vetoed is None else torch.where(vetoed, 0.0, weight)
