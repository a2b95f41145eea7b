"""verl's policy losses and fused heads, by verl 0.9.1's own names, signatures and metrics.

Importing the module registers every loss as "gk_<name>" beside verl's own; set `policy_loss.loss_mode=gk_vanilla`, and
have the workers import it: `actor_rollout_ref.model.external_lib=grpo_kernels.integrations.verl`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from verl.trainer.ppo.core_algos import register_policy_loss

from .. import checks, formulas
from ..config import GRPOLossConfig
from ..functional_linear import linear_per_token_logps
from ..outputs import GRPOLossOutput, PerToken
from .given_logps import UNCLIPPED_BELOW, check_tokens, clipped, loss_of_logps, lower_clip, mean_over, widened

__all__ = ["POLICY_LOSSES", "FusedLinearForPPO", "linear_cross_entropy", "policy_loss"]

_FIXED: Final = "seq-mean-token-mean"
_MODES: Final = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", _FIXED)
_METRIC: Final = "actor/"


class _Batch(NamedTuple):
    """One call, `[B, T]`; `gap` is logp - old."""

    config: Any
    fields: GRPOLossConfig
    gap: Tensor
    advantages: Tensor
    mask: Tensor
    out: GRPOLossOutput
    per_token: PerToken

    def mean(self, values: Tensor) -> Tensor:
        return mean_over(self.mask, values.to(self.gap.dtype))

    def clipped(self) -> Tensor:
        """Share of tokens whose clipped loss is above the unclipped one."""
        return self.mean(clipped(self.fields, self.per_token.ratio, self.advantages))


def _clip(config: Any) -> dict[str, Any]:
    """epsilon, epsilon_high."""
    low, high = config.clip_ratio_low, config.clip_ratio_high
    return {
        "epsilon": config.clip_ratio if low is None else low,
        "epsilon_high": config.clip_ratio if high is None else high,
    }


def _ratio_clip(config: Any) -> dict[str, Any]:
    """The same for a clip on ratios, which has no lower bound where clip_ratio_low is 1 or more."""
    fields = _clip(config)
    return fields | {"epsilon": lower_clip(fields["epsilon"])}


def _cispo(config: Any) -> dict[str, Any]:
    """The same for the cap of cispo, alone where clip_ratio_low is 1 or more: 10 in verl's own recipe."""
    fields = _ratio_clip(config)
    if fields["epsilon"] == UNCLIPPED_BELOW:
        return {"epsilon_high": fields["epsilon_high"], "cispo_bounds": "relative_upper"}
    return fields


def _cov(config: Any) -> dict[str, Any]:
    losses = config.policy_loss
    low, high, ratio = losses.clip_cov_lb, losses.clip_cov_ub, losses.clip_cov_ratio
    bounds = (1.0 if low is None else low, 5.0 if high is None else high)
    return _ratio_clip(config) | {"cov_ratio": 2e-4 if ratio is None else ratio, "cov_bounds": bounds}


def _kl_cov(config: Any) -> dict[str, Any]:
    ratio, coef = config.policy_loss.kl_cov_ratio, config.policy_loss.ppo_kl_coef
    return {"cov_ratio": 2e-4 if ratio is None else ratio, "cov_coef": 1.0 if coef is None else coef}


def _dppo_metrics(batch: _Batch) -> dict[str, Tensor]:
    leaves = formulas.leaves_tv if batch.fields.loss_type == "dppo_tv" else formulas.leaves_kl
    out = leaves(
        batch.gap, batch.advantages, batch.per_token.logps, batch.fields.lower_bound, batch.fields.upper_bound
    )  # fmt: skip
    capped = (batch.per_token.ratio > batch.fields.dppo_cap) & ~out
    return {"pg_clipfrac": batch.mean(out), "pg_clipfrac_lower": batch.mean(capped)}


