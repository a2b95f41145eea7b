"""Preset "openrlhf" is OpenRLHF 0.11.2: the loss of `ActorPPOTrainer.training_step` with its PolicyLoss and its KL."""

from __future__ import annotations

import importlib
import inspect
import re
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from parity_support import Draw, Result, assert_agree, assert_equal, draws, loud, run_ours
from torch import Tensor

import grpo_kernels as gk

OPTIONS: dict[str, st.SearchStrategy[Any]] = {
    "low": st.sampled_from([0.2, 0.05]),
    "high": st.sampled_from([0.2, 0.28, 1.0]),
    "dual_clip": st.sampled_from([None, 3.0, 1.4]),
    "token_level": st.booleans(),
    "kl": st.sampled_from([None, "k1", "k2", "k3"]),
    "kl_coef": st.sampled_from([0.01, 0.4]),
    "entropy_coef": st.sampled_from([None, 0.0, 0.05]),
    "global": st.sampled_from([None, (1, 40.0, 11.0), (4, 40.0, 11.0)]),  # dp_size, batch_num_tokens, global_batch_size
    "correction": st.sampled_from([None, "clip", "mask"]),
    "threshold": st.sampled_from([(0.5, 5.0), (0.9, 1.3)]),
    "shape": st.fixed_dictionaries(
        {
            "off_policy": st.sampled_from([0.4, 0.1, 1.2, 12.0]),  # the last reaches log_ratio_clamp,
            "reference": st.sampled_from([0.6, 0.6, 12.0]),  # and this one kl_clamp
            "empty_rows": st.sampled_from([False, False, True]),
            "token_advantages": st.sampled_from([False, True]),
        }
    ),
}


@pytest.fixture(scope="module")
def openrlhf() -> ModuleType:
    """OpenRLHF's own actor step; skips where OpenRLHF is missing."""
    return importlib.import_module("parity_openrlhf")


def coherent(options: dict[str, Any], policy: str) -> dict[str, Any]:
    """The options without those that OpenRLHF aggregates in two ways at once: its KL is always a mean over tokens."""
    options = dict(options)
    if policy == "gspo":
        options["token_level"] = False
    if not options["token_level"]:
        options["kl"] = None
    return options


def batch_info(options: dict[str, Any]) -> dict[str, Any] | None:
    if options["global"] is None:
        return None
    return dict(zip(("dp_size", "batch_num_tokens", "global_batch_size"), options["global"], strict=True))


def normalizer(batch: Draw, options: dict[str, Any], *, tokens: bool) -> float:
    """What OpenRLHF divides by; sequences without a token do not count."""
    dp_size, num_tokens, num_sequences = options["global"] or (1, batch.live, batch.sequences)
    return (num_tokens if tokens else num_sequences) / dp_size


def fields_of(options: dict[str, Any], policy: str) -> dict[str, Any]:
    """The options as overrides of preset "openrlhf"."""
    fields: dict[str, Any] = {"epsilon": options["low"], "epsilon_high": options["high"], "entropy": True}
    fields["dual_clip"] = options["dual_clip"]
    fields["entropy_coef"] = options["entropy_coef"] or 0.0
    if policy == "gspo":
        fields["importance_sampling_level"] = "sequence"
    elif not options["token_level"]:
        fields["loss_type"] = "grpo"
    if options["kl"] is not None:
        fields |= {"beta": options["kl_coef"], "kl_estimator": options["kl"]}
    if options["correction"] is not None and policy == "ppo":
        fields["rollout_correction"] = {"clip": "token_truncate", "mask": "token_mask"}[options["correction"]]
        fields["rollout_clip_min"], fields["rollout_clip_max"] = options["threshold"]
    return fields


@pytest.mark.parametrize("policy", ["ppo", "gspo"])
@draws
@given(seed=st.integers(0, 10**6), options=st.fixed_dictionaries(OPTIONS))
def test_the_loss_is_openrlhfs(openrlhf: ModuleType, policy: str, seed: int, options: dict[str, Any]) -> None:
    options = coherent(options, policy)
    correction = options["correction"]

    def theirs(batch: Draw, logps: Tensor, entropy: Tensor) -> tuple[Tensor, dict[str, float]]:
        return openrlhf.loss(
            batch, logps, entropy, kl_coef=options["kl_coef"] if options["kl"] else 0.0,
            kl_estimator=options["kl"] or "k1", entropy_coef=options["entropy_coef"], batch_info=batch_info(options),
            with_rollout=correction is not None, clip_eps_low=options["low"], clip_eps_high=options["high"],
            dual_clip=options["dual_clip"], token_level_loss=options["token_level"], policy_loss_type=policy,
            is_correction_level="off" if correction is None else "token", is_correction_mode=correction or "mask",
            is_correction_threshold=options["threshold"],
        )  # fmt: skip

    batch, their = loud(theirs, seed, **options["shape"])
    config = gk.GRPOLossConfig.preset("openrlhf", **fields_of(options, policy))
    # with a correction OpenRLHF's gspo takes the sampler for the old policy
    sampled = policy == "gspo" and correction is not None
    our, per_token = run_ours(
        batch, config, old_per_token_logps=batch.rollout if sampled else batch.old, ref_per_token_logps=batch.ref,
        rollout_per_token_logps=batch.rollout if correction and policy == "ppo" else None,
        normalizer=normalizer(batch, options, tokens=options["token_level"]),
        entropy_normalizer=normalizer(batch, options, tokens=True),
    )  # fmt: skip
    assert_agree(our, Result(their.loss, their.grad, {}), {}, where=f"{fields_of(options, policy)}")
    compare_metrics(policy, batch, our, per_token, dict(their.metrics), options)


