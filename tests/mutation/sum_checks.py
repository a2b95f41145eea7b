"""Checks of what is counted and averaged: metrics and advantages, by plain sums and by hand. See checks.py."""

from __future__ import annotations

import math
from typing import Any

import torch
from checks import ADVANTAGES, DOUBLE, GAP, INPUTS, LOGITS, LOGPS, MASK, check, close, ours
from torch import Tensor

from grpo_kernels import advantages as adv


@check
def metrics() -> None:
    out, _ = ours({"beta": 0.3, "entropy": True, "delta": 1.5}, importance_sampling_ratio=GAP.abs() + 0.2)
    live, ratio = MASK.bool(), GAP.exp().clamp(max=1.5)
    advantages = ADVANTAGES[:, None].expand_as(ratio)
    low, high = (ratio < 0.8) & (advantages < 0), (ratio > 1.2) & (advantages > 0)
    d, weight = (INPUTS["ref_per_token_logps"] - LOGPS)[live], (GAP.abs() + 0.2)[live]
    log_p = LOGITS.log_softmax(-1)
    raw = GAP.exp()[live]
    expected = {
        "num_tokens": live.sum(), "ratio/mean": raw.mean(), "ratio/min": raw.min(), "ratio/max": raw.max(),
        "importance_sampling_ratio/mean": weight.mean(), "importance_sampling_ratio/min": weight.min(),
        "importance_sampling_ratio/max": weight.max(), "clip_ratio/low_mean": low[live].double().mean(),
        "clip_ratio/high_mean": high[live].double().mean(),
        "clip_ratio/region_mean": (low | high)[live].double().mean(),
        "kl": (d.exp() - d - 1).mean(), "entropy": -(log_p.exp() * log_p).sum(-1)[live].mean(),
    }  # fmt: skip
    for name, value in expected.items():
        close(out.metrics[name], value, name)
    capped, _ = ours({"delta": 1.1})
    close(capped.metrics["clip_ratio/high_mean"], 0.0, "high after delta")
    close(out.metrics["policy_loss"], out.loss.detach(), "policy_loss")
    sampled = (INPUTS["old_per_token_logps"] - INPUTS["rollout_per_token_logps"])[live].abs()
    close(out.metrics["sampling_logp_difference/mean"], sampled.mean(), "sampling mean")
    close(out.metrics["sampling_logp_difference/max"], sampled.max(), "sampling max")


@check
def sequence_metrics() -> None:
    out, _ = ours({"importance_sampling_level": "sequence", "epsilon": 0.05, "epsilon_high": 0.01})
    lengths = MASK.sum(1)
    ratio = ((GAP * MASK).sum(1) / lengths.clamp(min=1)).exp()
    low = (ratio < 0.95) & (ADVANTAGES < 0) & (lengths > 0)
    high = (ratio > 1.01) & (ADVANTAGES > 0) & (lengths > 0)
    close(out.metrics["clip_ratio/low_mean"], low.double().mean(), "low")
    close(out.metrics["clip_ratio/high_mean"], high.double().mean(), "high")
    assert float(high.double().mean()) > 0
    out, _ = ours({"loss_type": "cispo", "epsilon_high": 1.1})
    flags = ((GAP.exp() > 1.1) & (ADVANTAGES[:, None] > 0))[MASK.bool()]
    close(out.metrics["cispo_clip_ratio"], flags.double().mean(), "cispo")


@check
def dppo_metrics() -> None:
    out, _ = ours({"loss_type": "dppo_tv", "epsilon": 0.02, "epsilon_high": 0.05})
    change, advantages = LOGPS.exp() - (LOGPS - GAP).exp(), ADVANTAGES[:, None].expand_as(LOGPS)
    low, high = (change < -0.02) & (advantages <= 0), (change > 0.05) & (advantages > 0)
    for name, flags in (("low", low), ("high", high), ("region", low | high)):
        close(out.metrics[f"clip_ratio/{name}_mean"], flags[MASK.bool()].double().mean(), name)


