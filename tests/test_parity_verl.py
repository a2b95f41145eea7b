"""Preset "verl" is verl 0.9.1: `ppo_loss` with every registered policy loss, aggregation and KL."""

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

# verl's loss_mode -> our fields; "bypass_mode" is two of the others on the sampler's log-probabilities
MODES: dict[str, dict[str, Any]] = {
    "vanilla": {"loss_type": "dapo"},
    "gspo": {"loss_type": "dapo", "importance_sampling_level": "sequence_token"},
    "cispo": {"loss_type": "cispo"},
    "sapo": {"loss_type": "sapo"},
    "gpg": {"loss_type": "gpg"},
    "dro": {"loss_type": "dro"},
    "dppo_tv": {"loss_type": "dppo_tv"},
    "dppo_kl": {"loss_type": "dppo_kl"},
    "clip_cov": {"loss_type": "clip_cov"},
    "kl_cov": {"loss_type": "kl_cov"},
    "geo_mean": {"loss_type": "gmpo"},
}
AGGREGATIONS = ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
FIXED = ("sapo", "geo_mean")  # these aggregate their policy term in one way, whatever loss_agg_mode says
KL_NAMES = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"} | {name: name for name in ("k1", "abs", "k2", "k3")}

OPTIONS: dict[str, st.SearchStrategy[Any]] = {
    "low": st.sampled_from([0.2, 0.05, 0.4]),
    "high": st.sampled_from([0.2, 0.28, 0.02]),
    "ratio_c": st.sampled_from([3.0, 1.5]),
    "tau": st.sampled_from([(1.0, 1.05), (0.6, 2.0)]),
    "dro_beta": st.sampled_from([0.1, 0.8]),
    "cov_ratio": st.sampled_from([2e-4, 0.3, 1.0]),
    "cov_bounds": st.sampled_from([(1.0, 5.0), (-0.2, 0.4), (0.0, 50.0)]),
    "cov_coef": st.sampled_from([0.1, 1.0]),
    "kl": st.sampled_from([None, *KL_NAMES, *(f"{name}+" for name in KL_NAMES)]),
    "kl_coef": st.sampled_from([0.001, 0.3]),
    "entropy_coef": st.sampled_from([0.0, 0.05]),
    "agg": st.sampled_from(AGGREGATIONS),
    "scale": st.sampled_from([None, 7]),
    "global": st.sampled_from([None, (1, 40, 11), (2, 40, 11)]),  # dp_size, batch_num_tokens, global_batch_size
    "rollout": st.sampled_from([None, ("token", 2.0), ("token", "0.6_1.5"), ("sequence", 2.0), ("sequence", "0.3_4")]),
    "shape": st.fixed_dictionaries(
        {
            "off_policy": st.sampled_from([0.4, 0.1, 1.2, 15.0]),  # the last reaches log_ratio_clamp,
            "reference": st.sampled_from([0.6, 0.6, 12.0]),  # and this one kl_clamp
            "empty_rows": st.sampled_from([False, False, True]),
            "token_advantages": st.booleans(),
        }
    ),
}


@pytest.fixture(scope="module")
def verl() -> ModuleType:
    """verl's own losses on plain tensors; skips where verl is missing."""
    return importlib.import_module("parity_verl")


def verls(verl: ModuleType, mode: str, options: dict[str, Any]) -> Any:
    """The options as verl's ActorConfig."""
    policy = {
        "dro_beta": options["dro_beta"], "clip_cov_ratio": options["cov_ratio"], "kl_cov_ratio": options["cov_ratio"],
        "clip_cov_lb": options["cov_bounds"][0], "clip_cov_ub": options["cov_bounds"][1],
        "ppo_kl_coef": options["cov_coef"],
    }  # fmt: skip
    return verl.actor_config(
        mode, policy=policy, clip_ratio_low=options["low"], clip_ratio_high=options["high"],
        clip_ratio_c=options["ratio_c"], tau_pos=options["tau"][0], tau_neg=options["tau"][1],
        loss_agg_mode=options["agg"], loss_scale_factor=options["scale"], entropy_coeff=options["entropy_coef"],
        use_kl_loss=options["kl"] is not None, kl_loss_type=options["kl"] or "k3", kl_loss_coef=options["kl_coef"],
    )  # fmt: skip


