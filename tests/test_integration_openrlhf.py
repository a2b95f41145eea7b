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
    "clip_eps_low": ({"clip_eps_low": 1.2}, "epsilon must be in"),
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
