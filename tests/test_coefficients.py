"""Every option's closed-form coefficient equals float64 autograd of the plain reference, for all combinations."""

from __future__ import annotations

import itertools
import os
from typing import Any

import pytest
import torch

import grpo_kernels as gk
from grpo_kernels import formulas, reference

B, T, V = 4, 7, 37
COMMON = {"temperature": 0.7, "softcap": 5.0, "logit_scale": 1.3, "max_completion_length": 9}
OBJECTIVES = [(name, level) for name in ("grpo", "bnpo", "dr_grpo", "dapo") for level in ("token", "sequence")]


def problem(seed: int) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    logits, ids = 3 * normal(B, T, V), torch.randint(0, V, (B, T), generator=generator)
    mask = torch.rand(B, T, generator=generator) > 0.3
    logps = reference.per_token_logps(logits, ids, mask, 0.7, 5.0, 1.3)[0]
    return logits, ids, {
        "completion_mask": mask,
        "advantages": torch.tensor([1.9, -0.4, 0.9, 1.2], dtype=torch.float64) + 0.1 * normal(B),
        "old_per_token_logps": logps + 0.5 * normal(B, T),
        "ref_per_token_logps": logps + 0.5 * normal(B, T),
    }  # fmt: skip


def assert_equal_to_reference(config: gk.GRPOLossConfig, seed: int, weight: torch.Tensor | None = None) -> None:
    logits, ids, rest = problem(seed)
    leaf = logits.requires_grad_()
    ours = gk.grpo_loss(leaf, ids, config=config, importance_sampling_ratio=weight, **rest).loss
    truth = reference.grpo_loss(leaf, ids, config, importance_sampling_ratio=weight, **rest)
    assert abs(truth.item()) > 1e-3
    (grad,) = torch.autograd.grad(3 * ours, leaf)
    (expected,) = torch.autograd.grad(3 * truth, leaf)
    assert expected.abs().max() > 1e-3
    torch.testing.assert_close(ours, truth, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(grad, expected, rtol=1e-10, atol=1e-13)


DRAWN = 0.5 + torch.rand(B, T, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
WEIGHTS = {"none": None, "sequence": DRAWN[:, 0], "token": DRAWN}
KL = [(0.0, "k3", False), *itertools.product([0.3], ["k1", "k2", "k3"], [False, True])]
# every combination, or some where each takes Triton's interpreter a second
TAKEN = slice(None, None, 9 if os.environ.get("GRPO_KERNELS_BACKEND") == "triton" else 1)


@pytest.mark.parametrize("weight", list(WEIGHTS))
@pytest.mark.parametrize(("loss_type", "level"), OBJECTIVES)
def test_clipped_losses(loss_type: str, level: str, weight: str) -> None:
    clips = itertools.product([None, 1.5], [None, 2.0], [0.0, 0.1])
    combinations = list(enumerate(itertools.product(KL, clips)))[TAKEN]
    for seed, ((beta, estimator, corrected), (delta, dual, coef)) in combinations:
        config = gk.GRPOLossConfig(
            loss_type=loss_type, importance_sampling_level=level, beta=beta, kl_estimator=estimator, delta=delta,
            use_bias_correction_kl=corrected, dual_clip=dual, epsilon_high=0.28, entropy_coef=coef, **COMMON,
        )  # fmt: skip
        assert_equal_to_reference(config, seed, WEIGHTS[weight])


@pytest.mark.parametrize("weight", list(WEIGHTS))
def test_cispo(weight: str) -> None:
    combinations = list(enumerate(itertools.product(KL, [0.0, 0.1])))[TAKEN]
    for seed, ((beta, estimator, corrected), coef) in combinations:
        config = gk.GRPOLossConfig(
            loss_type="cispo", epsilon_high=1.1, beta=beta, kl_estimator=estimator, use_bias_correction_kl=corrected,
            entropy_coef=coef, **COMMON,
        )  # fmt: skip
        assert_equal_to_reference(config, seed, WEIGHTS[weight])


@pytest.mark.parametrize("estimator", ["kl_k1", "kl_k2", "kl_k3"])
def test_kl_slopes_are_derivatives(estimator: str) -> None:
    near = torch.tensor([1e-9, -1e-9, 1e-5, 0.249999, 0.25, 0.250001, -0.25])
    gaps = torch.cat([torch.linspace(-6, 6, 241), near]).double()
    step = 1e-6
    value, slope = getattr(formulas, estimator)(gaps)
    above, below = (getattr(formulas, estimator)(gaps + s)[0] for s in (step, -step))
    torch.testing.assert_close(slope, (below - above) / (2 * step), rtol=1e-7, atol=1e-7)  # d = ref - logp
    if estimator != "kl_k1":
        assert (value >= 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_k3_is_exact_to_a_few_roundings_everywhere(dtype: torch.dtype) -> None:
    import mpmath

    gaps = torch.tensor(
        [s * g for g in (1e-12, 1e-6, 1e-4, 0.01, 0.2, 0.2499, 0.2501, 0.7, 3.0) for s in (1, -1)], dtype=dtype
    )
    value, slope = formulas.kl_k3(gaps)
    with mpmath.workdps(50):
        for gap, ours, ours_slope in zip(gaps.tolist(), value.tolist(), slope.tolist(), strict=True):
            truth = mpmath.expm1(gap) - mpmath.mpf(gap)
            assert abs(ours - truth) <= 20 * torch.finfo(dtype).eps * truth, gap
            assert abs(ours_slope + mpmath.expm1(gap)) <= 8 * torch.finfo(dtype).eps * abs(mpmath.expm1(gap)), gap


@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
@pytest.mark.parametrize("delta", [float("inf"), 1.1, 1.3, 4.0])
def test_the_slope_is_the_derivative_on_both_sides_of_every_kink(advantage: float, delta: float) -> None:
    kinks = torch.tensor([0.8, 1.28, 3.0, delta if delta < 10 else 2.0], dtype=torch.float64)
    for side in (0.999, 1.001):
        ratio = (kinks * side).requires_grad_()
        value, slope = formulas.clipped_surrogate(ratio, torch.full_like(ratio, advantage), 0.8, 1.28, delta, 3.0)
        above, _ = formulas.clipped_surrogate(
            ratio * 1.0000001, torch.full_like(ratio, advantage), 0.8, 1.28, delta, 3.0
        )
        torch.testing.assert_close(slope, (above - value) / 1e-7, rtol=1e-5, atol=1e-5)


def test_nan_is_never_selected_away() -> None:
    nan, one = torch.tensor([float("nan")]), torch.ones(1)
    for advantage in (1.0, -1.0, 0.0):
        assert all(x.isnan().all() for x in formulas.clipped_surrogate(nan, advantage * one, 0.8, 1.2, 2.0, 3.0))
        assert formulas.cispo_surrogate(nan, advantage * one, one, 0.8, 5.0)[0].isnan().all()
        assert formulas.clipped_surrogate(one, nan, 0.8, 1.2, 2.0, 3.0)[0].isnan().all()
    for kl in (formulas.kl_k1, formulas.kl_k2, formulas.kl_k3):
        assert all(x.isnan().all() for x in kl(nan))
    assert formulas.zero_safe_product(torch.zeros(1), nan).isnan().all()
    assert formulas.zero_safe_product(torch.zeros(1), torch.full((1,), torch.inf)).item() == 0
