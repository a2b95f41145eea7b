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


class TokenTerms(NamedTuple):
    """What the formulas give per token: see `formulas.token_terms`."""

    ratio: Tensor
    loss: Tensor
    slope: Tensor
    own_slope: Tensor
    kl: Tensor


def evaluate(
    config: GRPOLossConfig,
    tokens: TokenInputs,
    layout: Layout,
    normalizer: Tensor | None,
    entropy_normalizer: Tensor | None,
    terms: TokenTerms | None = None,
) -> Objective:
    """The loss of OBJECTIVES: surrogate, rollout weight, + beta KL, aggregation, - entropy_coef mean entropy.

    `terms` are given where a kernel has already made them (token level).
    """
    logps, live = tokens.logps, tokens.live
    lengths = layout.sum(live.to(logps.dtype))
    if terms is None:
        log_ratio = _log_ratio(tokens)
        if config.importance_sampling_level == "sequence":
            log_ratio = layout.spread(layout.sum(log_ratio) / lengths.clamp(min=1)).expand_as(logps)
        terms = _terms(config, tokens, log_ratio)
    slope = terms.slope
    if config.importance_sampling_level == "sequence":
        slope = layout.spread(layout.sum(torch.where(live, slope, 0.0)) / lengths.clamp(min=1))

    weights, scale, entropy_scale = shares(
        config, tokens.entropy is not None, layout, lengths, normalizer, entropy_normalizer
    )
    coef = torch.where(live, weights * (slope + terms.own_slope), 0.0)
    loss = torch.where(live, weights * terms.loss, 0.0).sum() * scale
    kl = None if config.beta == 0 else torch.where(live, terms.kl, 0.0)
    metrics = _metrics(config, tokens, layout, lengths, terms.ratio, kl)
    metrics["policy_loss"] = loss

    if tokens.entropy is not None and entropy_scale is not None:
        loss = loss + tokens.entropy.sum() * entropy_scale
    token_loss, ratio = (torch.where(live, values, 0.0) for values in (terms.loss, terms.ratio))
    return Objective(loss, coef, scale, entropy_scale, token_loss, kl, ratio, metrics)


def shares(
    config: GRPOLossConfig,
    entropy: bool,
    layout: Layout,
    lengths: Tensor,
    normalizer: Tensor | None,
    entropy_normalizer: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """c_i of every token (broadcastable), 1 / Z, and d loss / d entropy of every live token."""
    weights = layout.spread(aggregation.sequence_weights(config, lengths))
    scale = aggregation.denominator(config, lengths, normalizer).reciprocal()
    if not entropy or config.entropy_coef == 0:
        return weights, scale, None
    count = lengths.sum().clamp(min=1) if entropy_normalizer is None else entropy_normalizer
    return weights, scale, -config.entropy_coef / count


def term_options(config: GRPOLossConfig) -> tuple[float, float, float, float, float, bool, str, bool]:
    """lower, upper, delta, dual_clip, beta, cispo, kl, corrected: what `formulas.token_terms` takes from a config."""
    delta, dual_clip = (math.inf if limit is None else limit for limit in (config.delta, config.dual_clip))
    kl = "none" if config.beta == 0 else config.kl_estimator
    return (
        config.lower_bound, config.upper_bound, delta, dual_clip, config.beta,
        config.loss_type == "cispo", kl, config.use_bias_correction_kl,
    )  # fmt: skip


def _log_ratio(tokens: TokenInputs) -> Tensor:
    logps = tokens.logps
    # on-policy nothing is subtracted, and a NaN still shows
    return torch.where(logps == logps, 0.0, logps) if tokens.old is None else logps - tokens.old


def token_level_terms(config: GRPOLossConfig, tokens: TokenInputs) -> TokenTerms:
    """What the formulas give for tokens of any shape, each with its own ratio."""
    return _terms(config, tokens, _log_ratio(tokens))


def _terms(config: GRPOLossConfig, tokens: TokenInputs, log_ratio: Tensor) -> TokenTerms:
    logps = tokens.logps
    ratio = torch.exp(log_ratio)
    lower, upper, delta, dual_clip, beta, cispo, kl, corrected = term_options(config)
    terms = formulas.token_terms(
        ratio, tokens.advantages, logps, tokens.weight, tokens.ref, lower, upper, delta, dual_clip, beta,
        cispo, tokens.weight is not None, kl, corrected, config.importance_sampling_level == "token",
    )  # fmt: skip
    return TokenTerms(ratio, *terms)


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
        used = ratio if config.delta is None else ratio.clamp(max=config.delta)
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
