"""OpenRLHF's own actor step with our PolicyLoss in place of its: the same loss, gradient and numbers."""

from __future__ import annotations

import importlib
import inspect
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from parity_support import Draw, assert_equal, draws, loud, run_theirs
from test_parity_openrlhf import OPTIONS, batch_info
from torch import Tensor

from grpo_kernels.integrations.openrlhf import PolicyLoss

CORRECTIONS: list[dict[str, Any]] = [
    {"is_correction_level": "off"},
    {"is_correction_level": "token", "is_correction_mode": "clip"},
    {"is_correction_level": "token", "is_correction_mode": "mask", "is_correction_threshold": (0.9, 1.3)},
    {"is_correction_level": "seq", "is_correction_threshold": (0.8, 1.3)},
    {"is_correction_level": "token", "is_correction_gating": "tv", "is_correction_threshold": (0.0, 0.1)},
    {"is_correction_level": "seq", "is_correction_gating": "tv", "is_correction_threshold": (0.0, 0.1)},
    {"is_correction_level": "token", "is_correction_gating": "binary_kl", "is_correction_threshold": (0.0, 0.05)},
    {"is_correction_level": "seq", "is_correction_gating": "binary_kl", "is_correction_threshold": (0.0, 0.05)},
]


@pytest.fixture(scope="module")
def openrlhf() -> ModuleType:
    """OpenRLHF's own actor step; skips where OpenRLHF is missing."""
    return importlib.import_module("parity_openrlhf")


@pytest.mark.parametrize("policy", ["ppo", "gspo"])
@draws
@given(
    seed=st.integers(0, 10**6), options=st.fixed_dictionaries(OPTIONS), correction=st.sampled_from(CORRECTIONS)
)  # fmt: skip
def test_our_loss_is_openrlhfs(
    openrlhf: ModuleType, policy: str, seed: int, options: dict[str, Any], correction: dict[str, Any]
) -> None:
    """With everything that `training_step` puts around it, and every number that it logs."""

    def run(batch: Draw, logps: Tensor, entropy: Tensor) -> tuple[Tensor, dict[str, float]]:
        return openrlhf.loss(
            batch, logps, entropy, kl_coef=options["kl_coef"] if options["kl"] else 0.0,
            kl_estimator=options["kl"] or "k1", entropy_coef=options["entropy_coef"], batch_info=batch_info(options),
            with_rollout=correction["is_correction_level"] != "off", clip_eps_low=options["low"],
            clip_eps_high=options["high"], dual_clip=options["dual_clip"], token_level_loss=options["token_level"],
            policy_loss_type=policy, **correction,
        )  # fmt: skip

    options = options | {"shape": options["shape"] | {"empty_rows": correction["is_correction_level"] != "seq"}}
    batch, theirs = loud(run, seed, **options["shape"])
    with mock.patch.object(openrlhf.OPENRLHF.loss, "PolicyLoss", PolicyLoss):
        ours = run_theirs(batch, run)
    assert_equal(ours.loss, theirs.loss, f"{options} {correction} loss")
    assert_equal(ours.grad, theirs.grad, f"{options} {correction} gradient")
    assert set(ours.metrics) == set(theirs.metrics)
    for name, value in theirs.metrics.items():
        assert_equal(ours.metrics[name], value, f"{options} {correction} {name}", rtol=1e-6)


def test_the_signatures_are_openrlhfs(openrlhf: ModuleType) -> None:
    theirs = openrlhf.OPENRLHF.loss.PolicyLoss
    for method in ("__init__", "forward"):
        ours, wanted = (inspect.signature(getattr(cls, method)).parameters for cls in (PolicyLoss, theirs))
        assert {k: (p.kind, p.default) for k, p in ours.items()} == {
            k: (p.kind, p.default) for k, p in wanted.items()
        }  # fmt: skip
    assert isinstance(PolicyLoss(), torch.nn.Module)


REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "type": ({"policy_loss_type": "trpo"}, "policy_loss_type must be one of ppo, gspo, got 'trpo'"),
    "level": ({"is_correction_level": "batch"}, "is_correction_level must be one of off, token, seq"),
    "mode": ({"is_correction_mode": "drop"}, "is_correction_mode must be one of mask, clip"),
    "gating": ({"is_correction_gating": "kl"}, "is_correction_gating must be one of ratio, binary_kl, tv"),
    "clip by sequence": ({"is_correction_level": "seq", "is_correction_mode": "clip"}, "must be 'mask' but for token"),
    "clip of a divergence": (
        {"is_correction_level": "token", "is_correction_mode": "clip", "is_correction_gating": "tv"}, "'clip' with",
    ),
    "band of a divergence": ({"is_correction_level": "token", "is_correction_gating": "tv"}, "must start at 0"),
    "dual_clip": ({"dual_clip": 0.5}, "dual_clip must be > 1"),
    "clip_eps_low": ({"clip_eps_low": -0.2}, "epsilon must be in"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSALS)
def test_bad_options_are_refused(case: str) -> None:
    options, text = REFUSALS[case]
    with pytest.raises(ValueError, match=text):
        PolicyLoss(**options)


def test_a_correction_needs_the_samplers_log_probs() -> None:
    one = torch.zeros(1, 2)
    with pytest.raises(ValueError, match="rollout_log_probs must be given with is_correction_level='token', got None"):
        PolicyLoss(is_correction_level="token")(one, one, one, one)


def test_a_batch_without_a_mask_counts_whole() -> None:
    logps = torch.tensor([[-1.0, -2.0]], dtype=torch.float64, requires_grad=True)
    loss, clip_ratio, ppo_kl, vllm_kl, filtered = PolicyLoss()(
        logps, torch.tensor([[-1.1, -1.5]], dtype=torch.float64), torch.ones(1, 2)
    )
    ratio = torch.tensor([0.1, -0.5], dtype=torch.float64).exp()
    torch.testing.assert_close(loss, -ratio.clamp(max=1.2).mean(), rtol=1e-9, atol=0)
    assert (float(clip_ratio), vllm_kl, filtered) == (0.0, None, None)
    assert float(ppo_kl) == pytest.approx(0.2)
    loss.backward()
    assert logps.grad is not None
    torch.testing.assert_close(logps.grad[0], -ratio / 2, rtol=1e-9, atol=0)


def both(openrlhf: ModuleType, tensors: dict[str, Tensor], **options: Any) -> list[list[Tensor]]:
    """`[loss, gradient, clip_ratio, ppo_kl, ...]` of OpenRLHF's own and of ours."""
    results = []
    for cls in (openrlhf.OPENRLHF.loss.PolicyLoss, PolicyLoss):
        leaf = tensors["log_probs"].clone().requires_grad_()
        loss, *numbers = cls(**options)(**(tensors | {"log_probs": leaf}))
        results.append([loss.detach(), torch.autograd.grad(loss, leaf)[0], *(x for x in numbers if x is not None)])
    return results


