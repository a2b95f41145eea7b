"""Precision of the linear form where 16-bit sums, small coefficients or a large vocabulary could lose it."""

from __future__ import annotations

from typing import Any

import numpy as np
import oracle
import pytest
import torch
from linear_support import MODES, bytes_of, make_problem, product, rounded, run_linear, through_head
from oracle import Options
from oracle_rows import row_stats
from support import tensor
from tolerance import as_array

import grpo_kernels as gk


def relative_error(ours: Any, truth: Any) -> float:
    """In the Euclidean norm."""
    truth = as_array(truth).astype(np.float64)
    return float(np.linalg.norm(as_array(ours).astype(np.float64) - truth) / np.linalg.norm(truth))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_the_error_of_dweight_does_not_grow_with_the_chunks(mode: str, dtype: torch.dtype) -> None:
    """256 rows in 1 to 256 chunks: no further from the truth than one rounding of it, however many sums there were."""
    opt = Options(loss_type="dapo", epsilon_high=10.0)
    problem = make_problem(
        seed=70, dtype=dtype, lengths=(256,), vocab=61, hidden_size=16, holes=False, off_policy=0.1
    )  # fmt: skip
    problem = problem.but(advantages=np.array([2.0]))
    truth = through_head(oracle.grpo(problem.batch, opt).dlogits, problem)["weight"]
    once = relative_error(tensor(truth.astype(np.float64)).to(dtype), truth)
    for rows in (257, 128, 32, 4, 1):
        ours = run_linear(problem, opt, mode=mode, chunk_rows=rows).grads["weight"]
        assert ours.dtype == dtype
        assert relative_error(ours, truth) < 1.01 * once, f"{rows} rows a chunk"


@pytest.mark.parametrize("upstream", [1.0, 65536.0])
@pytest.mark.parametrize("mode", MODES)
def test_a_large_denominator_in_float16(mode: str, upstream: float) -> None:
    """Coefficients near 1 / 65536 are subnormal in float16; dweight, their sum, need not be."""
    opt = Options(loss_type="dapo")
    problem = make_problem(seed=71, dtype=torch.float16, lengths=(64, 64), vocab=23, hidden_size=8, holes=False)
    loud = 1.0 if upstream > 1 else 64.0
    problem = problem.but(old=None, normalizer=65536.0, advantages=loud * np.array([1.0, -0.5]))
    truth = through_head(oracle.grpo(problem.batch, opt).dlogits * upstream, problem)["weight"]
    ours = run_linear(problem, opt, mode=mode, upstream=upstream).grads["weight"]
    assert ours.dtype == torch.float16
    assert np.abs(truth).max() > 1e-4
    assert relative_error(ours, truth) < 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_large_vocabulary_within_1e_5(dtype: torch.dtype) -> None:
    vocab, size = 151936, 4
    rng = np.random.default_rng(0)
    hidden = rounded(rng.normal(0, 1, (2, size)), dtype)
    weight = rounded(rng.normal(0, 1.5, (vocab, size)), dtype)
    ids = np.array([vocab - 1, 77])
    truth = row_stats(product(hidden, weight), ids, real=np.float64)
    leaves = tensor(hidden, dtype).requires_grad_(), tensor(weight, dtype).requires_grad_()
    out = gk.linear_per_token_logps(*leaves, tensor(ids), entropy=True, chunk_bytes=bytes_of(1, vocab))
    assert np.abs(as_array(out.logps) - truth.logps).max() < 1e-5
    assert np.abs(as_array(out.entropy) - truth.entropy).max() < 1e-5
    assert np.abs(as_array(out.lse) - truth.lse).max() < 1e-5
    (out.logps.sum() + out.entropy.sum()).backward()
    dlogits = (truth.dlogps + truth.dentropy).astype(np.float64)
    eps = torch.finfo(dtype).eps
    for leaf, right in zip(leaves, (dlogits @ weight, dlogits.T @ hidden), strict=True):
        assert (np.abs(as_array(leaf.grad) - right) <= max(eps, 1e-5) * np.abs(right) + 1e-6).all()


@pytest.mark.parametrize("mode", MODES)
def test_logits_near_minus_1000_keep_their_digits(mode: str) -> None:
    """A bias far from 0 leaves every difference as it was."""
    opt = Options(loss_type="dapo")
    problem = make_problem(seed=72, dtype=torch.float64)
    bias = np.asarray(problem.bias) - 1000.0
    moved = make_problem(seed=72, dtype=torch.float64).but(logits=product(problem.hidden, problem.weight, bias))
    moved = type(moved)(moved.batch, moved.hidden, moved.weight, bias, moved.dtype)
    truth = oracle.grpo(moved.batch, opt)
    ran = run_linear(moved, opt, mode=mode)
    np.testing.assert_allclose(ran.loss.item(), float(truth.loss), rtol=1e-10)
    for name, value in through_head(truth.dlogits, moved).items():
        np.testing.assert_allclose(as_array(ran.grads[name]), value.astype(float), rtol=1e-9, atol=1e-11)


