"""The presets: what they set, that overrides hold, and that every loss of a project can be had through its preset.

That their numbers are the projects' own is proved beside the projects' code.
"""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import pytest
import torch

import grpo_kernels as gk

DEFAULT = gk.GRPOLossConfig()
# what differs from the defaults: (preset, overrides) -> fields
EXPECTED: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("trl", {}, {"use_bias_correction_kl": True, "entropy": True}),
    ("liger", {}, {"beta": 0.04}),
    ("verl", {}, {"dual_clip": 3.0, "log_ratio_clamp": 20.0, "kl_clamp": (20.0, 10.0)}),
    ("verl", {"kl_estimator": "k1"}, {"dual_clip": 3.0, "log_ratio_clamp": 20.0, "kl_estimator": "k1"}),
    ("verl", {"loss_type": "cispo", "epsilon_high": 5.0},
     {"loss_type": "cispo", "epsilon_high": 5.0, "cispo_bounds": "relative", "log_ratio_clamp": 20.0,
      "kl_clamp": (20.0, 10.0)}),
    ("verl", {"loss_type": "grpo", "importance_sampling_level": "sequence_token"},
     {"loss_type": "grpo", "importance_sampling_level": "sequence_token", "kl_clamp": (20.0, 10.0)}),
    ("verl", {"loss_type": "dppo_tv"},
     {"loss_type": "dppo_tv", "dppo_cap": 3.0, "log_ratio_clamp": 20.0, "kl_clamp": (20.0, 10.0)}),
    ("verl", {"loss_type": "clip_cov"}, {"loss_type": "clip_cov", "kl_clamp": (20.0, 10.0)}),
    ("verl", {"loss_type": "gmpo"}, {"loss_type": "gmpo", "kl_clamp": (20.0, 10.0)}),
    ("verl", {"rollout_correction": "token_truncate"},
     {"dual_clip": 3.0, "log_ratio_clamp": 20.0, "kl_clamp": (20.0, 10.0), "rollout_correction": "token_truncate",
      "rollout_clip_max": 2.0}),
    ("openrlhf", {}, {"kl_estimator": "k1", "kl_clamp": (None, 10.0), "log_ratio_clamp": 20.0}),
    ("openrlhf", {"importance_sampling_level": "sequence"},
     {"kl_estimator": "k1", "kl_clamp": (None, 10.0), "loss_type": "grpo", "importance_sampling_level": "sequence"}),
    ("openrlhf", {"rollout_correction": "token_mask", "dual_clip": 3.0},
     {"kl_estimator": "k1", "kl_clamp": (None, 10.0), "log_ratio_clamp": 20.0, "rollout_correction": "token_mask",
      "rollout_clip_min": 0.5, "rollout_clip_max": 5.0, "dual_clip": 3.0}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "overrides", "fields"), EXPECTED, ids=str)
def test_what_a_preset_sets(name: str, overrides: dict[str, Any], fields: dict[str, Any]) -> None:
    config = gk.GRPOLossConfig.preset(name, **overrides)
    changed = {
        field.name: getattr(config, field.name)
        for field in dataclasses.fields(config)
        if getattr(config, field.name) != getattr(DEFAULT, field.name)
    }
    assert changed == fields


LOSSES = {
    "trl": ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo", "gmpo"),
    "liger": ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo"),
    "verl": ("dapo", "grpo", "cispo", "sapo", "gmpo", "gpg", "dppo_tv", "dppo_kl", "dro", "clip_cov", "kl_cov"),
    "openrlhf": ("dapo", "grpo"),
}


@pytest.mark.parametrize(("name", "loss_type"), [(name, loss) for name, losses in LOSSES.items() for loss in losses])
def test_a_preset_goes_with_every_loss_of_its_project(name: str, loss_type: str) -> None:
    needed = {"dr_grpo": {"max_completion_length": 8}, "dro": {"dro_beta": 0.1}}.get(loss_type, {})
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*cispo caps the weight")  # TRL's and Liger's own default
        config = gk.GRPOLossConfig.preset(name, loss_type=loss_type, beta=0.1, **needed)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 3, 5, generator=generator)
    old, ref = (-1.5 + 0.1 * torch.randn(2, 3, generator=generator) for _ in range(2))
    out = gk.grpo_loss(
        logits, torch.ones(2, 3, dtype=torch.long), config=config, advantages=torch.tensor([1.0, -0.5]),
        old_per_token_logps=old, ref_per_token_logps=ref,
    )  # fmt: skip
    assert torch.isfinite(out.loss)
    assert out.loss != 0


def test_what_is_given_holds_over_the_preset() -> None:
    config = gk.GRPOLossConfig.preset("verl", dual_clip=None, log_ratio_clamp=5.0, kl_clamp=(None, None), epsilon=0.1)
    assert (config.dual_clip, config.log_ratio_clamp, config.kl_clamp) == (None, 5.0, (None, None))
    assert config.epsilon == 0.1


def test_an_unknown_field_is_named() -> None:
    with pytest.raises(TypeError, match="clip_ratio"):
        gk.GRPOLossConfig.preset("verl", clip_ratio=0.2)
    with pytest.raises(ValueError, match=r"loss_type must be one of .* got 'vanilla'"):
        gk.GRPOLossConfig.preset("verl", loss_type="vanilla")
