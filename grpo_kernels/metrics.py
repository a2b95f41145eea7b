"""What a loss reports: one pass over stacked token values, since at small N every operation costs as much as any."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from . import formulas
from .config import GRPOLossConfig
from .layout import Layout


class Measured(NamedTuple):
    """Token tensors of one shape to report on; None: not there."""

    ratio: Tensor
    gap: Tensor
    advantages: Tensor
    logps: Tensor
    weight: Tensor | None
    rollout_difference: tuple[Tensor, Tensor] | None
    """old - rollout, and where it is known."""
    kl: Tensor | None
    entropy: Tensor | None
    own: Tensor | None
    """Of the loss itself: phi of `vespo`, the tokens that a covariance selected."""


def metric_names(config: GRPOLossConfig, weighted: bool, sampled: bool = False) -> list[str]:
    """Names of the metrics in the order of `measure`; `sampled`: the rollout's log-probs are given."""
    spread = ["ratio"] + ["importance_sampling_ratio"] * weighted
    flags = _flag_names(config)
    means = [f"{name}/mean" for name in spread] + ["kl"] * (config.beta != 0) + ["entropy"] * config.needs_entropy
    extremes = [f"{name}/{how}" for how in ("min", "max") for name in spread]
    sampling = [f"sampling_logp_difference/{how}" for how in ("mean", "max")] * sampled
    return [*means, *flags, *_own_name(config), *extremes, *sampling, "num_tokens", "policy_loss"]


def _flag_names(config: GRPOLossConfig) -> list[str]:
    bounds = config.row.bounds
    if bounds == "cap":
        return ["cispo_clip_ratio"]
    return [f"clip_ratio/{which}_mean" for which in ("low", "high", "region")] if bounds else []


def _own_name(config: GRPOLossConfig) -> list[str]:
    own = {"vespo": "vespo/phi_seq_mean", "clip_cov": "cov_selected_ratio", "kl_cov": "cov_selected_ratio"}
    return [own[config.loss_type]] if config.loss_type in own else []


def measure(
    config: GRPOLossConfig, values: Measured, live: Tensor, layout: Layout, lengths: Tensor, policy_loss: Tensor
) -> Tensor:
    """The metrics as one vector, detached: see `metric_names`.

    Means are over live tokens. At sequence level clip flags, and phi of `vespo` always, are means over all sequences.
    """
    ratio = values.ratio
    num_tokens = lengths.sum()
    count = num_tokens.clamp(min=1)
    spread = [ratio] if values.weight is None else [ratio, values.weight.expand_as(ratio)]
    rows = [*spread, *(x for x in (values.kl, values.entropy) if x is not None)]
    # a mean over sequences is one over tokens with this weight
    by_sequence = None
    if config.importance_sampling_level != "token" or config.loss_type == "vespo":
        by_sequence = layout.spread(count / (lengths.clamp(min=1) * max(1, layout.num_sequences)))
    flags = [flag.to(ratio.dtype) for flag in _flags(config, values)]
    rows += [flag if by_sequence is None else flag * by_sequence for flag in flags]
    if values.own is not None:
        own = values.own.to(ratio.dtype)
        rows.append(own if by_sequence is None else own * by_sequence)
    stacked = torch.stack(rows).flatten(1)
    dead = ~live.reshape(-1)
    means = stacked.masked_fill(dead, 0.0).sum(1) / count
    if config.loss_type == "vespo":  # of a sequence without a live token phi is 1
        silent = (lengths == 0).to(means.dtype).sum() / max(1, layout.num_sequences)
        means = torch.cat([means[:-1], (means[-1] + silent).reshape(1)])
    parts = [means, _extremes(stacked[: len(spread)], dead, num_tokens)]
    if values.rollout_difference is not None:
        parts.append(_sampling(*values.rollout_difference))
    return torch.cat([*parts, torch.stack([num_tokens, policy_loss])])


def _flags(config: GRPOLossConfig, values: Measured) -> list[Tensor]:
    """Which tokens a clip holds back: below, above, either; for a cap above alone."""
    bounds, advantages = config.row.bounds, values.advantages
    lower, upper = config.lower_bound, config.upper_bound
    if not bounds:
        return []
    low, high = formulas.held_back(
        bounds, config.row.surrogate, values.ratio, values.gap, advantages, values.logps, lower, upper, config.delta,
        config.delta is not None,
    )  # fmt: skip
    return [high] if bounds == "cap" else [low, high, low | high]


def _extremes(rows: Tensor, dead: Tensor, num_tokens: Tensor) -> Tensor:
    """Smallest live value of each row, then the largest; 0 when there is none."""
    if rows.shape[1] == 0:
        return rows.new_zeros(2 * len(rows))
    low = rows.masked_fill(dead, torch.inf).amin(1)
    high = rows.masked_fill(dead, -torch.inf).amax(1)
    return torch.cat([low, high]).masked_fill(num_tokens == 0, 0.0)


def _sampling(difference: Tensor, known: Tensor) -> Tensor:
    """Mean and largest |old - rollout| over the tokens that the sampler scored."""
    size = difference.abs()
    most = size.amax() if size.numel() else size.new_zeros(())
    return torch.stack([size.sum() / known.sum().clamp(min=1), most])
