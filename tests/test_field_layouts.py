"""One batch in every layout: kinds, strides, views, holes and packing change nothing."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from oracle import Batch
from support import (
    LAYOUTS,
    OBJECTIVES,
    Ran,
    assert_same_run,
    config_of,
    full_options,
    make_batch,
    normal_rows,
    pack,
    poisoned,
    run,
    same_bits,
    tensor,
    uniform,
)
from tolerance import as_array

import grpo_kernels as gk

NAN = math.nan


# masks and ids of every kind


@pytest.mark.parametrize(
    "dtype",
    [torch.bool, torch.uint8, torch.int32, torch.int64, torch.float32, torch.bfloat16, torch.float16, torch.float64],
    ids=str,
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_kind_of_mask_means_the_same(dtype: torch.dtype, layout: str) -> None:
    batch = make_batch(seed=8, layout=layout)
    opt = full_options("grpo")
    clean = run(batch, opt)
    assert_same_run(run(batch, opt, completion_mask=tensor(batch.mask).to(dtype)), clean, str(dtype))
    if batch.cu_seqlens is not None:
        for kind in (torch.int32, torch.int64):
            assert_same_run(run(batch, opt, cu_seqlens=tensor(batch.cu_seqlens, kind)), clean, str(kind))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_side_inputs_of_another_precision_are_cast(dtype: torch.dtype) -> None:
    """To the result's, whatever comes: exact when widened, rounded once when narrowed."""
    batch = make_batch(seed=17, weight="token")
    opt = full_options("grpo")
    names = {
        "advantages": "advantages",
        "old": "old_per_token_logps",
        "ref": "ref_per_token_logps",
        "weight": "importance_sampling_ratio",
    }
    other = {argument: tensor(getattr(batch, name)).to(dtype) for name, argument in names.items()}
    expected = run(batch, opt, **{k: v.float() for k, v in other.items()})
    assert_same_run(run(batch, opt, **other), expected, str(dtype))


def test_ids_of_either_width_are_the_same() -> None:
    batch = make_batch(seed=18)
    opt = full_options("dapo")
    assert_same_run(run(batch.but(ids=batch.ids.astype(np.int32)), opt), run(batch, opt), "int32")


def test_ids_and_mask_may_have_their_own_strides() -> None:
    """An int mask's stride used for the ids is a known fault: give each tensor another one."""
    batch = make_batch(seed=9)
    opt = full_options("dapo")
    clean = run(batch, opt)
    b, t = batch.ids.shape

    def spread(x: torch.Tensor, fill: Any, step: int) -> torch.Tensor:
        wide = torch.full((b, t * step + 3), fill, dtype=x.dtype)
        wide[:, : t * step : step] = x
        return wide[:, : t * step : step]

    side = {
        "completion_mask": spread(tensor(batch.mask).long(), 1, 2),
        "old_per_token_logps": spread(tensor(batch.old, torch.float32), NAN, 3),
        "ref_per_token_logps": tensor(batch.ref, torch.float32).T.contiguous().T,
        "advantages": spread(tensor(batch.advantages, torch.float32)[:, None].expand(b, t), NAN, 2)[:, 0],
    }
    logits = tensor(batch.logits, torch.float32).requires_grad_()
    ids = spread(tensor(batch.ids), -100, 4)
    assert not any(x.is_contiguous() for x in (ids, *side.values()))
    out = gk.grpo_loss(logits, ids, config=config_of(opt), return_per_token=True, **side)
    out.loss.backward()
    assert logits.grad is not None
    assert_same_run(Ran(out.loss.detach(), logits.grad, out.metrics, out.per_token), clean, "strided side inputs")


@pytest.mark.parametrize("view", ["next token", "vocabulary", "every other row", "batch transposed"])
def test_logits_may_be_a_view(view: str) -> None:
    batch = make_batch(seed=10)
    opt = full_options("grpo")
    clean = run(batch, opt)
    b, t, v = batch.logits.shape
    values = tensor(batch.logits, torch.float32)
    base, cut = {
        "next token": (torch.full((b, t + 1, v), NAN), lambda x: x[:, :-1]),
        "vocabulary": (torch.full((b, t, v + 5), NAN), lambda x: x[..., :v]),
        "every other row": (torch.full((b, 2 * t, v), NAN), lambda x: x[:, ::2]),
        "batch transposed": (torch.full((t, b, v), NAN), lambda x: x.transpose(0, 1)),
    }[view]
    cut(base).copy_(values)
    base.requires_grad_()
    arguments = {
        "advantages": tensor(batch.advantages, torch.float32),
        "completion_mask": tensor(batch.mask),
        "old_per_token_logps": tensor(batch.old, torch.float32),
        "ref_per_token_logps": tensor(batch.ref, torch.float32),
    }
    with poisoned():
        out = gk.grpo_loss(cut(base), tensor(batch.ids), config=config_of(opt), **arguments)
        out.loss.backward()
    assert base.grad is not None
    assert same_bits(out.loss, clean.loss)
    assert same_bits(cut(base.grad), clean.grad)
    outside = torch.ones_like(base, dtype=torch.bool)
    cut(outside).fill_(False)
    assert (base.grad[outside] == 0).all()


