"""The oracle's formulas of one token: each policy term and KL with its derivatives by hand, from the papers.

`r` is the ratio, `d` = log r, `a` the advantage, `p` the log-probability, all numbers of one precision.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Options:
    """The same names and defaults as GRPOLossConfig, for what the oracle knows."""

    loss_type: str = "dapo"
    epsilon: float = 0.2
    epsilon_high: float | None = None
    delta: float | None = None
    dual_clip: float | None = None
    importance_sampling_level: str = "token"
    beta: float = 0.0
    kl_estimator: str = "k3"
    use_bias_correction_kl: bool = False
    temperature: float = 1.0
    softcap: float | None = None
    logit_scale: float = 1.0
    max_completion_length: int | None = None
    entropy: bool = False
    entropy_coef: float = 0.0
    aggregation: str | None = None
    log_ratio_clamp: float | None = None
    kl_clamp: tuple[float | None, float | None] = (None, None)
    kl_weighted_by_rollout: bool = False
    cispo_bounds: str = "absolute"
    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0
    dppo_cap: float = 20.0
    dro_beta: float | None = None

    @property
    def high(self) -> float:
        return self.epsilon if self.epsilon_high is None else self.epsilon_high

    @property
    def mode(self) -> str:
        """The aggregation."""
        own = {
            "grpo": "seq_mean_token_mean", "sapo": "seq_mean_token_mean", "gmpo": "seq_mean_token_mean",
            "dr_grpo": "seq_mean_token_sum_norm", "luspo": "seq_mean_token_sum",
        }  # fmt: skip
        return self.aggregation or own.get(self.loss_type, "token_mean")


CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")


def surrogate(r: Any, d: Any, gap: Any, a: Any, p: Any, opt: Options) -> tuple[Any, Any, Any]:
    """`(l, dl/d log r, dl/dp at fixed ratio)`; `gap` = p - old, of which `d` may be a bounded or a mean one."""
    nothing = a * 0
    if opt.loss_type in CLIPPED:
        return *clipped(r, a, opt), nothing
    if opt.loss_type == "dro":
        b = type(r)(opt.dro_beta)
        return b / 2 * d * d - a * p, b * d, -a
    if a == 0:
        return nothing, nothing, nothing
    if opt.loss_type == "gpg":
        return -a * p, nothing, -a
    if opt.loss_type == "sapo":
        tau = type(r)(opt.sapo_temperature_pos if a > 0 else opt.sapo_temperature_neg)
        gate = 1 / (1 + np.exp(-tau * (r - 1)))
        return -4 / tau * gate * a, -4 * gate * (1 - gate) * r * a, nothing
    if opt.loss_type == "cispo":
        high = type(r)(opt.high)
        low, cap = {
            "absolute": (type(r)(0), high), "relative": (1 - type(r)(opt.epsilon), 1 + high),
            "relative_upper": (type(r)(0), 1 + high),
        }[opt.cispo_bounds]  # fmt: skip
        w = min(max(r, low), cap)
        return -w * a * p, nothing, -w * a
    now, before = np.exp(p), np.exp(p - gap)
    if opt.loss_type == "dppo_tv":
        out = now - before > opt.high if a > 0 else before - now > opt.epsilon
    elif opt.loss_type == "dppo_kl":
        tiny = type(r)(1e-8)
        kl = -before * gap + (1 - before) * np.log((1 - before + tiny) / (1 - now + tiny))
        out = (kl > opt.high and now > before) if a > 0 else (kl > opt.epsilon and now < before)
    else:
        raise NotImplementedError(opt.loss_type)
    w = nothing if out else min(r, type(r)(opt.dppo_cap))
    return -w * a * p, nothing, -w * a


def clipped(r: Any, a: Any, opt: Options) -> tuple[Any, Any]:
    """`(l, dl/d log r)` of the clipped ratio."""
    if a == 0:
        return r * 0 if np.isfinite(r) else a * 0, a * 0
    lo, hi = type(r)(1) - type(r)(opt.epsilon), type(r)(1) + type(r)(opt.high)
    free, dfree = r, r
    if opt.delta is not None and r > opt.delta:
        free, dfree = type(r)(opt.delta), r * 0
    held, dheld = (lo, r * 0) if r < lo else (hi, r * 0) if r > hi else (r, r)
    if free * a < held * a:
        loss, dloss = -free * a, -dfree * a
    elif free * a > held * a:
        loss, dloss = -held * a, -dheld * a
    else:
        loss, dloss = -free * a, -(dfree + dheld) / 2 * a
    if opt.dual_clip is not None and a < 0 and loss > -opt.dual_clip * a:
        loss, dloss = -type(r)(opt.dual_clip) * a, r * 0
    return loss, dloss


def vespo_weight(log_w: Any, a: Any, opt: Options) -> Any:
    """phi of a sequence with log-weight `log_w`, which is bounded here."""
    real = type(log_w)
    log_w = min(max(log_w, np.log(real(1e-8))), real(20))
    k, lam = (opt.vespo_k_pos, opt.vespo_lambda_pos) if a >= 0 else (opt.vespo_k_neg, opt.vespo_lambda_neg)
    return np.exp(real(lam) + real(k) * log_w - real(lam) * np.exp(log_w))


def kl_term(d: Any, opt: Options) -> tuple[Any, Any]:
    """`(k, dk/dp)` with `d = f - p`."""
    name, (most_gap, most_value) = opt.kl_estimator, opt.kl_clamp
    held, moves = d, True
    if most_gap is not None and abs(d) > most_gap:
        held, moves = np.copysign(type(d)(most_gap), d), False
    value, slope = {
        "k1": lambda x: (-x, x * 0 + 1),
        "abs": lambda x: (abs(x), -np.sign(x)),
        "k2": lambda x: (x * x / 2, -x),
        "k3": lambda x: (np.expm1(x) - x, -np.expm1(x)),
    }[name.rstrip("+")](held)
    if most_value is not None and abs(value) > most_value:
        value, moves = np.copysign(type(d)(most_value), value), False
    if name.endswith("+"):
        return value, -d
    return value, slope if moves else d * 0


def prompts_of(count: int, groups: Any) -> list[list[int]]:
    """Sequences by prompt; `groups` names the prompt of each."""
    names = sorted(range(count), key=lambda s: groups[s])
    return [list(part) for _, part in itertools.groupby(names, key=lambda s: groups[s])]
