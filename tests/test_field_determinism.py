"""A row's numbers are its own, whatever it is scored with."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from oracle import Options
from support import (
    DTYPES,
    LOSS_TYPES,
    make_batch,
    normal,
    run,
    same_bits,
    score,
    truth_of,
)
from tolerance import as_array

NAN = math.nan


# A row's numbers are its own


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [5, 257, 32001])
@pytest.mark.parametrize("transform", [{}, {"temperature": 0.7, "softcap": 9.0}], ids=["plain", "capped"])
def test_a_row_is_bitwise_the_same_in_any_company(dtype: torch.dtype, vocab: int, transform: dict[str, float]) -> None:
    rows = 11
    logits = normal(rows, vocab, dtype, std=3.0)[0]
    ids = torch.arange(rows) * 7 % vocab
    together = score(logits, ids, **transform)
    wide = torch.full((2 * rows, vocab + 3), NAN, dtype=dtype)
    wide[::2, 1:-2] = logits
    padded = torch.full((8, 4, vocab), 3.0, dtype=dtype)
    padded[:, :2] = logits[torch.arange(16) % rows].reshape(8, 2, vocab)
    views = {
        "one by one": [score(logits[i : i + 1], ids[i : i + 1], **transform) for i in range(rows)],
        "strided": score(wide[::2, 1:-2], ids, **transform),
        "reversed": score(logits.flip(0), ids.flip(0), **transform),
        "padded": score(
            padded, torch.cat([ids[torch.arange(16) % rows].reshape(8, 2), torch.zeros(8, 2).long()], 1), **transform
        ),
        "masked company": score(
            torch.cat([torch.full((3, vocab), NAN, dtype=dtype), logits]),
            torch.cat([torch.zeros(3).long(), ids]),
            mask=torch.tensor([0] * 3 + [1] * rows),
            **transform,
        ),
    }
    for name in ("logps", "entropy", "lse"):
        expected = getattr(together, name)
        for how, got in views.items():
            if how == "one by one":
                value = torch.cat([getattr(x, name) for x in got])
            elif how == "reversed":
                value = getattr(got, name).flip(0)
            elif how == "padded":
                value = getattr(got, name)[:, :2].reshape(-1)[:rows]
            elif how == "masked company":
                value = getattr(got, name)[3:]
            else:
                value = getattr(got, name)
            assert same_bits(value, expected), f"{name}, {how}"


@pytest.mark.parametrize("inplace", [False, True])
def test_many_rows_in_several_chunks_are_what_each_is_alone(inplace: bool) -> None:
    """Dead NaN rows among them, so that compaction and chunk borders fall anywhere."""
    rows, vocab = 6000, 513
    logits, ids = normal(rows, vocab, torch.float32, std=3.0)[0], torch.arange(rows) * 11 % vocab
    mask = torch.rand(rows, generator=torch.Generator().manual_seed(5)) > 0.3
    logits[~mask] = NAN
    leaf = logits.clone().requires_grad_()
    out = score(leaf * 1.0, ids, mask=mask, inplace=inplace)
    picks = [0, 1, 2047, 2048, 4095, 4096, 4097, rows - 2, rows - 1, *range(100, rows, 397)]
    alone = [score(logits[i : i + 1].clone().requires_grad_(), ids[i : i + 1]) for i in picks if mask[i]]
    (out.logps.sum() + out.entropy.sum()).backward()
    assert leaf.grad is not None
    assert (leaf.grad[~mask] == 0).all() and (out.logps[~mask] == 0).all() and (out.entropy[~mask] == 0).all()
    for i, one in zip([i for i in picks if mask[i]], alone, strict=True):
        for name in ("logps", "entropy", "lse"):
            assert same_bits(getattr(out, name)[i : i + 1], getattr(one, name)), (name, i)
    truth = truth_of(logits[:300], ids[:300], mask=mask[:300].numpy())
    live = truth.live
    np.testing.assert_allclose(
        as_array(leaf.grad)[:300][live], (truth.dlogps + truth.dentropy)[live].astype(float), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("vocab", [129, 50257])
def test_thread_count_and_repetition_change_no_bit(vocab: int) -> None:
    logits = normal(24, vocab, torch.bfloat16, std=3.0)
    ids = torch.arange(24)[None] * 5 % vocab
    results = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3, 1):
            torch.set_num_threads(threads)
            leaf = logits.clone().requires_grad_()
            out = score(leaf, ids)
            (out.logps.sum() + 0.1 * out.entropy.sum()).backward()
            assert leaf.grad is not None
            results.append((*out, leaf.grad))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(same_bits(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_on_policy_ratio_is_exactly_one(dtype: torch.dtype, loss_type: str) -> None:
    batch = make_batch(dtype=dtype).but(old=None)
    opt = Options(loss_type=loss_type, beta=0.1, epsilon_high=1.1, max_completion_length=9)
    got = run(batch, opt, dtype)
    assert batch.mask is not None
    assert (got.per_token.ratio[torch.as_tensor(batch.mask)] == 1.0).all()
    assert all(got.metrics[f"ratio/{k}"].item() == 1.0 for k in ("mean", "min", "max"))
