"""The tests' own truth: every formula once more in NumPy, from the papers and the contract, with gradients by hand.

Nothing here imports the package under test or uses autograd. Small problems run in `numpy.longdouble` (64-bit mantissa
on x86), so that the truth is truer than float64 results; pass `real=np.float64` where V is large. Tokens are flat: a
padded `[B, T]` batch is B sequences of T tokens, a packed one is described by `cu_seqlens`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from oracle_losses import CLIPPED, Options, kl_term, prompts_of, surrogate, vespo_weight
from oracle_rows import Array, RowStats, row_stats

__all__ = [
    "Batch",
    "Options",
    "RowStats",
    "Truth",
    "group_advantages",
    "grpo",
    "row_stats",
    "sequence_index",
    "spread_out",
]


@dataclass(frozen=True)
class Batch:
    """Inputs of one loss call in NumPy, laid out as the package takes them: `[B, T]`, or `[N]` with `cu_seqlens`."""

    logits: Array
    ids: Array
    advantages: Array
    mask: Array | None = None
    old: Array | None = None
    ref: Array | None = None
    weight: Array | None = None  # importance_sampling_ratio
    temperature: Array | float | None = None
    cu_seqlens: Array | None = None
    normalizer: float | None = None
    entropy_normalizer: float | None = None
    groups: Array | None = None  # the prompt of each sequence

    def but(self, **changes: Any) -> Batch:
        return replace(self, **changes)


@dataclass(frozen=True)
class Truth:
    """Results of one loss call. What is flat has one value per token.

    `*_scale` is what one relative rounding of the log-probabilities and logits (`RowStats.size`) can move a result by,
    to first order and without luck: a ratio is an exponential, so a log-probability of -8 costs 8 eps.
    """

    loss: Any
    loss_scale: Any
    dlogits: Array  # like logits
    dlogits_scale: Array  # flat
    coef: Array  # d loss / d logps, flat
    metrics: Mapping[str, float]
    logps: Array  # flat, as the following
    entropy: Array
    token_loss: Array
    token_scale: Array
    kl: Array
    ratio: Array
    live: Array


def sequence_index(batch: Batch) -> tuple[Array, int]:
    """Sequence number of each flat token (-1: beyond the last sequence) and the number of sequences."""
    if batch.cu_seqlens is None:
        b, t = batch.ids.shape
        return np.repeat(np.arange(b), t), b
    cu = np.asarray(batch.cu_seqlens, dtype=np.int64)
    index = np.full(batch.ids.shape[0], -1, dtype=np.int64)
    for s, (start, stop) in enumerate(itertools.pairwise(cu)):
        index[start:stop] = s
    return index, len(cu) - 1


def spread_out(value: Array, batch: Batch, seq: Array, count: int, real: type) -> Array:
    """A sequence or token tensor as flat tokens; a 1-d or `[S, 1]` tensor of S values is a sequence tensor."""
    value = np.asarray(value)
    n = seq.shape[0]
    if batch.cu_seqlens is not None:
        if (value.shape == (n, 1) and n == count) or (value.shape == (n,) and n != count):
            return value.reshape(n).astype(real)
    elif value.shape == batch.ids.shape and not (value.shape[1] == 1 and value.shape[0] == count):
        return value.reshape(n).astype(real)
    per_seq = value.reshape(count).astype(real)
    return np.where(seq >= 0, per_seq[np.maximum(seq, 0)], real(0)) if count else np.zeros(n, real)


def grpo(batch: Batch, opt: Options, *, real: type = np.longdouble) -> Truth:
    """Loss, gradient and metrics of one batch."""
    seq, count = sequence_index(batch)
    n = seq.shape[0]
    v = batch.logits.shape[-1]
    mask = np.ones(n, bool) if batch.mask is None else np.asarray(batch.mask).reshape(n) != 0
    mask = mask & (seq >= 0)
    tau: Any = opt.temperature if batch.temperature is None else batch.temperature
    if np.ndim(tau) > 0:
        tau = np.asarray(tau)
        tau = np.broadcast_to(tau, batch.ids.shape).reshape(n) if batch.cu_seqlens is None else tau.reshape(n)
    with np.errstate(all="ignore"):
        stats = row_stats(
            np.asarray(batch.logits).reshape(n, v), np.asarray(batch.ids).reshape(n), mask=mask, temperature=tau,
            softcap=opt.softcap, logit_scale=opt.logit_scale, real=real,
        )  # fmt: skip
        return _objective(batch, opt, stats, seq, count, real)


def _objective(batch: Batch, opt: Options, stats: RowStats, seq: Array, count: int, real: type) -> Truth:
    n, live, p = seq.shape[0], stats.live, stats.logps
    zeros = np.zeros(n, real)
    adv = spread_out(batch.advantages, batch, seq, count, real)
    weight = None if batch.weight is None else spread_out(batch.weight, batch, seq, count, real)
    old = p if batch.old is None else np.asarray(batch.old).reshape(n).astype(real)
    ref = zeros if batch.ref is None else np.asarray(batch.ref).reshape(n).astype(real)
    lengths = np.array([np.count_nonzero(live & (seq == s)) for s in range(count)], dtype=np.int64)
    by_sequence = opt.importance_sampling_level == "sequence"
    gap = zeros if batch.old is None else np.where(live, p - old, real(0))
    bound = real(np.inf if opt.log_ratio_clamp is None else opt.log_ratio_clamp)
    log_ratio, moves = np.clip(gap, -bound, bound), np.abs(gap) <= bound

    ratio, policy_log_ratio, phi = zeros.copy(), zeros.copy(), zeros.copy()
    policy_moves = moves.copy()
    for s in range(count):
        mine = live & (seq == s)
        length = max(int(lengths[s]), 1)
        mean = log_ratio[mine].sum() / length
        policy_log_ratio[mine] = log_ratio[mine] if opt.importance_sampling_level == "token" else mean
        ratio[mine] = np.exp(policy_log_ratio[mine])
        if opt.loss_type == "gmpo":
            up = adv[mine] > 0
            held = np.where(
                up, np.minimum(log_ratio[mine], real(opt.high)), np.maximum(log_ratio[mine], -real(opt.epsilon))
            )
            policy_moves[mine] &= held == log_ratio[mine]
            policy_log_ratio[mine] = held.sum() / length
        if opt.loss_type == "vespo":
            log_w = np.clip(log_ratio[mine], -20, 20).sum()
            log_w += 0 if weight is None else np.clip(np.log(weight[mine]), np.log(1e-8), 20).sum()
            phi[mine] = [vespo_weight(real(log_w), a, opt) for a in adv[mine]]

    shares, z = _shares(opt, batch, lengths, real)
    entropy_z = max(real(live.sum()), real(1)) if batch.entropy_normalizer is None else real(batch.entropy_normalizer)

    token_loss, kl, coef = zeros.copy(), zeros.copy(), zeros.copy()
    through_ratio = zeros.copy()  # d loss_t / d log(ratio_t), before the sequence mean spreads it
    kl_through = zeros.copy()  # the part of it that a ratio times the KL makes
    share = zeros.copy()  # c_i / Z
    by_p, by_ratio = zeros.copy(), zeros.copy()  # |d loss_t / d p_t| and |d loss_t / d log ratio_t|, nothing cancelling
    by_weight = zeros.copy()  # cispo: |loss_t|, which moves with its detached weight although the gradient does not
    for t in np.flatnonzero(live):
        share[t] = shares[seq[t]] / z
        if opt.loss_type == "vespo":
            loss, dloss, direct = -phi[t] * adv[t] * p[t], zeros[0], -phi[t] * adv[t]
        elif opt.loss_type == "gmpo":
            loss = dloss = -np.exp(policy_log_ratio[t]) * adv[t]
            direct = zeros[0]
        else:
            loss, dloss, direct = surrogate(ratio[t], policy_log_ratio[t], gap[t], adv[t], p[t], opt)
        if weight is not None and opt.loss_type != "vespo":
            loss, dloss, direct = loss * weight[t], dloss * weight[t], direct * weight[t]
        if opt.loss_type in ("cispo", "dppo_tv", "dppo_kl"):
            by_weight[t] = abs(loss)
        if opt.beta != 0:
            k, dk = kl_term(ref[t] - p[t], opt)
            by_p[t] += abs(opt.beta) * (1 + abs(dk)) * (ratio[t] if opt.use_bias_correction_kl else 1)
            if opt.use_bias_correction_kl:
                k, dk = k * ratio[t], dk * ratio[t]
            if opt.kl_weighted_by_rollout and weight is not None:
                k, dk = k * weight[t], dk * weight[t]
            if opt.use_bias_correction_kl:
                kl_through[t] = opt.beta * k * share[t]
                dloss = dloss + opt.beta * k
            kl[t] = k
            loss, direct = loss + real(opt.beta) * k, direct + real(opt.beta) * dk
        by_p[t] += abs(direct)
        by_ratio[t] = abs(dloss)
        token_loss[t], coef[t], through_ratio[t] = loss, direct * share[t], dloss * share[t]
    size = stats.size
    token_scale, coef_scale = (by_p + by_weight) * size, by_p * share * size
    if by_sequence:
        for s in range(count):
            mine = live & (seq == s)
            length = max(int(lengths[s]), 1)
            coef[mine] += through_ratio[mine].sum() / length * moves[mine]
            token_scale[mine] += by_ratio[mine] * size[mine].sum() / length
            coef_scale[mine] += (by_ratio[mine] * share[mine]).sum() / length * size[mine].sum() / length
    else:
        if opt.loss_type == "gmpo":
            through_ratio = through_ratio - kl_through
            for s in range(count):
                mine = live & (seq == s)
                through_ratio[mine] = through_ratio[mine].sum() / max(int(lengths[s]), 1) * policy_moves[mine]
            through_ratio = through_ratio + kl_through
        coef += through_ratio * moves
        token_scale += by_ratio * size
        coef_scale += by_ratio * share * size

    policy = (token_loss * share).sum()
    loss = policy - real(opt.entropy_coef) * stats.entropy.sum() / entropy_z
    dead = ~live[:, None]
    dlogits = np.where(dead | (coef[:, None] == 0), real(0), coef[:, None] * stats.dlogps)
    if opt.entropy_coef != 0:
        dlogits = dlogits - np.where(dead, real(0), real(opt.entropy_coef) / entropy_z * stats.dentropy)

    metrics = _metrics(opt, live, adv, ratio, seq, count, kl, stats.entropy, weight)
    metrics["policy_loss"] = float(policy)
    bonus = abs(real(opt.entropy_coef)) / entropy_z * live * size * (1 + stats.entropy)
    return Truth(
        loss=loss,
        loss_scale=(token_scale * share).sum() + bonus.sum(),
        dlogits=dlogits.reshape(batch.logits.shape),
        dlogits_scale=coef_scale + bonus,
        coef=coef,
        metrics=metrics,
        logps=p,
        entropy=stats.entropy,
        token_loss=token_loss,
        token_scale=token_scale,
        kl=kl,
        ratio=ratio,
        live=live,
    )


def _shares(opt: Options, batch: Batch, lengths: Array, real: type) -> tuple[Array, Any]:
    """c_i of every sequence, and Z."""
    count = len(lengths)
    shares, z = np.ones(count, real), real(count)
    if opt.mode == "seq_mean_token_mean":
        shares = 1 / np.maximum(lengths, 1).astype(real)
    elif opt.mode == "seq_mean_token_sum_norm":
        if opt.max_completion_length is None:
            raise ValueError("max_completion_length")
        z = real(count * opt.max_completion_length)
    elif opt.mode == "prompt_mean":
        prompts = prompts_of(count, batch.groups)
        for prompt in prompts:
            shares[prompt] = 1 / real(max(int(lengths[prompt].sum()), 1))
        z = real(len(prompts))
    elif opt.mode in ("token_mean", "token_sum"):
        z = real(lengths.sum() if opt.mode == "token_mean" else 1)
    return shares, max(z, real(1)) if batch.normalizer is None else real(batch.normalizer)


def _metrics(
    opt: Options, live: Array, adv: Array, ratio: Array, seq: Array, count: int, kl: Array,
    entropy: Array, weight: Array | None,
) -> dict[str, float]:  # fmt: skip
    def mean(values: Array) -> float:
        return float(values[live].sum() / max(int(live.sum()), 1))

    metrics = {"num_tokens": float(live.sum())}
    if live.any():
        metrics |= {
            "ratio/mean": mean(ratio),
            "ratio/min": float(ratio[live].min()),
            "ratio/max": float(ratio[live].max()),
        }
        if weight is not None:
            name = "importance_sampling_ratio/"
            metrics |= {name + "mean": mean(weight), name + "min": float(weight[live].min())}
            metrics[name + "max"] = float(weight[live].max())
    if opt.beta != 0:
        metrics["kl"] = mean(kl)
    if opt.entropy or opt.entropy_coef != 0:
        metrics["entropy"] = mean(entropy)
    high = opt.high
    if opt.loss_type == "cispo":
        cap = high if opt.cispo_bounds == "absolute" else 1 + high
        metrics["cispo_clip_ratio"] = mean((ratio > cap) & (adv > 0))
    if opt.loss_type not in CLIPPED:
        return metrics
    bounded = ratio if opt.delta is None else np.minimum(ratio, opt.delta)
    low_flag, high_flag = (bounded < 1 - opt.epsilon) & (adv < 0), (bounded > 1 + high) & (adv > 0)
    for name, flag in (("low", low_flag), ("high", high_flag), ("region", low_flag | high_flag)):
        if opt.importance_sampling_level != "token":
            hits = [flag[mine].mean() for s in range(count) if (mine := live & (seq == s)).any()]
            metrics[f"clip_ratio/{name}_mean"] = float(sum(hits)) / max(count, 1)
        else:
            metrics[f"clip_ratio/{name}_mean"] = mean(flag)
    return metrics


def group_advantages(
    rewards: ArrayLike,
    groups: ArrayLike,
    *,
    baseline: str = "mean",
    scale: str = "group",
    ddof: int = 1,
    eps: float = 1e-4,
) -> Array:
    """Advantages of `rewards [B]` normalised inside the groups named by `groups [B]`; NaN means not scored."""
    r = np.asarray(rewards, dtype=np.longdouble)
    groups = np.asarray(groups)
    out = np.zeros(r.shape, np.longdouble)
    scored = ~np.isnan(r)

    def deviation(values: Array) -> Any:
        return np.sqrt(((values - values.mean()) ** 2).sum() / max(len(values) - ddof, 1))

    for g in np.unique(groups):
        mine = scored & (groups == g)
        x = r[mine]
        if len(x) == 0 or (x.min() == x.max() and (baseline, scale) != ("none", "none")):
            continue
        if baseline == "mean":
            centred = x - x.mean()
        elif baseline == "leave_one_out":
            centred = np.array([x[i] - np.delete(x, i).mean() for i in range(len(x))])
        else:
            centred = x
        if scale == "group":
            centred = centred / (deviation(x) + np.longdouble(eps))
        elif scale == "batch":
            centred = centred / (deviation(r[scored]) + np.longdouble(eps))
        out[mine] = centred
    return out
