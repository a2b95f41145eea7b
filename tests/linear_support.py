"""What the tests of the linear form share: problems whose logits NumPy multiplies, one call with its backward, meters.

The truth never comes from torch's own products: logits and both matrix gradients are NumPy's, in longdouble.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import oracle
import torch
from oracle import Batch, Options
from oracle_rows import Array
from support import config_of, full_options, loss_inputs, make_batch, pack, plain_loss, poisoned, result_dtype, tensor
from tolerance import as_array, assert_within_budget
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import grpo_kernels as gk

MODES = ["fast", "lean"]
FULL = full_options("grpo")


@dataclass(frozen=True)
class Problem:
    """One call of the linear form in NumPy: `batch.logits` are `hidden @ weight.T + bias` in longdouble.

    `hidden [B, T, H]` or `[N, H]`, `weight [V, H]` and `bias [V]` are float64 arrays that are exact in `dtype`.
    """

    batch: Batch
    hidden: Array
    weight: Array
    bias: Array | None
    dtype: torch.dtype

    def but(self, **changes: Any) -> Problem:
        """With some parts of the batch replaced."""
        return replace(self, batch=self.batch.but(**changes))


def product(hidden: Array, weight: Array, bias: Array | None = None) -> Array:
    """`hidden @ weight.T + bias` in longdouble."""
    with np.errstate(all="ignore"):
        logits = hidden.astype(np.longdouble) @ weight.T.astype(np.longdouble)
    return logits if bias is None else logits + bias


def rounded(value: Any, dtype: torch.dtype) -> Array:
    """float64 numbers that are exact in `dtype`."""
    return torch.as_tensor(np.asarray(value, dtype=np.float64)).to(dtype).double().numpy()


def make_problem(
    *, seed: int = 0, lengths: tuple[int, ...] = (5, 2, 7, 4), vocab: int = 37, hidden_size: int = 11,
    dtype: torch.dtype = torch.float32, layout: str = "padded", bias: bool = True, temperature: str | None = None,
    spread: float = 2.0, **options: Any,
) -> Problem:  # fmt: skip
    """`support.make_batch` with a head in front: logits of standard deviation `spread`, off-policy `old`, nearby `ref`.

    `temperature`: None, "[B, 1]" (padded only) or "token". A packed problem ends in dead rows of NaN.
    """
    rng = np.random.default_rng(1000 + seed)
    batch = make_batch(seed=seed, lengths=lengths, vocab=vocab, dtype=dtype, **options)
    b, t = batch.ids.shape
    side = result_dtype(dtype)
    hidden = rounded(rng.normal(0, 1, (b, t, hidden_size)), dtype)
    weight = rounded(rng.normal(0, spread / math.sqrt(hidden_size), (vocab, hidden_size)), dtype)
    offsets = rounded(rng.normal(0, 0.5, vocab), dtype) if bias else None
    heat = None
    if temperature is not None:
        heat = rounded(rng.uniform(0.6, 1.4, (b, t) if temperature == "token" else (b, 1)), side)
    logits = product(hidden, weight, offsets)

    def logps(values: Array) -> Array:
        return oracle.row_stats(values.reshape(b * t, vocab), batch.ids.reshape(-1), real=np.float64).logps

    move = (logps(logits) - logps(np.asarray(batch.logits))).reshape(b, t)
    batch = batch.but(
        logits=logits, temperature=heat, old=rounded(batch.old + move, side), ref=rounded(batch.ref + move, side)
    )
    if layout == "packed":
        others = pack(batch.but(logits=hidden, weight=heat), lengths)  # both go the way of the logits and the weights
        batch = pack(batch, lengths).but(temperature=others.weight)
        hidden = others.logits
    return Problem(batch, hidden, weight, offsets, dtype)


def make_operands(problem: Problem, frozen: Iterable[str] = ()) -> dict[str, Tensor]:
    """hidden, weight and bias (where there is one) as leaves that require grad, but for the frozen ones."""
    values = {"hidden": problem.hidden, "weight": problem.weight, "bias": problem.bias}
    return {
        name: tensor(value, problem.dtype).requires_grad_(name not in frozen)
        for name, value in values.items()
        if value is not None
    }


def bytes_of(rows: int, vocab: int, dtype: torch.dtype = torch.float32) -> int:
    """chunk_bytes that hold so many rows of logits on the CPU: one slab, in which the gradient takes their place."""
    return rows * vocab * (8 if dtype == torch.float64 else 4)


@dataclass(frozen=True)
class LinearRan:
    """What one loss call and its backward gave."""

    loss: Tensor
    grads: dict[str, Tensor]
    metrics: dict[str, Tensor]
    per_token: Any
    used: str


def run_linear(
    problem: Problem, opt: Options, *, mode: str = "auto", chunk_rows: int | None = None, frozen: Iterable[str] = (),
    upstream: float = 1.0, **changes: Any,
) -> LinearRan:  # fmt: skip
    """`gk.linear_grpo_loss` and its backward on `problem`, in poisoned memory."""
    arguments = loss_inputs(problem.batch, problem.dtype) | {"return_per_token": True} | changes
    if chunk_rows is not None:
        arguments["chunk_bytes"] = bytes_of(chunk_rows, problem.weight.shape[0], problem.dtype)
    operands = make_operands(problem, frozen)
    with poisoned():
        out = gk.linear_grpo_loss(
            operands["hidden"], operands["weight"], tensor(problem.batch.ids), bias=operands.get("bias"),
            config=config_of(opt), mode=mode, **arguments,
        )  # fmt: skip
        used = gk.backends.last_used()
        if out.loss.requires_grad:
            (out.loss * upstream).backward()
    grads = {name: x.grad for name, x in operands.items() if x.grad is not None}
    return LinearRan(out.loss.detach(), grads, out.metrics, out.per_token, used)


def score(operands: dict[str, Tensor], problem: Problem, **options: Any) -> gk.LogpsOutput:
    """`gk.linear_per_token_logps` with entropy, in poisoned memory."""
    arguments = {"mask": tensor(problem.batch.mask), "entropy": True} | options
    with poisoned():
        return gk.linear_per_token_logps(
            operands["hidden"], operands["weight"], tensor(problem.batch.ids), bias=operands.get("bias"), **arguments
        )


def train(operands: dict[str, Tensor], problem: Problem, how: str) -> tuple[Tensor, ...]:
    """Values of one call whose gradients are left in the operands: of the log-probs, or of a loss in one mode."""
    if how == "logps":
        out = score(operands, problem)
        (out.logps.sum() + out.entropy.sum()).backward()
        return out.logps, out.entropy, out.lse
    loss = gk.linear_grpo_loss(
        operands["hidden"], operands["weight"], tensor(problem.batch.ids), bias=operands["bias"], mode=how,
        config=gk.GRPOLossConfig(temperature=0.8), advantages=tensor(problem.batch.advantages, problem.dtype),
        completion_mask=tensor(problem.batch.mask), return_per_token=True,
    )  # fmt: skip
    loss.loss.backward()
    return loss.per_token.logps, loss.per_token.loss, loss.loss


def loss_of(
    opt: Options = FULL, *, seed: int = 60, dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[list[Tensor], Callable[..., gk.GRPOLossOutput]]:
    """Operands that require grad and the loss as a function of hidden, weight and bias."""
    problem = make_problem(seed=seed, dtype=dtype, weight="token", **options)
    arguments, ids, config = loss_inputs(problem.batch, dtype), tensor(problem.batch.ids), config_of(opt)

    def loss(hidden: Tensor, weight: Tensor, bias: Tensor | None = None, **more: Any) -> gk.GRPOLossOutput:
        return gk.linear_grpo_loss(hidden, weight, ids, bias=bias, config=config, **arguments | more)

    return list(make_operands(problem).values()), loss


def logps_of(operands: list[Tensor], **options: Any) -> gk.LogpsOutput:
    """Log-probs and entropies of fixed ids `[4, 8]`, for operands of `loss_of`."""
    ids = torch.arange(32).reshape(4, 8)
    return gk.linear_per_token_logps(operands[0], operands[1], ids, bias=operands[2], entropy=True, **options)


# The truth, and plain torch in the same precision


def through_head(dlogits: Array, problem: Problem) -> dict[str, Array]:
    """Gradients of hidden, weight and bias from that of the logits; rows whose gradient is 0 are not read."""
    rows = dlogits.reshape(-1, dlogits.shape[-1])
    hidden = np.where((rows != 0).any(-1)[:, None], problem.hidden.reshape(len(rows), -1), 0)
    grads = {"hidden": (rows @ problem.weight).reshape(problem.hidden.shape), "weight": rows.T @ hidden}
    return grads if problem.bias is None else grads | {"bias": rows.sum(0)}


def head_floors(row_scale: Array, problem: Problem) -> dict[str, Array]:
    """The scale of each gradient's rounding, from that of every row of the logits' gradient."""
    scale = np.asarray(row_scale, np.longdouble).reshape(-1)
    hidden = np.abs(np.nan_to_num(problem.hidden.reshape(len(scale), -1)))
    column = 2 * np.abs(problem.weight).max(0)
    floors = {
        "hidden": (scale[:, None] * column).reshape(problem.hidden.shape),
        "weight": np.broadcast_to(scale @ hidden, problem.weight.shape),
    }
    return floors if problem.bias is None else floors | {"bias": np.broadcast_to(scale.sum(), problem.bias.shape)}


def product_growth(problem: Problem, live: Array, options: Options) -> float:
    """How much larger the rounding of a dot product may be than that of the logit it gives: |h| @ |w| over |z|."""
    vocab, size = problem.weight.shape
    hidden = np.abs(problem.hidden.reshape(-1, size))[live]
    terms = hidden @ np.abs(problem.weight).T
    logits = np.abs(problem.batch.logits.reshape(-1, vocab))[live].astype(np.float64)
    largest = np.maximum(logits.max(-1), 1 / options.logit_scale)
    return max(1.0, float((terms.max(-1) / largest).max())) if len(terms) else 1.0


@dataclass(frozen=True)
class Expected:
    """Truth and plain torch of one loss call."""

    problem: Problem
    opt: Options
    truth: oracle.Truth
    growth: float
    ref: tuple[Tensor, Tensor, Tensor]  # loss, dlogits, live token losses


def expect(problem: Problem, opt: Options) -> Expected:
    """What `assert_expected` needs, made once for all modes and chunks."""
    truth = oracle.grpo(problem.batch, opt)
    side = result_dtype(problem.dtype)
    logits = tensor(problem.hidden, side) @ tensor(problem.weight, side).T
    logits = logits if problem.bias is None else logits + tensor(problem.bias, side)
    ref = plain_loss(problem.batch.but(logits=as_array(logits)), opt, side)
    return Expected(problem, opt, truth, product_growth(problem, truth.live, opt), ref)


def assert_expected(ran: LinearRan, want: Expected, where: str) -> None:
    """Loss, all gradients, per-token results and metrics inside the error budget."""
    problem, truth = want.problem, want.truth
    side, live = result_dtype(problem.dtype), torch.as_tensor(truth.live)
    ref_loss, ref_dlogits, ref_tokens = want.ref
    floor = want.growth * np.maximum(1, truth.loss_scale)
    assert_within_budget(ran.loss, ref_loss, truth.loss, side, floor=floor, name=f"{where}: loss")
    floors = head_floors(want.growth * truth.dlogits_scale, problem)
    refs = through_head(as_array(ref_dlogits).astype(np.float64), problem)
    for name, value in through_head(truth.dlogits, problem).items():
        assert_within_budget(
            ran.grads[name], tensor(refs[name]).to(problem.dtype), value, problem.dtype, compute=side,
            floor=floors[name], name=f"{where}: d{name}",
        )  # fmt: skip
    if ran.per_token is not None:
        assert_within_budget(
            ran.per_token.loss.reshape(-1)[live], ref_tokens, truth.token_loss[truth.live], side,
            floor=want.growth * np.maximum(1, truth.token_scale[truth.live]), name=f"{where}: per_token.loss",
        )  # fmt: skip
        for name in ("logps", "entropy", "kl", "ratio"):
            value = getattr(ran.per_token, name)
            if value is not None:
                np.testing.assert_allclose(
                    as_array(value).reshape(-1)[truth.live], getattr(truth, name)[truth.live].astype(float),
                    rtol=2e-5, atol=2e-6, err_msg=f"{where}: {name}",
                )  # fmt: skip
    assert set(ran.metrics) == set(truth.metrics), where
    for name, value in truth.metrics.items():
        np.testing.assert_allclose(ran.metrics[name].item(), value, rtol=2e-5, atol=2e-6, err_msg=f"{where}: {name}")


# Meters: both read what torch's profiler recorded, so that they are the same on every run

PRODUCTS = {
    f"aten::{name}": first
    for first, names in {0: ["mm", "bmm", "mv"], 1: ["addmm", "baddbmm", "addmv", "_addmm_activation"]}.items()
    for name in itertools.chain(names, (f"{name}_" for name in names))
}
"""Each operation that multiplies matrices, and the place of the first factor among its inputs."""


def product_flops(work: Callable[[], Any]) -> int:
    """2 m n k of every matrix product that ran, from the input shapes of the outermost events of products."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        work()
    total, busy_until = 0, dict[int, int]()
    products = [event for event in profiler.profiler.kineto_results.events() if event.name() in PRODUCTS]
    for event in sorted(products, key=lambda event: (event.start_ns(), -event.duration_ns())):
        thread = event.start_thread_id()
        if event.start_ns() < busy_until.get(thread, 0):
            continue  # inside another one
        busy_until[thread] = event.start_ns() + event.duration_ns()
        left, right = event.shapes()[PRODUCTS[event.name()] :][:2]
        total += 2 * math.prod(left) * (right[-1] if len(right) > 1 else 1)
    return total


