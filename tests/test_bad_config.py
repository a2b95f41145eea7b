"""Bad options are refused when they are set, with the reason; what is not built yet by its name."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from refusals import LONG, B, T, good, refused

import grpo_kernels as gk

NAN = math.nan


# the configuration


CONFIGS: dict[str, tuple[dict[str, Any], str, tuple[str, ...]]] = {
    "close loss type": ({"loss_type": "gropo"}, "loss_type", ("'grpo'", "gropo")),
    "close loss type, dr": ({"loss_type": "drgrpo"}, "loss_type", ("'dr_grpo'",)),
    "upper case": ({"loss_type": "DAPO"}, "loss_type", ("'dapo'",)),
    "unlike any": ({"loss_type": "zzzz"}, "loss_type", ("dapo",)),
    "epsilon 1": ({"epsilon": 1.0}, "epsilon", ("[0, 1)", "epsilon_high=0.28", "1.28")),
    "epsilon negative": ({"epsilon": -0.2}, "epsilon", ("[0, 1)", "epsilon_high=0.28", "1.28")),
    "epsilon 1, cispo": ({"epsilon": 1.0, "loss_type": "cispo", "epsilon_high": 5.0}, "epsilon", ("[0, 1)",)),
    "epsilon negative, gmpo": ({"epsilon": -0.2, "loss_type": "gmpo"}, "epsilon", (">= 0", "log-ratio")),
    "epsilon negative, dppo": ({"epsilon": -0.2, "loss_type": "dppo_kl"}, "epsilon", (">= 0", "divergence")),
    "epsilon NaN, gmpo": ({"epsilon": NAN, "loss_type": "gmpo"}, "epsilon", ()),
    "epsilon NaN": ({"epsilon": NAN}, "epsilon", ()),
    "epsilon_high negative": ({"epsilon_high": -0.28}, "epsilon_high", ("epsilon_high=0.28", "1.28")),
    "epsilon_high NaN": ({"epsilon_high": NAN}, "epsilon_high", ()),
    "delta 0": ({"delta": 0.0}, "delta", ("> 0",)),
    "delta negative": ({"delta": -1.0}, "delta", ("> 0",)),
    "delta NaN": ({"delta": NAN}, "delta", ()),
    "delta with cispo": ({"delta": 2.0, "loss_type": "cispo", "epsilon_high": 5.0}, "delta", ("cispo",)),
    "dual_clip 1": ({"dual_clip": 1.0}, "dual_clip", ("> 1",)),
    "dual_clip NaN": ({"dual_clip": NAN}, "dual_clip", ()),
    "dual_clip with cispo": ({"dual_clip": 3.0, "loss_type": "cispo", "epsilon_high": 5.0}, "dual_clip", ("cispo",)),
    "unknown level": ({"importance_sampling_level": "sentence"}, "importance_sampling_level", ("sequence",)),
    "cispo by sequence": (
        {"importance_sampling_level": "sequence", "loss_type": "cispo", "epsilon_high": 5.0},
        "importance_sampling_level",
        ("cispo", "token"),
    ),
    "unknown estimator": ({"kl_estimator": "k9"}, "kl_estimator", ("k3",)),
    "temperature 0": ({"temperature": 0.0}, "temperature", ("> 0",)),
    "temperature NaN": ({"temperature": NAN}, "temperature", ()),
    "softcap 0": ({"softcap": 0.0}, "softcap", ("> 0",)),
    "logit_scale NaN": ({"logit_scale": NAN}, "logit_scale", ()),
    "beta NaN": ({"beta": NAN}, "beta", ()),
    "entropy_coef NaN": ({"entropy_coef": NAN}, "entropy_coef", ()),
    "entropy_coef inf": ({"entropy_coef": math.inf}, "entropy_coef", ()),
    "maximum length 0": ({"max_completion_length": 0}, "max_completion_length", ()),
    "dr_grpo without": ({"loss_type": "dr_grpo"}, "max_completion_length", ("dr_grpo",)),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_config_refuses_values(case: str) -> None:
    change, argument, words = CONFIGS[case]
    refused(gk.GRPOLossConfig, change, ValueError, "GRPOLossConfig", argument, *words)


@pytest.mark.parametrize(("loss_type", "lower"), [("gmpo", -1.5), ("dppo_tv", 1.5), ("dppo_kl", 1.5)])
def test_a_bound_on_a_log_ratio_or_a_divergence_may_be_1_and_more(loss_type: str, lower: float) -> None:
    assert gk.GRPOLossConfig(loss_type=loss_type, epsilon=1.5).lower_bound == lower


@pytest.mark.parametrize(
    "change",
    [{"epsilon": "0.2"}, {"epsilon": None}, {"beta": None}, {"loss_type": None}, {"loss_type": 3}, {"entropy": "yes"},
     {"temperature": torch.ones(2)}, {"max_completion_length": 8.5}, {"use_bias_correction_kl": None}],
    ids=str,
)  # fmt: skip
def test_config_refuses_kinds(change: dict[str, Any]) -> None:
    (name,) = change
    refused(gk.GRPOLossConfig, change, TypeError, "GRPOLossConfig", name)


def test_config_is_frozen_and_by_keyword() -> None:
    config = gk.GRPOLossConfig()
    with pytest.raises(AttributeError):
        config.beta = 0.1
    with pytest.raises(TypeError):
        gk.GRPOLossConfig("grpo")
    with pytest.raises(TypeError, match="epsilon_low"):
        gk.GRPOLossConfig(epsilon_low=0.2)


def test_config_defaults_are_the_contract() -> None:
    config = gk.GRPOLossConfig()
    expected = {
        "loss_type": "dapo", "epsilon": 0.2, "epsilon_high": None, "delta": None, "dual_clip": None, "beta": 0.0,
        "importance_sampling_level": "token", "kl_estimator": "k3", "use_bias_correction_kl": False, "temperature": 1.0,
        "softcap": None, "logit_scale": 1.0, "entropy": False, "entropy_coef": 0.0, "max_completion_length": None,
    }  # fmt: skip
    assert {name: getattr(config, name) for name in expected} == expected


# options of what is not chosen


ELSEWHERE: dict[str, tuple[dict[str, Any], str]] = {
    "rollout_clip_max": ({"rollout_clip_max": 2.0}, "rollout_correction"),
    "rollout_clip_min": ({"rollout_clip_min": 0.5}, "rollout_correction"),
    "rollout_sequence_mean": ({"rollout_sequence_mean": "geometric"}, "rollout_correction"),
    "rollout_sequence_mean, by token": (
        {"rollout_sequence_mean": "geometric", "rollout_correction": "token_mask"},
        "token_mask",
    ),
    "rollout_veto": ({"rollout_veto": 1e-4}, "rollout_correction"),
    "rollout_correction, vespo": ({"rollout_correction": "sequence_mask", "loss_type": "vespo"}, "vespo"),
    "cispo_bounds": ({"cispo_bounds": "relative"}, "cispo"),
    "sapo_temperature_pos": ({"sapo_temperature_pos": 2.0}, "sapo"),
    "sapo_temperature_neg": ({"sapo_temperature_neg": 2.0}, "sapo"),
    "vespo_k_pos": ({"vespo_k_pos": 1.0}, "vespo"),
    "vespo_lambda_pos": ({"vespo_lambda_pos": 1.0}, "vespo"),
    "vespo_k_neg": ({"vespo_k_neg": 1.0}, "vespo"),
    "vespo_lambda_neg": ({"vespo_lambda_neg": 1.0}, "vespo"),
    "dppo_cap": ({"dppo_cap": 3.0}, "dppo_tv"),
    "dro_beta": ({"dro_beta": 0.1}, "dro"),
    "dro_beta, missing": ({"loss_type": "dro"}, "dro"),
    "cov_ratio": ({"cov_ratio": 1e-3}, "clip_cov"),
    "cov_bounds": ({"cov_bounds": (0.0, 1.0)}, "clip_cov"),
    "cov_coef": ({"cov_coef": 1.0}, "kl_cov"),
    "max_completion_length, aggregation": ({"aggregation": "seq_mean_token_sum_norm"}, "seq_mean_token_sum_norm"),
    **{
        f"{field}, {name}": ({field: 2.0, "loss_type": name}, name)
        for field in ("delta", "dual_clip")
        for name in ("sapo", "vespo", "gmpo", "gpg", "dppo_tv", "dppo_kl", "kl_cov")
    },
    **{
        f"epsilon_high, {name}": ({"epsilon_high": 0.28, "loss_type": name}, name)
        for name in ("sapo", "vespo", "gpg", "kl_cov")
    },
    **{
        f"importance_sampling_level, {name}": ({"importance_sampling_level": "sequence_token", "loss_type": name}, name)
        for name in ("vespo", "gmpo", "gpg", "dppo_tv", "dppo_kl", "clip_cov", "kl_cov")
    },
}  # fmt: skip
RANGES: dict[str, Any] = {
    "aggregation": "mean", "log_ratio_clamp": 0.0, "kl_clamp": (0.0, None), "top_entropy_quantile": 0.0,
    "off_policy_mask_threshold": NAN, "rollout_correction": "token", "rollout_sequence_mean": "mean",
    "rollout_veto": -1.0, "cispo_bounds": "upper", "sapo_temperature_pos": 0.0, "sapo_temperature_neg": -1.0,
    "vespo_k_pos": NAN, "dppo_cap": 0.0, "dro_beta": 0.0, "cov_ratio": 0.0, "cov_bounds": (5.0, 1.0), "cov_coef": NAN,
    "rollout_clip_max": 0.0, "rollout_clip_min": 0.0,
}  # fmt: skip
KINDS: dict[str, Any] = {
    "kl_clamp": 20.0, "cov_bounds": 5.0, "kl_weighted_by_rollout": 1, "aggregation": 3, "dro_beta": "0.1",
    "rollout_clip_max": "3", "top_entropy_quantile": None,
}  # fmt: skip


@pytest.mark.parametrize("case", ELSEWHERE)
def test_an_option_of_what_is_not_chosen_is_refused_with_the_reason(case: str) -> None:
    change, reason = ELSEWHERE[case]
    refused(gk.GRPOLossConfig, change, ValueError, "GRPOLossConfig", case.partition(",")[0], reason)


@pytest.mark.parametrize("name", RANGES)
def test_values_out_of_range(name: str) -> None:
    refused(gk.GRPOLossConfig, {name: RANGES[name]}, ValueError, "GRPOLossConfig", name)


@pytest.mark.parametrize("name", KINDS)
def test_values_of_the_wrong_kind(name: str) -> None:
    refused(gk.GRPOLossConfig, {name: KINDS[name]}, TypeError, "GRPOLossConfig", name)


def test_bounds_of_the_rollout_weight_are_in_order() -> None:
    options = {"rollout_correction": "token_mask", "rollout_clip_min": 3.0, "rollout_clip_max": 3.0}
    refused(gk.GRPOLossConfig, options, ValueError, "GRPOLossConfig", "rollout_clip_min", "3.0")


def test_pairs_may_be_lists_as_files_have_them() -> None:
    assert gk.GRPOLossConfig(kl_clamp=[20.0, None]) == gk.GRPOLossConfig(kl_clamp=(20.0, None))


def test_a_preset_has_a_name() -> None:
    with pytest.raises(ValueError, match=r"GRPOLossConfig\.preset: name must be one of .* 'tlr'\. Did you mean 'trl'"):
        gk.GRPOLossConfig.preset("tlr")


# what belongs together in a call


CALLS: dict[str, tuple[dict[str, Any], dict[str, Any], str, tuple[str, ...]]] = {
    "correction without log-probs": (
        {"rollout_correction": "token_mask"}, {}, "rollout_per_token_logps", ("token_mask", "NaN"),
    ),
    "two weights": (
        {"rollout_correction": "token_mask"},
        {"rollout_per_token_logps": torch.zeros(B, T), "importance_sampling_ratio": torch.ones(B)},
        "importance_sampling_ratio", ("token_mask",),
    ),
    "infinite log-probs": (
        {}, {"rollout_per_token_logps": torch.full((B, T), -math.inf)}, "rollout_per_token_logps", ("finite",),
    ),
    "log-probs of another shape": (
        {}, {"rollout_per_token_logps": torch.zeros(B, T + 1)}, "rollout_per_token_logps", ("shape",),
    ),
    "no prompts": ({"aggregation": "prompt_mean"}, {}, "group_size", ("prompt_mean",)),
    "uneven prompts": ({"aggregation": "prompt_mean"}, {"group_size": B + 1}, "group_size", ("divide",)),
    "vespo by sequence": (
        {"loss_type": "vespo"}, {"importance_sampling_ratio": torch.ones(B, 1)}, "importance_sampling_ratio",
        ("vespo",),
    ),
    "generator": ({}, {"generator": torch.Generator()}, "generator", ("clip_cov",)),
}  # fmt: skip


@pytest.mark.parametrize("case", CALLS)
def test_a_call_lacks_or_doubles(case: str) -> None:
    options, arguments, argument, words = CALLS[case]
    change = {"config": gk.GRPOLossConfig(**options)} | arguments
    refused(gk.grpo_loss, good() | change, ValueError, "grpo_loss", argument, *words)


def test_unbuilt_arguments_are_refused_by_name() -> None:
    call = good()
    kept = (torch.zeros(B * T, dtype=LONG), torch.arange(B * T + 1))
    with pytest.raises(NotImplementedError, match="sampling_mask"):
        gk.grpo_loss(**call, sampling_mask=kept)
    with pytest.raises(NotImplementedError, match="sampling_mask"):
        gk.per_token_logps(call["logits"], call["completion_ids"], sampling_mask=kept)
    for extra in (1, 4):
        with pytest.raises(NotImplementedError, match="targets"):
            gk.per_token_logps(call["logits"], torch.zeros(B, T, extra, dtype=LONG))
