"""Which tokens a loss keeps or picks, from the whole batch: masks of bool, without gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from .config import GRPOLossConfig
from .layout import Layout


def on_policy_enough(threshold: float, advantages: Tensor, gap: Tensor, live: Tensor, layout: Layout) -> Tensor:
    """Tokens of advantage >= 0, and all of a sequence whose mean gap (rollout or old - logp) is at most `threshold`.

    A sequence of NaN stays, so that it shows (DeepSeek-V3.2, arXiv 2512.02556 eq. 9; a missing gap is 0, as in TRL
    1.16).
    """
    lengths = layout.sum(live.to(gap.dtype)).clamp(min=1)
    far = layout.sum(torch.where(live, gap, 0.0)) / lengths > threshold
    return (advantages >= 0) | ~layout.spread(far)


def top_entropy(share: float, entropy: Tensor, live: Tensor) -> Tensor:
    """The tokens whose entropy reaches the quantile 1 - share of this call's live tokens, as torch.quantile has it.

    TRL 1.16's get_high_entropy_mask on one process.
    """
    if entropy.numel() == 0:
        return live
    # nanquantile: picking the live ones would cost a host sync
    quantile = torch.nanquantile(torch.where(live, entropy, torch.nan).flatten(), 1 - share)
    return live & ~(entropy < quantile)


def covariance(advantages: Tensor, logps: Tensor, live: Tensor) -> Tensor:
    """(A - mean A) (logp - mean logp) over live tokens (arXiv 2505.22617 eq. 10), -inf elsewhere."""
    count = live.sum().clamp(min=1)
    centred = [
        torch.where(live, values - torch.where(live, values, 0.0).sum() / count, 0.0) for values in (advantages, logps)
    ]
    return torch.where(live, centred[0] * centred[1], -torch.inf)


def clip_cov(
    config: GRPOLossConfig, cov: Tensor, clipped: Tensor, live: Tensor, generator: torch.Generator | None
) -> Tensor:
    """At random cov_ratio of the live tokens, at least one, among those unclipped with a covariance within cov_bounds.

    As in verl 0.9.1, with the same draw on the CPU. Counting costs a host sync.
    """
    low, high = config.cov_bounds
    found = torch.nonzero(((cov > low) & (cov < high) & ~clipped).reshape(-1)).squeeze(1)
    wanted = max(1, int(config.cov_ratio * int(live.sum())))
    device = torch.device("cpu") if generator is None else generator.device
    drawn = torch.randperm(len(found), generator=generator, device=device)[:wanted]
    chosen = torch.zeros_like(live).reshape(-1)
    chosen[found[drawn.to(found.device)]] = True
    return chosen.view_as(live)


def kl_cov(config: GRPOLossConfig, cov: Tensor, live: Tensor) -> Tensor:
    """The cov_ratio of the live tokens, at least one, with the largest covariance (verl 0.9.1)."""
    flat = cov.reshape(-1)
    count = live.sum().to(torch.float32 if live.device.type == "mps" else torch.float64)
    wanted = (count * config.cov_ratio).floor().clamp(min=1)
    rank = torch.empty_like(flat, dtype=torch.int64)
    rank[flat.argsort(descending=True, stable=True)] = torch.arange(len(flat), device=flat.device)
    return live & (rank < wanted).view_as(live)
