"""Group-relative advantages, before the loss and in it."""

from __future__ import annotations

import dataclasses
import math
import warnings
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from support import (
    DTYPES,
    LAYOUTS,
    OBJECTIVES,
    make_batch,
    objective_options,
    run,
    same_bits,
)
from tolerance import as_array
from torch import Tensor

import grpo_kernels as gk

NAN = math.nan


# Advantages


def advantages(rewards: Any, **kwargs: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return gk.group_advantages(torch.tensor(rewards), **kwargs)


def test_one_group_uses_the_sample_deviation() -> None:
    got = advantages([1.0, 0.0, 0.0, 0.0])
    assert got.dtype == torch.float32 and got.shape == (4,)
    np.testing.assert_allclose(got.numpy(), [1.4997001, -0.4999, -0.4999, -0.4999], atol=1e-6)
    np.testing.assert_allclose(advantages([1.0, 0.0, 0.0, 0.0], group_size=4).numpy(), got.numpy(), rtol=0)
    np.testing.assert_allclose(advantages([1.0, 0.0, 0.0, 0.0], ddof=0)[0].item(), 1.7316509, atol=1e-6)


@pytest.mark.parametrize("ids", [[0, 1, 0, 1], [7, -3, 7, -3], [2**40, 5, 2**40, 5]])
def test_groups_by_id_in_any_order(ids: list[int]) -> None:
    got = advantages([1.0, 5.0, 3.0, 9.0], group_ids=torch.tensor(ids))
    np.testing.assert_allclose(got.numpy(), [-0.7070568, -0.7070818, 0.7070568, 0.7070818], atol=1e-6)


@pytest.mark.parametrize("baseline", ["mean", "leave_one_out", "none"])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize("eps", [1e-4, 0.0, 0.1])
@pytest.mark.parametrize("missing", [False, True])
def test_advantages_of_uneven_groups(baseline: str, scale: str, ddof: int, eps: float, missing: bool) -> None:
    groups = np.array([3, 0, 3, 3, 9, 0, 0, 0, 5, 3, 7, 7])
    rewards = np.array([1.0, 0.5, 0.0, 2.0, 4.0, -1.0, 0.25, 3.0, 0.5, 1.5, 0.3, 0.3], dtype=np.float32)
    if missing:
        rewards[[2, 5, 8]] = NAN
    got = advantages(rewards, group_ids=torch.as_tensor(groups), baseline=baseline, scale=scale, ddof=ddof, eps=eps)
    truth = oracle.group_advantages(rewards, groups, baseline=baseline, scale=scale, ddof=ddof, eps=eps)
    np.testing.assert_allclose(got.numpy(), truth.astype(float), rtol=1e-5, atol=1e-6)
    order = np.argsort(groups, kind="stable")
    shuffled = advantages(
        rewards[order], group_ids=torch.as_tensor(groups[order]), baseline=baseline, scale=scale, ddof=ddof, eps=eps
    )
    np.testing.assert_allclose(shuffled.numpy(), truth[order].astype(float), rtol=1e-5, atol=1e-6)
    if baseline != "none" or scale != "none":
        assert (got[[4, 8, 10, 11]] == 0).all(), "a singleton and equal rewards give exactly 0"
    else:
        assert got[4].item() == 4.0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_consecutive_groups_equal_groups_by_id(dtype: torch.dtype, size: int) -> None:
    rewards = torch.randn(8, generator=torch.Generator().manual_seed(0)).to(dtype)
    by_size = gk.group_advantages(rewards, group_size=size)
    by_id = gk.group_advantages(rewards, group_ids=torch.arange(8) // size)
    truth = oracle.group_advantages(as_array(rewards), np.arange(8) // size)
    assert by_size.dtype == torch.float32
    np.testing.assert_allclose(by_size.numpy(), truth.astype(float), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(by_id.numpy(), truth.astype(float), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("size", [None, 1])
def test_a_group_of_one_is_zero_without_noise(baseline: str, scale: str, size: int | None) -> None:
    got = advantages([3.5], baseline=baseline, scale=scale, group_size=size)
    assert got.tolist() == [0.0]


@pytest.mark.parametrize("value", [0.1, 1e-30, 1e30, -7.3, 0.0])
@pytest.mark.parametrize("count", [2, 3, 7, 8, 100])
def test_equal_rewards_give_exactly_zero(value: float, count: int) -> None:
    for dtype in (torch.float32, torch.float64):
        for scale in ("group", "batch", "none"):
            got = gk.group_advantages(torch.full((count,), value, dtype=dtype), scale=scale)
            assert got.tolist() == [0.0] * count, (value, count, scale)


def test_a_large_offset_loses_nothing() -> None:
    """Two passes: rewards 1e6 + {0, 1, 2, 3} have the advantages of {0, 1, 2, 3}."""
    offset = advantages([1e6, 1e6 + 1, 1e6 + 2, 1e6 + 3])
    np.testing.assert_allclose(offset.numpy(), advantages([0.0, 1.0, 2.0, 3.0]).numpy(), rtol=1e-6)
    steps = np.array([0.0, 1.0, 0.0, 2.0, 0.0, 1.0, 2.0])  # their mean, 6 / 7, is no float32 at 1e7
    for groups in ({}, {"group_ids": torch.tensor([4] * 7)}):
        for scale in ("group", "batch", "none"):
            far, near = (advantages((x + steps).astype(np.float32), scale=scale, **groups) for x in (1e7, 0.0))
            np.testing.assert_allclose(far.numpy(), near.numpy(), rtol=1e-5, atol=1e-6)


def test_groups_without_a_scored_reward_are_zero() -> None:
    got = advantages([NAN, NAN, 1.0, 3.0], group_size=2)
    assert got[:2].tolist() == [0.0, 0.0]
    np.testing.assert_allclose(got[2:].numpy(), [-0.7070568, 0.7070568], atol=1e-6)
    assert advantages([NAN, NAN]).tolist() == [0.0, 0.0]
    assert advantages([NAN, 2.0], baseline="none", scale="none").tolist() == [0.0, 2.0]
    assert gk.group_advantages(torch.zeros(0)).shape == (0,)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("grouping", ["size", "ids", "one group"])
@pytest.mark.parametrize(("loss_type", "level"), OBJECTIVES)
def test_rewards_in_the_loss_equal_advantages_made_before(
    loss_type: str, level: str, grouping: str, layout: str
) -> None:
    batch = make_batch(seed=27, layout=layout)
    opt = objective_options(loss_type, level, {"beta": 0.1})
    rewards = torch.tensor([1.0, 0.0, 0.25, 2.0])
    groups = {
        "size": {"group_size": 2}, "ids": {"group_ids": torch.tensor([5, 1, 5, 5])}, "one group": {},
    }[grouping]  # fmt: skip
    expected = run(batch, opt, advantages=gk.group_advantages(rewards, **groups))
    got = run(batch, opt, advantages=None, rewards=rewards, **groups)
    assert got.loss.item() == pytest.approx(expected.loss.item(), rel=1e-6)
    torch.testing.assert_close(got.grad, expected.grad, rtol=1e-6, atol=1e-9)
    assert got.grad.norm() > 0.001


def test_tokens_of_an_unscored_reward_stay_live() -> None:
    batch = make_batch(seed=28)
    opt = objective_options("dapo", "token", {"beta": 0.1})
    rewards = torch.tensor([1.0, NAN, 0.0, 2.0])
    got = run(batch, opt, advantages=None, rewards=rewards)
    assert batch.mask is not None
    assert got.metrics["num_tokens"].item() == batch.mask.sum()
    truth = oracle.grpo(batch.but(advantages=oracle.group_advantages(rewards.numpy(), np.zeros(4)).astype(float)), opt)
    assert got.loss.item() == pytest.approx(float(truth.loss), rel=1e-5)
    np.testing.assert_allclose(as_array(got.grad), truth.dlogits.astype(float), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("loss_type", "level"), OBJECTIVES)
def test_equal_rewards_leave_only_the_kl(loss_type: str, level: str) -> None:
    """beta = 0: no gradient at all; beta > 0: that of the KL, and the tokens stay in the count."""
    batch = make_batch(seed=29)
    rewards: Tensor = torch.full((4,), 0.1)
    silent = run(batch, objective_options(loss_type, level, {}), advantages=None, rewards=rewards, group_size=4)
    assert silent.loss.item() == 0 and (silent.grad == 0).all()
    opt = objective_options(loss_type, level, {"beta": 0.3})
    pushed = run(batch, opt, advantages=None, rewards=rewards, group_size=4)
    only_kl = run(batch.but(advantages=np.zeros(4), old=None), opt)
    assert same_bits(pushed.grad, only_kl.grad)
    truth = oracle.grpo(batch.but(advantages=np.zeros(4)), opt)
    np.testing.assert_allclose(as_array(pushed.grad), truth.dlogits.astype(float), rtol=1e-5, atol=1e-7)
    assert pushed.grad.norm() > 0.001


@pytest.mark.parametrize(("loss_type", "level"), OBJECTIVES)
def test_a_module_is_the_function(loss_type: str, level: str) -> None:
    batch, opt = make_batch(seed=30), objective_options(loss_type, level, {"beta": 0.1})
    config = gk.GRPOLossConfig(**dataclasses.asdict(opt))
    module = gk.GRPOLoss(config)
    assert isinstance(module, torch.nn.Module) and not list(module.parameters())
    logits = torch.as_tensor(batch.logits).float()
    arguments = {
        "advantages": torch.as_tensor(batch.advantages).float(),
        "completion_mask": torch.as_tensor(batch.mask),
        "old_per_token_logps": torch.as_tensor(batch.old).float(),
        "ref_per_token_logps": torch.as_tensor(batch.ref).float(),
    }
    ids = torch.as_tensor(batch.ids)
    assert same_bits(module(logits, ids, **arguments).loss, gk.grpo_loss(logits, ids, config=config, **arguments).loss)
