"""Faults that others' fused heads had: rounded logits, sums in 16 bit, full-size temporaries, sharded heads.

Sizes from the reports run where there is a GPU; each has a smaller form that runs everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from linear_support import MODES, bytes_of, memory_changes, peak_bytes, product, rounded
from oracle_rows import row_stats
from support import same_bits, tensor
from tolerance import as_array
from torch import Tensor

import grpo_kernels as gk

GIB = 2**30
CPU: dict[str, Any] = {"impl": "torch"}  # where many rows run on the CPU: kernels of a GPU would be interpreted


def softmax_truth(hidden: np.ndarray, weight: np.ndarray, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """log p of `ids` and its gradient in the logits, all rows at once, in float64."""
    logits = hidden @ weight.T
    logits -= logits.max(-1, keepdims=True)
    exponentials = np.exp(logits)
    total = exponentials.sum(-1, keepdims=True)
    rows = np.arange(len(ids))
    dlogits = -exponentials / total
    dlogits[rows, ids] += 1
    return logits[rows, ids] - np.log(total[:, 0]), dlogits


def normal(seed: int, *shape: int, std: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> np.ndarray:
    return rounded(np.random.default_rng(seed).normal(0, std, shape), dtype)


# The product wrote bfloat16, so that the later float32 cast recovered nothing


def largest_error(rows: int, size: int, vocab: int, device: str, **options: Any) -> float:
    hidden, weight = normal(0, rows, size), normal(1, vocab, size, std=30 / size**0.5)
    ids = np.random.default_rng(2).integers(0, vocab, rows)
    truth, _ = softmax_truth(hidden, weight, ids)
    operands = (tensor(x, torch.bfloat16).to(device) for x in (hidden, weight))
    out = gk.linear_per_token_logps(*operands, tensor(ids).to(device), **options)
    assert out.logps.dtype == torch.float32
    return float(np.abs(as_array(out.logps) - truth).max())


def test_logits_of_standard_deviation_30_are_not_rounded() -> None:
    assert largest_error(8, 1024, 2001, "cpu") < 1e-3 < 1e-2 < largest_error(8, 1024, 2001, "cpu", logits_dtype="input")


@pytest.mark.gpu
@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_logits_of_standard_deviation_30_are_not_rounded_at_full_size(impl: str) -> None:
    assert largest_error(256, 1024, 32000, "cuda", impl=impl) < 1e-3


# A head of another precision than the body is neither rounded nor cast


def test_a_float32_head_behind_bfloat16_hidden_states() -> None:
    vocab, size = 151936, 4
    hidden, weight = normal(3, 2, size), normal(4, vocab, size, std=1.5, dtype=torch.float32)
    ids = np.array([5, vocab - 1])
    head = torch.nn.Linear(size, vocab, bias=False)
    with torch.no_grad():
        head.weight.copy_(tensor(weight, torch.float32))
    before = head.weight.detach().clone()
    body = tensor(hidden, torch.bfloat16).requires_grad_()
    out = gk.linear_per_token_logps(body, head.weight, tensor(ids))
    out.logps.sum().backward()
    truth = row_stats(product(hidden, weight), ids, real=np.float64)
    assert np.abs(as_array(out.logps) - truth.logps).max() < 1e-5
    assert head.weight.dtype == torch.float32 and same_bits(head.weight, before)
    assert body.grad is not None and body.grad.dtype == torch.bfloat16
    dlogps = truth.dlogps.astype(np.float64)
    np.testing.assert_allclose(as_array(head.weight.grad), dlogps.T @ hidden, rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(as_array(body.grad), dlogps @ weight, rtol=2.0**-8, atol=1e-6)


# dweight was summed in bfloat16, and small probabilities were filtered


@pytest.mark.parametrize("mode", MODES)
def test_dweight_of_8192_tokens_in_bfloat16(mode: str) -> None:
    rows, size, vocab = 8192, 128, 32
    hidden, weight = normal(5, rows, size), normal(6, vocab, size, std=0.2)
    ids = np.random.default_rng(7).integers(0, vocab, rows)
    advantages = normal(8, 64, dtype=torch.float32)
    _, dlogits = softmax_truth(hidden, weight, ids)
    expected = (-np.repeat(advantages, rows // 64)[:, None] * dlogits / rows).T @ hidden
    leaf = tensor(weight, torch.bfloat16).requires_grad_()
    out = gk.linear_grpo_loss(
        tensor(hidden, torch.bfloat16).reshape(64, -1, size), leaf, tensor(ids).reshape(64, -1),
        advantages=tensor(advantages, torch.float32), mode=mode, chunk_bytes=bytes_of(128, vocab), **CPU,
    )  # fmt: skip
    out.loss.backward()
    assert np.linalg.norm(as_array(leaf.grad) - expected) < 0.01 * np.linalg.norm(expected)
    assert (as_array(leaf.grad) != 0).mean() > 0.999


# Temporaries of the logits' size


def logits_free(rows: int, vocab: int, size: int, device: str, **options: Any) -> dict[str, Callable[[], Any]]:
    """The forward alone, and a step with a frozen head, on bfloat16 operands."""
    hidden = torch.randn(4, rows // 4, size, device=device, dtype=torch.bfloat16).requires_grad_()
    weight = torch.randn(vocab, size, device=device, dtype=torch.bfloat16)
    ids = torch.zeros(4, rows // 4, dtype=torch.long, device=device)

    def forward() -> Any:
        with torch.no_grad():
            return gk.linear_per_token_logps(hidden, weight, ids, entropy=True, **options)

    def step() -> Any:
        out = gk.linear_grpo_loss(hidden, weight, ids, advantages=torch.ones(4, device=device), **options)
        return torch.autograd.grad(out.loss, hidden)

    return {"forward": forward, "step": step}


@pytest.mark.parametrize("work", ["forward", "step"])
def test_no_temporary_grows_with_rows_times_vocabulary(work: str) -> None:
    rows, vocab = 1024, 8192
    changes = memory_changes(logits_free(rows, vocab, 16, "cpu", chunk_bytes=bytes_of(8, vocab), **CPU)[work])
    assert peak_bytes(changes) <= 0.06 * rows * vocab * 2


def extra_on_gpu(work: Callable[..., Any], prepare: Callable[[], tuple[Tensor, ...]] = tuple) -> int:
    """Bytes beyond those in use before, at the peak of a second run of `work(*prepare())`."""
    work(*prepare())
    torch.cuda.empty_cache()
    inputs = prepare()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work(*inputs)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.gpu
@pytest.mark.parametrize("work", ["forward", "step"])
def test_no_temporary_grows_with_rows_times_vocabulary_at_full_size(work: str) -> None:
    rows, vocab = 8192, 151936
    extra = extra_on_gpu(logits_free(rows, vocab, 1024, "cuda", chunk_bytes=16 * 2**20, impl="triton")[work])
    own = rows * 1024 * 2 * (work == "step")
    assert extra - own <= 0.01 * rows * vocab * 2


@pytest.mark.gpu
@pytest.mark.parametrize("inplace", [False, True])
def test_the_logits_path_adds_at_most_one_gradient_at_full_size(inplace: bool) -> None:
    shape = (4, 2048, 151936)
    ids = torch.zeros(shape[:2], dtype=torch.long, device="cuda")
    options = {"advantages": torch.ones(4, device="cuda"), "impl": "triton"}
    source = torch.ones(1, device="cuda", requires_grad=True)

    class Made(torch.autograd.Function):  # logits that are the output of an op which needs no memory in backward
        @staticmethod
        def forward(ctx: Any, source: Tensor) -> Tensor:
            return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad[0, 0, :1].float()

    def forward(logits: Tensor) -> Any:
        with torch.no_grad():
            return gk.grpo_loss(logits, ids, **options)

    def step(logits: Tensor) -> Any:
        return torch.autograd.grad(gk.grpo_loss(logits, ids, inplace=inplace, **options).loss, source)

    size = 2 * shape[0] * shape[1] * shape[2]
    extras = [extra_on_gpu(work, lambda: (Made.apply(source),)) for work in (forward, step)]
    assert extras[0] <= 0.01 * size
    assert extras[1] <= (0.01 if inplace else 1.01) * size


# Full logits in float32, and a chunk size that only inference honoured


def chunked_step(rows: int, vocab: int, size: int, device: str, **options: Any) -> Callable[[], Any]:
    hidden = torch.randn(rows, size, device=device, dtype=torch.bfloat16).requires_grad_()
    weight = torch.randn(vocab, size, device=device, dtype=torch.bfloat16).requires_grad_()
    ids = torch.zeros(1, rows, dtype=torch.long, device=device)
    advantages = torch.ones(1, device=device)

    def step() -> Any:
        out = gk.linear_grpo_loss(hidden[None], weight, ids, advantages=advantages, **options)
        return torch.autograd.grad(out.loss, (hidden, weight))

    return step


@pytest.mark.parametrize("mode", MODES)
def test_training_honours_the_chunk_size(mode: str) -> None:
    vocab, size, rows = 8192, 64, 16
    slab = bytes_of(rows, vocab)
    peaks = {}
    for tokens in (128, 512):
        changes = memory_changes(chunked_step(tokens, vocab, size, "cpu", mode=mode, chunk_bytes=slab, **CPU))
        peaks[tokens] = peak_bytes(changes)
        assert peaks[tokens] <= 3 * slab + vocab * size * 4 + tokens * (size * 6 + 64)
        assert max(changes) < tokens * vocab * 4
    assert peaks[512] <= 1.1 * peaks[128]


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
def test_training_honours_the_chunk_size_at_full_size(mode: str) -> None:
    vocab, size, rows = 248320, 2048, 1024
    options = {"mode": mode, "chunk_bytes": rows * vocab * 6, "impl": "triton"}
    peaks = {tokens: extra_on_gpu(chunked_step(tokens, vocab, size, "cuda", **options)) for tokens in (8192, 32768)}
    assert peaks[8192] <= 3 * rows * vocab * 4 + vocab * size * 4
    assert peaks[32768] <= 1.1 * peaks[8192]


# A frozen head still had its gradient


def frozen_and_trained(vocab: int, size: int, device: str, **options: Any) -> dict[str, Callable[[], Any]]:
    hidden = torch.randn(2, 64, size, device=device, dtype=torch.bfloat16).requires_grad_()
    heads = {"frozen": torch.randn(vocab, size, device=device, dtype=torch.bfloat16)}
    heads["trained"] = heads["frozen"].clone().requires_grad_()
    ids = torch.arange(128, device=device).reshape(2, 64)
    advantages = torch.tensor([1.0, -0.5], device=device)

    def step(head: Tensor) -> Any:
        hidden.grad = head.grad = None
        out = gk.linear_grpo_loss(hidden, head, ids, advantages=advantages, **options)
        if torch.is_grad_enabled():
            out.loss.backward()
        return out.loss, hidden.grad, head.grad

    return {name: lambda head=head: step(head) for name, head in heads.items()}


def assert_frozen_is_the_same(steps: dict[str, Callable[[], Any]]) -> None:
    (loss, dhidden, dweight), (other_loss, other_dhidden, other_dweight) = steps["frozen"](), steps["trained"]()
    assert dweight is None and other_dweight is not None and dhidden.abs().max() > 0
    assert same_bits(loss, other_loss) and same_bits(dhidden, other_dhidden)
    with torch.no_grad():
        assert same_bits(steps["trained"]()[0], loss)


@pytest.mark.parametrize("mode", MODES)
def test_a_frozen_head_costs_no_gradient(mode: str) -> None:
    vocab, size = 8192, 64
    steps = frozen_and_trained(vocab, size, "cpu", mode=mode, chunk_bytes=bytes_of(8, vocab), **CPU)
    assert_frozen_is_the_same(steps)
    frozen, trained = (peak_bytes(memory_changes(steps[name])) for name in ("frozen", "trained"))
    assert trained - frozen >= 0.75 * vocab * size * (4 if mode == "fast" else 2)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
def test_a_frozen_head_costs_no_gradient_at_full_size(mode: str) -> None:
    steps = frozen_and_trained(151936, 4096, "cuda", mode=mode, chunk_bytes=64 * 2**20, impl="triton")
    assert_frozen_is_the_same(steps)
    frozen, trained = (extra_on_gpu(steps[name]) for name in ("frozen", "trained"))
    assert trained - frozen >= (2.3 if mode == "fast" else 1.15) * GIB


# Sharded heads

FORMS: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "log-probs": gk.linear_per_token_logps,
    "loss": lambda hidden, weight, ids: gk.linear_grpo_loss(hidden, weight, ids, advantages=torch.ones(2)),
    "module": lambda hidden, weight, ids: gk.LinearGRPOLoss()(hidden, weight, ids, advantages=torch.ones(2)),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [(0,), (0, 4), (28,), (13,), (7, 2, 2)], ids=str)
def test_a_shard_instead_of_the_head_is_named(shape: tuple[int, ...], form: str) -> None:
    """ZeRO-3 leaves an empty tensor, FSDP a flat piece."""
    hidden, ids = torch.randn(2, 3, 4), torch.zeros(2, 3, dtype=torch.long)
    with pytest.raises(ValueError, match=r"(?s)weight.*sharded parameter.*gather"):
        FORMS[form](hidden, torch.zeros(shape), ids)
    assert FORMS[form](hidden, torch.randn(7, 4), ids) is not None


@pytest.fixture
def one_process() -> Iterator[Any]:
    distributed = torch.distributed
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield distributed.device_mesh.init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("which", ["hidden", "weight"])
def test_a_dtensor_is_named(which: str, form: str, one_process: Any) -> None:
    from torch.distributed.tensor import Shard, distribute_tensor

    plain = {"hidden": torch.randn(2, 3, 4), "weight": torch.randn(7, 4)}
    ids = torch.zeros(2, 3, dtype=torch.long)
    sharded = distribute_tensor(plain[which], one_process, [Shard(0)])
    with pytest.raises(TypeError, match=rf"{which}.*DTensor.*full_tensor"):
        FORMS[form](*(plain | {which: sharded}).values(), ids)
    assert FORMS[form](*(plain | {which: sharded.full_tensor()}).values(), ids) is not None
