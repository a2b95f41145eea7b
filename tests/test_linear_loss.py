"""The loss from hidden states: inside the error budget of NumPy's products, whatever the options, mode and chunk."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from linear_support import (
    MODES,
    assert_expected,
    expect,
    make_operands,
    make_problem,
    rounded,
    run_linear,
)
from oracle import Options
from support import (
    DTYPES,
    LAYOUTS,
    OBJECTIVES,
    config_of,
    default_impl,
    full_options,
    loss_inputs,
    objective_options,
    tensor,
)
from test_field_objective import EXTRAS
from tolerance import as_array

import grpo_kernels as gk

NAN = float("nan")
TRANSFORM: dict[str, Any] = {"temperature": 0.7, "softcap": 4.0, "logit_scale": 1.3}


def modes_of(level: str) -> list[str]:
    """Coefficients of a sequence-level loss need the whole sequence first."""
    return MODES if level == "token" else ["lean"]


# Every option and loss; dtype, layout, bias and chunk size take turns


@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize(("loss_type", "level"), OBJECTIVES)
def test_every_option_of_every_loss(loss_type: str, level: str, extra: str) -> None:
    turn = OBJECTIVES.index((loss_type, level)) + len(OBJECTIVES) * list(EXTRAS).index(extra)
    dtype, layout = DTYPES[turn % 4], LAYOUTS[turn // 4 % 2]
    opt = objective_options(loss_type, level, EXTRAS[extra])
    problem = make_problem(
        seed=200 + turn, dtype=dtype, layout=layout, bias=turn % 3 > 0, weight="token" if turn % 2 else None
    )
    want = expect(problem, opt)
    assert abs(float(want.truth.loss)) > 1e-4
    for mode in modes_of(level):
        ran = run_linear(problem, opt, mode=mode, chunk_rows=(None, 3, 7)[turn % 3])
        assert_expected(ran, want, mode)
        assert ran.used == f"{default_impl()} {mode}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("loss_type", "level"), OBJECTIVES)
def test_every_loss_in_every_dtype_and_layout(loss_type: str, level: str, layout: str, dtype: torch.dtype) -> None:
    """With every term on: KL, weights, entropy, cap, scale, bias and a temperature per token."""
    opt = full_options(loss_type, level, softcap=4.0, logit_scale=1.3)
    problem = make_problem(seed=5, dtype=dtype, layout=layout, temperature="token", weight="token")
    want = expect(problem, opt)
    for mode in modes_of(level):
        assert_expected(run_linear(problem, opt, mode=mode, chunk_rows=4), want, mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("weight", ["[B]", "[B, 1]", "token"])
@pytest.mark.parametrize("token_advantages", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_shape_of_weights_and_advantages(layout: str, token_advantages: bool, weight: str, mode: str) -> None:
    opt = full_options("grpo")
    problem = make_problem(seed=6, layout=layout, weight=weight, token_advantages=token_advantages)
    want = expect(problem, opt)
    assert_expected(run_linear(problem, opt, mode=mode), want, mode)
    if not token_advantages:
        wide = problem.but(advantages=problem.batch.advantages[:, None])
        assert_expected(run_linear(wide, opt, mode=mode), want, "[B, 1]")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("temperature", [0.6, "0-d", "[B, 1]", "token"])
def test_every_kind_of_temperature(temperature: Any, mode: str) -> None:
    """The argument overrides the config's."""
    opt = Options(temperature=3.0, softcap=5.0, logit_scale=1.2, beta=0.1)
    if temperature in (0.6, "0-d"):
        number = float(torch.tensor(0.6)) if temperature == "0-d" else 0.6
        problem = make_problem(seed=7).but(temperature=number)
        changes = {"temperature": torch.tensor(0.6)} if temperature == "0-d" else {}
    else:
        problem, changes = make_problem(seed=7, temperature=temperature), {}
    assert_expected(run_linear(problem, opt, mode=mode, **changes), expect(problem, opt), str(temperature))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("normalizer", "entropy_normalizer"), [(0.25, None), (37.0, 0.5), (None, 100.0)])