def _vanilla_metrics(batch: _Batch) -> dict[str, Tensor]:
    lower = (batch.per_token.ratio > batch.config.get("clip_ratio_c", 3.0)) & (batch.advantages < 0)
    return {"pg_clipfrac": batch.clipped(), "pg_clipfrac_lower": batch.mean(lower)}


def _cispo_metrics(batch: _Batch) -> dict[str, Tensor]:
    ratio = batch.per_token.ratio
    out = (ratio < batch.fields.lower_bound) | (ratio > batch.fields.upper_bound)
    return {"pg_clipfrac": batch.mean(out), "pg_clipfrac_lower": out.new_zeros((), dtype=ratio.dtype)}


def _geo_mean_metrics(batch: _Batch) -> dict[str, Tensor]:
    out = (batch.gap < batch.fields.lower_bound) | (batch.gap > batch.fields.upper_bound)
    high, low = out & (batch.advantages > 0), out & (batch.advantages < 0)
    return {"pg_clipfrac": batch.mean(high), "pg_clipfrac_lower": batch.mean(low)}


def _no_clip(batch: _Batch) -> dict[str, Tensor]:
    zero = batch.gap.new_zeros(())
    return {"pg_clipfrac": zero, "pg_clipfrac_lower": zero}


class _PolicyLoss(NamedTuple):
    """A registered loss of verl's as fields of ours."""

    loss_type: str
    fields: Callable[[Any], dict[str, Any]]
    metrics: Callable[[_Batch], dict[str, Tensor]] | None
    """Of its clip; None: it logs nothing at all."""
    bound: float = math.inf
    """On |logp - old|, where `ppo_kl` is measured."""


_LOSSES: Final = {
    "vanilla": _PolicyLoss(
        "dapo", lambda c: _ratio_clip(c) | {"dual_clip": c.get("clip_ratio_c", 3.0)}, _vanilla_metrics, bound=20.0
    ),
    # exp(10) bounds the ratio, from above alone
    "gspo": _PolicyLoss(
        "dapo", lambda c: _ratio_clip(c) | {"importance_sampling_level": "sequence_token", "delta": math.exp(10.0)},
        lambda batch: {"pg_clipfrac": batch.clipped(), "pg_clipfrac_lower": batch.gap.new_zeros(())},
    ),
    "sapo": _PolicyLoss(
        "sapo", lambda c: {"sapo_temperature_pos": c.tau_pos, "sapo_temperature_neg": c.tau_neg}, _no_clip, bound=20.0
    ),
    "cispo": _PolicyLoss("cispo", _cispo, _cispo_metrics, bound=20.0),
    "gpg": _PolicyLoss("gpg", lambda _: {}, None),
    "dro": _PolicyLoss("dro", lambda c: {"dro_beta": c.policy_loss.dro_beta}, lambda _: {}),
    "dppo_tv": _PolicyLoss(
        "dppo_tv", lambda c: _clip(c) | {"dppo_cap": c.get("clip_ratio_c", 20.0)}, _dppo_metrics, bound=20.0
    ),
    "dppo_kl": _PolicyLoss(
        "dppo_kl", lambda c: _clip(c) | {"dppo_cap": c.get("clip_ratio_c", 20.0)}, _dppo_metrics, bound=20.0
    ),
    "clip_cov": _PolicyLoss("clip_cov", _cov, lambda batch: {"pg_clipfrac": batch.out.metrics["cov_selected_ratio"]}),
    "kl_cov": _PolicyLoss("kl_cov", _kl_cov, lambda _: {}),
    "geo_mean": _PolicyLoss("gmpo", _clip, _geo_mean_metrics),
}  # fmt: skip
POLICY_LOSSES: Final = tuple(_LOSSES)
"""verl's names. Its "bypass_mode" calls two of them, and stays its own."""


