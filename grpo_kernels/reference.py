"""The whole loss in plain differentiable torch, in the dtype of the logits: what the fused paths are held against.

Nothing here is shared with them: log_softmax, min, clamp and autograd instead of saved statistics, formulas and
coefficients. In float64 it is the truth of the tests; in another dtype, "plain PyTorch at that dtype".
"""

from __future__ import annotations

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
) -> Tensor:
    """The loss of `grpo_kernels.grpo_loss` for padded `[B, T]` inputs, differentiable through everything. 0-d."""
    live = (completion_ids >= 0) & (completion_ids < logits.shape[-1])
    live = live if completion_mask is None else live & (completion_mask != 0)
    heat = config.temperature if temperature is None else temperature
    logps, entropy, _ = per_token_logps(logits, completion_ids, live, heat, config.softcap, config.logit_scale)
    advantages = _tokens(advantages, live, logps)
    old = logps.detach() if old_per_token_logps is None else _tokens(old_per_token_logps, live, logps)
    lengths = live.sum(dim=1, keepdim=True).to(logps.dtype)
    log_ratio = torch.where(live, logps - old, 0.0)
    if config.importance_sampling_level == "sequence":
        log_ratio = (log_ratio.sum(dim=1, keepdim=True) / lengths.clamp(min=1)).expand_as(logps)
    ratio = log_ratio.exp()

    loss = _surrogate(config, ratio, advantages, logps)
    if importance_sampling_ratio is not None:
        loss = loss * _tokens(importance_sampling_ratio, live, logps)
    if config.beta != 0 and ref_per_token_logps is not None:
        loss = loss + config.beta * _kl(config, ratio, logps, _tokens(ref_per_token_logps, live, logps))
    loss = torch.where(live, loss, 0.0)

    total, count = _aggregate(config, loss, lengths), max(1.0, lengths.sum().item())
    if normalizer is None:
        per_token = config.loss_type in ("bnpo", "dapo", "cispo")
        normalizer = count if per_token else max(1, logits.shape[0]) * _constant_length(config)
    bonus = config.entropy_coef * entropy.sum() / (count if entropy_normalizer is None else entropy_normalizer)
    return total / normalizer - bonus


def _tokens(values: Tensor, live: Tensor, like: Tensor) -> Tensor:
    values = values.unsqueeze(1) if values.ndim == 1 else values
    return torch.where(live, values.to(like.dtype), 0.0)


def _surrogate(config: GRPOLossConfig, ratio: Tensor, advantages: Tensor, logps: Tensor) -> Tensor:
    if config.loss_type == "cispo":
        return -ratio.detach().clamp(max=config.upper_bound) * advantages * logps
    # a ratio that overflows in a branch that min discards must not turn its zero gradient into NaN
    ratio = torch.where(advantages == 0, ratio.detach().nan_to_num(posinf=1.0), ratio)
    ratio = torch.where((advantages > 0) & torch.isinf(ratio), ratio.detach().clamp(max=1e30), ratio)
    free = ratio if config.delta is None else ratio.clamp(max=config.delta)
    loss = -torch.min(free * advantages, ratio.clamp(config.lower_bound, config.upper_bound) * advantages)
    if config.dual_clip is None:
        return loss
    return torch.where(advantages < 0, torch.min(loss, -config.dual_clip * advantages), loss)


def _kl(config: GRPOLossConfig, ratio: Tensor, logps: Tensor, ref: Tensor) -> Tensor:
    d = ref - logps
    kl = {"k1": -d, "k2": d.square() / 2, "k3": d.exp() - d - 1}[config.kl_estimator]
    return kl * ratio if config.use_bias_correction_kl else kl


def _aggregate(config: GRPOLossConfig, loss: Tensor, lengths: Tensor) -> Tensor:
    if config.loss_type == "grpo":
        return (loss.sum(dim=1, keepdim=True) / lengths.clamp(min=1)).sum()
    return loss.sum()


def _constant_length(config: GRPOLossConfig) -> int:
    return (config.max_completion_length or 1) if config.loss_type == "dr_grpo" else 1