def test_expanded_logits_are_read_as_they_are() -> None:
    """Stride 0 over the batch: every sequence scored by the same rows, gradients summed by autograd."""
    rows, ids = normal_rows(5, 9), torch.arange(15).reshape(3, 5) % 9
    shared, separate = rows.clone().requires_grad_(), rows.expand(3, 5, 9).clone().requires_grad_()
    advantages = torch.tensor([1.0, -0.5, 0.25])
    a = gk.grpo_loss(shared.expand(3, 5, 9), ids, advantages=advantages)
    b = gk.grpo_loss(separate, ids, advantages=advantages)
    a.loss.backward()
    b.loss.backward()
    assert shared.grad is not None and separate.grad is not None
    assert same_bits(a.loss, b.loss)
    torch.testing.assert_close(shared.grad, separate.grad.sum(0))


# Holes


@pytest.mark.parametrize(("loss_type", "level"), OBJECTIVES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_holes_equal_the_batch_with_those_tokens_removed(loss_type: str, level: str, layout: str) -> None:
    opt = full_options(loss_type, level)
    full = make_batch(seed=12, lengths=(6, 6, 6), vocab=9, holes=False, weight="token")
    mask = np.array([[1, 1, 0, 0, 1, 1, 0], [0, 1, 1, 1, 1, 0, 0], [1, 0, 1, 0, 1, 1, 0]], dtype=bool)
    kept = [np.flatnonzero(m) for m in mask]

    def removed(x: Any) -> Any:
        return np.stack([row[k] for row, k in zip(x, kept, strict=True)])

    short = Batch(
        removed(full.logits),
        removed(full.ids),
        full.advantages,
        None,
        removed(full.old),
        removed(full.ref),
        removed(full.weight),
    )
    holey = full.but(mask=mask)
    if layout == "packed":
        holey = pack(holey, (6, 6, 6))
    a, b = run(holey, opt), run(short, opt)
    assert a.loss.item() == pytest.approx(b.loss.item(), rel=1e-6)
    live = (
        torch.as_tensor(mask) if layout == "padded" else torch.as_tensor(np.append(mask[:, :6].ravel(), [False, False]))
    )
    torch.testing.assert_close(a.grad[live].reshape(b.grad.shape), b.grad, rtol=1e-6, atol=1e-9)
    assert (a.grad[~live] == 0).all()
    assert same_bits(a.per_token.logps[live].reshape(3, 4), b.per_token.logps)
    for name, value in b.metrics.items():
        assert a.metrics[name].item() == pytest.approx(value.item(), rel=1e-6, abs=1e-7), name


def test_the_row_denominator_counts_live_tokens() -> None:
    """Mask [1,1,0,0,1,1]: each live token of a grpo row weighs 1/4."""
    logits = uniform(1, 6).requires_grad_()
    config = gk.GRPOLossConfig(loss_type="grpo")
    gk.grpo_loss(
        logits, torch.zeros(1, 6, dtype=torch.long), config=config, advantages=torch.ones(1),
        completion_mask=torch.tensor([[1, 1, 0, 0, 1, 1]]),
    ).loss.backward()  # fmt: skip
    assert logits.grad is not None
    np.testing.assert_allclose(logits.grad[0, :, 0].numpy(), -0.75 / 4 * np.array([1, 1, 0, 0, 1, 1]), rtol=1e-6)


# Packing


@pytest.mark.parametrize(("loss_type", "level"), OBJECTIVES)
@pytest.mark.parametrize("weight", [None, "[B]", "[B, 1]", "token"])
@pytest.mark.parametrize("token_advantages", [False, True])
def test_packed_equals_padded(loss_type: str, level: str, weight: str | None, token_advantages: bool) -> None:
    opt = full_options(loss_type, level)
    lengths = (2, 4, 5)
    batch = make_batch(seed=13, lengths=lengths, weight=weight, token_advantages=token_advantages)
    padded, packed = run(batch, opt), run(pack(batch, lengths), opt)
    keep = torch.arange(batch.ids.shape[1])[None] < torch.tensor(lengths)[:, None]
    n = int(keep.sum())
    assert packed.loss.item() == pytest.approx(padded.loss.item(), rel=1e-6)
    assert (packed.grad[n:] == 0).all()
    torch.testing.assert_close(packed.grad[:n], padded.grad[keep], rtol=1e-6, atol=1e-9)
    assert same_bits(packed.per_token.logps[:n], padded.per_token.logps[keep])
    assert same_bits(packed.per_token.entropy[:n], padded.per_token.entropy[keep])
    assert packed.metrics.keys() == padded.metrics.keys()
    for name, value in padded.metrics.items():
        assert packed.metrics[name].item() == pytest.approx(value.item(), rel=1e-6, abs=1e-7), name


@pytest.mark.parametrize(("loss_type", "level"), OBJECTIVES)
def test_empty_sequences_in_a_pack_count_like_masked_rows(loss_type: str, level: str) -> None:
    opt = full_options(loss_type, level)
    packed = make_batch(seed=14, lengths=(2, 4), layout="packed", holes=False)
    with_empty = packed.but(
        cu_seqlens=np.array([0, 0, 2, 2, 6, 6]),
        advantages=np.array([9.0, *packed.advantages[:1], NAN, *packed.advantages[1:], -9.0]),
    )
    got = run(with_empty, opt)
    truth = oracle.grpo(with_empty, opt)
    assert got.loss.item() == pytest.approx(float(truth.loss), rel=1e-5)
    np.testing.assert_allclose(as_array(got.grad), truth.dlogits.astype(float), rtol=1e-5, atol=1e-7)
    for name, value in truth.metrics.items():
        assert got.metrics[name].item() == pytest.approx(value, rel=1e-5, abs=1e-6), name


def test_a_boundary_token_belongs_to_its_own_sequence() -> None:
    """Changing sequence 2's rows, ids and old changes no gradient of sequence 1 under a fixed denominator."""
    packed = make_batch(seed=15, lengths=(3, 4), layout="packed", holes=False).but(normalizer=7.0)
    other = make_batch(seed=99, lengths=(3, 4), layout="packed", holes=False)
    mixed = packed.but(
        logits=np.concatenate([packed.logits[:3], other.logits[3:]]),
        ids=np.concatenate([packed.ids[:3], other.ids[3:]]),
        old=np.concatenate([np.asarray(packed.old)[:3], np.asarray(other.old)[3:]]),
    )
    for loss_type, level in OBJECTIVES:
        opt = full_options(loss_type, level, entropy_coef=0.0)
        a, b = run(packed, opt), run(mixed, opt)
        assert same_bits(a.grad[:3], b.grad[:3]), (loss_type, level)
        assert not same_bits(a.grad[3:7], b.grad[3:7])


def test_as_many_tokens_as_sequences_is_not_ambiguous() -> None:
    """S == N: `[N]` is one value per sequence, `[N, 1]` one per token."""
    cu = np.array([0, 0, 2, 3])
    batch = make_batch(seed=16, lengths=(3,), layout="packed", holes=False)
    batch = batch.but(
        logits=batch.logits[:3],
        ids=batch.ids[:3],
        mask=None,
        old=np.asarray(batch.old)[:3],
        ref=np.asarray(batch.ref)[:3],
        cu_seqlens=cu,
    )
    values = np.array([5.0, -1.0, 0.25])
    opt = full_options("dapo")
    for name in ("advantages", "weight"):
        base = batch.but(advantages=np.array([1.0, 1.0, -1.0]))
        per_sequence, per_token = base.but(**{name: values}), base.but(**{name: values[:, None]})
        results = []
        for case in (per_sequence, per_token):
            got, truth = run(case, opt), oracle.grpo(case, opt)
            assert got.loss.item() == pytest.approx(float(truth.loss), rel=1e-5), name
            np.testing.assert_allclose(as_array(got.grad), truth.dlogits.astype(float), rtol=1e-5, atol=1e-7)
            results.append(got.loss.item())
        assert abs(results[0] - results[1]) > 1e-3


def test_one_flat_sequence_in_the_log_prob_function() -> None:
    logits, ids = normal_rows(5, 17), torch.arange(5)
    flat, batched = gk.per_token_logps(logits, ids), gk.per_token_logps(logits[None], ids[None])
    assert flat.logps.shape == (5,)
    assert same_bits(flat.logps, batched.logps[0])
