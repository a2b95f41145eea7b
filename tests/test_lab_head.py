"""The head's Gram matrix out of the fused loss is that of explicit per-sample gradients, and changes nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels import lab

B, T, H, V, G = 8, 7, 16, 211, 4
IMPLS = [
    pytest.param(name, marks=pytest.mark.skipif(not report.startswith("available"), reason=report))
    for name, report in gk.backends.report().items()
    if name != "triton"
]
ADVANTAGES = torch.tensor([1.0, 0.0, -1.0, 0.0, 0.0, 0.0, 0.0, 0.0])  # a silent group, and responses at the mean


def inputs(dtype: torch.dtype = torch.float64, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = (scale * torch.randn(B, T, H, generator=generator)).to(dtype).requires_grad_()
    weight = torch.randn(V, H, generator=generator).to(dtype).requires_grad_()
    ids = torch.randint(0, V, (B, T), generator=generator)
    mask = torch.rand(B, T, generator=generator) > 0.3
    mask[3] = False
    ids[0, 0] = -100
    return hidden, weight, ids, mask


def explicit(
    hidden: Tensor, weight: Tensor, ids: Tensor, mask: Tensor, bias: Tensor | None = None, temperature: float = 1.0,
    softcap: float | None = None,
) -> Tensor:  # fmt: skip
    """`[B, d]`: each response's gradient of log pi over the head's weight, and bias, by autograd in float64."""
    leaves = [weight.detach().double().requires_grad_()]
    if bias is not None:
        leaves.append(bias.detach().double().requires_grad_())
    found = []
    for row, target, live in zip(hidden.detach().double(), ids, mask & (ids >= 0), strict=True):
        logits = row @ leaves[0].T + (leaves[1] if bias is not None else 0)
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        logps = (logits / temperature).log_softmax(-1).gather(1, target.clamp(min=0).unsqueeze(1)).squeeze(1)
        grads = torch.autograd.grad(torch.where(live, logps, 0.0).sum(), leaves)
        found.append(torch.cat([grad.flatten() for grad in grads]))
    return torch.stack(found)


def grams(scores: Tensor) -> Tensor:
    grouped = scores.view(-1, G, scores.shape[-1])
    return grouped @ grouped.mT


def close(ours: Tensor, truth: Tensor) -> None:
    """Within 1e-6 of |s_a| |s_b|."""
    norms = truth.diagonal(dim1=1, dim2=2).sqrt()
    scale = norms.unsqueeze(1) * norms.unsqueeze(2)
    assert truth.abs().max() > 1
    assert ((ours - truth).abs() <= 1e-6 * scale).all(), ((ours - truth).abs() / scale).nan_to_num().max()


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 0.7}, {"bias": True}, {"softcap": 5.0}, {"chunk": 3}, {"mode": "lean"}],
    ids=["plain", "temperature", "bias", "softcap", "small slabs", "lean"],
)
def test_exact_products_are_those_of_explicit_gradients(impl: str, dtype: torch.dtype, options: dict[str, Any]) -> None:
    hidden, weight, ids, mask = inputs(dtype)
    bias = torch.linspace(-1, 1, V, dtype=dtype) if options.get("bias") else None
    heat, cap = options.get("temperature", 1.0), options.get("softcap")
    scores = lab.HeadScores(B, G)
    with scores.watch(ids):
        gk.linear_grpo_loss(
            hidden, weight, ids, bias=bias, advantages=ADVANTAGES, completion_mask=mask, impl=impl,
            config=gk.GRPOLossConfig(temperature=heat, softcap=cap), mode=options.get("mode", "auto"),
            chunk_bytes=G * T * V * dtype.itemsize if "chunk" in options else None,
        )  # fmt: skip
    close(scores.gram, grams(explicit(hidden, weight, ids, mask, bias, heat, cap)))


@pytest.mark.parametrize("method", ["exact", "sketch"])
def test_triton_kernels_give_the_same_products(method: str) -> None:
    """Where the slab keeps its logits, the gradient is made beside it."""
    pytest.importorskip("triton")
    hidden, weight, ids, mask = inputs(torch.float32)
    found = []
    for impl in ("torch", "triton"):
        scores = lab.HeadScores(B, G, method=method, k=8)
        with scores.watch(ids):
            gk.linear_per_token_logps(hidden, weight, ids, mask=mask, temperature=0.9, impl=impl)
        found.append(scores.gram)
    close(found[1], found[0])


def test_confident_tokens_keep_their_digits() -> None:
    """Most tokens have p near 1, where onehot - p cancels. Small integers: their logits are exact in float32."""
    hidden, weight, ids, mask = inputs(torch.float32)
    with torch.no_grad():
        hidden.mul_(4).round_()
        weight.mul_(2).round_()
        ids = torch.where(ids < 0, ids, (hidden @ weight.T).argmax(-1))
        logps = gk.linear_per_token_logps(hidden, weight, ids, mask=mask).logps
        assert -1e-3 < logps[mask].median() < 0
    scores = lab.HeadScores(B, G)
    with scores.watch(ids):
        gk.linear_per_token_logps(hidden, weight, ids, mask=mask)
    close(scores.gram, grams(explicit(hidden, weight, ids, mask)))


def test_packed_calls_bring_their_groups_one_after_the_other() -> None:
    hidden, weight, ids, mask = inputs()
    scores = lab.HeadScores(B, G)
    for first in (0, 4):
        live = mask[first : first + 4]
        ends = torch.tensor([0, *live.sum(1).cumsum(0).tolist()], dtype=torch.int32)
        packed = ids[first : first + 4][live]
        with scores.watch(packed, cu_seqlens=ends, first=first):
            gk.linear_grpo_loss(
                hidden[first : first + 4][live], weight, packed, advantages=ADVANTAGES[first : first + 4],
                cu_seqlens=ends,
            )  # fmt: skip
    close(scores.gram, grams(explicit(hidden, weight, ids, mask)))


@pytest.mark.parametrize("k_hidden", [None, 12])
def test_sketches_are_unbiased(k_hidden: int | None) -> None:
    hidden, weight, ids, mask = inputs()
    bias = torch.linspace(-1, 1, V, dtype=torch.float64)
    truth = grams(explicit(hidden, weight, ids, mask, bias))
    found = []
    for seed in range(200):
        scores = lab.HeadScores(B, G, method="sketch", k=8, k_hidden=k_hidden, seed=seed)
        with scores.watch(ids):
            gk.linear_grpo_loss(
                hidden, weight, ids, bias=bias, advantages=ADVANTAGES, completion_mask=mask, chunk_bytes=13 * V * 8
            )
        assert scores.scores.shape == (B // G, G, 8 * (k_hidden or H + 1))
        found.append(scores.gram)
    values = torch.stack(found)
    error = values.std(0) / len(found) ** 0.5
    seen = error > 0  # a fully masked response has none
    assert seen.sum() >= 16 + 9
    assert ((values.mean(0) - truth)[seen].abs() < 4.5 * error[seen]).all()


@pytest.mark.parametrize("method", ["exact", "sketch"])
@pytest.mark.parametrize("impl", IMPLS)
def test_the_loss_does_not_notice(method: str, impl: str) -> None:
    results = []
    for watched in (False, True):
        hidden, weight, ids, mask = inputs(torch.float32)
        scores = lab.HeadScores(B, G, method=method, k=8)
        advantages = torch.arange(8.0) - 3.5
        call = lambda h=hidden, w=weight, i=ids, m=mask, a=advantages: gk.linear_grpo_loss(  # noqa: E731
            h, w, i, advantages=a, completion_mask=m, impl=impl, chunk_bytes=G * T * V * 4
        )
        if watched:
            with scores.watch(ids):
                out = call()
        else:
            out = call()
        out.loss.backward()
        results.append((out.loss.detach(), hidden.grad, weight.grad))
    for plain, seen in zip(*results, strict=True):
        assert plain is not None
        if method == "sketch":
            assert torch.equal(plain, seen)  # bit for bit
        else:  # whole groups to a slab: sums in another order
            torch.testing.assert_close(plain, seen, rtol=1e-5, atol=1e-6)


def test_advice_from_the_loss_and_the_heads_own_gradient() -> None:
    """Gram from the slab, |sum of the gradients|^2 from the weight's gradient of the leave-one-out loss."""
    hidden, weight, ids, mask = inputs()
    rewards = torch.tensor([[1.0, 0, 0, 1], [0, 0, 0, 1]], dtype=torch.float64)
    advantages = gk.group_advantages(rewards.flatten(), group_size=G, baseline="leave_one_out", scale="none")
    scores = lab.HeadScores(B, G)
    with scores.watch(ids):
        # grpo with equal lengths would divide by T: a denominator of 1 and a token sum is what dapo gives
        out = gk.linear_grpo_loss(
            hidden, weight, ids, advantages=advantages, completion_mask=mask, normalizer=1.0,
            config=gk.GRPOLossConfig(loss_type="dapo"),
        )  # fmt: skip
    out.loss.backward()
    assert weight.grad is not None
    whole = (weight.grad / G).square().sum().item()
    ours = lab.estimate_constants(rewards, gram=scores.gram, loo_sum_sq=whole)
    right = lab.estimate_constants(rewards, explicit(hidden, weight, ids, mask).view(2, G, -1))
    for name in ("Vb", "A", "B2", "J2", "A0"):
        assert getattr(ours, name) == pytest.approx(getattr(right, name), rel=1e-5), name


