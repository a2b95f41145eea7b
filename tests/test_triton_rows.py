"""Row statistics and their gradient on the Triton kernels: every dtype, border and transform against the oracle."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from oracle_rows import row_stats
from support import DTYPES, normal_rows, poisoned, result_dtype, same_bits
from tolerance import as_array
from torch import Tensor
from triton_support import (
    DEVICE,
    WIDTHS,
    Scored,
    assert_rows_within_budget,
    blocks_of,
    places,
    rows_like,
    scored,
    upstream_of,
)

import grpo_kernels as gk

INF, NAN = math.inf, math.nan
CAPPED = {"softcap": 5.0, "logit_scale": 0.5, "temperature": 0.6}


# Borders: of blocks, of programs, of the row


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(("std", "mean"), [(2, 0), (30, -900)])
def test_every_border_of_a_row(dtype: torch.dtype, width: str, std: float, mean: float) -> None:
    vocab = WIDTHS[width](*blocks_of(dtype))
    assert_rows_within_budget(rows_like(vocab, dtype, std=std, mean=mean, seed=vocab), places(vocab, dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", ["3", "block", "2 blocks + 1"])
@pytest.mark.parametrize("value", [-1000.0, -30.0, 30.0])
def test_constant_rows_are_uniform(dtype: torch.dtype, width: str, value: float) -> None:
    """A column too many, or one that counts as 0, is off by far more than the budget."""
    vocab = WIDTHS[width](*blocks_of(dtype))
    ids = torch.tensor([0, vocab - 1])
    ours = scored(torch.full((2, vocab), value, dtype=dtype), ids)
    step = 2 * torch.finfo(result_dtype(dtype)).eps
    np.testing.assert_allclose(as_array(ours.logps), -math.log(vocab), rtol=step)
    np.testing.assert_allclose(as_array(ours.entropy), math.log(vocab), rtol=step)
    np.testing.assert_allclose(as_array(ours.lse), value + math.log(vocab), rtol=step)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("vocab", [151936, 151935])
def test_a_whole_vocabulary(dtype: torch.dtype, vocab: int) -> None:
    logits = normal_rows(2, vocab, dtype, std=3.0)
    assert_rows_within_budget(logits, torch.tensor([int(logits[0].float().argmax()), vocab - 1]), np.float64)


# The transform


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("std", [1.0, 20.0])
@pytest.mark.parametrize(
    "transform",
    [{"temperature": 0.6}, {"softcap": 3.0}, {"logit_scale": 0.25}, CAPPED, {"logit_scale": 1.7, "temperature": 3.0}],
    ids=str,
)
def test_scale_then_cap_then_temperature(dtype: torch.dtype, std: float, transform: dict[str, float]) -> None:
    vocab = blocks_of(dtype).block + 1
    assert_rows_within_budget(rows_like(vocab, dtype, std=std), places(vocab, dtype), **transform)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("extra", [{}, {"softcap": 4.0, "logit_scale": 1.3}], ids=["plain", "capped"])
def test_each_row_has_its_own_temperature(dtype: torch.dtype, extra: dict[str, float]) -> None:
    vocab = blocks_of(dtype).block + 5
    ids = places(vocab, dtype)
    heat = torch.linspace(0.4, 3.0, len(ids), dtype=result_dtype(dtype))
    assert_rows_within_budget(rows_like(vocab, dtype), ids, temperature=heat, **extra)


@pytest.mark.parametrize("form", ["0-d", "[B, 1]", "token", "strided"])
def test_every_form_of_temperature(form: str) -> None:
    logits, ids = normal_rows(6, 33).reshape(2, 3, 33), torch.arange(6).reshape(2, 3)
    heat = {
        "0-d": torch.tensor(0.7),
        "[B, 1]": torch.tensor([[0.7], [1.6]]),
        "token": torch.linspace(0.5, 2, 6).reshape(2, 3),
        "strided": torch.linspace(0.5, 2, 12).reshape(3, 4)[:, ::2].T,
    }[form]
    ours = scored(logits, ids, temperature=heat)
    apart = [
        scored(logits[i, j : j + 1], ids[i, j : j + 1], temperature=float(heat.expand(2, 3)[i, j]))
        for i in range(2)
        for j in range(3)
    ]
    for name in ("logps", "entropy", "lse"):
        assert same_bits(getattr(ours, name).reshape(-1), torch.cat([getattr(one, name) for one in apart])), name


# Removed columns


def removed(vocab: int, where: str, block: int) -> Tensor:
    """Which columns are gone, bool [V]."""
    gone = torch.zeros(vocab, dtype=torch.bool)
    if where == "first block":
        gone[: block + 1] = True
    elif where == "scattered":
        gone[::3] = gone[block : block + 7] = True
    elif where == "all but one":
        gone[:] = True
        gone[vocab - 2] = False
    else:
        gone[-9:] = True
    return gone


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hidden", [-INF, "min"])
@pytest.mark.parametrize("where", ["first block", "scattered", "all but one", "tail"])
@pytest.mark.parametrize("transform", [{}, CAPPED], ids=["plain", "capped"])
def test_removed_columns_have_no_mass_no_entropy_and_no_gradient(
    dtype: torch.dtype, hidden: Any, where: str, transform: dict[str, float]
) -> None:
    """The result is that of the row without them, in plain torch and in truth."""
    vocab = 2 * blocks_of(dtype).block + 9
    gone = removed(vocab, where, blocks_of(dtype).block)
    kept = (~gone).nonzero().ravel()
    rows = normal_rows(2, vocab, dtype, std=3.0)
    rows[:, gone] = torch.finfo(dtype).min if hidden == "min" else hidden
    short = torch.tensor([0, len(kept) - 1])
    ours = scored(rows, kept[short], **transform)
    truth = row_stats(as_array(rows[:, kept]), as_array(short), **transform)
    upstream = as_array(upstream_of(short, dtype))[..., None]
    expected = upstream[0] * truth.dlogps + upstream[1] * truth.dentropy
    eps = torch.finfo(result_dtype(dtype)).eps
    for name in ("logps", "entropy", "lse"):
        np.testing.assert_allclose(
            as_array(getattr(ours, name)), getattr(truth, name).astype(float), rtol=8 * eps, atol=16 * eps, err_msg=name
        )
    assert (ours.grad[:, gone] == 0).all()
    np.testing.assert_allclose(
        as_array(ours.grad[:, kept]), expected.astype(float), rtol=torch.finfo(dtype).eps, atol=64 * eps
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("transform", [{}, CAPPED], ids=["plain", "capped"])
@pytest.mark.parametrize("bad", ["all -inf", "all finfo.min", "+inf", "nan"])
def test_a_bad_live_row_is_nan_alone(dtype: torch.dtype, bad: str, transform: dict[str, float]) -> None:
    vocab = blocks_of(dtype).block + 3
    clean_rows, ids = normal_rows(3, vocab, dtype), torch.tensor([vocab - 1, 4, 0])
    rows = clean_rows.clone()
    value = {"all -inf": -INF, "all finfo.min": torch.finfo(dtype).min, "+inf": INF, "nan": NAN}[bad]
    rows[1, slice(None) if bad.startswith("all") else slice(7, 8)] = value
    clean, spoilt = scored(clean_rows, ids, **transform), scored(rows, ids, **transform)
    for name in Scored._fields:
        ours = getattr(spoilt, name)
        assert ours[1].isnan().any() and (name == "grad" or ours[1].isnan()), name
        assert same_bits(ours[[0, 2]], getattr(clean, name)[[0, 2]]), name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", ["3", "2 blocks + 1"])
@pytest.mark.parametrize("transform", [{}, CAPPED], ids=["plain", "capped"])
def test_a_target_that_was_removed_is_impossible(dtype: torch.dtype, width: str, transform: dict[str, float]) -> None:
    vocab = WIDTHS[width](*blocks_of(dtype))
    ids = places(vocab, dtype)
    rows = normal_rows(len(ids), vocab, dtype)
    rows[torch.arange(len(ids)), ids] = -INF
    ours = scored(rows, ids, **transform)
    truth = row_stats(as_array(rows), as_array(ids), **transform)
    assert (ours.logps == -INF).all()
    np.testing.assert_allclose(as_array(ours.entropy), truth.entropy.astype(float), rtol=1e-6, atol=1e-6)
    upstream = as_array(upstream_of(ids, dtype))[..., None]
    expected = (upstream[0] * truth.dlogps + upstream[1] * truth.dentropy).astype(float)
    np.testing.assert_allclose(as_array(ours.grad), expected, rtol=2 * torch.finfo(dtype).eps, atol=2e-6)
    assert (ours.grad[torch.arange(len(ids)), ids] == 0).all()


def test_the_extremes_of_float16() -> None:
    rows = torch.tensor([[65504.0, -65504.0], [65504.0, -65504.0], [65504.0, -65472.0]], dtype=torch.float16)
    leaf = rows.to(DEVICE).requires_grad_()
    out = gk.per_token_logps(leaf, torch.tensor([0, 1, 1], device=DEVICE), entropy=True, impl="triton")
    assert out.logps.tolist() == [0.0, -131008.0, -130976.0]
    assert out.entropy is not None and out.entropy.tolist() == pytest.approx([0.0, 0.0, 0.0], abs=6e-8)
    out.logps.sum().backward()
    assert leaf.grad is not None and leaf.grad.tolist() == [[0.0, 0.0], [-1.0, 0.0], [-1.0, 1.0]]


# Digits that a difference would lose


@pytest.mark.parametrize("offset", [0.0, -1000.0, 500.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("place", [0, 1, -1])
def test_a_nearly_certain_target_keeps_its_digits(dtype: torch.dtype, offset: float, place: int) -> None:
    """1 - p = 6e-8: `p - 1` is off by all of it, log(p) likewise."""
    vocab = 2 * blocks_of(dtype).block + 1
    target = int(places(vocab, dtype)[place])
    rows = torch.full((1, vocab), offset - math.log((vocab - 1) / 6e-8), dtype=torch.float64).to(dtype)
    rows[0, target] = offset
    ids = torch.tensor([target])
    truth = row_stats(as_array(rows), as_array(ids))
    assert 5e-9 < float(truth.dlogps[0, target]) < 1e-6
    leaf = rows.to(DEVICE).requires_grad_()
    out = gk.per_token_logps(leaf, ids.to(DEVICE), entropy=True, impl="triton")
    assert out.entropy is not None
    (spread,) = torch.autograd.grad(out.entropy.sum(), leaf, retain_graph=True)
    out.logps.sum().backward()
    assert leaf.grad is not None
    # the exponent itself, gap / ln 2, was rounded to the dtype of the arithmetic: 2^-24 of some 30
    close = 3e-6 if dtype != torch.float64 else 1e-11  # the oracle rounds 1 + 6e-8
    assert out.logps.item() == pytest.approx(float(truth.logps[0]), rel=close, abs=0)
    assert out.entropy.item() == pytest.approx(float(truth.entropy[0]), rel=close, abs=1e-11)
    grad = as_array(leaf.grad)[0]
    tolerance = torch.finfo(dtype).eps + 3e-6
    if dtype == torch.float16:  # whose numbers down there are 2^-24 apart
        assert abs(grad[target] - truth.dlogps[0, target]) <= 2**-25 * 1.01
    else:
        np.testing.assert_allclose(grad, truth.dlogps[0].astype(float), rtol=tolerance)
        np.testing.assert_allclose(as_array(spread)[0], truth.dentropy[0].astype(float), rtol=tolerance + 3e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("place", [0, 1, -1])
def test_a_hopeless_target_keeps_its_digits(dtype: torch.dtype, place: int) -> None:
    """A log-prob below the smallest exponential is legal; nothing clamps it."""
    vocab = 2 * blocks_of(dtype).block + 1
    target = int(places(vocab, dtype)[place])
    rows = normal_rows(1, vocab, dtype)
    rows[0, target] = -5000.0
    assert_rows_within_budget(rows, torch.tensor([target]))
    assert scored(rows, torch.tensor([target])).logps.item() < -4990


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_mass_of_the_others_is_exact(dtype: torch.dtype) -> None:
    """What backward works with: R / S = 1 - p, relative to itself, for likely and unlikely targets alike."""
    vocab = blocks_of(dtype).block + 1
    ids = places(vocab, dtype)
    rows = rows_like(vocab, dtype, std=4.0)
    rows[0, ids[0]] = 24.0
    heat = torch.tensor(0.7, dtype=result_dtype(dtype), device=DEVICE)
    op = torch.ops.grpo_kernels.row_stats_triton
    with poisoned():
        logps, entropy, _, row_max, total, others = op(rows.to(DEVICE), ids.to(DEVICE), heat, 1.3, None, False)
    assert entropy.shape == (0,)
    assert same_bits(row_max.cpu(), rows.amax(1).to(row_max.dtype))
    truth = row_stats(as_array(rows), as_array(ids), temperature=float(heat), logit_scale=1.3)
    own = truth.dlogps[np.arange(len(ids)), ids.numpy()] / 1.3 * float(heat)
    assert own.min() < 1e-8
    rest = as_array(others).astype(np.longdouble) / as_array(total)
    np.testing.assert_allclose(rest.astype(float), own.astype(float), rtol=2e-6 if dtype != torch.float64 else 1e-14)
    assert logps.dtype == result_dtype(dtype)


# Which rows count, and where they lie


@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dead_rows_are_zero_and_never_read(ids_dtype: torch.dtype, dtype: torch.dtype) -> None:
    vocab = blocks_of(dtype).block + 3
    rows, ids = normal_rows(6, vocab, dtype), torch.arange(6) * 7 % vocab
    mask = torch.tensor([1, 0, 1, 1, 0, 1])
    clean = scored(rows, ids.to(ids_dtype), mask=mask)
    rows[mask == 0] = NAN
    by_mask = scored(rows, ids.to(ids_dtype), mask=mask)
    by_id = scored(rows, torch.where(mask == 0, -100, ids).to(ids_dtype))
    for name in Scored._fields:
        value = getattr(clean, name)
        assert (value[mask == 0] == 0).all() and (value[mask == 1] != 0).any(), name
        assert same_bits(getattr(by_mask, name), value) and same_bits(getattr(by_id, name), value), name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("entropy", [False, True])
def test_a_row_without_upstream_gradient_is_written_but_not_read(dtype: torch.dtype, entropy: bool) -> None:
    """The gradient op by itself: NaN logits and NaN statistics stand where the coefficients are 0."""
    ops = torch.ops.grpo_kernels
    vocab = blocks_of(dtype).program + 3
    rows, ids = normal_rows(3, vocab, dtype).to(DEVICE), torch.tensor([0, 5, vocab - 1], device=DEVICE)
    heat = torch.ones((), dtype=result_dtype(dtype), device=DEVICE)
    _, spread, _, *stats = ops.row_stats_triton(rows, ids, heat, 1.0, None, entropy)
    coefs = torch.tensor([[1.5, 0.0, -0.5], [0.3, 0.0, 0.0]], dtype=heat.dtype, device=DEVICE)
    expected = ops.row_grad_triton(rows, ids, heat, 1.0, None, spread, *stats, coefs[0], coefs[1] if entropy else None)
    rows[1] = NAN
    for values in (*stats, *([spread] if entropy else [])):
        values[1] = NAN
    arguments = (ids, heat, 1.0, None, spread, *stats, coefs[0], coefs[1] if entropy else None)
    with poisoned():
        ours = ops.row_grad_triton(rows, *arguments)
    assert same_bits(ours, expected) and (ours[1] == 0).all() and (ours[0] != 0).any()
    ops.row_grad_triton_(rows, *arguments)
    assert same_bits(rows, expected)


VIEWS: dict[str, Any] = {
    "next token": (lambda b, t, v: (b, t + 1, v), lambda x: x[:, :-1]),
    "vocabulary": (lambda b, t, v: (b, t, v + 5), lambda x: x[..., :-5]),
    "aligned vocabulary": (lambda b, t, v: (b, t, v + 16 - v % 16), lambda x: x[..., : x.shape[-1] - 9]),
    "every other row": (lambda b, t, v: (b, 2 * t, v), lambda x: x[:, ::2]),
    "batch transposed": (lambda b, t, v: (t, b, v), lambda x: x.transpose(0, 1)),
    "from the middle": (lambda b, t, v: (b, t, v + 4), lambda x: x[..., 3:-1]),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("view", VIEWS)
def test_logits_may_be_any_view(dtype: torch.dtype, view: str) -> None:
    """Within the budget; test_triton_safety.py says which views give the same bits."""
    shape, cut = VIEWS[view]
    b, t, v = 2, 2, 7 + 16 * (blocks_of(dtype).block // 16)
    ids = torch.tensor([[0, v - 1], [v // 2, v - 8]])
    values = normal_rows(b * t, v, dtype).reshape(b, t, v)
    base = torch.full(shape(b, t, v), NAN, dtype=dtype, device=DEVICE)
    assert cut(base).shape == values.shape
    cut(base).copy_(values)
    base.requires_grad_()
    upstream = upstream_of(ids, dtype)
    with poisoned():
        out = gk.per_token_logps(cut(base), ids.to(DEVICE), entropy=True, impl="triton")
        (out.logps * upstream[0].to(DEVICE) + out.entropy * upstream[1].to(DEVICE)).sum().backward()
    truth = row_stats(as_array(values).reshape(-1, v), as_array(ids).reshape(-1))
    u = as_array(upstream).reshape(2, -1, 1)
    expected = (u[0] * truth.dlogps + u[1] * truth.dentropy).astype(float)
    side = torch.finfo(result_dtype(dtype)).eps
    for name, value in (("logps", out.logps), ("entropy", out.entropy), ("lse", out.lse)):
        np.testing.assert_allclose(
            as_array(value).reshape(-1), getattr(truth, name).astype(float), rtol=4 * side, atol=4 * side, err_msg=name
        )
    assert base.grad is not None
    np.testing.assert_allclose(
        as_array(cut(base.grad)).reshape(-1, v), expected, rtol=torch.finfo(dtype).eps, atol=32 * side
    )
    outside = torch.ones_like(base, dtype=torch.bool)
    cut(outside).fill_(False)
    assert (base.grad[outside] == 0).all()


@pytest.mark.parametrize("leading", [(0, 3), (2, 0), (0,)])
def test_no_row_at_all(leading: tuple[int, ...]) -> None:
    leaf = torch.zeros(*leading, 4, device=DEVICE, requires_grad=True)
    out = gk.per_token_logps(leaf, torch.zeros(leading, dtype=torch.long, device=DEVICE), entropy=True, impl="triton")
    assert out.entropy is not None
    assert out.logps.shape == out.entropy.shape == out.lse.shape == leading
    (out.logps.sum() + out.entropy.sum()).backward()
    assert leaf.grad is not None and leaf.grad.shape == leaf.shape


@pytest.mark.parametrize("form", ["sum", "expanded", "strided", "only entropy", "one element"])
def test_every_layout_of_the_upstream_gradient(form: str) -> None:
    """`.sum()` sends a stride-0 gradient."""
    raw, ids = normal_rows(6, 9, torch.float64).reshape(2, 3, 9), torch.arange(6).reshape(2, 3)

    def total(logps: Tensor, entropy: Tensor) -> Tensor:
        weights = torch.arange(1.0, 13.0, dtype=torch.float64, device=logps.device).reshape(2, 6)[:, ::2]
        return {
            "sum": logps.sum() + entropy.sum(), "expanded": (logps * weights[:, :1].expand(2, 3)).sum(),
            "strided": (logps * weights).sum() + (entropy * weights.T.contiguous().T).sum(),
            "only entropy": entropy.sum(), "one element": logps[1, 2],
        }[form]  # fmt: skip

    leaf, plain = raw.clone().to(DEVICE).requires_grad_(), raw.clone().requires_grad_()
    with poisoned():
        out = gk.per_token_logps(leaf, ids.to(DEVICE), entropy=True, impl="triton")
        assert out.entropy is not None
        total(out.logps, out.entropy).backward()
    logp = plain.log_softmax(-1)
    total(logp.gather(-1, ids[..., None])[..., 0], -(logp.exp() * logp).sum(-1)).backward()
    assert leaf.grad is not None
    torch.testing.assert_close(leaf.grad.cpu(), plain.grad, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("value", [-1e30, -1e20, 1e30])
def test_a_softcap_leaves_no_share_of_a_huge_logit(value: float) -> None:
    """-1e30 is a common mask."""
    rows = torch.tensor([[value, 1.0, 2.0, 0.5]])
    ids = torch.tensor([0])
    truth = torch.log_softmax(30.0 * torch.tanh(rows.double() / 30.0), -1)[0, 0]
    ours = scored(rows, ids, softcap=30.0)
    assert ours.logps[0].item() == pytest.approx(truth.item(), abs=2e-4)


@pytest.mark.parametrize("transform", [{}, CAPPED], ids=["plain", "capped"])
def test_a_row_without_a_distribution_has_no_gradient_that_looks_like_one(transform: dict[str, float]) -> None:
    ours = scored(torch.full((1, 5), -INF), torch.tensor([2]), **transform)
    assert ours.logps.isnan().all() and ours.grad.isnan().all()