@check
def vespo_metric() -> None:
    out, _ = ours({"loss_type": "vespo"})
    total = (GAP * MASK).sum(1)
    k, lam = torch.where(ADVANTAGES >= 0, 2.0, 3.0), torch.where(ADVANTAGES >= 0, 3.0, 2.0)
    close(out.metrics["vespo/phi_seq_mean"], (lam + k * total - lam * total.exp()).exp().mean(), "phi")


# advantages: float32 results


def near(mine: Tensor, true: Any, what: str) -> None:
    true = torch.as_tensor(true, dtype=DOUBLE)
    assert mine.shape == true.shape, what
    worst = (mine.double() - true).abs().max()
    assert bool(worst <= 3e-7 * max(1.0, float(true.abs().max()))), f"{what}: {mine} is not {true}"


R = [1.0, 0.25, -0.5, 0.75, 2.0, 0.0, 0.25]
IDS = [4, 4, 9, 4, 9, 9, 4]


def by_hand(rewards: list[float], others: bool, ddof: int, eps: float | None) -> list[float]:
    """Group-relative advantages from their definition, one response at a time."""
    result = []
    for i, r in enumerate(rewards):
        pool = rewards[:i] + rewards[i + 1 :] if others else rewards
        mean = sum(pool) / len(pool)
        variance = sum((x - mean) ** 2 for x in pool) / (len(pool) - ddof)
        result.append((r - mean) if eps is None else (r - mean) / (math.sqrt(variance) + eps))
    return result


def in_groups(values: Any) -> list[float]:
    """`values(rewards of a group)` put back in the order of R."""
    result = [0.0] * len(R)
    for group in set(IDS):
        places = [i for i, x in enumerate(IDS) if x == group]
        for place, value in zip(places, values([R[i] for i in places]), strict=True):
            result[place] = value
    return result


@check
def group_advantages() -> None:
    rewards, ids = torch.tensor(R), torch.tensor(IDS)
    for ddof in (0, 1):
        mine = adv.group_advantages(rewards, group_ids=ids, ddof=ddof, eps=0.01)
        near(mine, in_groups(lambda g, ddof=ddof: by_hand(g, False, ddof, 0.01)), f"group {ddof}")
    mine = adv.group_advantages(rewards, group_ids=ids, scale="none")
    near(mine, in_groups(lambda g: by_hand(g, False, 1, None)), "mean")
    mine = adv.group_advantages(rewards, group_ids=ids, baseline="leave_one_out", scale="none")
    near(mine, in_groups(lambda g: by_hand(g, True, 1, None)), "leave one out")
    near(adv.group_advantages(rewards, baseline="none", scale="none"), R, "none")
    mean = sum(R) / len(R)
    std = math.sqrt(sum((r - mean) ** 2 for r in R) / 6)
    mine = adv.group_advantages(rewards, group_ids=ids, scale="batch", eps=0.01)
    near(mine, [x / (std + 0.01) for x in in_groups(lambda g: by_hand(g, False, 1, None))], "batch")
    mine = adv.group_advantages(torch.tensor([1.0, 0, 0, 0]), baseline="none", eps=0.0)
    near(mine, [2.0, 0, 0, 0], "no baseline, std 1/2")


@check
def others_deviation() -> None:
    rewards, ids = torch.tensor(R), torch.tensor(IDS)
    options: dict[str, Any] = {"baseline": "leave_one_out", "scale": "leave_one_out"}
    mine = adv.group_advantages(rewards, group_ids=ids, eps=1e-6, **options)
    near(mine, in_groups(lambda g: by_hand(g, True, 1, 1e-6)), "others")
    near(adv.group_advantages(torch.tensor([1.0, 0, 0]), eps=1e-6, **options)[0], 1.0, "the others are alike")