def compare_metrics(
    policy: str, batch: Draw, our: Result, per_token: Any, logged: dict[str, float], options: dict[str, Any]
) -> None:
    """Each number that OpenRLHF logs, from what we return."""
    live = batch.mask.bool()
    if policy == "ppo":
        assert_equal(our.metrics["clip_ratio/region_mean"], logged.pop("ppo_clip_ratio"), "ppo_clip_ratio")
    else:  # a mean over tokens, where ours is one over sequences as in TRL
        ratio, advantages = per_token.ratio, batch.token_advantages()
        clipped = ((ratio > 1 + options["high"]) & (advantages > 0)) | ((ratio < 1 - options["low"]) & (advantages < 0))
        assert_equal(clipped[live].double().mean(), logged.pop("ppo_clip_ratio"), "ppo_clip_ratio")
    gap = (per_token.logps - batch.old)[live]
    assert_equal(-gap.mean(), logged.pop("ppo_kl"), "ppo_kl")
    if "vllm_kl" in logged:
        difference = (batch.rollout - batch.old)[live]
        assert_equal(difference.mean(), logged.pop("vllm_kl"), "vllm_kl")
        low, high = options["threshold"]
        weight = (-difference).exp()
        outside = (weight < low) | (weight > high)
        assert_equal(outside.double().mean(), logged.pop("is_filter_ratio"), "is_filter_ratio")
        kept = weight.clamp(low, high) if options["correction"] == "clip" else weight.where(~outside, 0.0)
        assert_equal(our.metrics["importance_sampling_ratio/mean"], kept.mean(), "importance_sampling_ratio")
    if "kl" in logged:
        scale = batch.live / normalizer(batch, options, tokens=True)
        assert_equal(our.metrics["kl"] * scale, logged.pop("kl"), "kl")
        assert_equal((per_token.logps - batch.ref)[live].mean(), logged.pop("logprobs_diff"), "logprobs_diff")
    assert not logged


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@draws
@given(seed=st.integers(0, 10**6), kl_coef=st.sampled_from([0.05, 0.5]))
def test_the_unbiased_gradient_is_the_straight_through_one(
    openrlhf: ModuleType, estimator: str, seed: int, kl_coef: float
) -> None:
    """On-policy, where OpenRLHF's detached weight pi / pi_old is 1; off-policy it has one that we do not offer."""

    def theirs(batch: Draw, logps: Tensor, entropy: Tensor) -> tuple[Tensor, dict[str, float]]:
        now = Draw(**vars(batch) | {"old": batch.logps(batch.logits)[0]})
        return openrlhf.loss(now, logps, None, kl_coef=kl_coef, kl_estimator=estimator, unbiased_gradient=True)[0], {}

    batch, their = loud(theirs, seed)
    config = gk.GRPOLossConfig.preset("openrlhf", beta=kl_coef, kl_estimator=f"{estimator}+")
    our, _ = run_ours(batch, config, ref_per_token_logps=batch.ref)
    assert_agree(our, their, {})


@pytest.mark.parametrize("kl_coef", [0.0, 0.01])
@pytest.mark.parametrize("policy", ["ppo", "gspo"])
def test_the_defaults_are_openrlhfs(openrlhf: ModuleType, policy: str, kl_coef: float) -> None:
    if policy == "gspo":
        kl_coef = 0.0  # its KL would be a mean over tokens beside a mean over sequences

    def theirs(batch: Draw, logps: Tensor, entropy: Tensor) -> tuple[Tensor, dict[str, float]]:
        return openrlhf.loss(batch, logps, None, kl_coef=kl_coef, policy_loss_type=policy)[0], {}

    batch, their = loud(theirs, 3, off_policy=0.6)
    level = {"importance_sampling_level": "sequence"} if policy == "gspo" else {}
    config = gk.GRPOLossConfig.preset("openrlhf", beta=kl_coef, **level)
    our, _ = run_ours(batch, config, old_per_token_logps=batch.old, ref_per_token_logps=batch.ref)
    assert_agree(our, their, {})


def test_the_default_band_of_the_correction_is_openrlhfs(openrlhf: ModuleType) -> None:
    default = inspect.signature(openrlhf.OPENRLHF.loss.PolicyLoss).parameters["is_correction_threshold"].default
    config = gk.GRPOLossConfig.preset("openrlhf", rollout_correction="token_mask")
    assert (config.rollout_clip_min, config.rollout_clip_max) == default


def test_every_policy_loss_and_kl_of_openrlhf_is_compared(openrlhf: ModuleType) -> None:
    source = inspect.getsource(openrlhf.OPENRLHF.loss.PolicyLoss.forward)
    assert set(re.findall(r'policy_loss_type == "(\w+)"', source)) == {"ppo", "gspo"}
    source = inspect.getsource(openrlhf.OPENRLHF.utils.compute_approx_kl)
    assert set(re.findall(r'kl_estimator == "(\w+)"', source)) == {"k1", "k2", "k3"}
    assert torch.equal(openrlhf.OPENRLHF.utils.masked_mean(torch.tensor([1.0, 3.0]), None), torch.tensor(2.0))
