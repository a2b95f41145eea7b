"""Row statistics and their gradient on the C++ kernels: every dtype, border and transform against the oracle."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from cpp_support import BLOCK, CHAIN, WIDTHS, instruction_set, needs_cpp, places, row_op, rows_like
from kernel_support import Scored, assert_rows_within_budget, scored, upstream_of
from oracle_rows import row_stats
from support import DTYPES, normal_rows, poisoned, result_dtype, same_bits
from tolerance import as_array
from torch import Tensor

import grpo_kernels as gk

__all__ = ["instruction_set"]
pytestmark = [needs_cpp, pytest.mark.usefixtures("instruction_set")]
INF, NAN = math.inf, math.nan
CAPPED = {"softcap": 5.0, "logit_scale": 0.5, "temperature": 0.6}
TRANSFORMS = [
    {"temperature": 0.6}, {"softcap": 3.0}, {"logit_scale": 0.25}, CAPPED, {"logit_scale": 1.7, "temperature": 3.0},
]  # fmt: skip


def assert_right(logits: Tensor, ids: Tensor, real: type = np.longdouble, **transform: Any) -> None:
    assert_rows_within_budget(logits, ids, real, impl="cpp", **transform)


# Borders: of steps, of blocks, of the row


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", WIDTHS)
@pytest.mark.parametrize(("std", "mean"), [(2, 0), (30, -900)])
def test_every_border_of_a_row(dtype: torch.dtype, vocab: int, std: float, mean: float) -> None:
    assert_right(rows_like(vocab, dtype, std=std, mean=mean, seed=vocab), places(vocab))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [3, 17, BLOCK + 2])
@pytest.mark.parametrize("value", [-1000.0, -30.0, 30.0])
@pytest.mark.parametrize("transform", [{}, {"softcap": 15.0, "temperature": 0.1}, {"softcap": 1000.0}], ids=str)
def test_constant_rows_are_uniform(dtype: torch.dtype, vocab: int, value: float, transform: dict[str, float]) -> None:
    """A column too many, one that counts as 0, or a target with a cap of its own is off by far more than the budget."""
    ours = scored(torch.full((2, vocab), value, dtype=dtype), torch.tensor([0, vocab - 1]), "cpp", **transform)
    step = 2 * torch.finfo(result_dtype(dtype)).eps
    np.testing.assert_allclose(as_array(ours.logps), -math.log(vocab), rtol=step)
    np.testing.assert_allclose(as_array(ours.entropy), math.log(vocab), rtol=step)
    if not transform:
        np.testing.assert_allclose(as_array(ours.lse), value + math.log(vocab), rtol=step)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_whole_vocabulary(dtype: torch.dtype) -> None:
    logits = normal_rows(2, 151936, dtype, std=3.0)
    assert_right(logits, torch.tensor([int(logits[0].float().argmax()), 151935]), np.float64)


@pytest.mark.parametrize("order", ["ascending", "descending"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_maximum_that_moves_with_every_block(dtype: torch.dtype, order: str) -> None:
    vocab = 3 * BLOCK + 5
    logits = torch.linspace(-60, 60, vocab).to(dtype).expand(3, -1)
    logits = logits if order == "ascending" else logits.flip(1)
    assert_right(logits, torch.tensor([0, vocab // 2, vocab - 1]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rise", [0.3, 0.99, 1.01])
@pytest.mark.parametrize("target", ["rival", "top"])
def test_a_maximum_that_rises_a_little_with_every_block(dtype: torch.dtype, rise: float, target: str) -> None:
    """One logit of each block stands out, by a little more than that of the block before, and holds nearly all mass."""
    blocks = 6
    logits = normal_rows(1, blocks * BLOCK, dtype, std=1.0) - 30
    logits[0, BLOCK // 2 :: BLOCK] = torch.arange(blocks).mul(rise).to(dtype)
    column = (blocks - (2 if target == "rival" else 1)) * BLOCK + BLOCK // 2
    assert_right(logits, torch.tensor([column]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("vocab", "transform"), [(3 * BLOCK + 9, {}), (3, {"softcap": 30.0}), (5001, CAPPED)], ids=str)
def test_an_entropy_beside_it_changes_no_bit(dtype: torch.dtype, vocab: int, transform: dict[str, float]) -> None:
    logits, ids = normal_rows(300, vocab, dtype, std=2.0), torch.arange(300) * 7 % vocab
    bare, beside = (gk.per_token_logps(logits, ids, impl="cpp", entropy=e, **transform) for e in (False, True))
    assert same_bits(bare.logps, beside.logps) and same_bits(bare.lse, beside.lse)


@pytest.mark.parametrize("transform", [{"temperature": 1e4}, {"logit_scale": 1e-4}, {"temperature": 21.0}], ids=str)
@pytest.mark.parametrize("vocab", [4, BLOCK + 3])
@pytest.mark.parametrize("impl", ["cpp", "torch"])
def test_the_lowest_float16_counts_under_no_temperature(impl: str, vocab: int, transform: dict[str, float]) -> None:
    logits, ids = normal_rows(2, vocab, torch.float16, std=2.0), torch.tensor([1, vocab - 1])
    logits[:, 2] = torch.finfo(torch.float16).min
    kept = torch.arange(vocab) != 2
    found = scored(logits, ids, impl, **transform)
    bare = scored(logits[:, kept], torch.tensor([1, vocab - 2]), impl, **transform)
    for name in ("logps", "entropy", "lse"):
        ours, theirs = getattr(found, name).double(), getattr(bare, name).double()
        torch.testing.assert_close(ours, theirs, rtol=2e-7, atol=1e-10)
    assert all((grad[:, 2] == 0).all() for grad in found[3:])


# The transform


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("std", [1.0, 20.0])
@pytest.mark.parametrize("transform", TRANSFORMS, ids=str)
def test_scale_then_cap_then_temperature(dtype: torch.dtype, std: float, transform: dict[str, float]) -> None:
    assert_right(rows_like(CHAIN + 5, dtype, std=std), places(CHAIN + 5), **transform)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("extra", [{}, {"softcap": 4.0, "logit_scale": 1.3}], ids=["plain", "capped"])
def test_each_row_has_its_own_temperature(dtype: torch.dtype, extra: dict[str, float]) -> None:
    ids = places(CHAIN + 5)
    heat = torch.linspace(0.4, 3.0, len(ids), dtype=result_dtype(dtype))
    assert_right(rows_like(CHAIN + 5, dtype), ids, temperature=heat, **extra)


@pytest.mark.parametrize("form", ["0-d", "[B, 1]", "token", "strided"])
def test_every_form_of_temperature(form: str) -> None:
    logits, ids = normal_rows(6, 33).reshape(2, 3, 33), torch.arange(6).reshape(2, 3)
    heat = {
        "0-d": torch.tensor(0.7),
        "[B, 1]": torch.tensor([[0.7], [1.6]]),
        "token": torch.linspace(0.5, 2, 6).reshape(2, 3),
        "strided": torch.linspace(0.5, 2, 12).reshape(3, 4)[:, ::2].T,
    }[form]
    ours = scored(logits, ids, "cpp", temperature=heat)
    apart = [
        scored(logits[i, j : j + 1], ids[i, j : j + 1], "cpp", temperature=float(heat.expand(2, 3)[i, j]))
        for i in range(2)
        for j in range(3)
    ]
    for name in ("logps", "entropy", "lse"):
        assert same_bits(getattr(ours, name).reshape(-1), torch.cat([getattr(one, name) for one in apart])), name


@pytest.mark.parametrize("value", [-1e30, -1e20, 1e30])
def test_a_softcap_leaves_no_share_of_a_huge_logit(value: float) -> None:
    rows = torch.tensor([[value, 1.0, 2.0, 0.5]])
    truth = torch.log_softmax(30.0 * torch.tanh(rows.double() / 30.0), -1)[0, 0]
    assert scored(rows, torch.tensor([0]), "cpp", softcap=30.0).logps[0].item() == pytest.approx(truth.item(), abs=2e-4)


# Removed columns


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hidden", [-INF, "min"])
@pytest.mark.parametrize("where", ["first block", "scattered", "all but one", "tail"])
@pytest.mark.parametrize("transform", [{}, CAPPED], ids=["plain", "capped"])
def test_removed_columns_have_no_mass_no_entropy_and_no_gradient(
    dtype: torch.dtype, hidden: Any, where: str, transform: dict[str, float]
) -> None:
    """The result is that of the row without them."""
    vocab = BLOCK + CHAIN + 9
    gone = torch.zeros(vocab, dtype=torch.bool)
    if where == "first block":
        gone[: BLOCK + 1] = True
    elif where == "scattered":
        gone[::3] = True
    elif where == "all but one":
        gone[:] = True
        gone[vocab - 2] = False
    else:
        gone[-9:] = True
    kept = (~gone).nonzero().ravel()
    rows = normal_rows(2, vocab, dtype, std=3.0)
    rows[:, gone] = torch.finfo(dtype).min if hidden == "min" else hidden
    short = torch.tensor([0, len(kept) - 1])
    ours = scored(rows, kept[short], "cpp", **transform)
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
@pytest.mark.parametrize("vocab", [11, CHAIN + 3, 2 * BLOCK + 3])
@pytest.mark.parametrize("transform", [{}, CAPPED], ids=["plain", "capped"])
@pytest.mark.parametrize("bad", ["all -inf", "all finfo.min", "+inf", "nan"])
def test_a_bad_live_row_is_nan_alone(dtype: torch.dtype, bad: str, vocab: int, transform: dict[str, float]) -> None:
    clean_rows, ids = normal_rows(3, vocab, dtype), torch.tensor([vocab - 1, 4, 0])
    value = {"all -inf": -INF, "all finfo.min": torch.finfo(dtype).min, "+inf": INF, "nan": NAN}[bad]
    clean = scored(clean_rows, ids, "cpp", **transform)
    for column in (4, 7, vocab - 1):  # the target, in a step, in the tail
        rows = clean_rows.clone()
        rows[1, slice(None) if bad.startswith("all") else column] = value
        spoilt = scored(rows, ids, "cpp", **transform)
        for name in Scored._fields:
            ours = getattr(spoilt, name)
            assert ours[1].isnan().any() and (name == "grad" or ours[1].isnan()), (name, column)
            assert same_bits(ours[[0, 2]], getattr(clean, name)[[0, 2]]), name


@pytest.mark.parametrize("transform", [{}, CAPPED], ids=["plain", "capped"])
def test_a_row_without_a_distribution_has_no_gradient_that_looks_like_one(transform: dict[str, float]) -> None:
    ours = scored(torch.full((1, 5), -INF), torch.tensor([2]), "cpp", **transform)
    assert ours.logps.isnan().all() and ours.grad.isnan().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [3, CHAIN + 3])
@pytest.mark.parametrize("transform", [{}, CAPPED], ids=["plain", "capped"])
def test_a_target_that_was_removed_is_impossible(dtype: torch.dtype, vocab: int, transform: dict[str, float]) -> None:
    ids = places(vocab)
    rows = normal_rows(len(ids), vocab, dtype)
    rows[torch.arange(len(ids)), ids] = -INF
    ours = scored(rows, ids, "cpp", **transform)
    truth = row_stats(as_array(rows), as_array(ids), **transform)
    assert (ours.logps == -INF).all()
    np.testing.assert_allclose(as_array(ours.entropy), truth.entropy.astype(float), rtol=1e-6, atol=1e-6)
    upstream = as_array(upstream_of(ids, dtype))[..., None]
    expected = (upstream[0] * truth.dlogps + upstream[1] * truth.dentropy).astype(float)
    np.testing.assert_allclose(as_array(ours.grad), expected, rtol=2 * torch.finfo(dtype).eps, atol=2e-6)
    assert (ours.grad[torch.arange(len(ids)), ids] == 0).all()


# Digits that a difference would lose


@pytest.mark.parametrize("offset", [0.0, -1000.0, 500.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("target", [0, BLOCK, 2 * BLOCK])
def test_a_nearly_certain_target_keeps_its_digits(dtype: torch.dtype, offset: float, target: int) -> None:
    """1 - p = 6e-8: `p - 1` is off by all of it, log(p) likewise."""
    vocab, ids = 2 * BLOCK + 1, torch.tensor([target])
    rows = torch.full((1, vocab), offset - math.log((vocab - 1) / 6e-8), dtype=torch.float64).to(dtype)
    rows[0, target] = offset
    truth = row_stats(as_array(rows), as_array(ids))
    heat = torch.ones((), dtype=result_dtype(dtype))
    logps, entropy, _, *stats = row_op("row_stats")(rows, ids, heat, 1.0, None, True)
    close = 1e-6 if dtype != torch.float64 else 1e-11  # the oracle rounds 1 + 6e-8
    assert logps.item() == pytest.approx(float(truth.logps[0]), rel=close, abs=0)
    assert entropy.item() == pytest.approx(float(truth.entropy[0]), rel=close, abs=1e-11)
    share = stats[2].double() / stats[1].double()
    assert share.item() == pytest.approx(float(truth.dlogps[0, target]), rel=close)
    one, nothing = torch.ones_like(logps), torch.zeros_like(logps)
    tolerance = torch.finfo(dtype).eps + 1e-6
    smallest = 2**-25 * 1.01 if dtype == torch.float16 else 0.0
    of_logp = row_op("row_grad")(rows, ids, heat, 1.0, None, entropy, *stats, one, None)
    np.testing.assert_allclose(as_array(of_logp), truth.dlogps.astype(float), rtol=tolerance, atol=smallest)
    of_entropy = row_op("row_grad")(rows, ids, heat, 1.0, None, entropy, *stats, nothing, one)
    np.testing.assert_allclose(as_array(of_entropy), truth.dentropy.astype(float), rtol=tolerance, atol=smallest)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_hopeless_target_keeps_its_digits(dtype: torch.dtype) -> None:
    """A log-prob below the smallest exponential is legal; nothing clamps it."""
    rows = normal_rows(1, 33, dtype)
    rows[0, 9] = -5000.0
    assert_right(rows, torch.tensor([9]))
    assert scored(rows, torch.tensor([9]), "cpp").logps.item() < -4990


def test_many_small_terms_beside_a_large_one_are_not_lost() -> None:
    """A running float32 sum of 1 + 3e-8 + 3e-8 + ... stays 1."""
    rows = torch.full((1, 100_001), -17.3)
    rows[0, 5] = 0.0
    truth = row_stats(as_array(rows), np.array([7]), real=np.float64)
    with poisoned():
        _, entropy, _, _, total, _ = row_op("row_stats")(rows, torch.tensor([7]), torch.ones(()), 1.0, None, True)
    assert total.item() == pytest.approx(1 + 1e5 * math.exp(-rows[0, 0].double().abs().item()), rel=1.2e-7)
    assert entropy.item() == pytest.approx(float(truth.entropy[0]), rel=1e-6)
