"""What must not change a result: the order of sequences, the size of a chunk, threads, micro-batches, the layout."""

from __future__ import annotations

import dataclasses
from typing import Any

import hypothesis.strategies as st
import torch
from hypothesis import given, settings
from oracle import Options
from support import OBJECTIVES, make_batch, pack, run, same_bits

from grpo_kernels.ops import rows


@st.composite
def options(draw: st.DrawFn) -> Options:
    """Any combination that the config accepts."""
    loss_type, level = draw(st.sampled_from(OBJECTIVES))
    clips: dict[str, Any] = {}
    if loss_type != "cispo":
        clips = {"delta": draw(st.sampled_from([None, 1.2, 4.0])), "dual_clip": draw(st.sampled_from([None, 3.0]))}
    return Options(
        loss_type=loss_type, importance_sampling_level=level, epsilon_high=1.1 if loss_type == "cispo" else 0.28,
        beta=draw(st.sampled_from([0.0, 0.04])), kl_estimator=draw(st.sampled_from(["k1", "k2", "k3"])),
        use_bias_correction_kl=draw(st.booleans()), entropy_coef=draw(st.sampled_from([0.0, 0.05])),
        temperature=draw(st.sampled_from([1.0, 0.6])), softcap=draw(st.sampled_from([None, 8.0])),
        max_completion_length=11, **clips,
    )  # fmt: skip


seeds = st.integers(0, 2**16)


@settings(max_examples=40)
@given(options(), seeds, st.permutations(range(4)))
def test_the_order_of_sequences(opt: Options, seed: int, order: list[int]) -> None:
    batch = make_batch(seed=seed, weight="token")
    moved = batch.but(**{
        f.name: value[list(order)]
        for f in dataclasses.fields(batch)
        if getattr(value := getattr(batch, f.name), "shape", (0,))[0] == 4
    })  # fmt: skip
    ours, theirs = run(batch, opt), run(moved, opt)
    torch.testing.assert_close(theirs.loss, ours.loss, rtol=1e-5, atol=1e-6)
    assert same_bits(theirs.per_token.logps, ours.per_token.logps[list(order)])
    torch.testing.assert_close(theirs.grad, ours.grad[list(order)], rtol=1e-5, atol=1e-7)


@settings(max_examples=40)
@given(options(), seeds, st.integers(1, 400), st.integers(1, 3), st.booleans())
def test_chunks_threads_and_place_change_no_bit(opt: Options, seed: int, chunk: int, threads: int, full: bool) -> None:
    batch = make_batch(seed=seed)
    expected = run(batch, opt)
    before = rows._CHUNK_CPU, rows._CHUNK_DEVICE, rows._reads_in_place, torch.get_num_threads()
    try:
        rows._CHUNK_CPU = rows._CHUNK_DEVICE = chunk
        rows._reads_in_place = lambda device: full
        torch.set_num_threads(threads)
        ours = run(batch, opt)
    finally:
        rows._CHUNK_CPU, rows._CHUNK_DEVICE, rows._reads_in_place = before[:3]
        torch.set_num_threads(before[3])
    assert same_bits(ours.loss, expected.loss)
    assert same_bits(ours.grad, expected.grad)


@settings(max_examples=40)
@given(options(), seeds)
def test_packed_equals_padded(opt: Options, seed: int) -> None:
    lengths = (5, 2, 7, 4)
    batch = make_batch(seed=seed, lengths=lengths, weight="[B]")
    padded, packed = run(batch, opt), run(pack(batch, lengths), opt)
    torch.testing.assert_close(packed.loss, padded.loss, rtol=1e-5, atol=1e-6)
    keep = torch.arange(8)[None, :] < torch.tensor(lengths)[:, None]
    assert same_bits(packed.per_token.logps[:18], padded.per_token.logps[keep])
    torch.testing.assert_close(packed.grad[:18], padded.grad[keep], rtol=1e-5, atol=1e-7)
    for name, value in padded.metrics.items():
        torch.testing.assert_close(packed.metrics[name], value, rtol=1e-5, atol=1e-6)


@settings(max_examples=40)
@given(options(), seeds, st.integers(1, 3))
def test_micro_batches_with_one_normalizer(opt: Options, seed: int, cut: int) -> None:
    batch = make_batch(seed=seed).but(normalizer=13.0, entropy_normalizer=13.0)
    whole, parts = run(batch, opt), []
    for rows_of in (slice(0, cut), slice(cut, 4)):
        part = {
            f.name: value[rows_of]
            for f in dataclasses.fields(batch)
            if getattr(value := getattr(batch, f.name), "shape", (0,))[0] == 4
        }
        parts.append(run(batch.but(**part), opt))
    torch.testing.assert_close(parts[0].loss + parts[1].loss, whole.loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(torch.cat([p.grad for p in parts]), whole.grad, rtol=1e-5, atol=1e-7)
