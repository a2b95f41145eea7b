"""Group statistics: rewards of the responses to one prompt become advantages."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from . import checks
from .layout import Layout, PackedLayout, PaddedLayout

EPS = 1e-4  # TRL's


def group_advantages(
    rewards: Tensor,
    *,
    group_size: int | None = None,
    group_ids: Tensor | None = None,
    baseline: str = "mean",
    scale: str = "group",
    ddof: int = 1,
    eps: float = EPS,
) -> Tensor:
    """A_i = (r_i - baseline) / (std + eps) within each group.

    Args:
        rewards: `[B]`, any real dtype. NaN means unscored: excluded from the statistics, advantage 0.
        group_size: consecutive groups of this size; must divide B. Without it and `group_ids`: one group.
        group_ids: `[B]`, any integers in any order; equal ids form a group, of any size.
        baseline: "mean", "leave_one_out" (the mean of the others: RLOO, arXiv 2402.14740) or "none".
        scale: "group" (divide by the group's std + eps), "batch" (by the std of all scored rewards + eps) or "none".
        ddof: 1 (TRL, torch) or 0 (numpy): the std divides by n - ddof.
        eps: added to the std; 1e-4 is TRL's.

    Returns:
        float32, `[B]`. A group with one scored reward, or whose scored rewards are all equal, gives exactly 0, unless
        baseline and scale are both "none". Differences are taken from the group's largest reward first, so that an
        offset common to the group loses no digits.

    Source: GRPO, arXiv 2402.03300 section 4.1.2; the defaults are TRL 1.16's.
    """
    check_group_arguments("group_advantages", rewards, group_size, group_ids, baseline, scale, ddof, eps)
    values = rewards.detach()
    if values.numel() == 0:
        return values.to(torch.float32)
    if group_ids is None:
        grouped = values.reshape(-1, group_size or values.shape[0])
        result = _normalise(grouped, PaddedLayout(grouped.shape), baseline, scale, ddof, eps)
        return result.reshape(-1)
    # sorted into runs: sums by index would use float atomics on a GPU
    _, inverse, counts = torch.unique(group_ids, return_inverse=True, return_counts=True)
    order = torch.argsort(inverse, stable=True)
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    result = _normalise(values[order], PackedLayout(offsets, len(values)), baseline, scale, ddof, eps)
    return torch.empty_like(result).index_copy_(0, order, result)


def _normalise(rewards: Tensor, groups: Layout, baseline: str, scale: str, ddof: int, eps: float) -> Tensor:
    wide = torch.float32 if rewards.device.type == "mps" else torch.float64
    rewards = rewards.to(wide)
    scored = ~torch.isnan(rewards)
    count = groups.sum(scored.to(wide))
    top = groups.max(torch.where(scored, rewards, -torch.inf))
    bottom = -groups.max(torch.where(scored, -rewards, -torch.inf))
    gap = torch.where(scored, rewards - groups.spread(top), 0.0)
    mean_gap = groups.sum(gap) / count.clamp(min=1)
    residual = torch.where(scored, gap - groups.spread(mean_gap), 0.0)
    advantage = {"mean": residual, "none": torch.where(scored, rewards, 0.0)}.get(baseline)
    if advantage is None:
        advantage = residual * groups.spread(count / (count - 1).clamp(min=1))
    if scale == "group":
        variance = groups.sum(residual.square()) / (count - ddof).clamp(min=1)
        advantage = advantage / (groups.spread(variance.sqrt()) + eps)
    elif scale == "batch":
        advantage = advantage / (_batch_std(rewards, scored, ddof) + eps)
    if baseline == "none" and scale == "none":
        return advantage.to(torch.float32)
    silent = groups.spread((top == bottom) | (count <= 1))
    return torch.where(scored & ~silent, advantage, 0.0).to(torch.float32)


def _batch_std(rewards: Tensor, scored: Tensor, ddof: int) -> Tensor:
    gap = torch.where(scored, rewards - torch.where(scored, rewards, -torch.inf).amax(), 0.0)
    count = scored.sum()
    residual = torch.where(scored, gap - gap.sum() / count.clamp(min=1), 0.0)
    return (residual.square().sum() / (count - ddof).clamp(min=1)).sqrt()


def check_group_arguments(
    function: str, rewards: Any, group_size: Any, group_ids: Any, baseline: str, scale: str, ddof: Any, eps: Any
) -> None:
    """The arguments of group_advantages."""
    rewards = checks.check_tensor(function, "rewards", rewards, checks.REALS, "real numbers")
    if rewards.ndim != 1:
        raise ValueError(checks.complain(function, "rewards", "must be [B]", checks.shape_of(rewards), "Flatten it."))
    checks.check_choice(function, "baseline", baseline, ("mean", "leave_one_out", "none"))
    checks.check_choice(function, "scale", scale, ("group", "batch", "none"))
    if isinstance(ddof, bool) or not isinstance(ddof, int) or ddof not in (0, 1):
        raise ValueError(checks.complain(function, "ddof", "must be 0 or 1", ddof, "TRL uses 1."))
    if isinstance(eps, bool) or not isinstance(eps, (int, float)):
        raise TypeError(checks.complain(function, "eps", "must be a number", type(eps).__name__, "TRL uses 1e-4."))
    if not (math.isfinite(eps) and eps >= 0):
        raise ValueError(checks.complain(function, "eps", "must be finite and >= 0", eps, "TRL uses 1e-4."))
    if group_size is not None and group_ids is not None:
        advice = "Use group_size for consecutive groups, group_ids for any others."
        raise ValueError(checks.complain(function, "group_size", "must be None with group_ids", group_size, advice))
    if group_size is not None:
        if isinstance(group_size, bool) or not isinstance(group_size, int):
            raise TypeError(
                checks.complain(
                    function, "group_size", "must be an int", type(group_size).__name__, "Convert it with int()."
                )
            )
        if group_size < 1 or len(rewards) % group_size:
            wanted = f"must be >= 1 and divide the number of rewards, {len(rewards)}"
            raise ValueError(
                checks.complain(function, "group_size", wanted, group_size, "Use group_ids for uneven groups.")
            )
    if group_ids is not None:
        ids = checks.check_tensor(function, "group_ids", group_ids, checks.INTEGERS, "integers")
        if ids.shape != rewards.shape:
            got = f"{checks.shape_of(ids)} with rewards {checks.shape_of(rewards)}"
            raise ValueError(
                checks.complain(function, "group_ids", "must have the shape of rewards", got, "Give one id each.")
            )
        checks.check_device(function, "rewards", rewards.device, {"group_ids": ids})
