"""Masking faults of public GRPO losses: dead tokens are never read and count nowhere."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from oracle import Batch
from support import (
    DTYPES,
    LAYOUTS,
    LOSS_TYPES,
    OBJECTIVES,
    assert_same_run,
    config_of,
    full_options,
    make_batch,
    normal_rows,
    pack,
    poisoned,
    run,
    same_bits,
    uniform,
)

import grpo_kernels as gk

INF, NAN = math.inf, math.nan
SIDE_POISON = [NAN, INF, -INF, -1e10, 200.0]
LENGTHS = (5, 2, 7, 4)


def dead_slots(batch: Batch) -> Any:
    assert batch.mask is not None
    return ~np.asarray(batch.mask, dtype=bool)


def spoil(batch: Batch, name: str, value: float) -> Batch:
    """`value` at every dead slot of one token tensor, in every column of its row."""
    array = np.array(getattr(batch, name), copy=True)
    array[dead_slots(batch)] = value
    return batch.but(**{name: array})


# Poison where nothing counts


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("loss_type", "level"), OBJECTIVES)
def test_poison_in_dead_slots_changes_no_bit(loss_type: str, level: str, layout: str) -> None:
    opt = full_options(loss_type, level)
    batch = make_batch(seed=3, lengths=LENGTHS, vocab=5, token_advantages=True, weight="token")
    rng = np.random.default_rng(0)
    batch = batch.but(temperature=rng.uniform(0.5, 1.5, batch.ids.shape).astype(np.float32).astype(np.float64))
    if layout == "packed":
        batch = repacked(batch)
    clean = run(batch, opt)
    assert torch.isfinite(clean.loss) and abs(clean.loss.item()) > 0.01
    assert (clean.grad[torch.as_tensor(dead_slots(batch))] == 0).all()
    for name in ("old", "ref", "weight", "advantages", "logits"):
        for value in SIDE_POISON:
            assert_same_run(run(spoil(batch, name, value), opt), clean, f"{name} = {value}")
    for value in (NAN, INF, 0.0, -1.0):
        assert_same_run(run(spoil(batch, "temperature", value), opt), clean, f"temperature = {value}")
    for dead_id in (-100, -1, 5, 10**6, -(2**31), 2**62):
        assert_same_run(run(spoil(batch, "ids", dead_id), opt), clean, f"ids = {dead_id}")
    everything = batch
    for name in ("old", "ref", "weight", "advantages", "logits"):
        everything = spoil(everything, name, NAN)
    assert_same_run(run(spoil(everything, "ids", -100), opt), clean, "everything NaN")


def repacked(batch: Batch) -> Batch:
    """Packed, with the per-token temperature packed along and the tail masked too, so that it can be spoilt."""
    keep = np.arange(batch.ids.shape[1])[None] < np.asarray(LENGTHS)[:, None]
    packed = pack(batch, LENGTHS)
    mask = np.array(packed.mask, copy=True)
    mask[-2:] = False
    tau = np.concatenate([np.asarray(batch.temperature)[keep], np.full(2, 1.0)])
    return packed.but(mask=mask, temperature=tau)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_poison_in_dead_logits_changes_no_bit_in_any_dtype(dtype: torch.dtype) -> None:
    batch = make_batch(seed=4, dtype=dtype, vocab=70)
    opt = full_options("grpo")
    clean = run(batch, opt, dtype)
    for value in (NAN, INF, -INF, torch.finfo(dtype).min):
        assert_same_run(run(spoil(batch, "logits", value), opt, dtype), clean, f"logits = {value}")


@pytest.mark.parametrize("slot", [(0, 1), (1, 2)])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_the_reported_batch_one_slot_at_a_time(loss_type: str, slot: tuple[int, int]) -> None:
    """B = 2, T = 3, V = 4 zeros, mask [[1,0,1],[1,1,0]], adv [+1,-1]."""
    rng = np.random.default_rng(1)
    p = -math.log(4)
    batch = Batch(
        np.zeros((2, 3, 4)), np.array([[0, 1, 2], [3, 0, 1]]), np.array([1.0, -1.0]), np.array([[1, 0, 1], [1, 1, 0]]),
        old=p + rng.normal(0, 0.2, (2, 3)), ref=p + rng.normal(0, 0.5, (2, 3)), weight=rng.uniform(0.5, 1.5, (2, 3)),
    )  # fmt: skip
    opt = full_options(loss_type)
    clean = run(batch, opt)
    for name in ("old", "ref", "weight", "logits"):
        for value in SIDE_POISON:
            array = np.array(getattr(batch, name), copy=True)
            array[slot] = value
            spoilt = run(batch.but(**{name: array}), opt)
            assert_same_run(spoilt, clean, f"{name}{slot} = {value}")
            assert (spoilt.grad[slot] == 0).all()


@pytest.mark.parametrize(("loss_type", "level"), OBJECTIVES)
@pytest.mark.parametrize("name", ["advantages", "weight"])
def test_poison_in_the_sequence_value_of_a_dead_sequence_changes_no_bit(loss_type: str, level: str, name: str) -> None:
    batch = make_batch(seed=5, vocab=5, weight="[B]")
    assert batch.mask is not None
    mask = np.array(batch.mask, copy=True)
    mask[1] = False
    batch = batch.but(mask=mask)
    opt = full_options(loss_type, level)
    clean = run(batch, opt)
    for shape in ((4,), (4, 1)):
        for value in (NAN, INF, -1e10):
            array = np.array(getattr(batch, name), copy=True)
            array[1] = value
            assert_same_run(run(batch.but(**{name: array.reshape(shape)}), opt), clean, f"{name} {shape} = {value}")


@pytest.mark.parametrize("how", ["per_token_logps", "packed"])
def test_poison_in_dead_rows_of_the_log_prob_function(how: str) -> None:
    logits, ids = normal_rows(6, 41), torch.arange(6)
    mask = torch.tensor([1, 0, 1, 1, 0, 1])
    if how == "per_token_logps":
        logits, ids, mask = logits.reshape(2, 3, 41), ids.reshape(2, 3), mask.reshape(2, 3)
    spoilt = logits.clone()
    spoilt[mask == 0] = NAN
    spoilt_ids = torch.where(mask == 0, 10**9, ids)
    results = []
    for x, i in ((logits, ids), (spoilt, spoilt_ids)):
        leaf = x.clone().requires_grad_()
        with poisoned():
            out = gk.per_token_logps(leaf, i, mask=mask, entropy=True)
            (out.logps.sum() + out.entropy.sum()).backward()
        results.append((out.logps, out.entropy, leaf.grad))
    assert all(same_bits(a, b) for a, b in zip(*results, strict=True))
    logps, entropy, grad = results[1]
    assert (logps[mask == 0] == 0).all() and (entropy[mask == 0] == 0).all()
    assert grad is not None and (grad[mask == 0] == 0).all()


@pytest.mark.parametrize("name", ["logits", "old", "ref", "weight", "advantages"])
@pytest.mark.parametrize("entropy_coef", [0.0, 0.2])
@pytest.mark.parametrize(("loss_type", "level"), OBJECTIVES)
def test_nan_in_a_live_slot_surfaces(loss_type: str, level: str, entropy_coef: float, name: str) -> None:
    """As a refusal or as a loss that is NaN, never as a number."""
    batch = make_batch(seed=6, vocab=5, token_advantages=True, weight="token")
    assert batch.mask is not None and batch.mask[2, 0]
    array = np.array(getattr(batch, name), copy=True)
    array[2, 0] = NAN
    try:
        got = run(batch.but(**{name: array}), full_options(loss_type, level, entropy_coef=entropy_coef))
    except ValueError as error:
        assert {"old": "old_per_token_logps", "ref": "ref_per_token_logps"}[name] in str(error)  # noqa: PT017
    else:
        assert got.loss.isnan()
        assert got.grad[2, 0].isnan().any(), "nor may the gradient look healthy"


def test_poison_in_the_temperature_of_a_dead_sequence_changes_no_bit() -> None:
    batch = make_batch(seed=5, vocab=5)
    mask = np.array(batch.mask, copy=True)
    mask[1] = False
    batch = batch.but(mask=mask)
    clean = run(batch.but(temperature=np.array([[0.5], [1.0], [2.0], [1.0]])), full_options("grpo"))
    for value in (NAN, INF, 0.0, -1.0):
        spoilt = batch.but(temperature=np.array([[0.5], [value], [2.0], [1.0]]))
        assert_same_run(run(spoilt, full_options("grpo")), clean, f"temperature = {value}")


@pytest.mark.parametrize(("loss_type", "level"), OBJECTIVES)
def test_poison_behind_the_last_packed_sequence_changes_no_bit(loss_type: str, level: str) -> None:
    """Tokens beyond cu_seqlens[-1] are dead without any mask."""
    opt = full_options(loss_type, level)
    batch = make_batch(
        seed=19, lengths=(3, 4), vocab=5, layout="packed", holes=False, weight="token", token_advantages=True
    )
    batch = batch.but(mask=None)
    clean = run(batch, opt)
    assert (clean.grad[7:] == 0).all() and clean.metrics["num_tokens"].item() == 7
    for name in ("logits", "old", "ref", "weight", "advantages"):
        for value in (0.0, INF, -1e10):
            array = np.array(getattr(batch, name), copy=True)
            array[7:] = value
            assert_same_run(run(batch.but(**{name: array}), opt), clean, f"{name} = {value}")
    for dead_id in (-100, 5, 10**6):
        ids = np.array(batch.ids, copy=True)
        ids[7:] = dead_id
        assert_same_run(run(batch.but(ids=ids), opt), clean, f"ids = {dead_id}")


# Dead by id


@pytest.mark.parametrize(("loss_type", "level"), OBJECTIVES)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_negative_ids_are_dead_without_a_mask(loss_type: str, level: str, dtype: torch.dtype) -> None:
    batch = make_batch(seed=7, vocab=5)
    assert batch.mask is not None
    opt = full_options(loss_type, level)
    by_mask = run(batch, opt)
    by_id = run(batch.but(ids=np.where(batch.mask, batch.ids, -100).astype(str(dtype)[6:]), mask=None), opt)
    assert_same_run(by_id, by_mask, "ids -100")


# Nothing left


@pytest.mark.parametrize(("loss_type", "level"), OBJECTIVES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dead_by", ["mask", "ids"])
def test_no_live_token_gives_zero(loss_type: str, level: str, layout: str, dead_by: str) -> None:
    batch = make_batch(seed=11, layout=layout, weight="token")
    nothing = np.zeros_like(np.asarray(batch.mask))
    batch = batch.but(mask=nothing) if dead_by == "mask" else batch.but(ids=np.full_like(batch.ids, -100), mask=None)
    got = run(batch, full_options(loss_type, level))
    assert got.loss.item() == 0.0
    assert (got.grad == 0).all()
    for name, value in got.metrics.items():
        assert torch.isfinite(value), name
    assert got.metrics["kl"].item() == 0 and got.metrics["entropy"].item() == 0
    assert all(value.item() == 0 for name, value in got.metrics.items() if "clip" in name or name == "num_tokens")


@pytest.mark.parametrize(("loss_type", "level"), OBJECTIVES)
@pytest.mark.parametrize("shape", ["B = 0", "T = 0", "N = 0", "no sequence", "empty sequences"])
def test_empty_inputs_give_zero(loss_type: str, level: str, shape: str) -> None:
    b, t, cu = {
        "B = 0": (0, 3, None), "T = 0": (2, 0, None), "N = 0": (2, 0, [0, 0, 0]), "no sequence": (0, 4, [0]),
        "empty sequences": (3, 4, [0, 0, 0, 0]),
    }[shape]  # fmt: skip
    leading = (b, t) if cu is None else (t,)
    logits = torch.zeros(*leading, 4, requires_grad=True)
    ids = torch.zeros(leading, dtype=torch.long)
    side = torch.zeros(leading)
    with poisoned():
        out = gk.grpo_loss(
            logits,
            ids,
            config=config_of(full_options(loss_type, level)),
            advantages=torch.ones(b),
            old_per_token_logps=side,
            ref_per_token_logps=side,
            cu_seqlens=None if cu is None else torch.tensor(cu),
        )
        out.loss.backward()
    assert out.loss.item() == 0.0
    assert logits.grad is not None and logits.grad.shape == logits.shape and (logits.grad == 0).all()
    assert all(torch.isfinite(value) for value in out.metrics.values())


@pytest.mark.parametrize("leading", [(0, 3), (2, 0), (0,)])
def test_empty_log_probs(leading: tuple[int, ...]) -> None:
    logits = torch.zeros(*leading, 4, requires_grad=True)
    out = gk.per_token_logps(logits, torch.zeros(leading, dtype=torch.long), entropy=True)
    assert out.logps.shape == out.entropy.shape == out.lse.shape == leading
    (out.logps.sum() + out.entropy.sum()).backward()
    assert logits.grad is not None and logits.grad.shape == logits.shape


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize(
    ("loss_type", "normalizer", "expected"),
    [("grpo", None, 0.5), ("bnpo", None, 1.0), ("dr_grpo", None, 0.25), ("dapo", 4, 1.0), ("dapo", None, 1.0),
     ("cispo", None, -math.log(4))],
)  # fmt: skip
def test_a_fully_masked_row_counts_as_a_row(
    loss_type: str, normalizer: int | None, expected: float, layout: str
) -> None:
    """Lengths (0, 4), adv (+1, -1)."""
    shape, mask, cu = ((2, 4), torch.tensor([[0] * 4, [1] * 4]), None)
    if layout == "packed":
        shape, mask, cu = ((4,), torch.ones(4), torch.tensor([0, 0, 4]))
    logits = uniform(*shape).requires_grad_()
    config = gk.GRPOLossConfig(loss_type=loss_type, max_completion_length=8, epsilon_high=2.0)
    out = gk.grpo_loss(
        logits, torch.zeros(shape, dtype=torch.long), config=config, advantages=torch.tensor([1.0, -1.0]),
        completion_mask=mask, cu_seqlens=cu, normalizer=normalizer,
    )  # fmt: skip
    out.loss.backward()
    assert out.loss.item() == pytest.approx(expected, rel=1e-6)
    assert logits.grad is not None
    assert (logits.grad[..., :1] != 0).sum() == 4


# Two masks that disagree


@pytest.mark.parametrize("shape", [(2, 7), (2, 5), (1, 6), (2, 1), (6,), (2, 6, 1), (6, 2)])
def test_a_mask_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    logits, ids, mask = uniform(2, 6), torch.zeros(2, 6, dtype=torch.long), torch.ones(shape)
    for call in (
        lambda: gk.grpo_loss(logits, ids, advantages=torch.ones(2), completion_mask=mask),
        lambda: gk.per_token_logps(logits, ids, mask=mask),
    ):
        with pytest.raises(ValueError, match="mask") as caught:
            call()
        numbers = [", ".join(str(n) for n in s) for s in ((2, 6), shape)]
        assert all(n in str(caught.value) for n in numbers), caught.value


# A mask is never inferred


@pytest.mark.parametrize("token", [0, 1, 3])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_no_id_is_special(loss_type: str, token: int) -> None:
    """All ids equal, as with pad == eos: every token counts."""
    config = gk.GRPOLossConfig(loss_type=loss_type, max_completion_length=3, epsilon_high=2.0)
    results = []
    for mask in (None, torch.ones(2, 3)):
        logits = uniform(2, 3).requires_grad_()
        ids = torch.full((2, 3), token)
        out = gk.grpo_loss(logits, ids, config=config, advantages=torch.tensor([1.0, -0.5]), completion_mask=mask)
        out.loss.backward()
        assert out.metrics["num_tokens"].item() == 6
        assert logits.grad is not None
        assert (logits.grad[..., token] != 0).all()
        results.append((out.loss, logits.grad))
    assert same_bits(results[0][0], results[1][0]) and same_bits(results[0][1], results[1][1])
    factor = math.log(4) if loss_type == "cispo" else -1.0
    assert results[0][0].item() == pytest.approx(0.25 * factor, rel=1e-6)