def policy_loss(
    name: str,
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """verl 0.9.1's policy loss `name`, of preset "verl", and what it logs.

    Args:
        old_log_prob, log_prob, advantages, response_mask: `[B, T]`.
        loss_agg_mode: verl's; "sapo" and "geo_mean" have one of their own, as in verl.
        config: verl's ActorConfig, with its global_batch_info.
        rollout_is_weights: `[B, T]` or None. These and the advantages may be `[B, 1]`.

    Raises:
        ValueError: an option that this loss does not have, shapes that differ, or no global count on several processes.
        TypeError: no config.
    """
    ours = _LOSSES[name]
    function = f"gk_{name}"
    checks.check_choice(function, "loss_agg_mode", loss_agg_mode, _MODES)
    if config is None:
        raise TypeError(checks.complain(function, "config", "must be verl's ActorConfig", None, "Pass the actor's."))
    check_tokens(
        function, ("log_prob", log_prob), ("old_log_prob", old_log_prob), ("response_mask", response_mask),
        advantages=advantages, rollout_is_weights=rollout_is_weights,
    )  # fmt: skip
    mode = _FIXED if name in ("sapo", "geo_mean") else loss_agg_mode
    normalizer: float | Tensor = float(max(1, len(log_prob)))
    if name == "geo_mean":  # a plain mean over rows, each with one advantage and one weight
        advantages = widened(advantages)
        lengths = (response_mask != 0).sum(-1, keepdim=True) + 1e-8
        mean = torch.where(response_mask != 0, advantages, 0.0).sum(-1, keepdim=True) / lengths
        spread = torch.where(response_mask != 0, (advantages - mean).abs(), 0.0)
        if bool((spread > 1e-4 * mean.abs() + 1e-6).any()):
            raise ValueError(
                "gk_geo_mean: advantages must be one per sequence, got tokens that differ. verl's own takes the mean "
                "of a sequence but each token's sign: use that, or an estimator of outcomes."
            )
        advantages = mean
        if rollout_is_weights is not None:
            logs = torch.where(response_mask != 0, torch.log(widened(rollout_is_weights) + 1e-10), 0.0)
            rollout_is_weights = torch.exp(logs.sum(-1, keepdim=True) / lengths)
    else:
        normalizer = _normalizer(mode, response_mask, **config.global_batch_info)
    fields = {"loss_type": ours.loss_type, "aggregation": mode.replace("-", "_")} | ours.fields(config)
    if mode.endswith("norm"):  # in the normalizer; the config wants to know it too
        fields["max_completion_length"] = log_prob.shape[1]
    settings = GRPOLossConfig.preset("verl", **fields)
    out = loss_of_logps(
        function, settings, log_prob, response_mask, advantages=advantages, old=old_log_prob,
        weight=rollout_is_weights, normalizer=normalizer,
    )  # fmt: skip
    if out.per_token is None:
        raise RuntimeError(f"{function}: the loss returned no token values.")
    if ours.metrics is None:
        return out.loss, {}
    gap = torch.where(response_mask != 0, widened(log_prob.detach()) - widened(old_log_prob.detach()), 0.0)
    batch = _Batch(config, settings, gap, advantages, response_mask, out, out.per_token)
    kl = batch.mean(gap.abs() if name == "kl_cov" else -gap.clamp(-ours.bound, ours.bound))
    metrics = {f"{_METRIC}{key}": value for key, value in (ours.metrics(batch) | {"ppo_kl": kl}).items()}
    numbers = torch.stack([value.to(gap.dtype) for value in metrics.values()]).tolist()  # one host sync
    return out.loss, dict(zip(metrics, numbers, strict=True))


def _normalizer(
    mode: str,
    mask: Tensor,
    dp_size: int = 1,
    batch_num_tokens: int | None = None,
    global_batch_size: int | None = None,
    loss_scale_factor: int | None = None,
) -> float | Tensor:
    """What verl's agg_loss divides by: global counts, or those of this batch, without sequences of no token."""
    count: Any
    if mode == "token-sum":
        count = 1
    elif mode == "token-mean":
        count = (mask != 0).sum().clamp(min=1) if batch_num_tokens is None else batch_num_tokens
    else:
        count = (mask != 0).any(-1).sum().clamp(min=1) if global_batch_size is None else global_batch_size
    local = isinstance(count, Tensor) and (batch_num_tokens if mode == "token-mean" else global_batch_size) is None
    if local and dp_size > 1:
        needed = "batch_num_tokens" if mode == "token-mean" else "global_batch_size"
        raise ValueError(
            f"policy_loss: {needed} must be given when dp_size > 1, got None with dp_size {dp_size}. "
            "Put it into config.global_batch_info."
        )
    if mode.endswith("norm"):
        count = count * (loss_scale_factor or mask.shape[-1])
    scaled: float | Tensor = count / dp_size
    return scaled


def _register(name: str) -> None:
    default = _FIXED if name in ("gspo", "sapo") else "token-mean"  # as verl's own of that name

    def loss(
        old_log_prob: Tensor,
        log_prob: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        loss_agg_mode: str = default,
        config: Any = None,
        rollout_is_weights: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, float]]:
        return policy_loss(
            name, old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights
        )

    loss.__name__ = loss.__qualname__ = f"gk_{name}"
    register_policy_loss(f"gk_{name}")(loss)


