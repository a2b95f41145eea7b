"""Every loss and option of the objective: the closed-form coefficient is float64 autograd of the plain reference."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import grpo_kernels as gk
from grpo_kernels import reference

B, T, V = 6, 7, 23
OWN: dict[str, dict[str, Any]] = {
    "grpo": {"epsilon_high": 0.28}, "bnpo": {"delta": 1.5}, "dr_grpo": {"max_completion_length": 9},
    "dapo": {"dual_clip": 1.4}, "luspo": {}, "cispo": {"epsilon_high": 1.1},
    "sapo": {"sapo_temperature_pos": 0.7, "sapo_temperature_neg": 1.4},
    "vespo": {"vespo_k_pos": 1.5, "vespo_lambda_pos": 0.8, "vespo_k_neg": 1.2, "vespo_lambda_neg": 0.5},
    "gmpo": {"epsilon": 0.3, "epsilon_high": 0.4}, "gpg": {},
    "dppo_tv": {"epsilon": 0.02, "epsilon_high": 0.03, "dppo_cap": 1.2},
    "dppo_kl": {"epsilon": 0.002, "epsilon_high": 0.003, "dppo_cap": 1.2},
    "dro": {"dro_beta": 0.7}, "clip_cov": {"cov_ratio": 0.2, "cov_bounds": (0.1, 5.0)},
    "kl_cov": {"cov_ratio": 0.3, "cov_coef": 0.8},
}  # fmt: skip
LEVELS = ("token", "sequence", "sequence_token")
CASES = [
    (name, level) for name in OWN for level in LEVELS if level == "token" or name in
    ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "sapo")
]  # fmt: skip
MODES = (
    "seq_mean_token_mean", "token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm", "token_sum", "prompt_mean",
)  # fmt: skip
ESTIMATORS = ("k1", "abs", "k2", "k3", "k1+", "abs+", "k2+", "k3+")


def problem(seed: int, on_policy: bool = False, token_advantages: bool = False) -> tuple[Any, Any, dict[str, Any]]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    logits, ids = 2 * normal(B, T, V), torch.randint(0, V, (B, T), generator=generator)
    mask = torch.rand(B, T, generator=generator) > 0.3
    mask[4] = False
    logps = reference.per_token_logps(logits, ids, mask, 0.7, 5.0, 1.3)[0]
    sampled = logps + 0.2 * normal(B, T)
    sampled[0, 1] = torch.nan
    advantages = torch.tensor([1.9, -0.4, 0.9, -0.7, 0.3, 0.0], dtype=torch.float64)
    if token_advantages:
        advantages = advantages[:, None] + 0.7 * normal(B, T)
    return logits.requires_grad_(), ids, {
        "completion_mask": mask,
        "advantages": advantages,
        "old_per_token_logps": None if on_policy else (logps + 0.5 * normal(B, T)).clamp(max=-1e-3),
        "ref_per_token_logps": logps + 0.8 * normal(B, T),
        "rollout_per_token_logps": sampled,
    }  # fmt: skip


COMMON = {"temperature": 0.7, "softcap": 5.0, "logit_scale": 1.3}


def assert_equal_to_reference(
    seed: int,
    given: dict[str, Any] | None = None,
    /,
    on_policy: bool = False,
    token_advantages: bool = False,
    **options: Any,
) -> gk.GRPOLossOutput:
    config = gk.GRPOLossConfig(**COMMON | options)
    logits, ids, rest = problem(seed, on_policy, token_advantages)
    rest |= given or {}
    if config.aggregation_mode == "prompt_mean":
        rest |= {"group_size": 2}
    random = config.loss_type == "clip_cov"
    make = torch.Generator().manual_seed
    ours = gk.grpo_loss(logits, ids, config=config, generator=make(seed) if random else None, **rest)
    truth = reference.grpo_loss(logits, ids, config, generator=make(seed), **rest)
    assert abs(truth.item()) > 1e-5
    (grad,) = torch.autograd.grad(3 * ours.loss, logits)
    (expected,) = torch.autograd.grad(3 * truth, logits)
    assert expected.abs().max() > 1e-4
    torch.testing.assert_close(ours.loss, truth, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(grad, expected, rtol=1e-9, atol=1e-12)
    return ours


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize(("loss_type", "level"), CASES)
def test_every_loss_with_every_kl(loss_type: str, level: str, estimator: str) -> None:
    extras = [
        {"beta": 0.0}, {}, {"use_bias_correction_kl": True}, {"kl_clamp": (0.7, None)},
        {"kl_clamp": (None, 0.2), "use_bias_correction_kl": True}, {"log_ratio_clamp": 0.4},
        {"log_ratio_clamp": 0.3, "use_bias_correction_kl": True},
        {"rollout_correction": "token_truncate", "kl_weighted_by_rollout": True, "use_bias_correction_kl": True},
    ]  # fmt: skip
    for seed, extra in enumerate(extras):
        options = {"beta": 0.3, "kl_estimator": estimator, **OWN[loss_type], **extra}
        assert_equal_to_reference(
            seed, loss_type=loss_type, importance_sampling_level=level, token_advantages=seed % 2 == 1, **options
        )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("loss_type", "level"), CASES)
def test_every_loss_with_every_aggregation(loss_type: str, level: str, mode: str) -> None:
    for seed, coef in enumerate((0.0, 0.1)):
        assert_equal_to_reference(
            20 + seed, loss_type=loss_type, importance_sampling_level=level, aggregation=mode, beta=0.2,
            entropy_coef=coef, **OWN[loss_type] | {"max_completion_length": 9},
        )  # fmt: skip


CORRECTIONS = [
    (mode, mean)
    for mode in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
    for mean in ("product", "geometric")
    if mean == "product" or mode.startswith("sequence")
]


@pytest.mark.parametrize(("correction", "mean"), CORRECTIONS)
@pytest.mark.parametrize(("loss_type", "level"), CASES)
def test_every_loss_with_every_correction(loss_type: str, level: str, correction: str, mean: str) -> None:
    if loss_type == "vespo" and correction.startswith("sequence"):
        pytest.skip("refused: VESPO multiplies the weights of tokens")
    bounds = [{}, {"rollout_clip_min": 0.7, "rollout_clip_max": 1.3}, {"rollout_clip_max": None, "rollout_veto": 0.5}]
    for seed, (bound, on_policy) in enumerate(itertools.product(bounds, (False, True))):
        assert_equal_to_reference(
            40 + seed, on_policy=on_policy, loss_type=loss_type, importance_sampling_level=level,
            rollout_correction=correction, rollout_sequence_mean=mean, beta=0.2, **OWN[loss_type] | bound,
        )  # fmt: skip


@pytest.mark.parametrize("on_policy", [False, True])
@pytest.mark.parametrize(("loss_type", "level"), CASES)
def test_every_loss_with_the_masks(loss_type: str, level: str, on_policy: bool) -> None:
    masks = [
        {"off_policy_mask_threshold": -0.02}, {"top_entropy_quantile": 0.4},
        {"off_policy_mask_threshold": 0.05, "top_entropy_quantile": 0.6, "entropy_coef": 0.2, "log_ratio_clamp": 0.4},
    ]  # fmt: skip
    for seed, (mask, sampled) in enumerate(itertools.product(masks, (False, True))):
        given = {} if sampled else {"rollout_per_token_logps": None}
        assert_equal_to_reference(
            60 + seed, given, on_policy=on_policy, loss_type=loss_type, importance_sampling_level=level,
            beta=0.2, token_advantages=seed % 2 == 1, **OWN[loss_type] | mask,
        )  # fmt: skip


@pytest.mark.parametrize("bounds", ["absolute", "relative", "relative_upper"])
def test_the_bounds_of_cispo(bounds: str) -> None:
    for seed in range(3):
        assert_equal_to_reference(
            seed,
            loss_type="cispo",
            cispo_bounds=bounds,
            epsilon=0.1,
            epsilon_high=1.05 if bounds == "absolute" else 0.1,
        )
