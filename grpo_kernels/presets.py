"""The conventions of other projects as fields of GRPOLossConfig, each read in the code of one version."""

from __future__ import annotations

from typing import Any, Final

from .config_checks import NAME, match
from .loss_types import TABLE

PRESETS: Final = ("trl", "liger", "verl", "openrlhf")


def settings(name: str, overrides: dict[str, Any]) -> dict[str, Any]:
    """The fields of a preset under what the caller gives; see `GRPOLossConfig.preset`."""
    if name not in PRESETS:
        hint = match(name, PRESETS) or " Choose one of these."
        raise ValueError(f"{NAME}.preset: name must be one of {', '.join(PRESETS)}, got {name!r}.{hint}")
    chosen = {"trl": _trl, "liger": _liger, "verl": _verl, "openrlhf": _openrlhf}[name](overrides)
    return {**chosen, **overrides}


def _trl(_overrides: dict[str, Any]) -> dict[str, Any]:
    """TRL 1.16.0, the defaults of GRPOConfig.

    With vLLM its default is rollout_correction="sequence_mask"; set it and pass the sampler's log-probs.
    """
    return {"use_bias_correction_kl": True, "entropy": True}


def _liger(_overrides: dict[str, Any]) -> dict[str, Any]:
    """Liger 0.8.5, the defaults of LigerFusedLinearGRPOLoss."""
    return {"beta": 0.04}


def _verl(overrides: dict[str, Any]) -> dict[str, Any]:
    """verl 0.9.1: the policy loss "vanilla" with ActorConfig, and what its other losses change.

    `dapo` is "vanilla" with token-mean, sequence_token "gspo" (with loss_type "grpo": its sequence mean), `gmpo`
    "geo_mean"; the others have their own names. "gspo" bounds the sequence's log-ratio at 10, from above alone.
    """
    loss_type = overrides.get("loss_type", "dapo")
    level = overrides.get("importance_sampling_level", "token")
    fields: dict[str, Any] = {"kl_clamp": (20.0, 10.0)}  # of low_var_kl, its k3; the other estimators have none
    if overrides.get("kl_estimator", "k3") not in ("k3", "k3+"):
        fields = {}
    surrogate = TABLE[loss_type].surrogate if isinstance(loss_type, str) and loss_type in TABLE else ""
    if level == "token" and loss_type != "clip_cov":
        if surrogate in ("clip", "cispo", "sapo", "dppo_tv", "dppo_kl"):
            fields["log_ratio_clamp"] = 20.0
        if surrogate == "clip":
            fields["dual_clip"] = 3.0
    if loss_type == "cispo":
        fields["cispo_bounds"] = "relative"
    if surrogate in ("dppo_tv", "dppo_kl"):
        fields["dppo_cap"] = 3.0
    if overrides.get("rollout_correction", "none") != "none":
        fields["rollout_clip_max"] = 2.0
    return fields


def _openrlhf(overrides: dict[str, Any]) -> dict[str, Any]:
    """OpenRLHF 0.11.2: PolicyLoss of type "ppo", or "gspo" at sequence level, and its k1 bounded at 10."""
    fields: dict[str, Any] = {"kl_estimator": "k1", "kl_clamp": (None, 10.0)}
    if overrides.get("importance_sampling_level", "token") == "token":
        fields["log_ratio_clamp"] = 20.0
    else:
        fields["loss_type"] = "grpo"  # "gspo" turns its token mean into one over sequences
    correction = overrides.get("rollout_correction", "none")
    if correction != "none":
        fields |= {"rollout_clip_min": 0.5, "rollout_clip_max": 5.0}
    return fields