def batch_of(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(0)
    old = -0.1 - 3 * torch.rand(4, 6, generator=rng)
    tensors = {
        "log_probs": old + 0.4 * torch.randn(4, 6, generator=rng), "old_log_probs": old,
        "advantages": torch.randn(4, 1, generator=rng).expand(4, 6),
        "rollout_log_probs": old + 0.1 * torch.randn(4, 6, generator=rng),
    }  # fmt: skip
    return {name: values.to(dtype) for name, values in tensors.items()} | {
        "action_mask": torch.tensor([[1, 1, 1, 0, 0, 0]] + [[1] * 6] * 3)
    }


@pytest.mark.parametrize("far", [False, True])
@pytest.mark.parametrize("low", [1.0, 3.0])
@pytest.mark.parametrize("policy", ["ppo", "gspo"])
def test_a_lower_clip_that_no_ratio_reaches_is_openrlhfs(
    openrlhf: ModuleType, policy: str, low: float, far: bool
) -> None:
    tensors = batch_of()
    if far:  # a ratio below the least that a float tells from 1 - epsilon
        tensors["log_probs"][tensors["advantages"][:, 0] < 0] -= 45.0
    theirs, ours = both(openrlhf, tensors, policy_loss_type=policy, clip_eps_low=low)
    for our, their in zip(ours, theirs, strict=True):
        assert_equal(our, their, policy, rtol=1e-6)


def test_an_infinite_log_prob_is_openrlhfs(openrlhf: ModuleType) -> None:
    tensors = batch_of()
    tensors["log_probs"][1, 1] = -torch.inf
    theirs, ours = both(openrlhf, tensors)
    for our, their in zip(ours[:3], theirs[:3], strict=True):
        assert_equal(our, their, "-inf", rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_are_read_as_what_they_hold(openrlhf: ModuleType, dtype: torch.dtype) -> None:
    """OpenRLHF's own in float64 on the same numbers, which are more than 16 bits count."""
    tensors = {name: values.repeat(100, 30) for name, values in batch_of(dtype).items()}
    exact = {name: x.double() if x.is_floating_point() else x for name, x in tensors.items()}
    options = {"is_correction_level": "token", "is_correction_threshold": (0.9, 1.3)}
    leaf = tensors["log_probs"].requires_grad_()
    theirs, _ = both(openrlhf, exact, **options)
    ours = PolicyLoss(**options)(**tensors)
    for our, their in zip(ours, (theirs[0], *theirs[2:]), strict=True):
        assert_equal(our.detach(), their, str(dtype), rtol=1e-5)
    (grad,) = torch.autograd.grad(ours[0], leaf)
    assert_equal(grad.double(), theirs[1], "gradient", rtol=1e-2)


def test_a_second_derivative_raises() -> None:
    tensors = batch_of()
    leaf = tensors["log_probs"].requires_grad_()
    loss = PolicyLoss()(**(tensors | {"log_probs": leaf * 1.0}))[0]
    (grad,) = torch.autograd.grad(loss, leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward is not supported"):
        torch.autograd.grad(grad.square().sum(), leaf)


BAD_CALLS: dict[str, tuple[str, Any, str, str]] = {
    "old of another shape": ("old_log_probs", torch.zeros(4, 5), "off", r"old_log_probs must have the shape of log_"),
    "old not finite": ("old_log_probs", torch.full((4, 6), torch.nan), "off", "old_log_probs must be finite"),
    "flat advantages": (
        "advantages",
        torch.ones(6),
        "off",
        r"advantages must have the shape of log_probs, .*got \[6\]",
    ),
    "a longer mask": ("action_mask", torch.ones(4, 7), "off", r"action_mask must have .*got \[4, 7\]"),
    "a negative mask": ("action_mask", -torch.ones(4, 6), "off", "action_mask must be finite and >= 0"),
    "a sampler's row": ("rollout_log_probs", torch.zeros(4, 1), "token", r"rollout_log_probs must .*got \[4, 1\]"),
}


@pytest.mark.parametrize("case", BAD_CALLS)
def test_a_bad_argument_is_refused_by_its_name_in_openrlhf(case: str) -> None:
    argument, value, level, text = BAD_CALLS[case]
    with pytest.raises(ValueError, match=f"PolicyLoss: {text}"):
        PolicyLoss(is_correction_level=level)(**(batch_of() | {argument: value}))


def test_the_sampler_in_place_of_the_old_policy_must_be_finite() -> None:
    tensors = batch_of()
    tensors["rollout_log_probs"][1, 2] = torch.nan
    with pytest.raises(
        ValueError, match=r"PolicyLoss: rollout_log_probs must be finite at live tokens, got nan at \[1"
    ):
        PolicyLoss(policy_loss_type="gspo", is_correction_level="token")(**tensors)
