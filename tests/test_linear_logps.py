"""Log-probs and entropies from hidden states: values, gradients under any upstream, and what never changes a bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from linear_support import (
    Problem,
    bytes_of,
    head_floors,
    make_operands,
    make_problem,
    product_growth,
    run_linear,
    score,
    through_head,
    train,
)
from oracle import Options
from oracle_rows import row_stats
from support import DTYPES, default_impl, full_options, plain_row_stats, result_dtype, same_bits, tensor
from tolerance import as_array, assert_within_budget
from torch import Tensor

import grpo_kernels as gk

NAN = float("nan")
TRANSFORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "cap and scale": {"softcap": 3.0, "logit_scale": 1.4, "temperature": 1.3},
}


def flat(problem: Problem) -> Problem:
    """The same rows as `[N, H]`."""
    batch = problem.batch
    return replace(
        problem,
        batch=batch.but(
            logits=batch.logits.reshape(-1, batch.logits.shape[-1]), ids=batch.ids.reshape(-1),
            mask=np.asarray(batch.mask).reshape(-1),
        ),
        hidden=problem.hidden.reshape(-1, problem.hidden.shape[-1]),
    )  # fmt: skip


def upstreams(problem: Problem, seed: int = 3) -> tuple[np.ndarray, np.ndarray]:
    """One weight per token for logps and entropy."""
    rng = np.random.default_rng(seed)
    side = result_dtype(problem.dtype)
    return tuple(torch.as_tensor(rng.normal(0, 1, problem.batch.ids.shape)).to(side).double().numpy() for _ in "pe")


def assert_right(problem: Problem, transform: dict[str, Any], **options: Any) -> None:
    """Values and all gradients inside the error budget, for a weighted sum of logps and entropies."""
    side, ids = result_dtype(problem.dtype), problem.batch.ids
    up_logps, up_entropy = upstreams(problem)
    operands = make_operands(problem)
    out = score(operands, problem, **transform, **options)
    ((out.logps * tensor(up_logps, side)).sum() + (out.entropy * tensor(up_entropy, side)).sum()).backward()

    vocab = problem.weight.shape[0]
    tau = as_array(transform.get("temperature", 1.0))
    tau = np.broadcast_to(tau, ids.shape).reshape(-1) if tau.ndim else tau
    rest = {k: v for k, v in transform.items() if k != "temperature"}
    truth = row_stats(
        problem.batch.logits.reshape(-1, vocab), ids.reshape(-1), mask=np.asarray(problem.batch.mask).reshape(-1),
        temperature=tau, **rest,
    )  # fmt: skip
    growth = product_growth(problem, truth.live, Options(logit_scale=transform.get("logit_scale", 1.0)))
    logits = tensor(problem.hidden, side) @ tensor(problem.weight, side).T
    logits = logits if problem.bias is None else logits + tensor(problem.bias, side)
    leaf = logits.reshape(-1, vocab)[torch.as_tensor(truth.live)].requires_grad_()
    heat = torch.as_tensor(tau[truth.live]).to(side) if tau.ndim else float(tau)
    ref = plain_row_stats(leaf, tensor(ids.reshape(-1)[truth.live]), temperature=heat, **rest)
    for name, value in zip(("logps", "entropy", "lse"), ref, strict=True):
        ours = getattr(out, name).reshape(-1)
        assert ours.dtype == side
        assert_within_budget(
            ours[torch.as_tensor(truth.live)], value, getattr(truth, name)[truth.live], side,
            floor=growth * truth.size[truth.live], name=name,
        )  # fmt: skip
        if name != "lse":
            assert (ours[torch.as_tensor(~truth.live)] == 0).all(), name
    weights = up_logps.reshape(-1, 1), up_entropy.reshape(-1, 1)
    total = sum((tensor(w[truth.live][:, 0], side) * v).sum() for w, v in zip(weights, ref, strict=False))
    total.backward()
    plain = np.zeros((len(truth.live), vocab))
    plain[truth.live] = as_array(leaf.grad)
    dlogits = np.where(truth.live[:, None], weights[0] * truth.dlogps + weights[1] * truth.dentropy, 0)
    scale = sum(np.abs(w[:, 0]) for w in weights) * truth.size * (1 + truth.entropy) * truth.live
    floors = head_floors(growth * scale * transform.get("logit_scale", 1.0) / np.min(tau), problem)
    refs = through_head(plain, problem)
    for name, value in through_head(dlogits, problem).items():
        grad = operands[name].grad
        assert grad is not None and grad.dtype == problem.dtype
        assert_within_budget(
            grad, tensor(refs[name]).to(problem.dtype), value, problem.dtype, compute=side, floor=floors[name],
            name=f"d{name}",
        )  # fmt: skip


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("layout", ["padded", "flat"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_and_gradients(dtype: torch.dtype, layout: str, bias: bool, transform: str) -> None:
    problem = make_problem(seed=30, dtype=dtype, bias=bias)
    problem = problem if layout == "padded" else flat(problem)
    assert_right(problem, TRANSFORMS[transform], chunk_bytes=bytes_of(3, 37, dtype))
    assert gk.backends.last_used() == f"{default_impl()} lean"


@pytest.mark.parametrize("kind", ["0-d", "[B, 1]", "token"])
def test_every_kind_of_temperature(kind: str) -> None:
    problem = make_problem(seed=31)
    shape = {"0-d": (), "[B, 1]": (problem.batch.ids.shape[0], 1), "token": problem.batch.ids.shape}[kind]
    assert_right(problem, {"temperature": torch.rand(shape) + 0.5})


@pytest.mark.parametrize("rows", [1, 2, 5, 26, 1000])
def test_chunks_from_one_row_to_all(rows: int) -> None:
    assert_right(make_problem(seed=32), {"softcap": 4.0}, chunk_bytes=bytes_of(rows, 37))


@pytest.mark.parametrize("vocab", [1, 2, 255, 600])
def test_odd_sizes(vocab: int) -> None:
    assert_right(make_problem(seed=33, vocab=vocab, hidden_size=7, lengths=(1, 6)), {})


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_triton(dtype: torch.dtype) -> None:
    pytest.importorskip("triton")
    assert_right(make_problem(seed=34, dtype=dtype, lengths=(3, 2)), TRANSFORMS["cap and scale"], impl="triton")
    assert gk.backends.last_used() == "triton lean"


@pytest.mark.parametrize("ids", ["int32", "-100"])
def test_ids_of_either_width_and_negative_ones_are_dead(ids: str) -> None:
    problem = make_problem(seed=35)
    if ids == "int32":
        problem = problem.but(ids=problem.batch.ids.astype(np.int32))
    else:
        problem = problem.but(ids=np.where(problem.batch.mask, problem.batch.ids, -100), mask=np.ones((4, 8), bool))
    assert_right(problem, {})


# Any objective


def own_objective(logps: Tensor, entropy: Tensor, advantages: Tensor) -> Tensor:
    """No loss of ours: the square root of the probability, an entropy floor, and a hinge on neighbours."""
    floor = torch.relu(2.0 - entropy).square().sum()
    neighbours = torch.relu(logps[:, 1:] - logps[:, :-1] + 0.5)
    return -(advantages[:, None] * (logps / 2).exp()).mean() + 0.1 * floor + 0.01 * neighbours.pow(3).sum()


OBJECTIVES: dict[str, Callable[..., Tensor]] = {
    "own": own_objective,
    "sum of log-probs": lambda logps, entropy, advantages: logps.sum(),
    "sum of entropies": lambda logps, entropy, advantages: entropy.sum(),
}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_any_objective_trains_as_on_plain_logits(name: str) -> None:
    objective = OBJECTIVES[name]
    problem = make_problem(seed=36, dtype=torch.float64).but(mask=np.ones((4, 8), bool))
    advantages = tensor(problem.batch.advantages)
    ours, plain = make_operands(problem), make_operands(problem)
    out = score(ours, problem, temperature=0.8)
    objective(out.logps, out.entropy, advantages).backward()
    logits = (plain["hidden"] @ plain["weight"].T + plain["bias"]) / 0.8
    logp = logits.log_softmax(-1)
    picked = logp.gather(-1, tensor(problem.batch.ids)[..., None])[..., 0]
    objective(picked, -(logp.exp() * logp).sum(-1), advantages).backward()
    for operand, leaf in ours.items():
        assert leaf.grad is not None and leaf.grad.abs().max() > 1e-6
        torch.testing.assert_close(leaf.grad, plain[operand].grad, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("form", ["sum", "mean", "expanded", "strided", "one element", "only entropy"])
def test_every_layout_of_the_upstream_gradient(form: str) -> None:
    """`.sum()` sends a stride-0 gradient: reading past its one element is a known fault."""
    problem = make_problem(seed=37, dtype=torch.float64).but(mask=np.ones((4, 8), bool))

    def total(logps: Tensor, entropy: Tensor) -> Tensor:
        weights = torch.arange(64.0, dtype=torch.float64).reshape(4, 16)[:, ::2]
        return {
            "sum": logps.sum() + entropy.sum(), "mean": logps.mean(),
            "expanded": (logps * torch.arange(4.0, dtype=torch.float64)[:, None].expand(4, 8)).sum(),
            "strided": (logps * weights).sum() + (entropy * weights.T.contiguous().T).sum(),
            "one element": logps[1, 2], "only entropy": entropy.sum(),
        }[form]  # fmt: skip

    ours, plain = make_operands(problem), make_operands(problem)
    out = score(ours, problem)
    total(out.logps, out.entropy).backward()
    logp = (plain["hidden"] @ plain["weight"].T + plain["bias"]).log_softmax(-1)
    picked = logp.gather(-1, tensor(problem.batch.ids)[..., None])[..., 0]
    total(picked, -(logp.exp() * logp).sum(-1)).backward()
    for name, leaf in ours.items():
        torch.testing.assert_close(leaf.grad, plain[name].grad, rtol=1e-11, atol=1e-12)


def test_gradcheck() -> None:
    problem = make_problem(seed=38, dtype=torch.float64, vocab=5, hidden_size=3, lengths=(3, 1))
    operands = make_operands(problem)
    ids, mask = tensor(problem.batch.ids), tensor(problem.batch.mask)

    def both(hidden: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        out = gk.linear_per_token_logps(
            hidden, weight, ids, bias=bias, mask=mask, softcap=3.0, logit_scale=1.2, temperature=0.7, entropy=True,
            chunk_bytes=bytes_of(2, 5, torch.float64),
        )  # fmt: skip
        return out.logps, out.entropy

    assert torch.autograd.gradcheck(both, tuple(operands.values()))


def test_lse_is_not_differentiable_and_entropy_is_made_on_request_only() -> None:
    problem = make_problem(seed=39)
    out = score(make_operands(problem), problem)
    assert out.logps.requires_grad and out.entropy.requires_grad and not out.lse.requires_grad
    assert score(make_operands(problem), problem, entropy=False).entropy is None


@pytest.mark.parametrize("function", ["logps", "fast", "lean"])
def test_frozen_inputs_get_no_gradient_and_change_no_other(function: str) -> None:
    problem = make_problem(seed=40, weight="token")

    def gradients(frozen: tuple[str, ...]) -> dict[str, Tensor]:
        if function != "logps":
            return run_linear(problem, full_options("grpo"), mode=function, frozen=frozen).grads
        operands = make_operands(problem, frozen)
        out = score(operands, problem)
        (out.logps.sum() + 2 * out.entropy.sum()).backward()
        return {name: x.grad for name, x in operands.items() if x.grad is not None}

    everything = gradients(())
    assert set(everything) == {"hidden", "weight", "bias"}
    for frozen in (("weight",), ("bias",), ("hidden",), ("weight", "bias"), ("hidden", "bias"), ("hidden", "weight")):
        some = gradients(frozen)
        assert set(some) == set(everything) - set(frozen)
        for name, grad in some.items():
            assert same_bits(grad, everything[name]), (frozen, name)


# Columns and rows that are no numbers


@pytest.mark.parametrize("how", ["logps", "fast", "lean"])
def test_columns_of_minus_infinity_equal_the_head_without_them(how: str) -> None:
    """A bias of -inf masks a column, as padded vocabularies do: probability 0, gradient 0, no NaN."""
    problem = make_problem(seed=41, dtype=torch.float64, vocab=12).but(ids=np.full((4, 8), 3))
    cut = [0, 7, 11]
    kept = [v for v in range(12) if v not in cut]
    masked = make_operands(problem)
    with torch.no_grad():
        masked["bias"][cut] = -torch.inf
    small = {name: x.detach() if name == "hidden" else x.detach()[kept] for name, x in masked.items()}
    small = {name: x.clone().requires_grad_() for name, x in small.items()}
    ours = train(masked, problem, how)
    theirs = train(small, problem.but(ids=np.full((4, 8), kept.index(3))), how)
    close = {"rtol": 1e-12, "atol": 1e-13}
    torch.testing.assert_close(ours, theirs, **close)
    torch.testing.assert_close(masked["hidden"].grad, small["hidden"].grad, **close)
    for name in ("weight", "bias"):
        torch.testing.assert_close(masked[name].grad[kept], small[name].grad, **close)
        assert (masked[name].grad[cut] == 0).all()


@pytest.mark.parametrize("how", ["logps", "fast", "lean"])
@pytest.mark.parametrize("bad", [NAN, float("inf")])
def test_a_live_row_that_is_no_number_gives_nan_for_itself_alone(bad: float, how: str) -> None:
    problem = make_problem(seed=42)
    clean, spoilt = make_operands(problem), make_operands(problem)
    with torch.no_grad():
        spoilt["hidden"][0, 0] = bad
    assert problem.batch.mask is not None and problem.batch.mask[0, 0]
    good, ours = train(clean, problem, how), train(spoilt, problem, how)
    others = torch.ones(4, 8, dtype=torch.bool)
    others[0, 0] = False
    values = zip((*ours[:2], spoilt["hidden"].grad), (*good[:2], clean["hidden"].grad), strict=True)
    for mine, right in values:
        assert mine[0, 0].isnan().all()
        assert torch.isfinite(mine[others]).all()
        torch.testing.assert_close(mine[others], right[others], rtol=1e-6, atol=1e-7)
    assert spoilt["weight"].grad.isnan().any()