def our_fields(mode: str, options: dict[str, Any], width: int) -> dict[str, Any]:
    """The same options as overrides of preset "verl"."""
    fields: dict[str, Any] = dict(MODES[mode])
    if mode not in ("sapo", "gpg", "dro", "kl_cov"):
        fields |= {"epsilon": options["low"], "epsilon_high": options["high"]}
    fields |= {
        "vanilla": {"dual_clip": options["ratio_c"]},
        "sapo": {"sapo_temperature_pos": options["tau"][0], "sapo_temperature_neg": options["tau"][1]},
        "dro": {"dro_beta": options["dro_beta"]},
        "dppo_tv": {"dppo_cap": options["ratio_c"]},
        "dppo_kl": {"dppo_cap": options["ratio_c"]},
        "clip_cov": {"cov_ratio": options["cov_ratio"], "cov_bounds": options["cov_bounds"]},
        "kl_cov": {"cov_ratio": options["cov_ratio"], "cov_coef": options["cov_coef"]},
    }.get(mode, {})
    if options["kl"] is not None:
        name, plus = options["kl"].rstrip("+"), "+" * options["kl"].endswith("+")
        fields |= {"beta": options["kl_coef"], "kl_estimator": KL_NAMES[name] + plus}
    fields["aggregation"] = options["agg"].replace("-", "_")
    if options["agg"].endswith("norm"):
        fields["max_completion_length"] = options["scale"] or width
    if options["rollout"] is not None:
        level, limit = options["rollout"]
        low, _, high = str(limit).rpartition("_")
        fields |= {"rollout_correction": f"{level}_{'mask' if low else 'truncate'}", "rollout_clip_max": float(high)}
        if low:
            fields["rollout_clip_min"] = float(low)
    return fields | {"entropy": True, "entropy_coef": options["entropy_coef"]}


def normalizer(batch: Draw, options: dict[str, Any], rows: int | None = None) -> float:
    """What verl divides by: means over sequences leave out those without a token."""
    dp_size, tokens, sequences = options["global"] or (1, batch.live, batch.sequences)
    count = {"token-mean": tokens, "token-sum": 1}.get(options["agg"], rows or sequences)
    if options["agg"].endswith("norm"):
        count *= options["scale"] or batch.ids.shape[1]
    return count / dp_size


def plain(options: dict[str, Any], mode: str) -> dict[str, Any]:
    """The options without those that verl mixes in a way that no single aggregation gives (docs/conventions.md)."""
    options = dict(options)
    if mode in FIXED:
        options["agg"] = "seq-mean-token-mean"
    if mode == "geo_mean":  # a plain mean over rows, and the KL over the global batch
        options["global"] = None
        options["shape"] = options["shape"] | {"empty_rows": False, "token_advantages": False}
        options["rollout"] = None  # its weight of a sequence is exp(mean log(w + 1e-10)), whatever the level
    if mode == "kl_cov":  # the tokens of one sequence have one covariance, and the largest is anyone's choice
        options["shape"] = options["shape"] | {"token_advantages": True}
    if mode == "gspo":  # it bounds the log-ratio at 10, from above alone
        options["shape"] = options["shape"] | {"off_policy": min(1.2, options["shape"]["off_policy"])}
    if options["agg"] != "token-mean":
        options["entropy_coef"] = 0.0  # verl's entropy is aggregated like its loss; ours is a mean over tokens
    return options


@pytest.mark.parametrize("mode", MODES)
@draws
@given(seed=st.integers(0, 10**6), options=st.fixed_dictionaries(OPTIONS))
def test_the_loss_is_verls(verl: ModuleType, mode: str, seed: int, options: dict[str, Any]) -> None:
    options = plain(options, mode)
    dp_size, tokens, sequences = options["global"] or (1, None, None)

    def theirs(batch: Draw, logps: Tensor, entropy: Tensor) -> tuple[Tensor, dict[str, float]]:
        weights = None if options["rollout"] is None else verl.rollout_weights(batch, *options["rollout"])
        torch.manual_seed(seed)  # clip_cov draws from the global generator
        return verl.loss(
            verls(verl, mode, options), batch, logps, entropy, dp_size=dp_size,
            batch_num_tokens=tokens, global_batch_size=sequences, weights=weights,
        )  # fmt: skip

    batch, their = loud(theirs, seed, tokens=3, **options["shape"])  # two tokens have one covariance
    fields = our_fields(mode, options, batch.ids.shape[1])
    config = gk.GRPOLossConfig.preset("verl", **fields)
    random = {"generator": torch.Generator().manual_seed(seed)} if mode == "clip_cov" else {}
    our, per_token = run_ours(
        batch, config, old_per_token_logps=batch.old, ref_per_token_logps=batch.ref,
        rollout_per_token_logps=batch.rollout if options["rollout"] else None,
        normalizer=normalizer(batch, options, len(batch.ids) if mode == "geo_mean" else None),
        entropy_normalizer=normalizer(batch, options | {"agg": "token-mean"}), **random,
    )  # fmt: skip
    assert_agree(our, Result(their.loss, their.grad, {}), {}, where=f"{fields}")
    compare_metrics(mode, batch, our, per_token, their, options)


