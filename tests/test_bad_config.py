"""Bad options are refused when they are set; what is not built yet is refused by its name."""

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


# what is not built yet is refused by name


UNBUILT_FIELDS: dict[str, Any] = {
    "aggregation": "token_mean",
    "log_ratio_clamp": 20.0,
    "kl_clamp": (20.0, 10.0),
    "kl_weighted_by_rollout": True,
    "top_entropy_quantile": 0.8,
    "off_policy_mask_threshold": 0.5,
    "rollout_correction": "token_truncate",
    "rollout_clip_max": 2.0,
    "rollout_clip_min": 0.5,
    "rollout_sequence_mean": "geometric",
    "rollout_veto": 1e-4,
    "cispo_bounds": "relative",
    "sapo_temperature_pos": 2.0,
    "sapo_temperature_neg": 2.0,
    "vespo_k_pos": 1.0,
    "vespo_lambda_pos": 1.0,
    "vespo_k_neg": 1.0,
    "vespo_lambda_neg": 1.0,
    "dro_beta": 0.1,
    "cov_ratio": 1e-3,
    "cov_bounds": (0.0, 1.0),
    "cov_coef": 1.0,
}
UNBUILT_FIELD_DEFAULTS: dict[str, Any] = {
    "aggregation": None,
    "log_ratio_clamp": None,
    "kl_clamp": (None, None),
    "kl_weighted_by_rollout": False,
    "top_entropy_quantile": 1.0,
    "off_policy_mask_threshold": None,
    "rollout_correction": "none",
    "rollout_clip_max": 3.0,
    "rollout_clip_min": None,
    "rollout_sequence_mean": "product",
    "rollout_veto": None,
    "cispo_bounds": "absolute",
    "sapo_temperature_pos": 1.0,
    "sapo_temperature_neg": 1.05,
    "vespo_k_pos": 2.0,
    "vespo_lambda_pos": 3.0,
    "vespo_k_neg": 3.0,
    "vespo_lambda_neg": 2.0,
    "dro_beta": None,
    "cov_ratio": 2e-4,
    "cov_bounds": (1, 5),
    "cov_coef": 0.1,
}
UNBUILT_VALUES = [
    *[
        ("loss_type", x)
        for x in ("luspo", "sapo", "vespo", "gmpo", "gpg", "dppo_tv", "dppo_kl", "dro", "clip_cov", "kl_cov")
    ],
    ("importance_sampling_level", "sequence_token"),
    *[("kl_estimator", x) for x in ("abs", "k1+", "abs+", "k2+", "k3+")],
]


@pytest.mark.parametrize("name", UNBUILT_FIELDS)
def test_an_unbuilt_field_is_refused_by_name_when_set(name: str) -> None:
    with pytest.raises(NotImplementedError, match=name):
        gk.grpo_loss(**good() | {"config": gk.GRPOLossConfig(**{name: UNBUILT_FIELDS[name]})})


@pytest.mark.parametrize("name", UNBUILT_FIELD_DEFAULTS)
def test_an_unbuilt_field_at_its_default_is_accepted(name: str) -> None:
    config = gk.GRPOLossConfig(beta=0.1, **{name: UNBUILT_FIELD_DEFAULTS[name]})
    assert torch.isfinite(gk.grpo_loss(**good() | {"config": config}).loss)
    assert getattr(gk.GRPOLossConfig(), name) == UNBUILT_FIELD_DEFAULTS[name]


@pytest.mark.parametrize(("name", "value"), UNBUILT_VALUES)
def test_an_unbuilt_value_is_refused_by_name(name: str, value: str) -> None:
    with pytest.raises(NotImplementedError, match=rf"{name}.*{value.replace('+', '.')}"):
        gk.grpo_loss(**good() | {"config": gk.GRPOLossConfig(**{name: value})})


def test_unbuilt_arguments_are_refused_by_name() -> None:
    call = good()
    with pytest.raises(NotImplementedError, match="rollout_per_token_logps"):
        gk.grpo_loss(**call, rollout_per_token_logps=torch.zeros(B, T))
    kept = (torch.zeros(B * T, dtype=LONG), torch.arange(B * T + 1))
    with pytest.raises(NotImplementedError, match="sampling_mask"):
        gk.grpo_loss(**call, sampling_mask=kept)
    with pytest.raises(NotImplementedError, match="sampling_mask"):
        gk.per_token_logps(call["logits"], call["completion_ids"], sampling_mask=kept)
    for extra in (1, 4):
        with pytest.raises(NotImplementedError, match="targets"):
            gk.per_token_logps(call["logits"], torch.zeros(B, T, extra, dtype=LONG))
