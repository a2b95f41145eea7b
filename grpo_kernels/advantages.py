"""Group statistics: rewards of the responses to one prompt become advantages."""

from __future__ import annotations

import math
from collections.abc import Callable
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
        scale: "group" (divide by the group's std + eps), "batch" (by the std of all scored rewards + eps),
            "leave_one_out" (by the std of the group's other scored rewards + eps, where that is not 0: NeMo-RL, with
            baseline="leave_one_out" and eps=1e-6) or "none".
        ddof: 1 (TRL, torch) or 0 (numpy): the std divides by n - ddof.
        eps: added to the std; 1e-4 is TRL's.

    Returns:
        float32, `[B]`. A group with one scored reward, or whose scored rewards are all equal, gives exactly 0, unless
        baseline and scale are both "none". Differences are taken from the group's largest reward first, so that an
        offset common to the group loses no digits.

    Source: GRPO, arXiv 2402.03300 section 4.1.2; the defaults are TRL 1.16's.
    """
    check_group_arguments("group_advantages", rewards, group_size, group_ids, baseline, scale, ddof, eps)
    return _by_group(
        rewards, group_size, group_ids, lambda values, groups: _normalise(values, groups, baseline, scale, ddof, eps)
    ).to(torch.float32)


def reinforce_plus_plus_advantages(
    rewards: Tensor,
    lengths: Tensor,
    *,
    group_size: int | None = None,
    group_ids: Tensor | None = None,
    baseline: str = "none",
    ddof: int = 1,
    eps: float = 1e-8,
) -> Tensor:
    """A_i = (b_i - mean) / sqrt(var + eps), b = r or r minus its group's mean; both over the tokens of the batch.

    Args:
        rewards: `[B]`; NaN means unscored: advantage 0, in no statistic.
        lengths: `[B]`, tokens of each response: each counts with the advantage of its response.
        group_size, group_ids: see `group_advantages`; they matter with a baseline.
        baseline: "none" (REINFORCE++), "mean" (REINFORCE++-baseline) or "leave_one_out".
        ddof: 1 (verl 0.9.1) or 0 (OpenRLHF 0.11.2, which bounds the variance by 1e-8 where verl adds it).
        eps: added to the variance.

    Returns:
        float32, `[B]`; one value for all tokens of a response. 0 for a batch, and with a baseline for a group, whose
        rewards are all equal.

    Source: REINFORCE++, arXiv 2501.03262.
    """
    name = "reinforce_plus_plus_advantages"
    check_group_arguments(name, rewards, group_size, group_ids, baseline, "none", ddof, eps)
    lengths = _check_lengths(name, lengths, rewards)
    centred = _by_group(
        rewards, group_size, group_ids, lambda values, groups: _normalise(values, groups, baseline, "none", ddof, 0.0)
    )
    silent = torch.isnan(rewards)
    if baseline != "none":
        silent = _by_group(rewards, group_size, group_ids, _silent) > 0
    return _whitened(centred, torch.isnan(rewards), silent, lengths, ddof, eps)


def gdpo_advantages(
    rewards: Tensor,
    weights: Tensor | None = None,
    lengths: Tensor | None = None,
    *,
    group_size: int | None = None,
    group_ids: Tensor | None = None,
    ddof: int = 1,
    eps: float = EPS,
) -> Tensor:
    """Each reward normalised within its group, their weighted sum, normalised over the batch.

    Args:
        rewards: `[B, K]`; NaN means that this reward does not score the response.
        weights: `[K]`; None: 1 each.
        lengths: `[B]` tokens: the batch is that of tokens, and divided by sqrt(var + 1e-8) (verl 0.9.1). None: that of
            responses, divided by std + eps (TRL 1.16's normalize_then_sum).
        group_size, group_ids, ddof, eps: see `group_advantages`. verl: eps=1e-6.

    Returns:
        float32, `[B]`. A response whose rewards are all silent in their groups, or missing, gives exactly 0.

    Source: GDPO, arXiv 2601.05242.
    """
    name = "gdpo_advantages"
    rewards = checks.check_tensor(name, "rewards", rewards, checks.REALS, "real numbers")
    if rewards.ndim != 2 or rewards.shape[1] == 0:
        raise ValueError(checks.complain(name, "rewards", "must be [B, K]", checks.shape_of(rewards), "Stack them."))
    columns = rewards.unbind(1)
    check_group_arguments(name, columns[0], group_size, group_ids, "mean", "group", ddof, eps)
    if weights is not None:
        weights = checks.check_tensor(name, "weights", weights, checks.REALS, "real numbers")
        if weights.shape != rewards.shape[1:]:
            wanted = f"must be [{rewards.shape[1]}], one per reward"
            raise ValueError(checks.complain(name, "weights", wanted, checks.shape_of(weights), "Give one each."))
    lengths = None if lengths is None else _check_lengths(name, lengths, columns[0])
    parts = [
        _by_group(column, group_size, group_ids, lambda r, groups: _normalise(r, groups, "mean", "group", ddof, eps))
        for column in columns
    ]
    total = sum(part if weights is None else part * weights[k] for k, part in enumerate(parts))
    eps = eps if lengths is None else 1e-8
    silent = torch.stack([_by_group(column, group_size, group_ids, _silent) for column in columns]).amin(0) > 0
    return _whitened(total, torch.isnan(rewards).all(1), silent, lengths, ddof, eps)  # type: ignore[arg-type]


def pass_at_k_advantages(
    rewards: Tensor, k: int, *, group_size: int | None = None, group_ids: Tensor | None = None
) -> Tensor:
    """Of c successes in n responses: (1 - R) / s and (1 - R - C(n-c-1, k-1) / C(n-1, k-1)) / s for a failure.

    R = 1 - C(n-c, k) / C(n, k) is the chance that one of k responses succeeds, s = sqrt(R (1 - R)).

    Args:
        rewards: `[B]` of 0 and 1; NaN means unscored: advantage 0, not in n.
        k: at least 1; a group with fewer responses gives 0.
        group_size, group_ids: see `group_advantages`.

    Returns:
        float32, `[B]`; exactly 0 where R is 0 or 1.

    Source: Pass@k training, arXiv 2508.10751; the combinations of Chen et al., 2107.03374.
    """
    name = "pass_at_k_advantages"
    check_group_arguments(name, rewards, group_size, group_ids, "mean", "none", 1, 0.0)
    checks.check_count(name, "k", k, 1, "It is how many responses may be tried.")
    if checks.reads_data(rewards) and bool(((rewards != 0) & (rewards != 1) & ~torch.isnan(rewards)).any()):
        advice = "Threshold other rewards first."
        raise ValueError(checks.complain(name, "rewards", "must be 0, 1 or NaN", "other values", advice))

    def of_groups(values: Tensor, groups: Layout) -> Tensor:
        scored = ~torch.isnan(values)
        n = groups.sum(scored.to(values.dtype))
        failures = groups.sum((scored & (values == 0)).to(values.dtype))
        none_of_k = _falling_ratio(failures, n, k)
        chance = 1 - none_of_k
        deviation = groups.spread((chance * none_of_k).sqrt())
        missed = groups.spread(none_of_k)
        alone = groups.spread(_falling_ratio(failures - 1, n - 1, k - 1))
        advantage = torch.where(values == 1, missed, missed - alone) / torch.where(deviation > 0, deviation, 1.0)
        return torch.where(scored & (deviation > 0) & groups.spread(n >= k), advantage, 0.0)

    return _by_group(rewards, group_size, group_ids, of_groups).to(torch.float32)


def max_rl_advantages(rewards: Tensor, *, group_size: int | None = None, group_ids: Tensor | None = None) -> Tensor:
    """A_i = (r_i - mean) / mean within each group: for rewards of 0 and 1 maximum likelihood to order n - 1.

    Args:
        rewards: `[B]`, at least 0; NaN means unscored: advantage 0, not in the mean.
        group_size, group_ids: see `group_advantages`.

    Returns:
        float32, `[B]`; exactly 0 for a group of one, or of equal rewards.

    Source: MaxRL, arXiv 2602.02710.
    """
    name = "max_rl_advantages"
    check_group_arguments(name, rewards, group_size, group_ids, "mean", "none", 1, 0.0)
    if checks.reads_data(rewards) and bool((rewards < 0).any()):
        raise ValueError(checks.complain(name, "rewards", "must be >= 0", "negative ones", "Their mean divides."))

    def of_groups(values: Tensor, groups: Layout) -> Tensor:
        residual = _normalise(values, groups, "mean", "none", 1, 0.0)
        scored = ~torch.isnan(values)
        count = groups.sum(scored.to(values.dtype)).clamp(min=1)
        mean = groups.spread(groups.sum(torch.where(scored, values, 0.0)) / count)
        return torch.where(residual == 0, 0.0, residual / torch.where(mean > 0, mean, 1.0))

    return _by_group(rewards, group_size, group_ids, of_groups).to(torch.float32)


def _by_group(
    rewards: Tensor, group_size: int | None, group_ids: Tensor | None, statistic: Callable[[Tensor, Layout], Tensor]
) -> Tensor:
    """`statistic(rewards, groups)` in float64, in the order of the rewards."""
    values = rewards.detach().to(torch.float32 if rewards.device.type == "mps" else torch.float64)
    if values.numel() == 0:
        return values
    if group_ids is None:
        grouped = values.reshape(-1, group_size or values.shape[0])
        return statistic(grouped, PaddedLayout(grouped.shape)).reshape(-1)
    # sorted into runs: sums by index would use float atomics on a GPU
    _, inverse, counts = torch.unique(group_ids, return_inverse=True, return_counts=True)
    order = torch.argsort(inverse, stable=True)
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    result = statistic(values[order], PackedLayout(offsets, len(values)))
    return torch.empty_like(result).index_copy_(0, order, result)


def _normalise(rewards: Tensor, groups: Layout, baseline: str, scale: str, ddof: int, eps: float) -> Tensor:
    wide = rewards.dtype
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
    elif scale == "leave_one_out":
        deviation, alike = _std_of_others(rewards, residual, groups, count, (bottom, top), ddof)
        advantage = torch.where(alike, advantage, advantage / (deviation + eps))
    if baseline == "none" and scale == "none":
        return advantage
    silent = groups.spread((top == bottom) | (count <= 1))
    return torch.where(scored & ~silent, advantage, 0.0)


def _std_of_others(
    rewards: Tensor, residual: Tensor, groups: Layout, count: Tensor, ends: tuple[Tensor, Tensor], ddof: int
) -> tuple[Tensor, Tensor]:
    """The std of each one's group without it, and whether those are all equal, told by counting, not by rounding."""
    squares = groups.sum(residual.square())
    own = residual.square() * groups.spread(count / (count - 1).clamp(min=1))
    variance = (groups.spread(squares) - own).clamp(min=0) / groups.spread((count - 1 - ddof).clamp(min=1))
    alike = torch.zeros_like(rewards, dtype=torch.bool)
    for end in ends:
        at_end = rewards == groups.spread(end)
        others = groups.spread(groups.sum(at_end.to(rewards.dtype))) - at_end.to(rewards.dtype)
        alike |= others >= groups.spread(count - 1)
    return variance.sqrt(), alike


def _falling_ratio(top: Tensor, bottom: Tensor, k: int) -> Tensor:
    """C(top, k) / C(bottom, k), 0 for top < k."""
    ratio = torch.ones_like(top)
    for step in range(k):
        ratio = ratio * ((top - step).clamp(min=0) / (bottom - step).clamp(min=1))
    return ratio


def _whitened(
    values: Tensor, unscored: Tensor, silent: Tensor, lengths: Tensor | None, ddof: int, eps: float
) -> Tensor:
    """(values - mean) / deviation over scored responses, or over their tokens; see the two that call it. float32."""
    scored = ~unscored
    weight = scored.to(values.dtype) if lengths is None else torch.where(scored, lengths.to(values.dtype), 0.0)
    count = weight.sum()
    mean = (values * weight).sum() / count.clamp(min=1)
    residual = torch.where(scored, values - mean, 0.0)
    variance = (residual.square() * weight).sum() / (count - ddof).clamp(min=1)
    result = residual / (variance.sqrt() + eps if lengths is None else (variance + eps).sqrt())
    top, bottom = (torch.where(scored, s * values, -torch.inf) for s in (1.0, -1.0))
    equal = top.amax() == -bottom.amax() if values.numel() else unscored.any()
    return torch.where(unscored | silent | equal, 0.0, result).to(torch.float32)


def _silent(rewards: Tensor, groups: Layout) -> Tensor:
    """1 where a response is unscored, or the scored rewards of its group are all equal, else 0."""
    scored = ~torch.isnan(rewards)
    top = groups.max(torch.where(scored, rewards, -torch.inf))
    bottom = -groups.max(torch.where(scored, -rewards, -torch.inf))
    return (~scored | groups.spread(top <= bottom)).to(rewards.dtype)


def _batch_std(rewards: Tensor, scored: Tensor, ddof: int) -> Tensor:
    gap = torch.where(scored, rewards - torch.where(scored, rewards, -torch.inf).amax(), 0.0)
    count = scored.sum()
    residual = torch.where(scored, gap - gap.sum() / count.clamp(min=1), 0.0)
    return (residual.square().sum() / (count - ddof).clamp(min=1)).sqrt()


def _check_lengths(function: str, lengths: object, rewards: Tensor) -> Tensor:
    lengths = checks.check_tensor(function, "lengths", lengths, checks.REALS, "token counts")
    if lengths.shape != rewards.shape:
        got = f"{checks.shape_of(lengths)} with rewards {checks.shape_of(rewards)}"
        raise ValueError(checks.complain(function, "lengths", "must be one per response", got, "Give token counts."))
    return lengths


def check_group_arguments(
    function: str, rewards: Any, group_size: Any, group_ids: Any, baseline: str, scale: str, ddof: Any, eps: Any
) -> None:
    """The arguments of group_advantages."""
    rewards = checks.check_tensor(function, "rewards", rewards, checks.REALS, "real numbers")
    if rewards.ndim != 1:
        raise ValueError(checks.complain(function, "rewards", "must be [B]", checks.shape_of(rewards), "Flatten it."))
    checks.check_choice(function, "baseline", baseline, ("mean", "leave_one_out", "none"))
    checks.check_choice(function, "scale", scale, ("group", "batch", "leave_one_out", "none"))
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
