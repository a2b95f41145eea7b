"""Preset "trl" is TRL 1.16.0: the loss of `GRPOTrainer._compute_loss`, run on a trainer that is nothing else."""

from __future__ import annotations

import importlib
import inspect
import math
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from parity_projects import wide
from parity_support import Draw, Result, assert_agree, assert_equal, draw, draws, loud, run_ours
from torch import Tensor

import grpo_kernels as gk

LOSS_TYPES = ["grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo"]
PER_TOKEN = ["dapo", "cispo", "vespo"]  # what TRL divides by the tokens of the generation batch
CLIPPED = ["grpo", "bnpo", "dr_grpo", "dapo", "luspo"]
NAMES = {
    "kl": "kl", "entropy": "entropy", "policy_loss": "policy_loss", "cispo_clip_ratio": "cispo_clip_ratio",
    "clip_ratio/low_mean": "clip_ratio/low_mean", "clip_ratio/high_mean": "clip_ratio/high_mean",
    "clip_ratio/region_mean": "clip_ratio/region_mean", "vespo/phi_seq_mean": "vespo/phi_seq_mean",
}  # fmt: skip
NOT_OURS = ("clip_ratio/low_min", "clip_ratio/high_max", "entropy_coef")  # extremes over sequences; a setting

# One value of each is the default, so that every other option is also seen alone.
OPTIONS: dict[str, st.SearchStrategy[Any]] = {
    "importance_sampling_level": st.sampled_from(["token", "sequence"]),
    "epsilon": st.sampled_from([0.2, 0.05]),
    "epsilon_high": st.sampled_from([None, 0.28, 1.3]),
    "delta": st.sampled_from([None, 1.1, 2.0]),
    "beta": st.sampled_from([0.0, 0.04, 0.7]),
    "use_bias_correction_kl": st.booleans(),
    "sapo_temperature_pos": st.sampled_from([1.0, 0.7]),
    "sapo_temperature_neg": st.sampled_from([1.05, 1.6]),
    "vespo_k_pos": st.sampled_from([2.0, 1.5]),
    "vespo_lambda_pos": st.sampled_from([3.0, 0.6]),
    "vespo_k_neg": st.sampled_from([3.0, 0.8]),
    "vespo_lambda_neg": st.sampled_from([2.0, 0.0]),
    "top_entropy_quantile": st.sampled_from([1.0, 0.8, 0.35]),
    "off_policy_mask_threshold": st.sampled_from([None, 0.3, 0.05]),
    "entropy_coef": st.sampled_from([0.0, 0.03, -0.2]),
}
MODES = ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
ROLLOUT: dict[str, st.SearchStrategy[Any]] = {
    "mode": st.sampled_from(["none", *MODES]),
    "clip_max": st.sampled_from([3.0, 1.2]),
    "clip_min": st.sampled_from([None, 0.7]),
    "missing": st.booleans(),  # a log-probability that the sampler did not give
}
CALL: dict[str, st.SearchStrategy[Any]] = {
    "training": st.sampled_from([True, True, False]),
    "accumulation": st.sampled_from([1, 3]),
    "steps_per_generation": st.sampled_from([1, 2, 6]),
    "processes": st.sampled_from([1, 4]),
    "on_policy": st.sampled_from([False, False, True]),
    "shape": st.fixed_dictionaries(
        {
            "off_policy": st.sampled_from([0.4, 0.1, 1.0]),
            "token_advantages": st.sampled_from([False, False, True]),
            "empty_rows": st.sampled_from([False, False, True]),
        }
    ),
}


@pytest.fixture(scope="module")
def trl() -> ModuleType:
    """TRL's trainer without its surroundings; skips where TRL is missing."""
    return importlib.import_module("parity_trl")


