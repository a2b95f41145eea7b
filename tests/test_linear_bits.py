"""What never changes a bit of the linear form: company, repetition, views."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from linear_support import bytes_of, make_operands, make_problem, run_linear, score, train
from oracle import Options
from support import DTYPES, full_options, poisoned, same_bits, tensor
from torch import Tensor

import grpo_kernels as gk

NAN = float("nan")


def assert_same_rows(ours: Any, theirs: Any, where: str) -> None:
    for name in ("logps", "entropy", "lse"):
        assert same_bits(getattr(ours, name).reshape(-1), getattr(theirs, name).reshape(-1)), f"{where}: {name}"


def rows_of(dtype: torch.dtype, rows: int = 11, vocab: int = 131, size: int = 24) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    hidden = torch.randn(rows, size, generator=generator).to(dtype)
    weight = (torch.randn(vocab, size, generator=generator) / 2).to(dtype)
    return hidden, weight, torch.arange(rows) * 7 % vocab


@pytest.mark.parametrize("chunk_rows", [None, 4, 1])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_is_bitwise_the_same_in_any_company(dtype: torch.dtype, chunk_rows: int | None) -> None:
    """Alone, in another order, behind dead rows, in a batch with padding: the same product of a padded panel."""
    hidden, weight, ids = rows_of(dtype)
    chunk = None if chunk_rows is None else bytes_of(chunk_rows, 131, dtype)

    def call(rows: Tensor, targets: Tensor, mask: Tensor | None = None) -> gk.LogpsOutput:
        with poisoned():
            return gk.linear_per_token_logps(rows, weight, targets, mask=mask, entropy=True, chunk_bytes=chunk)

    together = call(hidden, ids)
    alone = [call(hidden[i : i + 1], ids[i : i + 1]) for i in range(11)]
    assert_same_rows(gk.LogpsOutput(*(torch.cat(x) for x in zip(*alone, strict=True))), together, "alone")
    backwards = call(hidden.flip(0), ids.flip(0))
    assert_same_rows(gk.LogpsOutput(*(x.flip(0) for x in backwards)), together, "reversed")
    crowd = call(
        torch.cat([torch.full((3, 24), NAN, dtype=dtype), hidden, hidden]),
        torch.cat([torch.zeros(3).long(), ids, ids]),
        torch.tensor([0] * 3 + [1] * 22),
    )
    for start in (3, 14):
        assert_same_rows(gk.LogpsOutput(*(x[start : start + 11] for x in crowd)), together, "behind dead rows")
    padded = torch.full((11, 5, 24), NAN, dtype=dtype)
    padded[:, 2] = hidden
    mask = torch.zeros(11, 5).index_fill(1, torch.tensor([2]), 1)
    targets = torch.zeros(11, 5, dtype=torch.long)
    targets[:, 2] = ids
    assert_same_rows(gk.LogpsOutput(*(x[:, 2] for x in call(padded, targets, mask))), together, "padded")


@pytest.mark.parametrize("mode", ["fast", "lean"])
def test_packed_and_padded_rows_agree_to_the_bit(mode: str) -> None:
    """With one denominator and one chunk the gradient of a row is its own too."""
    lengths = (3, 1, 5)
    opt = full_options("dapo")
    results = []
    for layout in ("padded", "packed"):
        problem = make_problem(seed=43, lengths=lengths, layout=layout, holes=False).but(
            normalizer=9.0, entropy_normalizer=9.0
        )
        ran = run_linear(problem, opt, mode=mode)
        keep = torch.arange(6)[None] < torch.tensor(lengths)[:, None]
        keep = keep if layout == "padded" else torch.arange(11) < 9
        results.append((ran.per_token.logps[keep], ran.per_token.entropy[keep], ran.grads["hidden"][keep]))
    assert all(same_bits(a, b) for a, b in zip(*results, strict=True))


SAME_POLICY: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "cap": {"softcap": 4.0},
    "entropy": {"entropy": True},
    "bonus": {"entropy_coef": 0.1},
}


@pytest.mark.parametrize("options", SAME_POLICY)
@pytest.mark.parametrize("mode", ["fast", "lean"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_old_log_probs_of_the_same_weights_give_ratios_of_exactly_one(
    dtype: torch.dtype, mode: str, options: str
) -> None:
    """Scored earlier, without grad and with another mask: a row's log-prob is one number."""
    opt = Options(**SAME_POLICY[options])
    problem = make_problem(seed=46, dtype=dtype)
    with torch.no_grad():
        old = score(
            make_operands(problem), problem, mask=None, entropy=False, temperature=opt.temperature, softcap=opt.softcap
        ).logps
    ran = run_linear(problem, opt, mode=mode, old_per_token_logps=old)
    assert (ran.per_token.ratio[torch.as_tensor(problem.batch.mask)] == 1.0).all()
    assert ran.metrics["ratio/min"] == ran.metrics["ratio/max"] == 1.0


