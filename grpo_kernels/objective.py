"""The objective over a batch: `[N]`-sized arithmetic on log-probs, from the one copy of the formulas.

It returns the loss and, in closed form, its derivative in every log-prob, so that the V-sized work (statistics before,
gradient after) knows nothing of objectives.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from . import aggregation, formulas
from .config import GRPOLossConfig
from .layout import Layout


class TokenInputs(NamedTuple):
    """Token tensors of one dtype; where `live` is False they hold harmless finite numbers."""

    logps: Tensor
    entropy: Tensor | None
    live: Tensor
    advantages: Tensor
    old: Tensor | None
    ref: Tensor | None
    weight: Tensor | None


class Objective(NamedTuple):
    """A loss with its derivatives: d loss / d logps = coef * scale, d loss / d entropy = live * entropy_scale."""

    loss: Tensor
    coef: Tensor
    scale: Tensor
    entropy_scale: Tensor | None
    token_loss: Tensor
    kl: Tensor | None
    ratio: Tensor
    metrics: dict[str, Tensor]


def evaluate(
    config: GRPOLossConfig,
    tokens: TokenInputs,
    layout: Layout,
    normalizer: Tensor | None,
    entropy_normalizer: Tensor | None,
) -> Objective:
    """The loss of OBJECTIVES: surrogate, rollout weight, + beta KL, aggregation, - entropy_coef mean entropy."""
    logps, live = tokens.logps, tokens.live
    lengths = layout.sum(live.to(logps.dtype))
    # on-policy nothing is subtracted, and a NaN still shows
    log_ratio = torch.where(logps == logps, 0.0, logps) if tokens.old is None else logps - tokens.old
    per_sequence = config.importance_sampling_level == "sequence"
    if per_sequence:
        log_ratio = layout.spread(layout.sum(log_ratio) / lengths.clamp(min=1)).expand_as(logps)
    ratio = torch.exp(log_ratio)

    token_loss, slope = _policy_term(config, ratio, tokens)
    own_slope = None  # of terms that depend on their own token even when the ratio is the sequence's
    kl = None
    if config.beta != 0:
        kl, own_slope, kl_slope = _kl_term(config, ratio, tokens)
        token_loss = token_loss + config.beta * kl
        own_slope = config.beta * own_slope
        if kl_slope is not None:
            slope = slope + config.beta * kl_slope
    if per_sequence:
        slope = layout.spread(layout.sum(torch.where(live, slope, 0.0)) / lengths.clamp(min=1))
    if own_slope is not None:
        slope = slope + own_slope

    weights = layout.spread(aggregation.sequence_weights(config, lengths))
    scale = aggregation.denominator(config, lengths, normalizer).reciprocal()
    coef = torch.where(live, weights * slope, 0.0)
    loss = torch.where(live, weights * token_loss, 0.0).sum() * scale
    metrics = _metrics(config, tokens, layout, lengths, ratio, kl)
    metrics["policy_loss"] = loss

    entropy_scale = None
    if tokens.entropy is not None and config.entropy_coef != 0:
        count = lengths.sum().clamp(min=1) if entropy_normalizer is None else entropy_normalizer
        entropy_scale = -config.entropy_coef / count
        loss = loss + tokens.entropy.sum() * entropy_scale
    return Objective(
        loss, coef, scale, entropy_scale,
        torch.where(live, token_loss, 0.0),
        None if kl is None else torch.where(live, kl, 0.0),
        torch.where(live, ratio, 0.0),
        metrics,
    )  # fmt: skip


def _limit(value: float | None) -> float:
    return math.inf if value is None else value


def _policy_term(config: GRPOLossConfig, ratio: Tensor, tokens: TokenInputs) -> tuple[Tensor, Tensor]:
    """The weighted surrogate of each token and its slope in the token's (or its sequence's) log-ratio."""
    if config.loss_type == "cispo":
        loss, slope = formulas.cispo_surrogate(ratio, tokens.advantages, tokens.logps, config.upper_bound)
    else:
        loss, slope = formulas.clipped_surrogate(
            ratio,
            tokens.advantages,
            config.lower_bound,
            config.upper_bound,
            _limit(config.delta),
            _limit(config.dual_clip),
        )
    if tokens.weight is None:
        return loss, slope
    return formulas.zero_safe_product(tokens.weight, loss), formulas.zero_safe_product(tokens.weight, slope)


_KL = {"k1": formulas.kl_k1, "k2": formulas.kl_k2, "k3": formulas.kl_k3}


def _kl_term(config: GRPOLossConfig, ratio: Tensor, tokens: TokenInputs) -> tuple[Tensor, Tensor, Tensor | None]:
    """The KL of each token, its slope in the token's own log-prob, and, bias-corrected, its slope in the log-ratio."""
    if tokens.ref is None:
        raise ValueError(
            "grpo_loss: ref_per_token_logps must be given when beta is not 0, got None. Pass it or set beta=0."
        )
    value, slope = _KL[config.kl_estimator](tokens.ref - tokens.logps)
    if not config.use_bias_correction_kl:
        return value, slope, None
    value = formulas.zero_safe_product(ratio, value)
    return value, formulas.zero_safe_product(ratio, slope), value


