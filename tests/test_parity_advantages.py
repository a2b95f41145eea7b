"""Advantages of groups are TRL's, verl's and OpenRLHF's, by their own code; to float32, in which ours are returned."""

from __future__ import annotations

import importlib
import math
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from parity_support import Draw, assert_equal, draw, draws
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels import advantages

RTOL = 1e-6
SHAPES = {"seed": st.integers(0, 10**6), "groups": st.integers(1, 4), "size": st.sampled_from([2, 3, 5])}


@pytest.fixture(scope="module")
def trl() -> ModuleType:
    return importlib.import_module("parity_trl")  # skips where TRL is missing


@pytest.fixture(scope="module")
def verl() -> ModuleType:
    return importlib.import_module("parity_verl")


@pytest.fixture(scope="module")
def openrlhf() -> ModuleType:
    return importlib.import_module("parity_openrlhf")


def rewards_of(seed: int, *shape: int, missing: float = 0.0) -> Tensor:
    """Rewards in eighths, which float32 holds, with ties and, where asked for, NaN."""
    rng = torch.Generator().manual_seed(seed)
    rewards = torch.randint(-4, 9, shape, generator=rng).double() / 8
    rewards[torch.rand(shape, generator=rng) < missing] = math.nan
    return rewards


def responses(seed: int, count: int) -> Draw:
    """A batch of responses that each have a token, more than one in all."""
    batch = draw(seed, rows=count)
    mask = batch.mask.clone()
    mask[:, 0] = 1
    mask[0, 1] = 1
    return Draw(**vars(batch) | {"mask": mask})


def agree(ours: Tensor, theirs: Tensor, mask: Tensor | None = None, rtol: float = RTOL) -> None:
    """At every live token, if theirs have tokens."""
    if mask is not None:
        ours = ours[:, None].expand(mask.shape)[mask.bool()]
        theirs = theirs[mask.bool()]
    assert ours.dtype == torch.float32
    scale = max(1.0, float(theirs.abs().max()))  # differences of rewards of size 1
    assert_equal(ours / scale, theirs / scale, "advantages", rtol)
    assert (ours.double() - theirs).abs().max() <= rtol * scale


# TRL 1.16.0


@draws
@given(**SHAPES, scale=st.sampled_from(["group", "batch", "none"]), missing=st.sampled_from([0.0, 0.2]))
def test_sum_then_normalize(trl: ModuleType, seed: int, groups: int, size: int, scale: str, missing: float) -> None:
    rewards = rewards_of(seed, groups * size, missing=missing)
    scorer = trl.Scorer(
        responses(seed, len(rewards)), rewards[:, None], scale_rewards=scale, num_generations=size
    )  # fmt: skip
    agree(gk.group_advantages(rewards, group_size=size, scale=scale), scorer.score()["advantages"])


@draws
@given(**SHAPES, missing=st.sampled_from([0.0, 0.2]), weights=st.sampled_from([(1.0, 1.0, 1.0), (0.5, 2.0, -1.0)]))
def test_normalize_then_sum_is_gdpo(
    trl: ModuleType, seed: int, groups: int, size: int, missing: float, weights: tuple[float, ...]
) -> None:
    rewards = rewards_of(seed, groups * size, 3, missing=missing)
    scorer = trl.Scorer(
        responses(seed, len(rewards)), rewards, torch.tensor(weights).double(), num_generations=size,
        multi_objective_aggregation="normalize_then_sum",
    )  # fmt: skip
    agree(
        advantages.gdpo_advantages(rewards, torch.tensor(weights).double(), group_size=size),
        scorer.score()["advantages"],
    )


def test_the_rewards_of_the_loss_are_trls_defaults(trl: ModuleType) -> None:
    batch = responses(3, 6)
    rewards = rewards_of(3, 6)
    theirs = trl.Scorer(batch, rewards[:, None], num_generations=3).score()["advantages"]
    config = gk.GRPOLossConfig.preset("trl")
    given = {"config": config, "completion_mask": batch.mask, "old_per_token_logps": batch.old}
    by_rewards = gk.grpo_loss(batch.logits, batch.ids, rewards=rewards, group_size=3, **given).loss
    by_advantages = gk.grpo_loss(batch.logits, batch.ids, advantages=theirs, **given).loss
    assert abs(by_advantages) > 0.01
    assert_equal(by_rewards, by_advantages, "loss", RTOL)


# verl 0.9.1


def uneven_ids(seed: int, count: int) -> Tensor:
    """Groups of two and more responses, in any order."""
    rng = torch.Generator().manual_seed(seed)
    ids = torch.arange(count) // 2
    if count % 2:
        ids[-1] = ids[0]
    return ids[torch.randperm(count, generator=rng)] * 3 + 5


@pytest.mark.parametrize("by_std", [True, False])
@pytest.mark.parametrize("estimator", ["grpo", "grpo_vectorized"])
@draws
@given(seed=st.integers(0, 10**6), count=st.integers(2, 9))
def test_verl_grpo(verl: ModuleType, estimator: str, by_std: bool, seed: int, count: int) -> None:
    batch, rewards, ids = responses(seed, count), rewards_of(seed, count), uneven_ids(seed, count)
    theirs = verl.advantages(estimator, rewards, batch.mask, ids, norm_adv_by_std_in_grpo=by_std)
    scale = "group" if by_std else "none"
    agree(gk.group_advantages(rewards, group_ids=ids, scale=scale, eps=1e-6), theirs, batch.mask)


