"""The whole loss in plain differentiable torch, in the dtype of the logits: what the fused paths are held against.

Nothing here is shared with them: log_softmax, min, clamp and autograd instead of saved statistics, formulas and
coefficients. In float64 it is the truth of the tests; in another dtype, "plain PyTorch at that dtype".
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .config import GRPOLossConfig


def transform(
    logits: Tensor, temperature: float | Tensor = 1.0, softcap: float | None = None, logit_scale: float = 1.0
) -> Tensor:
    """z = cap(logit_scale * logits) / temperature; -inf stays -inf. Temperature: broadcastable to the rows."""
    z = logits * logit_scale
    if softcap is not None:
        z = torch.where(torch.isinf(z), z, softcap * torch.tanh(z / softcap))
    if isinstance(temperature, Tensor) and temperature.ndim > 0:
        temperature = temperature.expand(logits.shape[:-1]).unsqueeze(-1)
    return z / temperature


def per_token_logps(
    logits: Tensor,
    targets: Tensor,
    mask: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """(logps, entropy, lse) of each row, 0 where dead; `[..., V]` logits, targets and mask of the leading shape."""
    live = (targets >= 0) & (targets < logits.shape[-1])
    live = live if mask is None else live & (mask != 0)
    z = transform(torch.where(live.unsqueeze(-1), logits, torch.zeros_like(logits)), temperature, softcap, logit_scale)
    log_p = torch.log_softmax(z, dim=-1)
    index = torch.where(live, targets, 0).to(torch.int64).unsqueeze(-1)
    possible = torch.isfinite(log_p)
    entropy = -torch.where(possible, log_p.exp() * torch.where(possible, log_p, 0.0), 0.0).sum(-1)
    outputs = (log_p.gather(-1, index).squeeze(-1), entropy, torch.logsumexp(z, dim=-1).detach())
    return tuple(torch.where(live, value, 0.0) for value in outputs)  # type: ignore[return-value]


def grpo_loss(
    logits: Tensor,
    completion_ids: Tensor,
    config: GRPOLossConfig,
    advantages: Tensor,
    completion_mask: Tensor | None = None,
    old_per_token_logps: Tensor | None = None,
    ref_per_token_logps: Tensor | None = None,
    importance_sampling_ratio: Tensor | None = None,
    temperature: float | Tensor | None = None,
    normalizer: float | None = None,
    entropy_normalizer: float | None = None,
    rollout_per_token_logps: Tensor | None = None,
    group_size: int | None = None,
    group_ids: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """The loss of `grpo_kernels.grpo_loss` for padded `[B, T]` inputs, differentiable through everything. 0-d."""
    live = (completion_ids >= 0) & (completion_ids < logits.shape[-1])
    live = live if completion_mask is None else live & (completion_mask != 0)
    heat = config.temperature if temperature is None else temperature
    logps, entropy, _ = per_token_logps(logits, completion_ids, live, heat, config.softcap, config.logit_scale)
    advantages = _tokens(advantages, live, logps)
    old = logps.detach() if old_per_token_logps is None else _tokens(old_per_token_logps, live, logps)
    sampled = None if rollout_per_token_logps is None else _tokens(rollout_per_token_logps, live, logps)
    lengths = live.sum(dim=1, keepdim=True).to(logps.dtype)
    difference = torch.where(live, logps - old, 0.0)
    log_ratio = difference if config.log_ratio_clamp is None else _clamp(difference, config.log_ratio_clamp)
    ratio = _ratio(config, log_ratio, lengths)

    weight = None
    if importance_sampling_ratio is not None:
        weight = _tokens(importance_sampling_ratio, live, logps)
    elif config.rollout_correction != "none" and sampled is not None:
        weight = _rollout_weight(config, torch.nan_to_num(old.detach() - sampled, nan=0.0), live, lengths)

    loss = _surrogate(config, ratio, log_ratio, advantages, logps, old, weight, live)
    if config.loss_type in ("clip_cov", "kl_cov"):
        loss = _select_by_covariance(config, loss, ratio, log_ratio, advantages, logps.detach(), live, generator)
    if config.off_policy_mask_threshold is not None:
        drift = -log_ratio if sampled is None else torch.nan_to_num(sampled - logps, nan=0.0)
        mean = torch.where(live, drift.detach(), 0.0).sum(dim=1, keepdim=True) / lengths.clamp(min=1)
        loss = torch.where((advantages >= 0) | (mean <= config.off_policy_mask_threshold), loss, 0.0)
    acting = live
    if config.top_entropy_quantile < 1 and live.any():
        acting = live & (entropy >= torch.quantile(entropy[live], 1 - config.top_entropy_quantile))
        loss = torch.where(acting, loss, 0.0)
    if weight is not None and config.loss_type != "vespo":
        loss = loss * weight
    if config.beta != 0 and ref_per_token_logps is not None:
        kl = _kl(config, ratio, logps, _tokens(ref_per_token_logps, live, logps))
        if weight is not None and config.kl_weighted_by_rollout:
            kl = kl * weight
        loss = loss + config.beta * kl
    loss = torch.where(live, loss, 0.0)

    total, count = _aggregate(config, loss, lengths, group_size, group_ids)
    acting_entropy = torch.where(acting, entropy, 0.0).sum()
    acting_count = max(1.0, acting.sum().item())
    bonus = config.entropy_coef * acting_entropy / (acting_count if entropy_normalizer is None else entropy_normalizer)
    return total / (count if normalizer is None else normalizer) - bonus


def _tokens(values: Tensor, live: Tensor, like: Tensor) -> Tensor:
    values = values.unsqueeze(1) if values.ndim == 1 else values
    return torch.where(live, values.to(like.dtype), 0.0)


def _clamp(values: Tensor, limit: float | None) -> Tensor:
    return values if limit is None else values.clamp(-limit, limit)


def _ratio(config: GRPOLossConfig, log_ratio: Tensor, lengths: Tensor) -> Tensor:
    if config.importance_sampling_level == "token":
        return log_ratio.exp()
    mean = (log_ratio.sum(dim=1, keepdim=True) / lengths.clamp(min=1)).expand_as(log_ratio)
    if config.importance_sampling_level == "sequence":
        return mean.exp()
    return mean.detach().exp() * (log_ratio - log_ratio.detach()).exp()


def _rollout_weight(config: GRPOLossConfig, difference: Tensor, live: Tensor, lengths: Tensor) -> Tensor:
    difference = torch.where(live, difference, 0.0)
    level, how = config.rollout_correction.split("_")
    log_weight = difference
    if level == "sequence":
        log_weight = difference.sum(dim=1, keepdim=True)
        if config.rollout_sequence_mean == "geometric":
            log_weight = log_weight / lengths.clamp(min=1)
    weight = log_weight.exp().expand_as(difference)
    low = 0.0 if config.rollout_clip_min is None else config.rollout_clip_min
    high = math.inf if config.rollout_clip_max is None else config.rollout_clip_max
    weight = weight.clamp(low, high) if how == "truncate" else weight * ((weight >= low) & (weight <= high))
    if config.rollout_veto is not None:
        weight = weight * ~((difference.exp() < config.rollout_veto) & live).any(dim=1, keepdim=True)
    return weight


def _high(config: GRPOLossConfig) -> float:
    return config.epsilon if config.epsilon_high is None else config.epsilon_high


def _surrogate(
    config: GRPOLossConfig, ratio: Tensor, log_ratio: Tensor, advantages: Tensor, logps: Tensor, old: Tensor,
    weight: Tensor | None, live: Tensor,
) -> Tensor:  # fmt: skip
    name, low, high = config.loss_type, config.epsilon, _high(config)
    if name == "gpg":
        return -advantages * logps
    if name == "cispo":
        caps = {"absolute": (0.0, high), "relative": (1 - low, 1 + high), "relative_upper": (0.0, 1 + high)}
        return -ratio.detach().clamp(*caps[config.cispo_bounds]) * advantages * logps
    if name == "sapo":
        tau = torch.full_like(ratio, config.sapo_temperature_neg)
        tau[advantages.expand_as(ratio) > 0] = config.sapo_temperature_pos
        return -torch.sigmoid(tau * (ratio - 1)) * 4 / tau * advantages
    if name == "vespo":
        return -_phi(config, log_ratio.detach(), advantages, weight, live) * advantages * logps
    if name == "gmpo":
        bounded = log_ratio.clamp(-low, high)
        held = torch.where(advantages > 0, torch.minimum(log_ratio, bounded), torch.maximum(log_ratio, bounded))
        count = live.sum(dim=1, keepdim=True).clamp(min=1)
        return -(torch.where(live, held, 0.0).sum(dim=1, keepdim=True) / count).exp() * advantages
    if name == "dro":
        return -(advantages * logps - (config.dro_beta or 0.0) / 2 * log_ratio.square())
    if name in ("dppo_tv", "dppo_kl"):
        inside = _inside_trust_region(config, advantages, logps.detach(), old)
        return torch.where(inside, -advantages * ratio.detach().clamp(max=config.dppo_cap) * logps, 0.0)
    if name == "kl_cov":
        return -ratio * advantages
    return _clipped(config, ratio, advantages)


def _clipped(config: GRPOLossConfig, ratio: Tensor, advantages: Tensor) -> Tensor:
    # a ratio that overflows in a branch that min discards must not turn its zero gradient into NaN
    ratio = torch.where(advantages == 0, ratio.detach().nan_to_num(posinf=1.0), ratio)
    ratio = torch.where((advantages > 0) & torch.isinf(ratio), ratio.detach().clamp(max=1e30), ratio)
    free = ratio if config.delta is None else ratio.clamp(max=config.delta)
    loss = -torch.min(free * advantages, ratio.clamp(1 - config.epsilon, 1 + _high(config)) * advantages)
    if config.dual_clip is None:
        return loss
    return torch.where(advantages < 0, torch.min(loss, -config.dual_clip * advantages), loss)


def _phi(config: GRPOLossConfig, log_ratio: Tensor, advantages: Tensor, weight: Tensor | None, live: Tensor) -> Tensor:
    total = torch.where(live, log_ratio.clamp(-20, 20), 0.0).sum(dim=1, keepdim=True)
    if weight is not None:
        total = total + torch.where(live, weight.log().clamp(math.log(1e-8), 20), 0.0).sum(dim=1, keepdim=True)
    total = total.clamp(math.log(1e-8), 20)

    def phi(k: float, lam: float) -> Tensor:
        lam = max(lam, 1e-4)
        return (lam + k * total - lam * total.exp()).exp().nan_to_num(nan=0.0, posinf=0.0)

    good = phi(config.vespo_k_pos, config.vespo_lambda_pos)
    return torch.where(advantages >= 0, good, phi(config.vespo_k_neg, config.vespo_lambda_neg))


def _inside_trust_region(config: GRPOLossConfig, advantages: Tensor, logps: Tensor, old: Tensor) -> Tensor:
    low, high, p, q = config.epsilon, _high(config), logps.exp(), old.exp()
    if config.loss_type == "dppo_tv":
        return torch.where(advantages > 0, p - q <= high, p - q >= -low)
    kl = q * (old - logps) + (1 - q) * torch.log((1 - q + 1e-8) / (1 - p + 1e-8))
    return torch.where(advantages > 0, (kl <= high) | (p <= q), (kl <= low) | (p >= q))


def _select_by_covariance(
    config: GRPOLossConfig, loss: Tensor, ratio: Tensor, log_ratio: Tensor, advantages: Tensor, logps: Tensor,
    live: Tensor, generator: torch.Generator | None,
) -> Tensor:  # fmt: skip
    covariance = (advantages - advantages[live].mean()) * (logps - logps[live].mean())
    wanted = max(1, int(config.cov_ratio * int(live.sum())))
    if config.loss_type == "kl_cov":
        ranked = torch.where(live, covariance, -torch.inf).flatten()
        chosen = torch.zeros_like(live).flatten()
        chosen[ranked.topk(min(wanted, int(live.sum()))).indices] = True
        return loss + torch.where(chosen.view_as(live), config.cov_coef * log_ratio.abs(), 0.0)
    bounded = ratio.clamp(1 - config.epsilon, 1 + _high(config)) * advantages
    low, high = config.cov_bounds
    eligible = live & (bounded >= ratio * advantages) & (covariance > low) & (covariance < high)
    places = eligible.nonzero()
    places = places[torch.randperm(len(places), generator=generator)[:wanted]]
    chosen = torch.zeros_like(live)
    chosen[places[:, 0], places[:, 1]] = True
    return torch.where(chosen, 0.0, loss)


def _kl(config: GRPOLossConfig, ratio: Tensor, logps: Tensor, ref: Tensor) -> Tensor:
    most_gap, most_value = config.kl_clamp
    name, d = config.kl_estimator, _clamp(ref - logps, most_gap)
    kl = {"k1": -d, "abs": d.abs(), "k2": d.square() / 2, "k3": d.exp() - d - 1}[name.rstrip("+")]
    kl = _clamp(kl, most_value)
    if name.endswith("+"):
        k2 = (ref - logps).square() / 2
        kl = kl.detach() + k2 - k2.detach()
    return kl * ratio if config.use_bias_correction_kl else kl


def _aggregate(
    config: GRPOLossConfig, loss: Tensor, lengths: Tensor, group_size: int | None, group_ids: Tensor | None
) -> tuple[Tensor, float]:
    own = {
        "grpo": "seq_mean_token_mean", "sapo": "seq_mean_token_mean", "gmpo": "seq_mean_token_mean",
        "dr_grpo": "seq_mean_token_sum_norm", "luspo": "seq_mean_token_sum",
    }  # fmt: skip
    mode = config.aggregation or own.get(config.loss_type, "token_mean")
    sums, rows = loss.sum(dim=1, keepdim=True), max(1, len(loss))
    if mode == "seq_mean_token_mean":
        return (sums / lengths.clamp(min=1)).sum(), rows
    if mode == "seq_mean_token_sum":
        return sums.sum(), rows
    if mode == "seq_mean_token_sum_norm":
        return sums.sum(), rows * (config.max_completion_length or 1)
    if mode == "prompt_mean":
        index = torch.arange(len(loss)) // (group_size or 1) if group_ids is None else group_ids
        means = [sums[index == prompt].sum() / lengths[index == prompt].sum().clamp(min=1) for prompt in index.unique()]
        return torch.stack(means).sum(), len(means)
    return sums.sum(), 1.0 if mode == "token_sum" else max(1.0, lengths.sum().item())
