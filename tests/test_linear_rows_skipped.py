"""Rows that cannot matter never meet a matrix: the FLOPs of the products that really ran, and bits that never change.

In units of N H V: a forward product costs 2, the gradient of each operand 2, a recomputed forward 2 more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from linear_support import MODES, Problem, bytes_of, make_problem, product_flops, run_linear, step_of
from support import LAYOUTS, full_options, same_bits

import grpo_kernels as gk

NAN = float("nan")
B, T, V, H = 4, 64, 50, 8
N = B * T  # two panels of 128 rows, and a multiple of every smaller one used here
CHUNKS = [None, 16, 64, N]


def units(work: Callable[[], Any]) -> float:
    """FLOPs of all products of `work` over N H V."""
    return product_flops(work) / (N * H * V)


def chunk(rows: int | None, dtype: torch.dtype = torch.float32) -> int | None:
    return None if rows is None else bytes_of(rows, V, dtype)


def test_the_meter_counts_every_product_once() -> None:
    left, right, out = torch.ones(3, 4), torch.ones(4, 5), torch.zeros(3, 5)
    products: dict[str, Callable[[], Any]] = {
        "mm": lambda: left @ right,
        "mm.out": lambda: torch.mm(left, right, out=out),
        "addmm": lambda: torch.addmm(out, left, right),
        "addmm_": lambda: out.addmm_(left, right),
        "addmm.out": lambda: torch.addmm(out, left, right, out=out),
        "bmm": lambda: torch.bmm(left[None], right[None]),
        "linear": lambda: torch.nn.functional.linear(left[None], right.T, out[0]),
        "einsum": lambda: torch.einsum("ij,jk->ik", left, right),
        "columns": lambda: [left @ right[:, i] for i in range(5)],
    }
    assert {name: product_flops(work) for name, work in products.items()} == dict.fromkeys(products, 2 * 3 * 4 * 5)
    leaf = left.clone().requires_grad_()
    assert product_flops(lambda: (leaf @ right).sum().backward()) == 4 * 3 * 4 * 5


COSTS: dict[tuple[str, tuple[str, ...]], int] = {
    ("fast", ()): 6,
    ("fast", ("weight",)): 4,
    ("fast", ("weight", "bias")): 4,
    ("fast", ("hidden",)): 4,
    ("fast", ("hidden", "weight")): 2,
    ("lean", ()): 8,
    ("lean", ("weight",)): 6,
    ("lean", ("hidden", "bias")): 6,
    ("lean", ("hidden", "weight")): 4,
    ("auto", ()): 6,
    ("auto", ("hidden", "weight", "bias")): 2,
}


@pytest.mark.parametrize("rows", CHUNKS, ids=lambda rows: f"{rows} rows")
@pytest.mark.parametrize(("mode", "frozen"), COSTS, ids=lambda x: "+".join(x) if isinstance(x, tuple) else x)
def test_products_of_the_loss(mode: str, frozen: tuple[str, ...], rows: int | None) -> None:
    step = step_of((B, T), V, H, frozen=frozen, bias=True, mode=mode, chunk_bytes=chunk(rows))
    assert units(step) == COSTS[mode, frozen]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_products_in_other_dtypes(mode: str, dtype: torch.dtype) -> None:
    step = step_of((B, T), V, H, dtype=dtype, mode=mode, chunk_bytes=chunk(64, dtype))
    assert units(step) == COSTS[mode, ()]


@pytest.mark.parametrize(
    ("frozen", "cost"), [((), 8), (("weight",), 6), (("hidden",), 6), (("hidden", "weight"), 2)], ids=str
)
@pytest.mark.parametrize("entropy", [False, True])
def test_products_of_the_log_probs(entropy: bool, frozen: tuple[str, ...], cost: int) -> None:
    operands = {"hidden": torch.randn(B, T, H), "weight": torch.randn(V, H)}
    wanted = [x.requires_grad_() for name, x in operands.items() if name not in frozen]

    def step() -> Any:
        out = gk.linear_per_token_logps(*operands.values(), torch.zeros(B, T, dtype=torch.long), entropy=entropy)
        total = out.logps.sum() if out.entropy is None else out.entropy.sum()
        return torch.autograd.grad(total, wanted) if wanted else out

    assert units(step) == cost


def test_without_grad_there_is_one_product() -> None:
    step = step_of((B, T), V, H, mode="auto")
    with torch.no_grad():
        assert units(step) == 2


@pytest.mark.parametrize("rows", CHUNKS, ids=lambda rows: f"{rows} rows")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("share", [0.5, 0.0])
def test_dead_rows_meet_no_matrix(share: float, mode: str, rows: int | None) -> None:
    """Half the tokens, scattered; and none."""
    mask = torch.arange(N).reshape(B, T) % 2 < 2 * share
    step = step_of((B, T), V, H, mode=mode, completion_mask=mask, chunk_bytes=chunk(rows))
    assert units(step) == share * COSTS[mode, ()]


@pytest.mark.parametrize("mode", MODES)
def test_ids_outside_the_vocabulary_and_a_packed_tail_are_dead(mode: str) -> None:
    ids = torch.where(torch.arange(N) % 4 < 2, 3, -100)
    hidden, weight = torch.randn(N, H, requires_grad=True), torch.randn(V, H, requires_grad=True)

    def step() -> Any:
        out = gk.linear_grpo_loss(
            hidden, weight, ids, advantages=torch.ones(2), cu_seqlens=torch.tensor([0, 60, 128]), mode=mode,
            chunk_bytes=chunk(64),
        )  # fmt: skip
        return torch.autograd.grad(out.loss, (hidden, weight))

    assert units(step) == 0.25 * COSTS[mode, ()]


# Rows without an advantage: who needs their log-probs?

SILENT = torch.tensor([1.0, 0.0, -0.5, 0.0])
OLD = torch.full((B, T), -20.0)  # ratios above 1 by far, none of them clipped
NEEDS: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {  # config, arguments, whether silent rows get gradient
    "old": ({}, {"old_per_token_logps": OLD}, False),
    "per token": ({}, {"return_per_token": True}, False),
    "entropy metric": ({"entropy": True}, {}, False),
    "entropy bonus": ({"entropy_coef": 0.1}, {}, True),
    "KL": ({"beta": 0.1}, {"ref_per_token_logps": OLD / 5}, True),
}


@pytest.mark.parametrize("rows", CHUNKS, ids=lambda rows: f"{rows} rows")
@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "cispo"])
@pytest.mark.parametrize("mode", MODES)
def test_silent_rows_meet_no_matrix_when_nobody_needs_them(mode: str, loss_type: str, rows: int | None) -> None:
    config = gk.GRPOLossConfig(loss_type=loss_type, epsilon_high=5.0)
    step = step_of((B, T), V, H, mode=mode, config=config, advantages=SILENT, chunk_bytes=chunk(rows))
    assert units(step) == 0.5 * COSTS[mode, ()]


@pytest.mark.parametrize("mode", MODES)
def test_silent_groups_of_rewards_meet_no_matrix(mode: str) -> None:
    rewards = torch.tensor([1.0, 1.0, 0.0, 2.0])
    step = step_of((B, T), V, H, mode=mode, advantages=None, rewards=rewards, group_size=2, chunk_bytes=chunk(64))
    assert units(step) == 0.5 * COSTS[mode, ()]


@pytest.mark.parametrize("need", NEEDS)
@pytest.mark.parametrize("mode", MODES)
def test_silent_rows_that_somebody_needs_skip_only_their_gradient(mode: str, need: str) -> None:
    options, arguments, pulled = NEEDS[need]
    config = gk.GRPOLossConfig(epsilon_high=1e30, **options)
    step = step_of((B, T), V, H, mode=mode, config=config, advantages=SILENT, chunk_bytes=chunk(64), **arguments)
    assert units(step) == 2 + (COSTS[mode, ()] - 2) * (1.0 if pulled else 0.5)


# Rows whose coefficient came out 0


@pytest.mark.parametrize("rows", CHUNKS, ids=lambda rows: f"{rows} rows")
@pytest.mark.parametrize("mode", MODES)
def test_clipped_rows_skip_the_gradient_products(mode: str, rows: int | None) -> None:
    """Every ratio is e^20: a positive advantage is clipped, a negative one is not. Whole sequences of 64 rows."""
    advantages = torch.tensor([1.0, -1.0, -1.0, 1.0])
    options = {"advantages": advantages, "old_per_token_logps": torch.full((B, T), -40.0)}
    step = step_of((B, T), V, H, mode=mode, chunk_bytes=chunk(rows), **options)
    assert units(step) == 2 + (COSTS[mode, ()] - 2) * 0.5


@pytest.mark.parametrize("mode", MODES)
def test_clipped_rows_may_be_scattered(mode: str) -> None:
    advantages = torch.where(torch.arange(N).reshape(B, T) % 2 == 0, 1.0, -1.0)
    options = {"advantages": advantages, "old_per_token_logps": torch.full((B, T), -40.0)}
    step = step_of((B, T), V, H, mode=mode, chunk_bytes=chunk(N), **options)
    assert units(step) == 2 + (COSTS[mode, ()] - 2) * 0.5


def test_clipped_sequences_skip_the_gradient_products() -> None:
    config = gk.GRPOLossConfig(loss_type="grpo", importance_sampling_level="sequence")
    options = {"advantages": torch.tensor([1.0, -1.0, 1.0, 1.0]), "old_per_token_logps": torch.full((B, T), -40.0)}
    assert units(step_of((B, T), V, H, config=config, chunk_bytes=chunk(64), **options)) == 2 + 6 * 0.25


def test_a_batch_clipped_throughout_has_no_gradient_product() -> None:
    options = {"advantages": torch.ones(B), "old_per_token_logps": torch.full((B, T), -40.0)}
    for mode in MODES:
        step = step_of((B, T), V, H, mode=mode, **options)
        assert units(step) == 2
        assert all((grad == 0).all() for grad in step()[1])


@pytest.mark.parametrize("which", ["logps", "entropy"])
def test_log_probs_with_a_zero_upstream_skip_the_gradient_products(which: str) -> None:
    hidden, weight = torch.randn(B, T, H, requires_grad=True), torch.randn(V, H, requires_grad=True)
    upstream = torch.tensor([1.0, 0.0, 0.0, -2.0])[:, None].expand(B, T)

    def step() -> Any:
        out = gk.linear_per_token_logps(hidden, weight, torch.zeros(B, T, dtype=torch.long), entropy=which == "entropy")
        return torch.autograd.grad((getattr(out, which) * upstream).sum(), (hidden, weight))

    assert units(step) == 2 + 6 * 0.5
    assert (step()[0][1:3] == 0).all()


# What dead rows hold changes no bit


def spoilt(problem: Problem, value: float) -> Problem:
    """The same problem with `value` wherever a dead row has a number."""
    dead = ~np.asarray(problem.batch.mask, dtype=bool)

    def spoil(x: Any) -> Any:
        return np.where(dead.reshape(dead.shape + (1,) * (np.ndim(x) - dead.ndim)), value, x)

    changes = {name: spoil(getattr(problem.batch, name)) for name in ("old", "ref", "weight", "temperature")}
    return Problem(problem.batch.but(**changes), spoil(problem.hidden), problem.weight, problem.bias, problem.dtype)


@pytest.mark.parametrize("value", [NAN, float("inf"), -1e10])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_dead_rows_are_never_read(layout: str, level: str, value: float) -> None:
    opt = full_options("grpo", level)
    problem = make_problem(seed=50, layout=layout, weight="token", temperature="token")
    live = torch.as_tensor(np.asarray(problem.batch.mask, dtype=bool))
    if layout == "packed":
        live = live & (torch.arange(len(live)) < int(problem.batch.cu_seqlens[-1]))
    for mode in MODES if level == "token" else ["lean"]:
        clean, ours = (run_linear(p, opt, mode=mode, chunk_rows=4) for p in (problem, spoilt(problem, value)))
        assert torch.isfinite(clean.loss) and clean.loss.abs() > 1e-3
        assert same_bits(ours.loss, clean.loss)
        for name, grad in clean.grads.items():
            assert torch.isfinite(grad).all() and grad.abs().max() > 1e-6
            assert same_bits(ours.grads[name], grad), name
        for name, metric in clean.metrics.items():
            assert same_bits(ours.metrics[name], metric), name
        for name, tokens in clean.per_token._asdict().items():
            assert same_bits(getattr(ours.per_token, name), tokens), name
        assert (ours.grads["hidden"][~live] == 0).all()


@pytest.mark.parametrize("value", [NAN, float("inf")])
def test_dead_rows_of_the_log_probs_are_never_read(value: float) -> None:
    hidden, weight, ids = torch.randn(6, 5), torch.randn(9, 5), torch.tensor([1, -1, 4, 8, 0, 2])
    mask = torch.tensor([1, 1, 0, 1, 1, 1])
    dead = torch.tensor([False, True, True, False, False, False])
    results = []
    for fill in (0.0, value):
        leaves = torch.where(dead[:, None], fill, hidden).requires_grad_(), weight.clone().requires_grad_()
        out = gk.linear_per_token_logps(*leaves, ids, mask=mask, entropy=True)
        (out.logps.sum() + out.entropy.sum()).backward()
        results.append((*out, *(x.grad for x in leaves)))
    assert all(same_bits(a, b) for a, b in zip(*results, strict=True))
    *values, dhidden, _ = results[1]
    assert (dhidden[dead] == 0).all() and all((x[dead] == 0).all() for x in values[:2])