@pytest.mark.parametrize("estimator", ["rloo", "rloo_vectorized"])
@draws
@given(seed=st.integers(0, 10**6), count=st.integers(2, 9))
def test_verl_rloo(verl: ModuleType, estimator: str, seed: int, count: int) -> None:
    batch, rewards, ids = responses(seed, count), rewards_of(seed, count), uneven_ids(seed, count)
    theirs = verl.advantages(estimator, rewards, batch.mask, ids)
    agree(gk.group_advantages(rewards, group_ids=ids, baseline="leave_one_out", scale="none"), theirs, batch.mask)


@pytest.mark.parametrize("baseline", ["none", "mean"])
@draws
@given(seed=st.integers(0, 10**6), count=st.integers(2, 9))
def test_verl_reinforce_plus_plus(verl: ModuleType, baseline: str, seed: int, count: int) -> None:
    batch, rewards, ids = responses(seed, count), rewards_of(seed, count), uneven_ids(seed, count)
    name = {"none": "reinforce_plus_plus", "mean": "reinforce_plus_plus_baseline"}[baseline]
    theirs = verl.advantages(name, rewards, batch.mask, ids, config=SimpleNamespace(gamma=1.0))
    ours = advantages.reinforce_plus_plus_advantages(rewards, batch.lengths, group_ids=ids, baseline=baseline)
    agree_where_groups_differ(ours, theirs, rewards, ids if baseline == "mean" else ids * 0, batch.mask)


def agree_where_groups_differ(ours: Tensor, theirs: Tensor, rewards: Tensor, ids: Tensor, mask: Tensor) -> None:
    """Where a group's rewards are all equal ours is 0; theirs is minus the mean over tokens, over the deviation."""
    groups = [rewards[ids == group] for group in ids]
    silent = torch.stack([(group == group[0]).all() for group in groups])
    assert (ours[silent] == 0).all()
    if not silent.all():
        agree(ours[~silent], theirs[~silent], mask[~silent], rtol=1e-5)


@draws
@given(seed=st.integers(0, 10**6), count=st.integers(2, 9))
def test_verl_gdpo(verl: ModuleType, seed: int, count: int) -> None:
    batch, rewards, ids = responses(seed, count), rewards_of(seed, count, 2), uneven_ids(seed, count)
    weights = torch.tensor([0.5, 2.0])
    # verl puts a reward on the last token, of a response without holes
    lengths = batch.lengths
    mask = (torch.arange(batch.mask.shape[1]) < lengths[:, None]).to(torch.int64)
    options: dict[str, Any] = {"gdpo_reward_keys": ["a", "b"], "gdpo_reward_weights": weights.tolist()}
    theirs = verl.advantages(
        "gdpo", rewards[:, 0], mask, ids, config=options,
        non_tensor_batch={"a": rewards[:, 0].numpy(), "b": rewards[:, 1].numpy()},
        batch={"prompts": mask[:, :0], "attention_mask": mask},
    )  # fmt: skip
    ours = advantages.gdpo_advantages(rewards, weights, lengths, group_ids=ids, eps=1e-6)
    agree_where_groups_differ(ours, theirs.double(), rewards, ids, mask)


# OpenRLHF 0.11.2


@pytest.mark.parametrize("estimator", ["rloo", "dr_grpo", "group_norm", "flash_reinforce"])
@draws
@given(**SHAPES)
def test_openrlhf_groups(openrlhf: ModuleType, estimator: str, seed: int, groups: int, size: int) -> None:
    batch, rewards = responses(seed, groups * size), rewards_of(seed, groups * size)
    theirs = openrlhf.advantages(rewards, batch.mask, size, estimator)
    options: dict[str, Any] = {
        "rloo": {"baseline": "leave_one_out", "scale": "none"}, "dr_grpo": {"scale": "none"},
        "group_norm": {"eps": 1e-9}, "flash_reinforce": {"scale": "none", "group_size": len(rewards)},
    }[estimator]  # fmt: skip
    agree(gk.group_advantages(rewards, **{"group_size": size} | options), theirs, batch.mask)


@pytest.mark.parametrize("estimator", ["reinforce", "reinforce_baseline"])
@draws
@given(**SHAPES)
def test_openrlhf_reinforce(openrlhf: ModuleType, estimator: str, seed: int, groups: int, size: int) -> None:
    batch, rewards = responses(seed, groups * size), rewards_of(seed, groups * size)
    theirs = openrlhf.advantages(rewards, batch.mask, size, estimator)
    baseline = "none" if estimator == "reinforce" else "mean"
    ours = advantages.reinforce_plus_plus_advantages(
        rewards, batch.lengths, group_size=size, baseline=baseline, ddof=0, eps=0.0
    )
    ids = torch.arange(len(rewards)) // (size if baseline == "mean" else len(rewards))
    agree_where_groups_differ(ours, theirs, rewards, ids, batch.mask)
