"""How the batch is divided: micro-batches, ranks, constants."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from support import (
    LOSS_TYPES,
    OBJECTIVES,
    make_batch,
    objective_options,
    run,
    uniform,
)

import grpo_kernels as gk

NAN = math.nan


# How the batch is split


def lengths_2_4(rows: slice, normalizer: Any, loss_type: str = "dapo", **options: Any) -> float:
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]])[rows]
    out = gk.grpo_loss(
        uniform(2, 4)[rows],
        torch.zeros(2, 4, dtype=torch.long)[rows],
        config=gk.GRPOLossConfig(loss_type=loss_type, **options),
        advantages=torch.tensor([1.0, -1.0])[rows],
        completion_mask=mask,
        normalizer=normalizer,
    )
    return float(out.loss.item())


def test_micro_batches_under_one_normalizer_add_up() -> None:
    assert lengths_2_4(slice(0, 2), 6) == pytest.approx(1 / 3, rel=1e-6)
    assert lengths_2_4(slice(0, 1), 6) == pytest.approx(-1 / 3, rel=1e-6)
    assert lengths_2_4(slice(1, 2), 6) == pytest.approx(2 / 3, rel=1e-6)


@pytest.mark.parametrize(("name", "expected"), [("dapo", 0.32), ("bnpo", 0.32), ("grpo", 0.4)])
def test_token_mean_is_not_the_mean_of_means(name: str, expected: float) -> None:
    """100 tokens of loss 0.5 and 900 of 0.3."""
    mask = torch.zeros(2, 900)
    mask[0, :100], mask[1] = 1, 1
    out = gk.grpo_loss(
        uniform(2, 900), torch.zeros(2, 900, dtype=torch.long), config=gk.GRPOLossConfig(loss_type=name),
        advantages=torch.tensor([-0.5, -0.3]), completion_mask=mask,
    )  # fmt: skip
    assert out.loss.item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("loss_type", "level"), OBJECTIVES)
def test_ten_random_splits_add_up_to_the_whole(loss_type: str, level: str) -> None:
    lengths = (3, 7, 1, 5, 2, 6, 4, 8)
    batch = make_batch(seed=24, lengths=lengths)
    assert batch.mask is not None
    normalizer = {"grpo": 8.0, "dr_grpo": 8.0 * 7}.get(loss_type, float(batch.mask.sum()))
    opt = objective_options(loss_type, level, {"beta": 0.1, "entropy_coef": 0.1})
    batch = batch.but(normalizer=normalizer, entropy_normalizer=float(batch.mask.sum()))
    whole = run(batch, opt)
    unsplit = run(batch.but(normalizer=None, entropy_normalizer=None), opt)
    assert whole.loss.item() == pytest.approx(unsplit.loss.item(), rel=1e-6)
    rng = np.random.default_rng(0)
    for _ in range(10):
        order = rng.permutation(8)
        cuts = np.sort(rng.choice(np.arange(1, 8), size=rng.integers(1, 4), replace=False))
        total, grad = 0.0, torch.zeros_like(whole.grad)
        for rows in np.split(order, cuts):
            part = run(
                batch.but(
                    **{
                        k: np.asarray(getattr(batch, k))[rows]
                        for k in ("logits", "ids", "advantages", "mask", "old", "ref")
                    }
                ),
                opt,
            )
            total += part.loss.item()
            grad[torch.as_tensor(rows)] = part.grad
        assert total == pytest.approx(whole.loss.item(), rel=1e-5)
        torch.testing.assert_close(grad, whole.grad, rtol=1e-6, atol=1e-9)


def test_bnpo_and_unnormalised_dapo_depend_on_the_split() -> None:
    for name in ("bnpo", "dapo"):
        parts = [lengths_2_4(slice(0, 1), None, name), lengths_2_4(slice(1, 2), None, name)]
        assert sum(parts) / 2 == pytest.approx(0.0, abs=1e-7)
        assert lengths_2_4(slice(0, 2), None, name) == pytest.approx(1 / 3, rel=1e-6)


# Dr_grpo's constant


def test_dr_grpo_divides_by_rows_times_the_maximum_length() -> None:
    assert lengths_2_4(slice(0, 2), None, "dr_grpo", max_completion_length=8) == pytest.approx(0.125, rel=1e-6)
    results = []
    for width in (4, 16):
        mask = torch.zeros(2, width)
        mask[0, :2], mask[1, :4] = 1, 1
        out = gk.grpo_loss(
            uniform(2, width),
            torch.zeros(2, width, dtype=torch.long),
            advantages=torch.tensor([1.0, -1.0]),
            completion_mask=mask,
            config=gk.GRPOLossConfig(loss_type="dr_grpo", max_completion_length=8),
        )
        results.append(out.loss.item())
    assert results[0] == results[1] == pytest.approx(0.125, rel=1e-6)


def test_dr_grpo_without_a_maximum_length_is_refused() -> None:
    with pytest.raises(ValueError, match="max_completion_length"):
        lengths_2_4(slice(0, 2), None, "dr_grpo")


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_padding_width_changes_nothing(loss_type: str) -> None:
    opt = objective_options(loss_type, "token", {"beta": 0.1, "entropy_coef": 0.1, "entropy": True})
    batch = make_batch(seed=25)

    def widened(x: Any, fill: Any) -> Any:
        return np.concatenate([x, np.full((x.shape[0], 12, *x.shape[2:]), fill, x.dtype)], axis=1)

    wide = batch.but(
        logits=widened(batch.logits, NAN),
        ids=widened(batch.ids, 0),
        mask=widened(batch.mask, False),
        old=widened(batch.old, NAN),
        ref=widened(batch.ref, NAN),
    )
    narrow, padded = run(batch, opt), run(wide, opt)
    assert padded.loss.item() == pytest.approx(narrow.loss.item(), rel=1e-6)
    torch.testing.assert_close(padded.grad[:, : batch.ids.shape[1]], narrow.grad, rtol=1e-6, atol=1e-9)