def memory_changes(work: Callable[[], Any]) -> list[int]:
    """Bytes of every allocation (> 0) and release (< 0) during `work`, in order; its results are alive to the end."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        kept = work()
    del kept
    return [event.nbytes() for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]


def peak_bytes(changes: list[int]) -> int:
    """Largest sum of allocations alive at once."""
    return max(itertools.accumulate(changes, initial=0))


def step_of(
    rows: tuple[int, ...], vocab: int, hidden_size: int, *, dtype: torch.dtype = torch.float32,
    frozen: Iterable[str] = (), config: gk.GRPOLossConfig | None = None, bias: bool = False, **options: Any,
) -> Callable[[], Any]:  # fmt: skip
    """A training step of the loss on random `hidden [*rows, H]`: forward and backward, returning its gradients.

    Options that are not given: on-policy advantages of 1, no mask.
    """
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    hidden, weight = normal(*rows, hidden_size), normal(vocab, hidden_size)
    leaves = {"hidden": hidden, "weight": weight} | ({"bias": normal(vocab)} if bias else {})
    wanted = [x.requires_grad_() for name, x in leaves.items() if name not in frozen]
    ids = torch.randint(0, vocab, rows, generator=generator)
    arguments = {"advantages": torch.ones(rows[0])} | options

    def step() -> Any:
        out = gk.linear_grpo_loss(
            hidden, weight, ids, bias=leaves.get("bias"), config=config or gk.GRPOLossConfig(), **arguments
        )
        return out.loss, torch.autograd.grad(out.loss, wanted) if out.loss.requires_grad else ()

    return step
