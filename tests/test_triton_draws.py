"""Five hundred draws of all that a loss can be asked: the Triton kernels are as good as the torch implementation."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import numpy as np
import oracle
import torch
from hypothesis import HealthCheck, given, settings
from oracle import Batch, Options
from support import DTYPES, OBJECTIVES, result_dtype
from triton_support import assert_run_within_budget, run_on

import grpo_kernels as gk


def some(*values: Any) -> st.SearchStrategy[Any]:
    return st.sampled_from(values)


@st.composite
def options(draw: st.DrawFn) -> Options:
    """Any combination that the config accepts."""
    loss_type, level = draw(some(*OBJECTIVES, *OBJECTIVES[:5]))  # token level is the one with a kernel of its own
    clips: dict[str, Any] = {"epsilon_high": draw(some(1.0, 1.1, 5.0))}
    if loss_type != "cispo":
        clips = {
            "epsilon": draw(some(0.0, 0.2)), "epsilon_high": draw(some(None, 0.28)),
            "delta": draw(some(None, 1.1, 4.0)), "dual_clip": draw(some(None, 1.2, 3.0)),
        }  # fmt: skip
    return Options(
        loss_type=loss_type, importance_sampling_level=level, beta=draw(some(0.0, 0.04, -0.1)),
        kl_estimator=draw(some("k1", "k2", "k3")), use_bias_correction_kl=draw(st.booleans()),
        entropy=draw(st.booleans()), entropy_coef=draw(some(0.0, 0.0, 0.05, -0.2)),
        temperature=draw(some(1.0, 0.6, 1.7)), softcap=draw(some(None, None, 2.0, 30.0)),
        logit_scale=draw(some(1.0, 0.25, 1.3)), max_completion_length=draw(some(3, 11)), **clips,
    )  # fmt: skip


@st.composite
def problems(draw: st.DrawFn) -> tuple[Batch, Options, torch.dtype, dict[str, Any]]:
    """One to three sequences of up to three tokens, padded or packed, and the keyword arguments that are drawn too."""
    opt, dtype, rng = draw(options()), draw(some(*DTYPES)), np.random.default_rng(draw(st.integers(0, 2**32)))
    lengths = draw(st.lists(st.integers(0, 3), min_size=1, max_size=3))
    vocab = draw(st.integers(1, 40))
    packed = draw(st.booleans())
    b, t = len(lengths), max(*lengths, 1)
    n = (b, t) if not packed else (max(1, sum(lengths) + draw(st.integers(0, 1))),)

    def rounded(values: Any, to: torch.dtype | None = None) -> Any:
        return torch.as_tensor(np.asarray(values)).to(to or result_dtype(dtype)).double().numpy()

    logits = rounded(rng.normal(draw(some(0.0, -30.0)), draw(some(0.3, 3.0, 15.0)), (*n, vocab)), dtype)
    if draw(some(False, False, True)) and vocab > 2:
        logits[..., rng.permutation(vocab)[: vocab // 2]] = -np.inf
    ids = np.where(np.isneginf(logits).any(-1), logits.argmax(-1), rng.integers(0, vocab, n))
    temperature = draw(some(None, None, "row", "token"))
    if temperature is not None:
        temperature = rounded(rng.uniform(0.5, 2.0, (*n[:1], *([1] if temperature == "row" else n[1:]))[: len(n)]))
    heat = opt.temperature if temperature is None else np.broadcast_to(temperature, n).reshape(-1)
    p = oracle.row_stats(
        logits.reshape(-1, vocab), ids.reshape(-1), temperature=heat, softcap=opt.softcap, logit_scale=opt.logit_scale
    ).logps.reshape(n)
    mask = None if draw(st.booleans()) else rng.random(n) > 0.25
    if not packed:
        inside = np.arange(t)[None] < np.asarray(lengths)[:, None]
        mask = inside if mask is None else mask & inside

    def near(spread: float) -> Any:
        return rounded(p.astype(float) + rng.normal(0, spread, n))

    def sequences_or_tokens(low: float, high: float) -> Any:
        tokens = (*n, 1) if n == (b,) else n  # with as many tokens as sequences, [N] are sequences
        return rounded(rng.uniform(low, high, {"[B]": (b,), "[B, 1]": (b, 1), "token": tokens}[draw(shapes)]))

    shapes = some("[B]", "[B, 1]", "token")
    batch = Batch(
        logits,
        ids.astype(draw(some(np.int32, np.int64))),
        advantages=sequences_or_tokens(-1.5, 2.0),
        mask=mask,
        old=near(0.4) if draw(some(False, True, True)) else None,
        ref=near(0.5),
        weight=sequences_or_tokens(0.3, 1.8) if draw(st.booleans()) else None,
        temperature=temperature,
        cu_seqlens=np.cumsum([0, *lengths]) if packed else None,
        normalizer=draw(some(None, None, 5.0)),
        entropy_normalizer=draw(some(None, 7.0)),
    )
    arguments: dict[str, Any] = {}
    if dtype != torch.float64 and draw(some(False, False, True)):  # made before the kernel, advantages are float32
        size = draw(some(*(g for g in (1, 2, 3) if b % g == 0)))
        rewards = torch.tensor(draw(st.lists(some(0.0, 1.0, 0.25, float("nan")), min_size=b, max_size=b)))
        batch = batch.but(
            advantages=rounded(oracle.group_advantages(rewards.numpy(), np.arange(b) // size).astype(float))
        )
        arguments = {"advantages": None, "rewards": rewards, "group_size": size}
    return batch, opt, dtype, arguments


ROUTES: set[tuple[str, str]] = set()


@settings(max_examples=500, derandomize=True, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(problems())
def check(problem: tuple[Batch, Options, torch.dtype, dict[str, Any]]) -> None:
    batch, opt, dtype, arguments = problem
    theirs = run_on("torch", batch, opt, dtype)  # with rewards: the oracle's advantages of them
    ours = run_on("triton", batch, opt, dtype, **arguments)
    ROUTES.add((opt.importance_sampling_level, str(gk.backends.last_used())))
    assert_run_within_budget(ours, batch, opt, dtype, ref=theirs, slack=4.0)


def test_triton_is_as_good_as_torch_whatever_is_drawn() -> None:
    ROUTES.clear()
    check()
    assert {("token", "triton one-pass"), ("sequence", "triton")} == ROUTES