def options_of(loss_type: str, options: dict[str, Any]) -> dict[str, Any]:
    """The options as TRL takes them with this loss type, without what it would ignore and we refuse."""
    others = {"sapo", "vespo"} - {loss_type}
    options = {"loss_type": loss_type} | {k: v for k, v in options.items() if k.partition("_")[0] not in others}
    if loss_type not in CLIPPED:
        options["delta"] = None
    if loss_type in ("sapo", "vespo"):
        options |= {"epsilon": 0.2, "epsilon_high": None}
    if loss_type in ("cispo", "vespo"):
        options["importance_sampling_level"] = "token"
    if loss_type == "cispo":
        options["epsilon_high"] = {None: 5.0, 0.28: 1.1, 1.3: 1.3}[options["epsilon_high"]]
    if loss_type == "dr_grpo":
        options["max_completion_length"] = 9
    return options


def rollout_of(loss_type: str, batch: Draw, rollout: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any], Draw]:
    """TRL's options for the sampler's weights, ours, and the batch that they are of."""
    mode = rollout["mode"]
    if loss_type == "vespo":  # TRL refuses the others there
        mode = mode.replace("sequence", "token")
    if rollout["missing"]:
        where = int(batch.mask.reshape(-1).argmax())
        values = batch.rollout.reshape(-1).clone()
        values[where] = math.nan
        batch = Draw(**vars(batch) | {"rollout": values.reshape(batch.rollout.shape)})
    limits = {"clip_max": rollout["clip_max"], "clip_min": rollout["clip_min"]}
    theirs = {f"vllm_importance_sampling_{key}": value for key, value in limits.items()}
    ours = {f"rollout_{key}": value for key, value in limits.items()}
    if mode == "none":
        return {}, {"rollout_correction": "none"}, batch
    return (
        theirs | {"use_vllm": True, "vllm_importance_sampling_mode": mode}, ours | {"rollout_correction": mode}, batch,
    )  # fmt: skip


def normalizers(loss_type: str, batch: Draw, items: float, call: dict[str, Any], length: int) -> float:
    """What TRL divides by, as our explicit `normalizer`."""
    accumulation = call["accumulation"] if call["training"] else 1
    if loss_type in PER_TOKEN:
        scale = accumulation / call["steps_per_generation"] if call["training"] else 1.0
        return items / call["processes"] * scale
    rows = float(len(batch.ids))
    return accumulation * {"bnpo": float(batch.live), "dr_grpo": rows * length}.get(loss_type, rows)


def compare(
    trl: ModuleType, loss_type: str, seed: int, options: dict[str, Any], rollout: dict[str, Any], call: dict[str, Any]
) -> tuple[Draw, Any]:
    """Both losses of a batch that is loud in theirs."""
    options = options_of(loss_type, options)

    def theirs(batch: Draw, logps: Tensor, entropy: Tensor) -> tuple[Tensor, dict[str, float]]:
        sampler, _, batch = rollout_of(loss_type, batch, rollout)
        trainer = trl.Trainer(
            training=call["training"], accumulation=call["accumulation"], processes=call["processes"],
            steps_per_generation=call["steps_per_generation"], **options, **sampler,
        )  # fmt: skip
        inputs = {"ref_per_token_logps": batch.ref, "num_items_in_batch": torch.tensor(3.0 * batch.live).double()}
        if call["on_policy"]:
            batch = Draw(**vars(batch) | {"old": batch.logps(batch.logits)[0]})
        else:
            inputs["old_per_token_logps"] = batch.old
        scored = trl.Scorer(batch, batch.advantages.reshape(len(batch.ids), -1)[:, :1], **sampler).score()
        wanted = scored.keys() & {"importance_sampling_ratio", "sampling_per_token_logps"}
        inputs |= {name: scored[name] for name in wanted}
        loss = trainer.loss(batch, logps, entropy, **inputs)
        return loss, {name: value for name, value in trainer.metrics().items() if name not in NOT_OURS}

    batch, their = loud(theirs, seed, **call["shape"])
    _, sampler, given_batch = rollout_of(loss_type, batch, rollout)
    config = gk.GRPOLossConfig.preset("trl", **{"entropy": True} | options | sampler)
    accumulation = call["accumulation"] if call["training"] else 1
    our, per_token = run_ours(
        given_batch, config,
        old_per_token_logps=None if call["on_policy"] else batch.old,
        ref_per_token_logps=batch.ref, rollout_per_token_logps=given_batch.rollout,
        normalizer=normalizers(loss_type, batch, 3.0 * batch.live, call, config.max_completion_length or 0),
        entropy_normalizer=None if accumulation == 1 else accumulation * selected(trl, batch, options),
    )  # fmt: skip
    of_sequences = ["phi"] + ["clip_ratio"] * (options["importance_sampling_level"] == "sequence")
    logged = {
        name: value
        for name, value in their.metrics.items()
        # with advantages of tokens TRL's flags are of tokens at any level; ours are of sequences
        if not (call["shape"]["token_advantages"] and any(word in name for word in of_sequences))
    }
    if "policy_loss" in logged and loss_type not in PER_TOKEN:  # logged before it is divided by the accumulation steps
        logged["policy_loss"] /= accumulation
    their = Result(their.loss, their.grad, logged)
    assert_agree(our, their, NAMES, where=f"{options} {sampler} {call}")
    return batch, per_token


