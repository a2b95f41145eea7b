"""Every pair of options is honoured, exactly, or refused by name with the reason when the config is made."""

from __future__ import annotations

import dataclasses
import itertools
import re
import warnings
from typing import Any

import pytest
import torch

import grpo_kernels as gk
from grpo_kernels import reference

B, T, V = 6, 6, 17

# what each option is set to, and what it needs beside it to mean anything
VALUES: dict[str, list[Any]] = {
    "loss_type": [
        "grpo", "bnpo", "dr_grpo", "luspo", "cispo", "sapo", "vespo", "gmpo", "gpg", "dppo_tv", "dppo_kl", "dro",
        "clip_cov", "kl_cov",
    ],
    "aggregation": [
        "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm", "token_sum", "prompt_mean",
    ],
    "importance_sampling_level": ["sequence", "sequence_token"],
    "kl_estimator": ["k1", "abs", "k2", "k1+", "k3+"],
    "rollout_correction": ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"],
    "cispo_bounds": ["relative", "relative_upper"],
    "epsilon": [0.05], "epsilon_high": [0.4], "delta": [1.1], "dual_clip": [1.05], "log_ratio_clamp": [0.1],
    "beta": [0.3], "kl_clamp": [(0.3, 0.2)], "use_bias_correction_kl": [True], "kl_weighted_by_rollout": [True],
    "temperature": [0.6], "softcap": [3.0], "logit_scale": [1.7], "max_completion_length": [11], "entropy": [True],
    "entropy_coef": [0.4], "top_entropy_quantile": [0.5], "off_policy_mask_threshold": [0.0],
    "rollout_clip_max": [1.05], "rollout_clip_min": [0.95], "rollout_sequence_mean": ["geometric"],
    "rollout_veto": [0.8], "sapo_temperature_pos": [2.0], "sapo_temperature_neg": [0.5], "vespo_k_pos": [0.5],
    "vespo_lambda_pos": [0.5], "vespo_k_neg": [0.7], "vespo_lambda_neg": [0.4], "dppo_cap": [1.1], "dro_beta": [0.6],
    "cov_ratio": [0.4], "cov_bounds": [(-0.5, 5.0)], "cov_coef": [0.9],
}  # fmt: skip
COMPANIONS: dict[str, dict[str, Any]] = {
    "kl_estimator": {"beta": 0.2}, "kl_clamp": {"beta": 0.2}, "use_bias_correction_kl": {"beta": 0.2},
    "kl_weighted_by_rollout": {"beta": 0.2, "rollout_correction": "token_truncate"},
    "max_completion_length": {"aggregation": "seq_mean_token_sum_norm"},
    **{name: {"rollout_correction": "token_mask"} for name in ("rollout_clip_max", "rollout_clip_min")},
    "rollout_sequence_mean": {"rollout_correction": "sequence_truncate"},
    "rollout_veto": {"rollout_correction": "token_truncate"},
    "cispo_bounds": {"loss_type": "cispo", "epsilon_high": 1.2},
    **{name: {"loss_type": "sapo"} for name in VALUES if name.startswith("sapo")},
    **{name: {"loss_type": "vespo"} for name in VALUES if name.startswith("vespo")},
    "dppo_cap": {"loss_type": "dppo_tv"}, "dro_beta": {"loss_type": "dro"}, "cov_ratio": {"loss_type": "kl_cov"},
    "cov_coef": {"loss_type": "kl_cov", "cov_ratio": 0.3}, "cov_bounds": {"loss_type": "clip_cov", "cov_ratio": 0.3},
}  # fmt: skip
OF_VALUE: dict[Any, dict[str, Any]] = {
    "dr_grpo": {"max_completion_length": 9}, "seq_mean_token_sum_norm": {"max_completion_length": 9},
    "dro": {"dro_beta": 0.3}, "clip_cov": {"cov_ratio": 0.3, "cov_bounds": (0.0, 5.0)}, "kl_cov": {"cov_ratio": 0.3},
}  # fmt: skip
ITEMS = [(name, value) for name, values in VALUES.items() for value in values]


def options_of(*items: tuple[str, Any]) -> dict[str, Any]:
    """Both options, and their companions where these do not contradict them."""
    chosen: dict[str, Any] = {}
    for name, value in items:
        chosen |= COMPANIONS.get(name, {}) | (OF_VALUE.get(value, {}) if isinstance(value, str) else {})
    chosen |= dict(items)
    for value in list(chosen.values()):
        needed = OF_VALUE.get(value, {}) if isinstance(value, str) else {}
        chosen = needed | chosen
    return chosen


