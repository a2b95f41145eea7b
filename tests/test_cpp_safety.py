"""What the C++ kernels read and write, and what never changes a bit: threads, company, strides."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from cpp_support import BLOCK, CHAIN, instruction_set, needs_cpp, places, row_op, rows_like
from kernel_support import Scored, scored, upstream_of
from support import DTYPES, normal_rows, poisoned, result_dtype, same_bits
from torch import Tensor

import grpo_kernels as gk

__all__ = ["instruction_set"]
pytestmark = [needs_cpp, pytest.mark.usefixtures("instruction_set")]
INF, NAN = math.inf, math.nan
CAPPED = {"softcap": 5.0, "logit_scale": 0.5, "temperature": 0.6}


def assert_same(ours: Scored, theirs: Scored, where: str) -> None:
    for name in Scored._fields:
        assert same_bits(getattr(ours, name), getattr(theirs, name)), f"{where}: {name}"


# Which rows count


@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dead_rows_are_zero_and_never_read(ids_dtype: torch.dtype, dtype: torch.dtype) -> None:
    vocab = CHAIN + 3
    rows, ids = normal_rows(6, vocab, dtype), torch.arange(6) * 7 % vocab
    mask = torch.tensor([1, 0, 1, 1, 0, 1])
    clean = scored(rows, ids.to(ids_dtype), "cpp", mask=mask)
    rows[mask == 0] = NAN
    by_mask = scored(rows, ids.to(ids_dtype), "cpp", mask=mask)
    by_id = scored(rows, torch.where(mask == 0, -100, ids).to(ids_dtype), "cpp")
    for name in Scored._fields:
        value = getattr(clean, name)
        assert (value[mask == 0] == 0).all() and (value[mask == 1] != 0).any(), name
    assert_same(by_mask, clean, "mask")
    assert_same(by_id, clean, "ids")


def statistics_of(
    rows: Tensor, ids: Tensor, entropy: bool, softcap: float | None = None
) -> tuple[Tensor, list[Tensor]]:
    """The arguments of a gradient between targets and coefficients, and its statistics."""
    heat = torch.tensor(0.8, dtype=result_dtype(rows.dtype))
    _, spread, _, *stats = row_op("row_stats")(rows, ids, heat, 1.3, softcap, entropy)
    return heat, [spread, *stats]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("softcap", [None, 4.0])
def test_a_row_without_upstream_gradient_is_written_but_not_read(
    dtype: torch.dtype, entropy: bool, softcap: float | None
) -> None:
    vocab = CHAIN + 3
    rows, ids = normal_rows(3, vocab, dtype), torch.tensor([0, 5, vocab - 1])
    heat, stats = statistics_of(rows, ids, entropy, softcap)
    coefs = torch.tensor([[1.5, 0.0, -0.5], [0.3, 0.0, 0.0]], dtype=heat.dtype)
    arguments = (ids, heat, 1.3, softcap, *stats, coefs[0], coefs[1] if entropy else None)
    expected = row_op("row_grad")(rows, *arguments)
    rows[1] = NAN
    for values in stats if entropy else stats[1:]:
        values[1] = NAN
    with poisoned():
        ours = row_op("row_grad")(rows, *arguments)
    assert same_bits(ours, expected) and (ours[1] == 0).all() and (ours[0] != 0).any()
    row_op("row_grad_")(rows, *arguments)
    assert same_bits(rows, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [5, BLOCK + 21])
def test_the_gradient_of_a_part_goes_into_any_dtype(dtype: torch.dtype, out_dtype: torch.dtype, vocab: int) -> None:
    """The target of row 1 is elsewhere, in another part of the vocabulary: no column of this one is its own."""
    rows, ids = normal_rows(2, vocab, dtype, std=1.0), torch.tensor([vocab - 1, 3])
    heat, stats = statistics_of(rows, ids, True)
    coefs = torch.tensor([[1.5, -0.7], [0.3, 0.2]], dtype=heat.dtype)
    elsewhere = torch.tensor([vocab - 1, -2])
    exact = row_op("row_grad")(
        rows.to(heat.dtype), elsewhere, heat, 1.3, None, *stats, coefs[0], coefs[1]
    )  # in the arithmetic's own dtype, rounded by torch
    out = torch.full((2, vocab + 6), 7.0, dtype=out_dtype)
    row_op("row_grad_into")(rows, out[:, 3:-3], elsewhere, heat, 1.3, None, *stats, *coefs)
    assert same_bits(out[:, 3:-3], exact.to(out_dtype))
    assert (out[:, :3] == 7).all() and (out[:, -3:] == 7).all()
    whole = row_op("row_grad")(rows.to(heat.dtype), ids, heat, 1.3, None, *stats, coefs[0], coefs[1])
    assert same_bits(exact[0], whole[0])
    assert not torch.equal(exact[1, 3], whole[1, 3])
    assert same_bits(exact[1, 4:], whole[1, 4:])


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_weights_are_the_exponentials_and_zero_at_the_target(dtype: torch.dtype, entropy: bool) -> None:
    vocab = BLOCK + CHAIN + 21
    ids = torch.cat([places(vocab), torch.tensor([-1])])
    rows = torch.cat([rows_like(vocab, dtype), torch.full((1, vocab), NAN, dtype=dtype)])
    heat = torch.linspace(0.5, 2, len(ids), dtype=dtype)
    expected = row_op("row_stats")(rows, ids, heat, 1.3, None, entropy)
    storage = torch.full((len(ids), vocab + 4), 7.0, dtype=dtype)
    storage[:, 2:-2] = rows
    stats = row_op("row_weights_")(storage[:, 2:-2], ids, heat, 1.3, entropy)
    eps = torch.finfo(dtype).eps
    for ours, theirs in zip(stats, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=4 * eps, atol=4 * eps)
    assert (storage[:, :2] == 7).all() and (storage[:, -2:] == 7).all()
    live = slice(0, -1)
    y = (rows[live].double() - stats[3][live, None].double()) * 1.3 / heat[live, None].double()
    weights = y.exp().scatter(1, ids[live, None], 0.0)
    torch.testing.assert_close(storage[live, 2:-2].double(), weights, rtol=60 * eps, atol=1e-37)
    assert all((values[-1] == 0).all() for values in stats if values.numel())


# Bits


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("transform", [{}, CAPPED], ids=["plain", "capped"])
def test_threads_company_and_repetition_change_no_bit(dtype: torch.dtype, transform: dict[str, float]) -> None:
    vocab = 16 * BLOCK + 5  # enough work for each row to go to a thread of its own
    rows, ids = normal_rows(7, vocab, dtype, std=3.0), torch.arange(7) * 4001
    torch.set_num_threads(1)
    alone = [scored(rows[i : i + 1], ids[i : i + 1], "cpp", **transform) for i in range(7)]
    first = Scored(*(torch.cat(parts) for parts in zip(*alone, strict=True)))
    upstream = upstream_of(ids, dtype)
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        for order in (torch.arange(7), torch.arange(7).flip(0)):
            heat = torch.tensor(transform.get("temperature", 1.0), dtype=upstream.dtype)
            options = (heat, transform.get("logit_scale", 1.0), transform.get("softcap"))
            logps, entropy, lse, *stats = row_op("row_stats")(rows[order], ids[order], *options, True)
            for name, value in (("logps", logps), ("entropy", entropy), ("lse", lse)):
                assert same_bits(value, getattr(first, name)[order]), (threads, name)
            coefs = torch.ones(2, 7, dtype=upstream.dtype)
            grads = [
                row_op("row_grad")(
                    rows[part], ids[part], *options, *(s[back] for s in (entropy, *stats)), *coefs[:, back]
                )
                for part, back in ((order, slice(None)), (order[2:3], slice(2, 3)))
            ]
            assert same_bits(grads[0][2:3], grads[1]), threads


VIEWS: dict[str, Any] = {
    "next token": (lambda b, t, v: (b, t + 1, v), lambda x: x[:, :-1]),
    "vocabulary": (lambda b, t, v: (b, t, v + 5), lambda x: x[..., :-5]),
    "every other row": (lambda b, t, v: (b, 2 * t, v), lambda x: x[:, ::2]),
    "batch transposed": (lambda b, t, v: (t, b, v), lambda x: x.transpose(0, 1)),
    "from the middle": (lambda b, t, v: (b, t, v + 4), lambda x: x[..., 3:-1]),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("view", VIEWS)
def test_a_view_has_the_same_bits_and_nothing_beside_it_is_touched(
    dtype: torch.dtype, view: str, inplace: bool
) -> None:
    shape, cut = VIEWS[view]
    b, t, v = 2, 3, BLOCK + 37
    ids = torch.tensor([[0, v - 1, 5], [v // 2, v - 8, 9]])
    values = normal_rows(b * t, v, dtype).reshape(b, t, v)
    base = torch.full(shape(b, t, v), NAN, dtype=dtype)
    cut(base).copy_(values)
    heat, stats = statistics_of(values, ids, True)
    with poisoned():
        ours = statistics_of(cut(base), ids, True)[1]
    assert all(same_bits(a, b) for a, b in zip(ours, stats, strict=True))
    coefs = upstream_of(ids, dtype)
    arguments = (ids, heat, 1.3, None, *stats, coefs[0].T.contiguous().T, coefs[1])
    expected = row_op("row_grad")(values, *arguments)
    if inplace:
        row_op("row_grad_")(cut(base), *arguments)
        assert same_bits(cut(base), expected)
    else:
        with poisoned():
            assert same_bits(row_op("row_grad")(cut(base), *arguments), expected)
    outside = torch.ones_like(base, dtype=torch.bool)
    cut(outside).fill_(False)
    assert base[outside].isnan().all()


@pytest.mark.parametrize("leading", [(0, 3), (2, 0), (0,)])
def test_no_row_at_all(leading: tuple[int, ...]) -> None:
    leaf = torch.zeros(*leading, 4, requires_grad=True)
    out = gk.per_token_logps(leaf, torch.zeros(leading, dtype=torch.long), entropy=True, impl="cpp")
    assert out.entropy is not None
    assert out.logps.shape == out.entropy.shape == out.lse.shape == leading
    (out.logps.sum() + out.entropy.sum()).backward()
    assert leaf.grad is not None and leaf.grad.shape == leaf.shape


@pytest.mark.parametrize("form", ["sum", "expanded", "strided", "only entropy", "one element"])
def test_every_layout_of_the_upstream_gradient(form: str) -> None:
    """`.sum()` sends a stride-0 gradient."""
    raw, ids = normal_rows(6, 9, torch.float64).reshape(2, 3, 9), torch.arange(6).reshape(2, 3)

    def total(logps: Tensor, entropy: Tensor) -> Tensor:
        weights = torch.arange(1.0, 13.0, dtype=torch.float64).reshape(2, 6)[:, ::2]
        return {
            "sum": logps.sum() + entropy.sum(), "expanded": (logps * weights[:, :1].expand(2, 3)).sum(),
            "strided": (logps * weights).sum() + (entropy * weights.T.contiguous().T).sum(),
            "only entropy": entropy.sum(), "one element": logps[1, 2],
        }[form]  # fmt: skip

    leaf, plain = raw.clone().requires_grad_(), raw.clone().requires_grad_()
    with poisoned():
        out = gk.per_token_logps(leaf, ids, entropy=True, impl="cpp")
        assert out.entropy is not None
        total(out.logps, out.entropy).backward()
    logp = plain.log_softmax(-1)
    total(logp.gather(-1, ids[..., None])[..., 0], -(logp.exp() * logp).sum(-1)).backward()
    torch.testing.assert_close(leaf.grad, plain.grad, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("size", [1e-45, 3e-39, 1e-30, 1e30, 8e37, 3e38, INF])
def test_coefficients_of_any_size(size: float) -> None:
    """A coefficient's exponent goes into the exponents of the row, which have room for it or none."""
    rows, ids = torch.tensor([[0.0, -1e-3, -0.5, -40.0, -200.0]]), torch.tensor([4])
    heat = torch.ones(())
    _, spread, _, *stats = row_op("row_stats")(rows, ids, heat, 1.0, None, False)
    for sign in (1, -1):
        coef = torch.tensor([sign * size], dtype=torch.float32)
        grad = row_op("row_grad")(rows, ids, heat, 1.0, None, spread, *stats, coef, None)[0].double()
        expected = -coef.double() * rows.double().softmax(1)[0]
        expected[4] = coef.double() * (1 - rows.double().softmax(1)[0, 4])
        tiny, most = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
        normal = (expected.abs() >= 1.0001 * tiny) & (expected.abs() <= most)
        torch.testing.assert_close(grad[normal], expected[normal], rtol=1e-6, atol=0)  # of exp(-40) in float32
        beyond = (expected.abs() > most) & (rows[0] > -100)
        assert (grad[beyond] == expected[beyond].sign() * INF).all()
        assert (grad[expected.abs() < 0.9 * tiny] == 0).all()


def test_subnormal_results_are_zero_and_the_mode_of_the_processor_stays() -> None:
    rows = torch.tensor([[0.0, -90.0, -100.0, -1e4]])
    heat, stats = torch.ones(()), None
    _, spread, _, *stats = row_op("row_stats")(rows, torch.tensor([0]), heat, 1.0, None, False)
    grad = row_op("row_grad")(rows, torch.tensor([0]), heat, 1.0, None, spread, *stats, torch.ones(1), None)
    assert grad[0, 1:].abs().max().item() < 2e-38
    assert torch.tensor(1e-40).mul(0.5).item() > 0
