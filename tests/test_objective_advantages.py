"""Advantages of other projects and papers against hand arithmetic and their definitions in float64."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch

import grpo_kernels as gk
from grpo_kernels import advantages

NAN = math.nan
SCHEMES: dict[str, dict[str, Any]] = {
    "mean": {"scale": "none"},
    "loo": {"baseline": "leave_one_out", "scale": "none"},
    "std0": {"ddof": 0, "eps": 0.0},
    "std1": {"ddof": 1, "eps": 0.0},
}
# rewards -> advantages of mean, leave-one-out, std with ddof 0 and 1, by hand
VECTORS: list[tuple[list[float], list[list[float]]]] = [
    ([1, 0], [[0.5, -0.5], [1, -1], [1, -1], [0.707107, -0.707107]]),
    (
        [1, 0, 0, 0],
        [[0.75] + 3 * [-0.25], [1] + 3 * [-0.333333], [1.732051] + 3 * [-0.57735], [1.5] + 3 * [-0.5]],
    ),
    (
        [1, 1, 0, 0],
        [[0.5, 0.5, -0.5, -0.5], 2 * [0.666667] + 2 * [-0.666667], [1, 1, -1, -1], 2 * [0.866025] + 2 * [-0.866025]],
    ),
    (
        [1, 1, 1, 0],
        [3 * [0.25] + [-0.75], 3 * [0.333333] + [-1], 3 * [0.57735] + [-1.732051], 3 * [0.5] + [-1.5]],
    ),
    (
        [1] + 7 * [0],
        [[0.875] + 7 * [-0.125], [1] + 7 * [-0.142857], [2.645751] + 7 * [-0.377964], [2.474874] + 7 * [-0.353553]],
    ),
    (
        4 * [1] + 4 * [0],
        [
            4 * [0.5] + 4 * [-0.5], 4 * [0.571429] + 4 * [-0.571429], 4 * [1] + 4 * [-1],
            4 * [0.935414] + 4 * [-0.935414],
        ],
    ),
    (
        [0.2, 0.5, 0.9, 1.0],
        [
            [-0.45, -0.15, 0.25, 0.35], [-0.6, -0.2, 0.333333, 0.466667], [-1.405564, -0.468521, 0.780869, 1.093216],
            [-1.217254, -0.405751, 0.676252, 0.946753],
        ],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("rewards", "expected"), VECTORS, ids=str)
def test_vectors_by_hand(rewards: list[float], expected: list[list[float]]) -> None:
    for scheme, values in zip(SCHEMES, expected, strict=True):
        got = gk.group_advantages(torch.tensor(rewards, dtype=torch.float64), **SCHEMES[scheme])
        torch.testing.assert_close(got, torch.tensor(values, dtype=torch.float32), rtol=2e-6, atol=1e-6, msg=scheme)


@pytest.mark.parametrize(
    ("eps", "ddof0", "ddof1"),
    [
        (1e-8, 1.73205077, 1.49999997), (1e-6, 1.73204681, 1.499997), (1e-4, 1.7316509, 1.49970006),
        (1e-2, 1.69295372, 1.47058824),
    ],
)  # fmt: skip
def test_eps_is_added_to_the_deviation(eps: float, ddof0: float, ddof1: float) -> None:
    rewards = torch.tensor([1.0, 0, 0, 0])
    for ddof, expected in ((0, ddof0), (1, ddof1)):
        assert gk.group_advantages(rewards, ddof=ddof, eps=eps)[0].item() == pytest.approx(expected, abs=1.5e-7)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("value", [0.1, -3.3, 1e6, 0.0])
def test_silent_groups_are_exactly_zero_in_every_scheme(value: float, dtype: torch.dtype) -> None:
    rewards = torch.full((7,), value).to(dtype)
    lengths = torch.arange(1, 8)
    options = itertools.product(("mean", "leave_one_out"), ("group", "batch", "leave_one_out", "none"))
    results = [gk.group_advantages(rewards, baseline=baseline, scale=scale, eps=0.0) for baseline, scale in options]
    results += [
        advantages.reinforce_plus_plus_advantages(rewards, lengths),
        advantages.gdpo_advantages(torch.stack([rewards, rewards], 1)),
        advantages.max_rl_advantages(rewards.abs()),
        advantages.pass_at_k_advantages(torch.ones(7, dtype=dtype), 2),
        advantages.pass_at_k_advantages(torch.zeros(7, dtype=dtype), 2),
    ]
    assert all((result == 0).all() for result in results)


PASS_AT_K = {
    (2, 1): (1.732051, -0.247436), (2, 2): (1.074172, -0.358057), (2, 4): (0.522233, -0.522233),
    (4, 1): (1.0, -0.142857), (4, 2): (0.522233, -0.174078), (4, 4): (0.120386, -0.120386),
}  # fmt: skip


@pytest.mark.parametrize(("k", "successes"), PASS_AT_K)
def test_pass_at_k_by_hand(k: int, successes: int) -> None:
    good, bad = PASS_AT_K[k, successes]
    rewards = torch.tensor([1.0] * successes + [0.0] * (8 - successes))
    got = advantages.pass_at_k_advantages(rewards, k)
    torch.testing.assert_close(got, torch.where(rewards == 1, good, bad), rtol=0, atol=6e-7)


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_pass_at_k_is_the_normalised_gain_of_every_group_of_k(k: int) -> None:
    """By enumeration: the best of each k-subset that holds a response, minus the mean over all, over the deviation."""
    rewards = np.array([1.0, 0, 0, 1, 0, 0])
    best = {subset: rewards[list(subset)].max() for subset in itertools.combinations(range(6), k)}
    mean = np.mean(list(best.values()))
    deviation = np.std(list(best.values()))
    expected = [
        (np.mean([value for subset, value in best.items() if i in subset]) - mean) / deviation if deviation else 0.0
        for i in range(6)
    ]
    torch.testing.assert_close(
        advantages.pass_at_k_advantages(torch.tensor(rewards), k), torch.tensor(expected).float()
    )


def test_pass_at_k_of_uneven_groups_with_unscored_responses() -> None:
    rewards = torch.tensor([1.0, 0, NAN, 0, 1, 0, NAN])
    ids = torch.tensor([3, 3, 3, 3, 1, 1, 1])
    got = advantages.pass_at_k_advantages(rewards, 2, group_ids=ids)
    alone = [advantages.pass_at_k_advantages(torch.tensor(x), 2) for x in ([1.0, 0, 0], [1.0, 0])]
    expected = torch.tensor([*alone[0][:2], 0, alone[0][2], *alone[1], 0])
    assert torch.equal(got, expected)
    assert (alone[1] == 0).all()  # any two of two succeed


def test_leave_one_out_deviation() -> None:
    generator = np.random.default_rng(0)
    rewards = np.concatenate([generator.normal(3, 2, 5), [1.0, 0, 0, 0, 0], [2.0, 2, 1, 1, 1]])
    expected = []
    for group in rewards.reshape(3, 5):
        for i in range(5):
            others = np.delete(group, i)
            gap, deviation = group[i] - others.mean(), others.std(ddof=1)
            expected.append(gap / (deviation + 1e-6) if deviation > 0 else gap)
    got = gk.group_advantages(
        torch.tensor(rewards), group_size=5, baseline="leave_one_out", scale="leave_one_out", eps=1e-6
    )
    torch.testing.assert_close(got, torch.tensor(expected).float())
    assert got[5] == 1  # the others are all 0: nothing divides


@pytest.mark.parametrize("baseline", ["none", "mean", "leave_one_out"])
@pytest.mark.parametrize("ddof", [0, 1])
def test_reinforce_plus_plus_whitens_over_tokens(baseline: str, ddof: int) -> None:
    rewards = np.array([1.0, 0.0, 0.5, 2.0, 0.3, 0.9, 0.7, 0.7])
    lengths = np.array([3, 1, 7, 2, 5, 4, 6, 2])
    centred = rewards.copy()
    for group in np.split(np.arange(8), 2):
        others = [np.delete(rewards[group], i).mean() for i in range(4)]
        centred[group] -= {"none": 0.0, "mean": rewards[group].mean(), "leave_one_out": others}[baseline]
    tokens = np.repeat(centred, lengths)
    expected = (centred - tokens.mean()) / np.sqrt(tokens.var(ddof=ddof) + 1e-8)
    got = advantages.reinforce_plus_plus_advantages(
        torch.tensor(rewards), torch.tensor(lengths), group_size=4, baseline=baseline, ddof=ddof
    )
    torch.testing.assert_close(got, torch.tensor(expected).float())


@pytest.mark.parametrize("by_token", [False, True])
def test_gdpo(by_token: bool) -> None:
    generator = np.random.default_rng(1)
    rewards = np.stack([generator.normal(size=8), 10 * generator.random(8), [0, 0, 0, 0, 1, 0, 0, 1.0]], 1)
    weights, lengths = np.array([1.0, 0.5, 2.0]), np.array([3, 1, 7, 2, 5, 4, 6, 2])
    total = np.zeros(8)
    for group in np.split(np.arange(8), 2):
        for k in range(3):
            x = rewards[group, k]
            total[group] += weights[k] * (x - x.mean()) / (x.std(ddof=1) + 1e-4)
    pool = np.repeat(total, lengths) if by_token else total
    deviation = np.sqrt(pool.var(ddof=1) + 1e-8) if by_token else pool.std(ddof=1) + 1e-4
    got = advantages.gdpo_advantages(
        torch.tensor(rewards), torch.tensor(weights), torch.tensor(lengths) if by_token else None, group_size=4
    )
    torch.testing.assert_close(got, torch.tensor((total - pool.mean()) / deviation).float())


def test_gdpo_leaves_out_missing_rewards_and_silent_groups() -> None:
    rewards = torch.tensor([[1.0, NAN], [0.0, 2.0], [NAN, NAN], [5.0, 5.0], [5.0, 5.0], [5.0, 5.0]])
    got = advantages.gdpo_advantages(rewards, group_size=3)
    assert (got[2:] == 0).all()
    assert got[0] > 0 > got[1]


def test_max_rl_divides_by_the_mean() -> None:
    rewards = torch.tensor([1.0, 0, 0, 0, 1, 1, NAN, 0])
    expected = torch.tensor([3.0, -1, -1, -1, 0.5, 0.5, 0, -1])
    torch.testing.assert_close(advantages.max_rl_advantages(rewards, group_size=4), expected)


# w_G(p) of the schemes: E[gradient] = w_G(p) * gradient of p, for 0/1 rewards

WEIGHTS = {
    "none": [1, 1, 1, 1], "loo": [1, 1, 1, 1], "mean": [0.875] * 4,
    "std0": [2.47306, 2.32769, 2.02612, 1.85566], "std1": [2.31334, 2.17735, 1.89526, 1.73581],
    "max_rl": [6.03325, 5.21703, 3.46606, 1.98437],
}  # fmt: skip


@pytest.mark.parametrize("scheme", WEIGHTS)
def test_the_weight_that_a_scheme_gives_a_prompt(scheme: str) -> None:
    size = 8
    groups = torch.tril(torch.ones(size + 1, size), diagonal=-1).double()  # k successes in row k
    flat = groups.reshape(-1)
    if scheme == "max_rl":
        values = advantages.max_rl_advantages(flat, group_size=size)
    elif scheme == "none":
        values = gk.group_advantages(flat, group_size=size, baseline="none", scale="none")
    else:
        values = gk.group_advantages(flat, group_size=size, **SCHEMES[scheme])
    values = values.double().reshape(size + 1, size)
    for p, expected in zip((0.05, 0.1, 0.25, 0.5), WEIGHTS[scheme], strict=True):
        weight = 0.0
        for k in range(size + 1):
            chance = math.comb(size, k) * p**k * (1 - p) ** (size - k)
            good, bad = values[k, :k].sum().item(), values[k, k:].sum().item()
            weight += chance * (good / (size * p) - bad / (size * (1 - p)))
        assert weight == pytest.approx(expected, abs=1e-5), p


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: advantages.pass_at_k_advantages(torch.tensor([0.5, 1.0]), 1), "rewards must be 0, 1 or NaN"),
        (lambda: advantages.pass_at_k_advantages(torch.ones(2), 0), "k must be >= 1"),
        (lambda: advantages.max_rl_advantages(torch.tensor([-1.0, 1.0])), "rewards must be >= 0"),
        (lambda: advantages.gdpo_advantages(torch.ones(4)), r"rewards must be \[B, K\]"),
        (lambda: advantages.gdpo_advantages(torch.ones(4, 2), torch.ones(3)), r"weights must be \[2\]"),
        (lambda: advantages.gdpo_advantages(torch.ones(4, 2), group_size=3), "group_size must be >= 1 and divide"),
        (lambda: advantages.reinforce_plus_plus_advantages(torch.ones(4), torch.ones(3)), "lengths must be one per"),
        (lambda: gk.group_advantages(torch.ones(4), scale="leave_one"), "Did you mean 'leave_one_out'"),
    ],
)
def test_refusals(call: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        call()


def test_nothing_gives_nothing() -> None:
    none = torch.zeros(0)
    for got in (
        advantages.pass_at_k_advantages(none, 2), advantages.max_rl_advantages(none),
        advantages.reinforce_plus_plus_advantages(none, none), advantages.gdpo_advantages(torch.zeros(0, 2)),
    ):  # fmt: skip
        assert got.shape == (0,)
        assert got.dtype == torch.float32