def make_problem() -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    generator = torch.Generator().manual_seed(5)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    logits, ids = 1.5 * normal(B, T, V), torch.randint(0, V, (B, T), generator=generator)
    mask = torch.rand(B, T, generator=generator) > 0.2
    logps = reference.per_token_logps(logits, ids, mask)[0]
    old = (logps + 0.3 * normal(B, T)).clamp(max=-1e-3)
    sampled = old + 0.15 * normal(B, T)
    sampled[1, 2] = torch.nan
    return logits.requires_grad_(), ids, {
        "advantages": torch.tensor([1.2, -0.6, 0.8, -0.9, 1.5, 0.4], dtype=torch.float64),
        "completion_mask": mask, "old_per_token_logps": old, "ref_per_token_logps": logps + 0.5 * normal(B, T),
        "rollout_per_token_logps": sampled,
    }  # fmt: skip


LOGITS, IDS, REST = make_problem()


def call(config: gk.GRPOLossConfig) -> tuple[gk.GRPOLossOutput, torch.Tensor, dict[str, Any]]:
    given = REST | ({"group_size": 2} if config.aggregation_mode == "prompt_mean" else {})
    generator = {"generator": torch.Generator().manual_seed(1)} if config.loss_type == "clip_cov" else {}
    out = gk.grpo_loss(LOGITS, IDS, config=config, **given, **generator)
    return out, torch.autograd.grad(out.loss, LOGITS)[0], given


def make(options: dict[str, Any]) -> gk.GRPOLossConfig:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*cispo caps the weight")
        return gk.GRPOLossConfig(**options)


def test_every_field_is_in_the_table() -> None:
    assert {field.name for field in dataclasses.fields(gk.GRPOLossConfig)} == set(VALUES)
    default = gk.GRPOLossConfig()
    assert all(value != getattr(default, name) for name, value in ITEMS)


@pytest.mark.parametrize(("name", "value"), ITEMS, ids=lambda x: str(x).replace(" ", ""))
def test_every_pair_is_honoured_or_refused_with_the_reason(name: str, value: Any) -> None:
    honoured, refusals = 0, {}
    for other, second in ITEMS:
        if other == name:
            continue
        options = options_of((name, value), (other, second))
        try:
            config = make(options)
        except ValueError as error:
            refusals[other] = str(error), set(options)
            continue
        honoured += 1
        out, grad, given = call(config)
        truth = reference.grpo_loss(LOGITS, IDS, config, generator=torch.Generator().manual_seed(1), **given)
        (expected,) = torch.autograd.grad(truth, LOGITS)
        torch.testing.assert_close(out.loss, truth, rtol=1e-10, atol=1e-11, msg=str(options))
        torch.testing.assert_close(grad, expected, rtol=1e-8, atol=1e-11, msg=str(options))
    assert honoured
    for text, named in refusals.values():
        refused = re.match(r"GRPOLossConfig: (\w+) must .+, got .+\. .+", text)
        assert refused is not None, text
        assert refused[1] in named, text


@pytest.mark.parametrize(("name", "value"), ITEMS, ids=lambda x: str(x).replace(" ", ""))
def test_every_option_changes_something(name: str, value: Any) -> None:
    """Beside its companions, so that an option that is merely accepted shows."""
    options = options_of((name, value))
    before = {key: other for key, other in options.items() if key != name}
    if name == "loss_type":
        before = {}
    if name == "dro_beta":
        before |= {"dro_beta": 0.1}
    if name == "max_completion_length":
        before |= {"max_completion_length": 7}
    (out, grad, _), (old, old_grad, _) = call(make(options)), call(make(before))
    if name == "entropy":
        assert "entropy" in out.metrics.keys() - old.metrics.keys()
    elif name == "loss_type" and value == "bnpo":
        assert torch.equal(grad, old_grad)  # dapo by another name, but for the normalizer that it is given
    else:
        assert not torch.allclose(grad, old_grad, rtol=1e-6, atol=0), options


def test_combinations_of_three_with_a_loss_of_their_own() -> None:
    """Options of one loss meet each other and a level, a correction and a mask."""
    families = itertools.groupby((n for n in VALUES if n.startswith(("sapo", "vespo"))), lambda n: n.split("_")[0])
    for loss_type, names in families:
        own = {name: VALUES[name][0] for name in names}
        for extra in ({}, {"rollout_correction": "token_mask"}, {"top_entropy_quantile": 0.5}, {"beta": 0.2}):
            config = make({"loss_type": loss_type, **own, **extra})
            out, grad, given = call(config)
            truth = reference.grpo_loss(LOGITS, IDS, config, **given)
            torch.testing.assert_close(out.loss, truth, rtol=1e-10, atol=1e-11)
            torch.testing.assert_close(grad, torch.autograd.grad(truth, LOGITS)[0], rtol=1e-8, atol=1e-11)
