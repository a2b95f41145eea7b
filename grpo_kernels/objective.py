"""The objective over a batch: `[N]`-sized arithmetic on log-probs, from the one copy of the formulas.

It returns the loss and, in closed form, its derivative in every log-prob, so that the V-sized work (statistics before,
gradient after) knows nothing of objectives.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from . import aggregation, formulas, metrics, rollout, selection
from .config import GRPOLossConfig
from .layout import Layout
from .metrics import metric_names

__all__ = [
    "Objective", "TokenInputs", "TokenTerms", "evaluate", "metric_names", "shares", "term_options",
    "token_level_terms", "whole_because", "whole_field",
]  # fmt: skip
_LEAST_LOG_WEIGHT = math.log(1e-8)  # VESPO's
_MOST_LOG_WEIGHT = 20.0


class TokenInputs(NamedTuple):
    """Token tensors of one dtype; where `live` is False they hold harmless finite numbers."""

    logps: Tensor
    entropy: Tensor | None
    live: Tensor
    advantages: Tensor
    old: Tensor | None
    ref: Tensor | None
    weight: Tensor | None
    rollout: Tensor | None = None
    """The sampler's log-probs; NaN: missing."""
    generator: torch.Generator | None = None


class Objective(NamedTuple):
    """A loss with its derivatives: d loss / d logps = coef * scale, d loss / d entropy = live * entropy_scale."""

    loss: Tensor
    coef: Tensor
    scale: Tensor
    entropy_scale: Tensor | None
    """0-d, or one per token."""
    token_loss: Tensor
    kl: Tensor | None
    ratio: Tensor
    metrics: Tensor
    """One vector, in the order of `metric_names`."""


class TokenTerms(NamedTuple):
    """What the formulas give per token: see `formulas.token_terms`."""

    ratio: Tensor
    loss: Tensor
    slope: Tensor
    own_slope: Tensor
    kl: Tensor


def whole_field(config: GRPOLossConfig, on_policy: bool) -> str | None:
    """The option by which a token's coefficient needs more than that token; None: there is none."""
    if config.row.whole:
        return "loss_type"
    for field, usual in (
        ("importance_sampling_level", "token"), ("off_policy_mask_threshold", None), ("top_entropy_quantile", 1.0),
    ):  # fmt: skip
        if getattr(config, field) != usual:
            return field
    return "rollout_correction" if config.rollout_correction != "none" and on_policy else None


def whole_because(config: GRPOLossConfig, on_policy: bool) -> str | None:
    """`whole_field` and its value in words, for an error: torch.compile cannot write a number that it traces."""
    field = whole_field(config, on_policy)
    if field is None:
        return None
    unless = " and no old_per_token_logps" if field == "rollout_correction" else ""
    return f"{field}={getattr(config, field)!r}{unless}"


def evaluate(
    config: GRPOLossConfig,
    tokens: TokenInputs,
    layout: Layout,
    normalizer: Tensor | None,
    entropy_normalizer: Tensor | None,
    terms: TokenTerms | None = None,
) -> Objective:
    """The loss of OBJECTIVES: surrogate, masks, rollout weight, + beta KL, aggregation, - entropy_coef mean entropy.

    `terms` are given where a kernel has already made them (see `whole_field`).
    """
    logps, live = tokens.logps, tokens.live
    lengths = layout.sum(live.to(logps.dtype))
    tokens = _with_weight(config, tokens, layout)
    kept = None
    if config.top_entropy_quantile < 1 and tokens.entropy is not None:
        kept = selection.top_entropy(config.top_entropy_quantile, tokens.entropy, live)
    own = None
    if terms is None:
        if whole_field(config, tokens.old is None) is None:
            terms = token_level_terms(config, tokens)
        else:
            terms, own = _whole_terms(config, tokens, layout, lengths, kept)

    weights, scale, entropy_scale = shares(
        config, tokens.entropy is not None, layout, lengths, normalizer, entropy_normalizer
    )
    dead = ~live
    coef = (weights * (terms.slope + terms.own_slope)).masked_fill(dead, 0.0)
    token_loss, ratio = (values.masked_fill(dead, 0.0) for values in (terms.loss, terms.ratio))
    policy_loss = (weights * token_loss).sum() * scale
    kl = None if config.beta == 0 else terms.kl.masked_fill(dead, 0.0)
    difference = None
    if tokens.rollout is not None:
        old = logps if tokens.old is None else tokens.old
        difference = rollout.logp_difference(old, tokens.rollout, live)
    measured = metrics.Measured(
        terms.ratio, _gap(tokens), tokens.advantages, logps, tokens.weight, difference, kl, tokens.entropy, own
    )
    vector = metrics.measure(config, measured, live, layout, lengths, policy_loss)

    loss = policy_loss
    if tokens.entropy is not None and entropy_scale is not None:
        if kept is not None:
            count = kept.to(logps.dtype).sum().clamp(min=1) if entropy_normalizer is None else entropy_normalizer
            entropy_scale = torch.where(kept, -config.entropy_coef / count, 0.0)
            loss = loss + (tokens.entropy * entropy_scale).sum()
        else:
            loss = loss + tokens.entropy.sum() * entropy_scale
    return Objective(loss, coef, scale, entropy_scale, token_loss, kl, ratio, vector)