def test_normalizers_replace_the_denominators(normalizer: Any, entropy_normalizer: Any, mode: str) -> None:
    opt = full_options("dapo")
    problem = make_problem(seed=8).but(normalizer=normalizer, entropy_normalizer=entropy_normalizer)
    want = expect(problem, opt)
    ran = run_linear(problem, opt, mode=mode)
    assert_expected(ran, want, "numbers")
    given = {"normalizer": normalizer, "entropy_normalizer": entropy_normalizer}
    tensors = {name: None if value is None else torch.tensor(value) for name, value in given.items()}
    assert_expected(run_linear(problem, opt, mode=mode, **tensors), want, "0-d tensors")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("loss_type", ["dapo", "cispo"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_on_policy(layout: str, loss_type: str, mode: str) -> None:
    """No subtraction: ratio 1 exactly, and the gradient is that of `old = logps.detach()`."""
    opt = objective_options(loss_type, "token", {"temperature": 0.7})
    problem = make_problem(seed=9, layout=layout).but(old=None, ref=None)
    ran = run_linear(problem, opt, mode=mode)
    assert_expected(ran, expect(problem, opt), mode)
    assert all(ran.metrics[f"ratio/{how}"].item() == 1.0 for how in ("mean", "min", "max"))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("groups", ["one", "size", "ids"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rewards_are_normalised_in_their_groups(layout: str, groups: str, mode: str) -> None:
    rewards = np.array([1.0, 0.25, NAN, 2.0, -0.5, 0.75])
    ids = {"one": [0] * 6, "size": [0, 0, 1, 1, 2, 2], "ids": [7, -3, 7, 7, -3, 7]}[groups]
    changes: dict[str, Any] = {"advantages": None, "rewards": tensor(rewards, torch.float32)}
    if groups == "size":
        changes["group_size"] = 2
    elif groups == "ids":
        changes["group_ids"] = torch.tensor(ids)
    opt = full_options("grpo", epsilon_high=None)
    problem = make_problem(seed=10, lengths=(3, 2, 4, 1, 5, 2), layout=layout)
    problem = problem.but(advantages=rounded(oracle.group_advantages(rewards, ids), torch.float32))
    assert_expected(run_linear(problem, opt, mode=mode, **changes), expect(problem, opt), groups)


# Sizes and chunks


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("hidden_size", [1, 3, 47])
@pytest.mark.parametrize("vocab", [1, 2, 3, 127, 257, 599])
def test_odd_sizes(vocab: int, hidden_size: int, mode: str) -> None:
    opt = full_options("dapo", **TRANSFORM)
    problem = make_problem(seed=11, vocab=vocab, hidden_size=hidden_size, lengths=(1, 3, 6))
    assert_expected(run_linear(problem, opt, mode=mode, chunk_rows=4), expect(problem, opt), mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rows", [1, 127, 128, 129, 257])
def test_row_counts_around_a_panel(rows: int, mode: str) -> None:
    opt = full_options("dapo")
    problem = make_problem(seed=12, vocab=13, hidden_size=5, lengths=(rows,), holes=False, dtype=torch.float64)
    assert_expected(run_linear(problem, opt, mode=mode), expect(problem, opt), mode)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_chunks_from_one_row_to_all(mode: str, dtype: torch.dtype) -> None:
    opt = full_options("grpo")
    problem = make_problem(seed=13, dtype=dtype, lengths=(9, 2, 7, 12))
    want = expect(problem, opt)
    for rows in (1, 2, 3, 8, 26, 52, 1000):
        assert_expected(run_linear(problem, opt, mode=mode, chunk_rows=rows), want, f"{rows} rows")
    assert_expected(run_linear(problem, opt, mode=mode, chunk_bytes=1), want, "less than a row is a row")


@pytest.mark.parametrize("mode", MODES)
def test_a_vocabulary_of_thousands_in_16_bit(mode: str) -> None:
    """The weight is widened in slices: several of them, the last one short."""
    opt = full_options("dapo")
    problem = make_problem(seed=14, dtype=torch.bfloat16, vocab=5003, hidden_size=8, lengths=(3, 2))
    want = expect(problem, opt)
    for rows in (1, 2, 1000):
        assert_expected(run_linear(problem, opt, mode=mode, chunk_rows=rows), want, f"{rows} rows")


# Against the logits path


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("on_policy", [False, True])
@pytest.mark.parametrize("per_token", [False, True])
def test_rows_without_advantage_are_skipped_and_still_counted(per_token: bool, on_policy: bool, mode: str) -> None:
    """Denominators, metrics and clip shares are those of the loss on logits."""
    opt = Options(loss_type="grpo")
    problem = make_problem(seed=15).but(advantages=np.array([0.0, 1.0, 0.0, -0.5]))
    problem = problem.but(old=None) if on_policy else problem
    ran = run_linear(problem, opt, mode=mode, return_per_token=per_token)
    assert_expected(ran, expect(problem, opt), mode)
    assert (ran.grads["hidden"][[0, 2]] == 0).all()


@pytest.mark.parametrize(("loss_type", "level"), OBJECTIVES)
def test_it_is_the_loss_on_the_logits(loss_type: str, level: str) -> None:
    opt = full_options(loss_type, level, **TRANSFORM)
    problem = make_problem(seed=16, dtype=torch.float64, weight="token")
    ran = run_linear(problem, opt)
    operands = make_operands(problem)
    logits = operands["hidden"] @ operands["weight"].T + operands["bias"]
    out = gk.grpo_loss(
        logits, tensor(problem.batch.ids), config=config_of(opt), return_per_token=True,
        **loss_inputs(problem.batch, problem.dtype),
    )  # fmt: skip
    out.loss.backward()
    close = {"rtol": 1e-12, "atol": 1e-13}
    torch.testing.assert_close(ran.loss, out.loss.detach(), **close)
    assert list(ran.metrics) == list(out.metrics)
    for name, value in out.metrics.items():
        torch.testing.assert_close(ran.metrics[name], value, **close)
    for name, value in out.per_token._asdict().items():
        torch.testing.assert_close(getattr(ran.per_token, name), value, **close)
    for name, leaf in operands.items():
        torch.testing.assert_close(ran.grads[name], leaf.grad, **close)


def test_auto_picks_the_mode_and_says_which() -> None:
    problem = make_problem(seed=17)
    token, sequence = full_options("grpo"), full_options("grpo", "sequence")
    assert run_linear(problem, token).used == f"{default_impl()} fast"
    assert run_linear(problem, sequence).used == f"{default_impl()} lean"
    nothing = {"hidden", "weight", "bias"}
    assert run_linear(problem, token, frozen=nothing).used == f"{default_impl()} forward"
    assert run_linear(problem, sequence, frozen=nothing).used == f"{default_impl()} forward"


def test_num_live_tokens_changes_nothing() -> None:
    opt = full_options("dapo")
    for layout in LAYOUTS:
        problem = make_problem(seed=18, layout=layout)
        want = expect(problem, opt)
        ran = run_linear(problem, opt, num_live_tokens=int(want.truth.live.sum()))
        assert_expected(ran, want, layout)


@pytest.mark.parametrize("mode", MODES)
def test_logits_of_the_input_dtype(mode: str) -> None:
    """16-bit logits: rounded once, so as far off as that; what float32 logits are not."""
    opt = Options(loss_type="dapo")
    problem = make_problem(seed=19, dtype=torch.bfloat16, spread=6.0, vocab=301)
    truth = oracle.grpo(problem.batch, opt)
    errors = {}
    for name in ("input", "float32"):
        ran = run_linear(problem, opt, mode=mode, logits_dtype=name)
        logps = as_array(ran.per_token.logps).reshape(-1)
        errors[name] = np.abs(logps - truth.logps.astype(float))[truth.live].max()
        assert all(torch.isfinite(x).all() for x in ran.grads.values())
    half_step = np.abs(problem.batch.logits).max() * 2.0**-8
    assert errors["float32"] < 1e-5 < 1e-4 < errors["input"] < 2 * half_step
    exact = replace(problem, dtype=torch.float32)
    assert_expected(run_linear(exact, opt, mode=mode, logits_dtype="input"), expect(exact, opt), "float32 input")


# Nothing to do


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", ["no live token", "B = 0", "T = 0", "packed without sequences"])
def test_a_batch_without_a_live_token_gives_zeros(case: str, mode: str) -> None:
    shape = {"no live token": (2, 3), "B = 0": (0, 3), "T = 0": (2, 0), "packed without sequences": (4,)}[case]
    hidden = torch.full((*shape, 5), NAN).requires_grad_()
    weight, bias = torch.randn(7, 5, requires_grad=True), torch.randn(7, requires_grad=True)
    packed = len(shape) == 1
    out = gk.linear_grpo_loss(
        hidden, weight, torch.zeros(shape, dtype=torch.long), bias=bias, mode=mode, return_per_token=True,
        config=config_of(full_options("dapo")), advantages=torch.ones(0 if packed else shape[0]),
        completion_mask=torch.zeros(shape), ref_per_token_logps=torch.zeros(shape),
        cu_seqlens=torch.zeros(1, dtype=torch.int32) if packed else None,
    )  # fmt: skip
    out.loss.backward()
    assert out.loss.item() == 0
    assert all(torch.isfinite(x).all() for x in out.metrics.values())
    for leaf in (hidden, weight, bias):
        assert leaf.grad is not None and leaf.grad.shape == leaf.shape
        assert (leaf.grad == 0).all()


# The Triton row kernels, interpreted

TRITON: dict[str, tuple[Options, str]] = {
    "clip": (Options(epsilon_high=0.28, temperature=0.7), "fast"),
    "everything": (full_options("grpo", softcap=4.0, logit_scale=1.3), "fast"),
    "cispo": (full_options("cispo"), "fast"),
    "clip, lean": (Options(epsilon_high=0.28, temperature=0.7), "lean"),
    "sequence": (full_options("grpo", "sequence"), "lean"),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", TRITON)
def test_triton(name: str, dtype: torch.dtype) -> None:
    pytest.importorskip("triton")
    opt, mode = TRITON[name]
    problem = make_problem(seed=20, lengths=(3, 2), vocab=37, dtype=dtype, weight="token")
    ran = run_linear(problem, opt, mode=mode, impl="triton", chunk_rows=4)
    assert ran.used == f"triton {mode}"
    assert_expected(ran, expect(problem, opt), name)