def test_what_cannot_be_done_is_refused() -> None:
    hidden, weight, ids, _ = inputs()
    with pytest.raises(ValueError, match="num_sequences must be a multiple of group_size, got 7 and 4"):
        lab.HeadScores(7, 4)
    scores = lab.HeadScores(B, G)
    with (
        scores.watch(ids),
        pytest.raises(ValueError, match=f"chunk_bytes must hold a group's {G * T - 1} tokens, got 2"),
    ):
        gk.linear_per_token_logps(hidden, weight, ids, chunk_bytes=2 * V * 8)
    scores = lab.HeadScores(B, G)
    with scores.watch(ids):
        gk.linear_per_token_logps(hidden, weight, ids)
        with pytest.raises(RuntimeError, match="each response must be seen once"):
            gk.linear_per_token_logps(hidden, weight, ids)
    with pytest.raises(ValueError, match="method must be 'sketch' for scores"):
        _ = scores.scores
    with pytest.raises(ValueError, match="watch must have seen a linear call"):
        _ = lab.HeadScores(B, G, method="sketch").scores
    with pytest.raises(ValueError, match=r"completion_ids must be \[B, T\]"), lab.HeadScores(B, G).watch(ids[0]):
        pass
    with (
        pytest.raises(ValueError, match="first must be within num_sequences"),
        lab.HeadScores(B, G).watch(ids, first=1),
    ):
        pass
    outer, inner = lab.HeadScores(B, G), lab.HeadScores(B, G)
    with outer.watch(ids), pytest.raises(RuntimeError, match="one observer at a time"), inner.watch(ids):
        pass