for _name in POLICY_LOSSES:
    _register(_name)


class FusedLinearForPPO(nn.Module):
    """verl's `FusedLinearForPPO` of the same signature: log-probs and entropy from hidden states and the head.

    `chunk_size` rows of logits exist at a time. `impl_backend` chooses between two kernels of verl's; here it changes
    nothing. The entropy has the dtype of the hidden states, as in verl.
    """

    def __init__(self, chunk_size: int = 512, impl_backend: str = "torch") -> None:
        super().__init__()
        if impl_backend not in ("torch", "liger"):
            raise ValueError(
                f"FusedLinearForPPO: impl_backend must be 'torch' or 'liger', got {impl_backend!r}. Leave it out."
            )
        self.chunk_size, self.impl_backend = chunk_size, impl_backend

    def forward(
        self, hidden_states: Tensor, vocab_weights: Tensor, input_ids: Tensor, temperature: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """`[..., H]`, `[V, H]`, `[...]` -> log-probs (float32) and entropy, `[...]`."""
        row = vocab_weights.shape[0] * (8 if hidden_states.dtype == torch.float64 else 4)
        out = linear_per_token_logps(
            hidden_states, vocab_weights, input_ids, temperature=temperature, entropy=True,
            chunk_bytes=self.chunk_size * row,
        )  # fmt: skip
        return out.logps, _given(out.entropy).to(hidden_states.dtype)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float = 1.0,
    reduction: str = "none",
    dist_process_group: Any = None,
) -> tuple[Tensor, Tensor]:
    """verl's `linear_cross_entropy`: log-probs, reduced, and entropy, both flat `[N]` and float32.

    Raises:
        ValueError: an unknown reduction.
        NotImplementedError: a vocabulary that is split over processes.
    """
    if dist_process_group is not None and torch.distributed.get_world_size(dist_process_group) > 1:
        raise NotImplementedError(
            "linear_cross_entropy: dist_process_group must be one process, a split vocabulary is not built yet. "
            "Use verl's own under tensor parallelism."
        )
    if reduction not in ("none", "sum", "mean"):
        raise ValueError(f"linear_cross_entropy: reduction must be none, sum or mean, got {reduction!r}. Use 'none'.")
    out = linear_per_token_logps(
        hidden.reshape(-1, hidden.shape[-1]), weight, labels.reshape(-1), temperature=temperature, entropy=True
    )
    logps = out.logps if reduction == "none" else getattr(out.logps, reduction)()
    return logps, _given(out.entropy)


def _given(entropy: Tensor | None) -> Tensor:
    if entropy is None:
        raise RuntimeError("linear_per_token_logps returned no entropy.")
    return entropy