@pytest.mark.parametrize("mode", ["fast", "lean"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_repeated_call_repeats_every_bit(dtype: torch.dtype, mode: str) -> None:
    problem = make_problem(seed=44, dtype=dtype, weight="token")
    first, second = (run_linear(problem, full_options("grpo"), mode=mode, chunk_rows=5) for _ in range(2))
    assert same_bits(first.loss, second.loss)
    for name, grad in first.grads.items():
        assert same_bits(grad, second.grads[name]), name
    for name, value in first.metrics.items():
        assert same_bits(value, second.metrics[name]), name


@pytest.mark.parametrize("how", ["logps", "fast", "lean"])
def test_expanded_hidden_states_are_read_as_they_are(how: str) -> None:
    """Stride 0 over the batch: every sequence scored by the same rows, gradients summed by autograd."""
    problem = make_problem(seed=47, dtype=torch.float64)
    shared, separate = make_operands(problem), make_operands(problem)
    rows = shared["hidden"].detach()[:1].clone().requires_grad_()
    separate["hidden"] = rows.detach().expand(4, -1, -1).clone().requires_grad_()
    values = train(shared | {"hidden": rows.expand(4, -1, -1)}, problem, how)
    torch.testing.assert_close(values, train(separate, problem, how), rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(rows.grad, separate["hidden"].grad.sum(0, keepdim=True), rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(shared["weight"].grad, separate["weight"].grad, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("how", ["logps", "fast", "lean"])
@pytest.mark.parametrize("view", ["rows of a padded head", "transposed", "every other column"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_the_weight_may_be_a_view(dtype: torch.dtype, view: str, how: str) -> None:
    problem = make_problem(seed=48, dtype=dtype)
    vocab, size = problem.weight.shape
    base, cut = {
        "rows of a padded head": (torch.full((vocab + 5, size), NAN, dtype=dtype), lambda x: x[:vocab]),
        "transposed": (torch.full((size, vocab), NAN, dtype=dtype), lambda x: x.T),
        "every other column": (torch.full((vocab, 2 * size), NAN, dtype=dtype), lambda x: x[:, ::2]),
    }[view]
    plain, viewed = make_operands(problem), make_operands(problem)
    cut(base).copy_(plain["weight"].detach())
    base.requires_grad_()
    values = train(viewed | {"weight": cut(base)}, problem, how)
    close = {"rtol": 4 * torch.finfo(dtype).eps, "atol": 1e-7 if dtype == torch.bfloat16 else 1e-13}
    torch.testing.assert_close(values, train(plain, problem, how), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(cut(base.grad), plain["weight"].grad, **close)
    torch.testing.assert_close(viewed["hidden"].grad, plain["hidden"].grad, **close)


@pytest.mark.parametrize("view", ["next token", "every other row", "batch transposed", "features"])
def test_hidden_may_be_a_view(view: str) -> None:
    problem = make_problem(seed=45)
    values = tensor(problem.hidden, problem.dtype)
    b, t, size = values.shape
    base, cut = {
        "next token": (torch.full((b, t + 1, size), NAN), lambda x: x[:, :-1]),
        "every other row": (torch.full((b, 2 * t, size), NAN), lambda x: x[:, ::2]),
        "batch transposed": (torch.full((t, b, size), NAN), lambda x: x.transpose(0, 1)),
        "features": (torch.full((b, t, size + 3), NAN), lambda x: x[..., 1:-2]),
    }[view]
    cut(base).copy_(values)
    plain, viewed = make_operands(problem), make_operands(problem)
    base.requires_grad_()
    viewed["hidden"] = cut(base)
    outs = [score(operands, problem) for operands in (plain, viewed)]
    for out in outs:
        (out.logps.sum() + out.entropy.sum()).backward()
    assert_same_rows(*outs, view)
    assert base.grad is not None
    assert same_bits(cut(base.grad).contiguous(), plain["hidden"].grad)
    assert same_bits(viewed["weight"].grad, plain["weight"].grad)
    outside = torch.ones_like(base, dtype=torch.bool)
    cut(outside).fill_(False)
    assert (base.grad[outside] == 0).all()