@check
def silence() -> None:
    """Equal, missing and single rewards give exactly 0 and touch nothing else; a common offset loses no digits."""
    nan = math.nan
    for equal in ([0.1] * 7, [nan, 0.3, nan], [nan, nan], [0.7]):
        assert (adv.group_advantages(torch.tensor(equal)) == 0).all(), equal
        assert (adv.group_advantages(torch.tensor(equal), baseline="none") == 0).all(), equal
    mine = adv.group_advantages(torch.tensor([1.0, nan, 0.0, 0.0, 0.0]))
    near(mine, [1.49970006, 0, -0.49990002, -0.49990002, -0.49990002], "one missing")
    shifted = adv.group_advantages(torch.tensor([1.0, 0, 0, 0], dtype=DOUBLE) + 2.0**52)
    near(shifted, [1.49970006, -0.49990002, -0.49990002, -0.49990002], "offset")
    near(adv.group_advantages(torch.tensor([1.0, 0, 0, 0]), ddof=0), [1.7316509, *[-0.57721697] * 3], "ddof 0")


@check
def whitened() -> None:
    lengths = torch.tensor([3, 1, 2, 5, 1, 4, 2])
    n = lengths.tolist()
    for baseline, ddof in (("none", 1), ("none", 0), ("mean", 1), ("leave_one_out", 0)):
        mine = adv.reinforce_plus_plus_advantages(
            torch.tensor(R), lengths, group_ids=torch.tensor(IDS), baseline=baseline, ddof=ddof, eps=0.02
        )
        values = R if baseline == "none" else in_groups(lambda g, b=baseline: by_hand(g, b != "mean", 1, None))
        mean = sum(v * k for v, k in zip(values, n, strict=True)) / sum(n)
        variance = sum((v - mean) ** 2 * k for v, k in zip(values, n, strict=True)) / (sum(n) - ddof)
        near(mine, [(v - mean) / math.sqrt(variance + 0.02) for v in values], f"{baseline} {ddof}")


@check
def gdpo() -> None:
    second, weights = [x * x - 0.3 for x in R[::-1]], [0.5, 2.0]
    parts = [in_groups(lambda g: by_hand(g, False, 1, 0.01))]
    kept = list(R)
    R[:] = second
    parts.append(in_groups(lambda g: by_hand(g, False, 1, 0.01)))
    R[:] = kept
    total = [weights[0] * a + weights[1] * b for a, b in zip(*parts, strict=True)]
    mean = sum(total) / len(total)
    std = math.sqrt(sum((x - mean) ** 2 for x in total) / (len(total) - 1))
    mine = adv.gdpo_advantages(
        torch.tensor([R, second], dtype=DOUBLE).T, torch.tensor(weights), group_ids=torch.tensor(IDS), eps=0.01
    )
    near(mine, [(x - mean) / (std + 0.01) for x in total], "gdpo")


@check
def pass_at_k() -> None:
    for k, successes, good, bad in (
        (2, 1, 1.7320508, -0.24743583), (2, 2, 1.0741723, -0.35805744), (2, 4, 0.52223297, -0.52223297),
        (4, 1, 1.0, -0.14285714), (4, 2, 0.52223297, -0.17407766), (4, 4, 0.12038585, -0.12038585),
    ):  # fmt: skip
        rewards = torch.tensor([1.0] * successes + [0.0] * (8 - successes))
        near(adv.pass_at_k_advantages(rewards, k), [good] * successes + [bad] * (8 - successes), f"{k} {successes}")
    for certain in ([1.0] * 8, [0.0] * 8, [1.0, 1, 1, 1, 1, 1, 1, 0]):
        assert (adv.pass_at_k_advantages(torch.tensor(certain), 2) == 0).all(), certain


@check
def max_rl() -> None:
    near(adv.max_rl_advantages(torch.tensor([1.0, 0, 0, 0])), [3.0, -1, -1, -1], "one of four")
    near(adv.max_rl_advantages(torch.tensor([1.0, 1, 0, math.nan])), [0.5, 0.5, -1, 0], "two of three")
    assert (adv.max_rl_advantages(torch.tensor([0.0, 0, 0])) == 0).all()