def metric_names(config: GRPOLossConfig, weighted: bool) -> list[str]:
    """Names of the metrics in the order in which `evaluate` makes them."""
    names = ["num_tokens", "ratio/mean", "ratio/min", "ratio/max"]
    if weighted:
        names += [f"importance_sampling_ratio/{how}" for how in ("mean", "min", "max")]
    if config.loss_type == "cispo":
        names += ["cispo_clip_ratio"]
    else:
        names += [f"clip_ratio/{which}_mean" for which in ("low", "high", "region")]
    if config.beta != 0:
        names += ["kl"]
    if config.needs_entropy:
        names += ["entropy"]
    return [*names, "policy_loss"]


def _metrics(
    config: GRPOLossConfig, tokens: TokenInputs, layout: Layout, lengths: Tensor, ratio: Tensor, kl: Tensor | None
) -> dict[str, Tensor]:
    live, advantages = tokens.live, tokens.advantages
    count = lengths.sum().clamp(min=1)

    def mean(values: Tensor) -> Tensor:
        return torch.where(live, values, 0.0).sum() / count

    def spread_of(name: str, values: Tensor) -> dict[str, Tensor]:
        low, high = _extremes(values, live)
        return {f"{name}/mean": mean(values), f"{name}/min": low, f"{name}/max": high}

    def share(flags: Tensor) -> Tensor:
        flags = torch.where(live & flags, 1.0, 0.0).to(ratio.dtype)
        if config.importance_sampling_level == "token":
            return flags.sum() / count
        return (layout.sum(flags) / lengths.clamp(min=1)).sum() / max(1, layout.num_sequences)

    metrics = {"num_tokens": lengths.sum()} | spread_of("ratio", ratio)
    if tokens.weight is not None:
        metrics |= spread_of("importance_sampling_ratio", tokens.weight.expand_as(ratio))
    if config.loss_type == "cispo":
        metrics["cispo_clip_ratio"] = share((ratio > config.upper_bound) & (advantages > 0))
    else:
        used = ratio.clamp(max=_limit(config.delta))
        low = (used < config.lower_bound) & (advantages < 0)
        high = (used > config.upper_bound) & (advantages > 0)
        metrics |= {
            "clip_ratio/low_mean": share(low),
            "clip_ratio/high_mean": share(high),
            "clip_ratio/region_mean": share(low | high),
        }
    if kl is not None:
        metrics["kl"] = mean(kl)
    if tokens.entropy is not None:
        metrics["entropy"] = mean(tokens.entropy)
    return metrics


def _extremes(values: Tensor, live: Tensor) -> tuple[Tensor, Tensor]:
    """Smallest and largest live value, 0 when there is none."""
    if values.numel() == 0:
        return values.new_zeros(()), values.new_zeros(())
    some = live.any()
    low = torch.where(live, values, torch.inf).amin()
    high = torch.where(live, values, -torch.inf).amax()
    return torch.where(some, low, 0.0), torch.where(some, high, 0.0)