def compare_metrics(
    mode: str, batch: Draw, our: Result, per_token: Any, their: Result, options: dict[str, Any]
) -> None:
    """Each number that verl logs, from what we return."""
    logged = dict(their.metrics)
    live = batch.mask.bool()
    log_ratio = per_token.ratio.log() if mode != "gspo" else per_token.logps - batch.old
    entropy = logged.pop("actor/entropy_loss")
    if options["agg"] == "token-mean":
        assert_equal(our.metrics["entropy"] * batch.live / normalizer(batch, options), entropy, "entropy")
    kl, coef = logged.pop("kl_loss", 0.0), logged.pop("kl_coef", 0.0)
    assert_equal(our.metrics["policy_loss"], logged.pop("actor/pg_loss") + coef * kl, "policy_loss")
    if "actor/ppo_kl" in logged:
        size = log_ratio[live].abs() if mode == "kl_cov" else -log_ratio[live]
        assert_equal(size.mean(), logged.pop("actor/ppo_kl"), "ppo_kl")
    compare_clips(mode, batch, our, per_token, logged, options)
    assert not logged, logged


def compare_clips(
    mode: str, batch: Draw, our: Result, per_token: Any, logged: dict[str, float], options: dict[str, Any]
) -> None:
    """pg_clipfrac and pg_clipfrac_lower, which mean something else in every loss."""
    live, low, high = batch.mask.bool(), options["low"], options["high"]
    ratio, advantages = per_token.ratio[live], batch.token_advantages()[live]
    gap = (per_token.logps - batch.old)[live]
    name = {"vanilla": "clip_ratio/region_mean", "clip_cov": "cov_selected_ratio"}.get(mode)
    name = "clip_ratio/region_mean" if mode.startswith("dppo") else name
    flags = None
    if mode == "cispo":
        flags = (ratio < 1 - low) | (ratio > 1 + high)
    elif mode == "gspo":  # ours is a mean over sequences
        flags = ((ratio < 1 - low) & (advantages < 0)) | ((ratio > 1 + high) & (advantages > 0))
    elif mode == "geo_mean":
        flags = ((gap < -low) | (gap > high)) & (advantages > 0)
    elif mode == "sapo":
        flags = ratio != ratio
    if "actor/pg_clipfrac" in logged:
        share = our.metrics[name] if name else flags.double().mean()  # type: ignore[union-attr]
        assert_equal(share, logged.pop("actor/pg_clipfrac"), "pg_clipfrac")
    lower = ratio != ratio
    if mode == "vanilla":
        lower = (advantages < 0) & (ratio > options["ratio_c"])
    elif mode == "geo_mean":
        lower = ((gap < -low) | (gap > high)) & (advantages < 0)
    given = logged.pop("actor/pg_clipfrac_lower", 0.0)
    if not mode.startswith("dppo"):  # there it counts capped weights of tokens inside the region
        assert_equal(lower.double().mean(), given, "pg_clipfrac_lower")


def test_every_policy_loss_of_verl_is_compared(verl: ModuleType) -> None:
    own = {name for name in verl.VERL.core.POLICY_LOSS_REGISTRY if not name.startswith("gk_")}  # ours, if loaded
    assert own == set(MODES) | {"bypass_mode"}


def test_every_aggregation_of_verl_is_compared(verl: ModuleType) -> None:
    for mode in AGGREGATIONS:
        verl.actor_config(loss_agg_mode=mode)
    source = inspect.getsource(verl.VERL.core.agg_loss)
    assert set(re.findall(r'"((?:token|seq)-[a-z-]+)"', source)) == set(AGGREGATIONS)