def shares(
    config: GRPOLossConfig,
    entropy: bool,
    layout: Layout,
    lengths: Tensor,
    normalizer: Tensor | None,
    entropy_normalizer: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """c_i of every token (broadcastable), 1 / Z, and d loss / d entropy of every live token."""
    weights = layout.spread(aggregation.sequence_weights(config, layout, lengths))
    scale = aggregation.denominator(config, layout, lengths, normalizer).reciprocal()
    if not entropy or config.entropy_coef == 0:
        return weights, scale, None
    count = lengths.sum().clamp(min=1) if entropy_normalizer is None else entropy_normalizer
    return weights, scale, -config.entropy_coef / count


Limits = tuple[float, float, float, float, float, float, float, float, float, float]


def term_options(config: GRPOLossConfig) -> tuple[Limits, str, str, bool, bool]:
    """limits, surrogate, kl, corrected, kl_weighted: what `formulas.token_terms` takes from a config.

    limits are its lower, upper, delta, dual_clip, first, second, most_log_ratio, beta, most_gap, most_kl; what is off
    is infinite.
    """
    first, second = 0.0, 0.0
    if config.loss_type == "sapo":
        first, second = config.sapo_temperature_pos, config.sapo_temperature_neg
    elif config.loss_type in ("dppo_tv", "dppo_kl"):
        first = config.dppo_cap
    elif config.loss_type == "dro":
        first = config.dro_beta or 0.0
    off = (config.delta, config.dual_clip, config.log_ratio_clamp, *config.kl_clamp)
    delta, dual_clip, most_log_ratio, most_gap, most_kl = (math.inf if limit is None else limit for limit in off)
    limits = (
        config.lower_bound, config.upper_bound, delta, dual_clip, first, second, most_log_ratio, config.beta, most_gap,
        most_kl,
    )  # fmt: skip
    kl = "none" if config.beta == 0 else config.kl_estimator
    return limits, config.row.surrogate, kl, config.use_bias_correction_kl, config.kl_weighted_by_rollout


def _kl_flags(config: GRPOLossConfig, tokens: TokenInputs) -> tuple[str, bool, bool, bool, bool]:
    """kl, straight, kl_bounded, corrected, kl_weighted of `formulas.penalised_terms`."""
    kl = "none" if config.beta == 0 else config.kl_estimator
    weighted = config.kl_weighted_by_rollout and tokens.weight is not None
    bounded = config.kl_clamp != (None, None)
    return kl.removesuffix("+"), kl.endswith("+"), bounded, config.use_bias_correction_kl, weighted


def _gap(tokens: TokenInputs) -> Tensor:
    logps = tokens.logps
    # on-policy nothing is subtracted, and a NaN still shows
    return torch.where(logps == logps, 0.0, logps) if tokens.old is None else logps - tokens.old


def _with_weight(config: GRPOLossConfig, tokens: TokenInputs, layout: Layout) -> TokenInputs:
    """With the weight of the rollout, where it could not be made before the log-probs were there."""
    if config.rollout_correction == "none" or tokens.weight is not None or tokens.rollout is None:
        return tokens
    old = tokens.logps if tokens.old is None else tokens.old
    return tokens._replace(weight=rollout.correction(config, old, tokens.rollout, tokens.live, layout))


def token_level_terms(config: GRPOLossConfig, tokens: TokenInputs) -> TokenTerms:
    """What the formulas give for tokens of any shape, each by itself."""
    limits, surrogate, *_ = term_options(config)
    terms = formulas.token_terms(
        _gap(tokens), tokens.advantages, tokens.logps, tokens.weight, tokens.ref, *limits,
        surrogate, config.log_ratio_clamp is not None, tokens.weight is not None, *_kl_flags(config, tokens),
    )  # fmt: skip
    return TokenTerms(*terms)


def _whole_terms(
    config: GRPOLossConfig, tokens: TokenInputs, layout: Layout, lengths: Tensor, kept: Tensor | None
) -> tuple[TokenTerms, Tensor | None]:
    """The terms where tokens depend on each other, slopes spread over the sequences, and what `Measured.own` is."""
    logps, live, advantages = tokens.logps, tokens.live, tokens.advantages
    limits, surrogate, *_ = term_options(config)
    lower, upper, delta, dual_clip, first, second, most_log_ratio, beta, most_gap, most_kl = limits
    gap = _gap(tokens)
    log_ratio, stuck = formulas.bounded(gap, most_log_ratio)
    by_sequence = config.importance_sampling_level != "token"
    level = _sequence_mean(layout, lengths, log_ratio).expand_as(logps) if by_sequence else log_ratio
    ratio = torch.exp(level)

    own = None
    spread_over = ~stuck if config.importance_sampling_level == "sequence" else None
    if surrogate == "vespo":
        phi = _sequence_phi(config, tokens, layout, log_ratio)
        own = phi.expand_as(logps)
        loss, own_slope = formulas.weighted_logp(-formulas.zero_safe_product(phi, advantages), logps)
        slope = torch.zeros_like(loss)
    elif surrogate == "gmpo":
        log_held, cut = formulas.one_sided_log_ratio(log_ratio, advantages, lower, upper)
        mean = _sequence_mean(layout, lengths, torch.where(live, log_held, 0.0)).expand_as(logps)
        loss, slope = formulas.ratio_surrogate(torch.exp(mean), advantages)
        own_slope, spread_over = torch.zeros_like(loss), ~(stuck | cut)
    else:
        loss, slope, own_slope = formulas.policy_terms(
            surrogate, ratio, level, gap, advantages, logps, lower, upper, delta, dual_clip, first, second
        )
    if config.loss_type in ("clip_cov", "kl_cov"):
        own = _covariant(config, tokens, ratio)
        if config.loss_type == "clip_cov":
            loss, slope = (torch.where(own, 0.0, values) for values in (loss, slope))
        else:
            size, direction = formulas.kl_abs(-log_ratio)
            loss = loss + torch.where(own, config.cov_coef * size, 0.0)
            slope = slope + torch.where(own, config.cov_coef * direction, 0.0)
    keep = _kept(config, tokens, layout, gap, kept)
    if keep is not None:
        loss, slope, own_slope = (torch.where(keep, values, 0.0) for values in (loss, slope, own_slope))

    loss, slope, own_slope, kl = formulas.penalised_terms(
        loss, slope, own_slope, ratio, ~stuck, logps, tokens.weight, tokens.ref, beta, most_gap, most_kl,
        tokens.weight is not None and surrogate != "vespo", *_kl_flags(config, tokens),
        config.importance_sampling_level != "sequence",
    )  # fmt: skip
    if spread_over is None:
        slope = torch.where(stuck, 0.0, slope)
    else:
        slope = _sequence_mean(layout, lengths, torch.where(live, slope, 0.0))
        slope = torch.where(spread_over, slope, 0.0)
    return TokenTerms(ratio, loss, slope, own_slope, kl), own


def _sequence_mean(layout: Layout, lengths: Tensor, values: Tensor) -> Tensor:
    """The mean over each sequence's live tokens, given to its tokens; dead tokens hold 0."""
    return layout.spread(layout.sum(values) / lengths.clamp(min=1))


def _sequence_phi(config: GRPOLossConfig, tokens: TokenInputs, layout: Layout, log_ratio: Tensor) -> Tensor:
    """VESPO's weight of each token's sequence, by the sign of the token's advantage (TRL 1.16)."""
    total = layout.sum(log_ratio.clamp(-20.0, 20.0))
    if tokens.weight is not None:
        log_weight = torch.log(tokens.weight).clamp(_LEAST_LOG_WEIGHT, 20.0)
        total = total + layout.sum(torch.where(tokens.live, log_weight, 0.0))
    log_weight = layout.spread(total.clamp(_LEAST_LOG_WEIGHT, _MOST_LOG_WEIGHT))
    lam_pos, lam_neg = max(config.vespo_lambda_pos, 1e-4), max(config.vespo_lambda_neg, 1e-4)
    phi: Tensor = formulas.gamma_weight(
        log_weight, tokens.advantages, config.vespo_k_pos, lam_pos, config.vespo_k_neg, lam_neg
    )
    return phi


def _covariant(config: GRPOLossConfig, tokens: TokenInputs, ratio: Tensor) -> Tensor:
    """The tokens that a covariance selects."""
    live, advantages = tokens.live, tokens.advantages.expand_as(ratio)
    cov = selection.covariance(advantages, tokens.logps, live)
    if config.loss_type == "kl_cov":
        return selection.kl_cov(config, cov, live)
    low, high = (ratio < config.lower_bound) & (advantages < 0), (ratio > config.upper_bound) & (advantages > 0)
    return selection.clip_cov(config, cov, low | high, live, tokens.generator)


def _kept(
    config: GRPOLossConfig, tokens: TokenInputs, layout: Layout, gap: Tensor, kept: Tensor | None
) -> Tensor | None:
    """Where the policy term stays; None: everywhere."""
    threshold = config.off_policy_mask_threshold
    if threshold is None:
        return kept
    if tokens.rollout is not None:
        drift = -rollout.logp_difference(tokens.logps, tokens.rollout, tokens.live)[0]
    else:
        drift = -gap if config.log_ratio_clamp is None else -gap.clamp(-config.log_ratio_clamp, config.log_ratio_clamp)
    near = selection.on_policy_enough(threshold, tokens.advantages, drift, tokens.live, layout)
    return near if kept is None else near & kept