FAR: dict[str, tuple[float, float, float]] = {  # advantage, denominator, upstream
    "loud": (2e5, 2.0**18, 1.0),
    "quiet, but scaled": (1e-5, 1.0, 65536.0),
}


@pytest.mark.parametrize("case", FAR)
@pytest.mark.parametrize("mode", MODES)
def test_gradients_that_float16_can_hold_come_out_in_float16(mode: str, case: str) -> None:
    """Whatever their parts are: a coefficient beyond 65504 over a large denominator, a subnormal one times a scale."""
    advantage, normalizer, upstream = FAR[case]
    opt = Options(loss_type="dapo")
    problem = make_problem(seed=73, dtype=torch.float16, lengths=(16, 16), vocab=23, hidden_size=8, holes=False)
    problem = problem.but(old=None, normalizer=normalizer, advantages=advantage * np.array([1.0, -0.5]))
    truth = through_head(oracle.grpo(problem.batch, opt).dlogits * upstream, problem)
    grads = run_linear(problem, opt, mode=mode, upstream=upstream).grads
    for name, right in truth.items():
        assert 0.01 < np.abs(right).max() < 6e4
        assert relative_error(grads[name], right) < 1e-3, name


@pytest.mark.parametrize("function", [*MODES, "logps"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_nearly_certain_target_keeps_the_digits_of_its_gradient(dtype: torch.dtype, function: str) -> None:
    """1 - p = 6e-8: `p - 1` in float32 is off by all of it."""
    vocab = 1025
    bias = torch.full((vocab,), -23.5, dtype=dtype)
    bias[1000] = 0.0
    truth = row_stats(as_array(bias)[None].astype(np.float64), np.array([1000]))
    bias.requires_grad_()
    hidden, weight, ids = torch.ones(1, 1, 2, dtype=dtype), torch.zeros(vocab, 2, dtype=dtype), torch.tensor([[1000]])
    if function == "logps":
        gk.linear_per_token_logps(hidden, weight, ids, bias=bias).logps.sum().backward()
    else:
        advantage = -torch.ones(1)  # the loss is then the log-prob's ratio, with its gradient
        gk.linear_grpo_loss(hidden, weight, ids, bias=bias, advantages=advantage, mode=function).loss.backward()
    assert bias.grad is not None
    assert 2e-8 < float(truth.dlogps[0, 1000]) < 6e-7
    np.testing.assert_allclose(as_array(bias.grad), truth.dlogps[0].astype(float), rtol=0.01)


@pytest.mark.parametrize("mode", MODES)
def test_logits_of_hundreds_overflow_nothing(mode: str) -> None:
    opt = Options(loss_type="dapo", entropy=True)
    problem = make_problem(seed=74, spread=300.0).but(old=None)
    truth = oracle.grpo(problem.batch, opt)
    ran = run_linear(problem, opt, mode=mode)
    size = np.abs(problem.batch.logits).max()
    logps = as_array(ran.per_token.logps).reshape(-1)
    assert np.abs(logps - truth.logps.astype(float)).max() < 2e-6 * size
    for name, value in through_head(truth.dlogits, problem).items():
        np.testing.assert_allclose(as_array(ran.grads[name]), value.astype(float), rtol=1e-3, atol=1e-3)


def test_small_probabilities_keep_their_gradient() -> None:
    """Nothing is filtered: columns of probability 1e-9 get theirs, in the weight as in the hidden state."""
    hidden = torch.tensor([[1.0, 0.5]], requires_grad=True)
    weight = torch.zeros(6, 2)
    weight[1:, 0] = -20.0
    weight[1:, 1] = torch.arange(5) / 4
    weight.requires_grad_()
    gk.linear_per_token_logps(hidden, weight, torch.tensor([0])).logps.sum().backward()
    stats = row_stats(product(as_array(hidden), as_array(weight)), np.array([0]))
    assert weight.grad is not None
    assert 1e-10 < np.abs(stats.dlogps[0, 1:]).max() < 1e-8
    np.testing.assert_allclose(
        as_array(weight.grad), (stats.dlogps.T @ as_array(hidden)).astype(float), rtol=1e-5, atol=0
    )  # fmt: skip
