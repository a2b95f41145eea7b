"""The metrics of every loss, by hand or in NumPy, and their names."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from test_objective_coefficients import CASES, OWN, problem

import grpo_kernels as gk
from grpo_kernels import reference

BY_TOKEN = ["num_tokens", "policy_loss", "ratio/max", "ratio/mean", "ratio/min"]
CLIPS = ["clip_ratio/high_mean", "clip_ratio/low_mean", "clip_ratio/region_mean"]
OF_LOSS = {
    "cispo": ["cispo_clip_ratio"], "vespo": ["vespo/phi_seq_mean"], "kl_cov": ["cov_selected_ratio"],
    "clip_cov": [*CLIPS, "cov_selected_ratio"], "sapo": [], "gpg": [], "dro": [],
}  # fmt: skip


def run(
    loss_type: str, level: str = "token", seed: int = 3, **options: Any
) -> tuple[gk.GRPOLossOutput, dict[str, Any]]:
    config = gk.GRPOLossConfig(loss_type=loss_type, importance_sampling_level=level, **OWN[loss_type] | options)
    logits, ids, rest = problem(seed)
    generator = {"generator": torch.Generator().manual_seed(0)} if loss_type == "clip_cov" else {}
    out = gk.grpo_loss(logits.detach(), ids, config=config, return_per_token=True, **rest, **generator)
    live = rest["completion_mask"].numpy()
    logps = reference.per_token_logps(logits, ids, rest["completion_mask"])[0].detach()
    data = {
        "live": live, "logps": logps.numpy(), "gap": (logps - rest["old_per_token_logps"]).numpy() * live,
        "advantages": np.broadcast_to(rest["advantages"].numpy()[:, None], live.shape), "config": config,
        "difference": (rest["old_per_token_logps"] - rest["rollout_per_token_logps"]).numpy(),
    }  # fmt: skip
    return out, data


@pytest.mark.parametrize(("loss_type", "level"), CASES)
def test_the_names(loss_type: str, level: str) -> None:
    out, _ = run(loss_type, level, beta=0.2, entropy=True, rollout_correction="token_truncate")
    spread = [f"importance_sampling_ratio/{how}" for how in ("max", "mean", "min")]
    sampling = ["sampling_logp_difference/max", "sampling_logp_difference/mean"]
    own = OF_LOSS.get(loss_type, CLIPS)
    assert sorted(out.metrics) == sorted([*BY_TOKEN, *spread, *sampling, *own, "kl", "entropy"])
    assert all(value.ndim == 0 and not value.requires_grad for value in out.metrics.values())


@pytest.mark.parametrize(("loss_type", "level"), CASES)
def test_the_usual_ones(loss_type: str, level: str) -> None:
    out, data = run(loss_type, level, beta=0.2)
    live, token = data["live"], out.per_token
    assert token is not None
    ratios = token.ratio.numpy()[live]
    expected = {
        "num_tokens": live.sum(), "ratio/mean": ratios.mean(), "ratio/min": ratios.min(), "ratio/max": ratios.max(),
        "kl": token.kl.numpy()[live].mean(), "policy_loss": out.loss.item(),
    }  # fmt: skip
    known = ~np.isnan(data["difference"]) & live
    expected["sampling_logp_difference/mean"] = np.abs(data["difference"][known]).mean()
    expected["sampling_logp_difference/max"] = np.abs(data["difference"][known]).max()
    for name, value in expected.items():
        assert out.metrics[name].item() == pytest.approx(value, rel=1e-12, abs=1e-12), name


@pytest.mark.parametrize(("loss_type", "level"), [case for case in CASES if OF_LOSS.get(case[0], CLIPS)])
def test_what_a_loss_holds_back(loss_type: str, level: str) -> None:
    out, data = run(loss_type, level)
    config, live, advantages = data["config"], data["live"], data["advantages"]
    ratio = out.per_token.ratio.numpy()
    low, high = config.epsilon, config.epsilon if config.epsilon_high is None else config.epsilon_high
    up, down = advantages > 0, advantages < 0
    if loss_type == "cispo":
        assert out.metrics["cispo_clip_ratio"].item() == pytest.approx((up & (ratio > high))[live].mean())
        assert out.metrics["cispo_clip_ratio"] > 0
        return
    if loss_type in ("vespo", "kl_cov"):
        return
    if loss_type == "gmpo":
        flags = down & (data["gap"] < -low), up & (data["gap"] > high)
    elif loss_type in ("dppo_tv", "dppo_kl"):
        p, q = np.exp(data["logps"]), np.exp(data["logps"] - data["gap"])
        if loss_type == "dppo_tv":
            flags = ~up & (p - q < -low), up & (p - q > high)
        else:
            kl = q * np.log(q / p) + (1 - q) * np.log((1 - q + 1e-8) / (1 - p + 1e-8))
            flags = ~up & (kl > low) & (p < q), up & (kl > high) & (p > q)
    else:
        used = ratio if config.delta is None else np.minimum(ratio, config.delta)
        flags = down & (used < 1 - low), up & (used > 1 + high)
    for which, flag in zip(("low", "high", "region"), (*flags, flags[0] | flags[1]), strict=True):
        if level == "token":
            expected = flag[live].mean()
        else:
            expected = np.mean([flag[i, live[i]].mean() if live[i].any() else 0.0 for i in range(len(live))])
        assert out.metrics[f"clip_ratio/{which}_mean"].item() == pytest.approx(expected), which
    assert out.metrics["clip_ratio/region_mean"] > 0


def test_phi_of_vespo_is_a_mean_over_sequences_and_1_where_none_is_live() -> None:
    out, data = run("vespo")
    config, total = data["config"], []
    for gap, advantage, live in zip(data["gap"], data["advantages"][:, 0], data["live"], strict=True):
        k, lam = (config.vespo_k_pos, config.vespo_lambda_pos)
        if advantage < 0:
            k, lam = config.vespo_k_neg, config.vespo_lambda_neg
        log_w = gap[live].sum()
        total.append(math.exp(lam + k * log_w - lam * math.exp(log_w)))
    assert out.metrics["vespo/phi_seq_mean"].item() == pytest.approx(np.mean(total))
    assert total[4] == 1  # no live token


@pytest.mark.parametrize("loss_type", ["clip_cov", "kl_cov"])
def test_the_share_that_a_covariance_selects(loss_type: str) -> None:
    out, data = run(loss_type)
    live = data["live"].sum()
    assert out.metrics["cov_selected_ratio"].item() == pytest.approx(int(data["config"].cov_ratio * live) / live)


def test_weights_are_reported_as_they_weigh() -> None:
    bounds = {"rollout_clip_min": 0.8, "rollout_clip_max": 1.1}
    for mode, lowest in (("token_truncate", 0.8), ("token_mask", 0.0)):
        out, _ = run("dapo", rollout_correction=mode, **bounds)
        assert out.metrics["importance_sampling_ratio/min"] == lowest
        assert out.metrics["importance_sampling_ratio/max"] <= 1.1
    by_token, _ = run("dapo", rollout_correction="token_truncate", **bounds)
    weight = np.exp(np.nan_to_num(_["difference"]))[_["live"]].clip(0.8, 1.1)
    assert by_token.metrics["importance_sampling_ratio/mean"].item() == pytest.approx(weight.mean())


@pytest.mark.parametrize("loss_type", list(OWN))
def test_metrics_of_nothing_are_finite(loss_type: str) -> None:
    config = gk.GRPOLossConfig(
        loss_type=loss_type, **OWN[loss_type], beta=0.1, entropy_coef=0.1, rollout_correction="token_mask",
        off_policy_mask_threshold=0.1, top_entropy_quantile=0.5,
    )  # fmt: skip
    for rows, tokens in ((0, 3), (2, 0), (2, 3)):
        logits = torch.zeros(rows, tokens, 4, requires_grad=True)
        side = torch.full((rows, tokens), -1.0)
        out = gk.grpo_loss(
            logits, torch.zeros(rows, tokens, dtype=torch.long), config=config, advantages=torch.ones(rows),
            completion_mask=torch.zeros(rows, tokens), old_per_token_logps=side, ref_per_token_logps=side,
            rollout_per_token_logps=side,
        )  # fmt: skip
        out.loss.backward()
        assert out.loss == 0
        assert (logits.grad == 0).all()
        assert all(torch.isfinite(value) for value in out.metrics.values())