def selected(trl: ModuleType, batch: Draw, options: dict[str, Any]) -> float:
    """The tokens over which TRL takes the mean entropy: with a quantile, those of the highest entropy."""
    if options["top_entropy_quantile"] == 1.0:
        return float(batch.live)
    _, entropy = batch.logps(batch.logits)
    mask = trl.Trainer().get_high_entropy_mask(wide(entropy), batch.mask, 1 - options["top_entropy_quantile"])
    return float(mask.sum())


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@draws
@given(
    seed=st.integers(0, 10**6), options=st.fixed_dictionaries(OPTIONS), rollout=st.fixed_dictionaries(ROLLOUT),
    call=st.fixed_dictionaries(CALL),
)  # fmt: skip
def test_the_loss_is_trls(
    trl: ModuleType, loss_type: str, seed: int, options: dict[str, Any], rollout: dict[str, Any], call: dict[str, Any]
) -> None:
    compare(trl, loss_type, seed, options, rollout, call)


def test_the_defaults_are_trls(trl: ModuleType) -> None:
    """Every field of ours that is one of GRPOConfig's has its default, under its name."""
    theirs, ours = trl.defaults(), gk.GRPOLossConfig.preset("trl")
    shared = sorted(set(theirs) & set(ours.__slots__) - {"max_completion_length"})  # no default where it is required
    assert {"beta", "delta", "epsilon", "epsilon_high", "loss_type", "use_bias_correction_kl"} < set(shared)
    assert {name: getattr(ours, name) for name in shared} == {name: theirs[name] for name in shared}
    assert ours.rollout_clip_max == theirs["vllm_importance_sampling_clip_max"]
    assert ours.rollout_clip_min == theirs["vllm_importance_sampling_clip_min"]


def test_every_loss_type_of_trl_is_compared(trl: ModuleType) -> None:
    source = inspect.getsource(trl.Trainer._compute_loss)
    assert set(LOSS_TYPES) == {name for name in gk_names() if f'"{name}"' in source}


def gk_names() -> set[str]:
    from grpo_kernels import config

    return set(config.LOSS_TYPES)


@draws
@given(seed=st.integers(0, 10**6), rollout=st.fixed_dictionaries(ROLLOUT | {"mode": st.sampled_from(MODES)}))
def test_the_weights_of_the_sampler_are_trls(trl: ModuleType, seed: int, rollout: dict[str, Any]) -> None:
    """The metrics of the weights that `_generate_and_score_completions` logs, and the advantage-free weights."""
    batch = draw(seed)
    theirs, ours, batch = rollout_of("dapo", batch, rollout)
    scorer = trl.Scorer(batch, batch.advantages[:, None], **theirs)
    scorer.score()
    logged = scorer.metrics()
    config = gk.GRPOLossConfig.preset("trl", **ours)
    # weighed by the old policy, which the scorer's model still is
    our, _ = run_ours(batch, config, old_per_token_logps=batch.old, rollout_per_token_logps=batch.rollout)
    means = ["mean"] if rollout["mode"].startswith("token") else []  # of a sequence's weight ours is a mean over tokens
    for how in ("min", "max", *means):
        assert_equal(
            our.metrics[f"importance_sampling_ratio/{how}"], logged[f"sampling/importance_sampling_ratio/{how}"], how
        )