def test_every_kl_of_verl_is_compared(verl: ModuleType) -> None:
    names = set(re.findall(r'"([a-z_0-9]+)"', inspect.getsource(verl.VERL.core.kl_penalty_forward).split('"""')[2]))
    assert names == set(KL_NAMES) | {"full"}  # verl raises for "full"


@pytest.mark.parametrize("use_kl", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_the_defaults_are_verls(verl: ModuleType, mode: str, use_kl: bool) -> None:
    """Nothing overridden but the loss and what verl itself requires or switches on."""
    needed = {"dro_beta": 0.1} if mode == "dro" else {}
    beta = {"beta": verl.actor_config().kl_loss_coef} if use_kl else {}

    def theirs(batch: Draw, logps: Tensor, entropy: Tensor) -> tuple[Tensor, dict[str, float]]:
        aggregation = {"loss_agg_mode": "seq-mean-token-mean"} if mode in FIXED else {}
        config = verl.actor_config(mode, policy=needed, use_kl_loss=use_kl, **aggregation)
        torch.manual_seed(0)
        return verl.loss(config, batch, logps, None)

    config = gk.GRPOLossConfig.preset("verl", **MODES[mode], **needed, **beta)
    for seed in range(5):
        batch, their = loud(theirs, seed, tokens=3, off_policy=1.6, token_advantages=mode == "kl_cov")
        random = {"generator": torch.Generator().manual_seed(0)} if mode == "clip_cov" else {}
        our, _ = run_ours(batch, config, old_per_token_logps=batch.old, ref_per_token_logps=batch.ref, **random)
        assert_agree(our, Result(their.loss, their.grad, {}), {}, where=mode)


def test_the_default_threshold_of_the_weights_is_verls(verl: ModuleType) -> None:
    config = gk.GRPOLossConfig.preset("verl", rollout_correction="sequence_truncate")
    assert config.rollout_clip_max == verl.VERL.config.actor.RolloutCorrectionConfig().rollout_is_threshold
    assert config.rollout_clip_min is None


@draws
@given(seed=st.integers(0, 10**6), low=st.sampled_from([0.2, 0.4]), off_policy=st.sampled_from([0.3, 1.0]))
def test_bypass_mode_with_ppo_clip_is_vanilla_on_the_samplers_log_probs(
    verl: ModuleType, seed: int, low: float, off_policy: float
) -> None:
    def theirs(batch: Draw, logps: Tensor, entropy: Tensor) -> tuple[Tensor, dict[str, float]]:
        return verl.bypass("ppo_clip", batch, logps, clip_ratio_low=low), {}

    batch, their = loud(theirs, seed, off_policy=off_policy)
    config = gk.GRPOLossConfig.preset("verl", epsilon=low, epsilon_high=0.2)
    our, _ = run_ours(batch, config, old_per_token_logps=batch.rollout)
    assert_agree(our, their, {})


@draws
@given(
    seed=st.integers(0, 10**6), level=st.sampled_from(["token", "sequence"]),
    threshold=st.sampled_from([2.0, 1.2, "0.5_2"]), off_policy=st.sampled_from([0.3, 1.0]),
)  # fmt: skip
def test_bypass_mode_with_reinforce_is_gpg_weighed_against_the_sampler(
    verl: ModuleType, seed: int, level: str, threshold: float | str, off_policy: float
) -> None:
    def theirs(batch: Draw, logps: Tensor, entropy: Tensor) -> tuple[Tensor, dict[str, float]]:
        return verl.bypass("reinforce", batch, logps, rollout_is=level, rollout_is_threshold=threshold), {}

    batch, their = loud(theirs, seed, off_policy=off_policy)
    low, _, high = str(threshold).rpartition("_")
    limits = {"rollout_clip_max": float(high)} | ({"rollout_clip_min": float(low)} if low else {})
    config = gk.GRPOLossConfig.preset(
        "verl", loss_type="gpg", rollout_correction=f"{level}_{'mask' if low else 'truncate'}", **limits
    )
    our, _ = run_ours(batch, config, rollout_per_token_logps=batch.rollout)  # no old policy: weighed as it is now
    assert_agree(our, their, {})
