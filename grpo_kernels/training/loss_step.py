"""How long the loss of a run takes, beside the same step in eager torch."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import grpo_kernels as gk

from .measure import wait_for
from .packing import Pack
from .policy import Policy
from .update import policy_loss

_ROUNDS = 7


def measure_loss_step(policy: Policy, pack: Pack, advantages: Tensor, config: gk.GRPOLossConfig) -> dict[str, Any]:
    """Times forward and backward of one pack's loss, from hidden states to the gradients of head and hidden states.

    Ours with all its metrics against what a trainer writes in plain torch: the head, log_softmax in float32, gather, a
    clipped surrogate, its mean. They take turns; medians, in ms. Parameters and random states stay as they are.

    Args:
        advantages: one of each sequence of the pack, `[S]`.

    Returns:
        `ours_ms`, `eager_ms`, `ran` (what `backends.last_used` says), `tokens`, `vocabulary`.
    """
    with torch.no_grad():
        rows = policy(pack)
    head = policy.head()
    lengths = pack.cu_seqlens.diff()
    per_token = advantages.repeat_interleave(lengths)
    vocabulary = rows.shape[-1] if head is None else head.weight.shape[0]
    device = rows.device

    def ours(leaf: Tensor) -> Tensor:
        given = leaf if head is not None else leaf * 1.0  # logits are given away
        loss: Tensor = policy_loss(
            policy, given, pack, config=config, advantages=advantages, **_needed(config, pack)
        ).loss
        return loss

    def eager(leaf: Tensor) -> Tensor:
        logits = leaf if head is None else head(leaf)
        logps = (logits.float() / config.temperature).log_softmax(-1).gather(-1, pack.completion_ids[:, None])[:, 0]
        ratio = torch.exp(logps - logps.detach())
        return -torch.minimum(ratio * per_token, ratio.clamp(0.8, 1.2) * per_token).mean()

    def seconds(step: Callable[[Tensor], Tensor]) -> float:
        leaf = rows.detach().clone().requires_grad_()
        wanted = [leaf, *(p for p in (() if head is None else head.parameters()) if p.requires_grad)]
        wait_for(device)
        start = time.perf_counter()
        torch.autograd.grad(step(leaf), wanted)
        wait_for(device)
        return time.perf_counter() - start

    seconds(ours)
    ran = gk.backends.last_used()
    seconds(eager)
    times = [(seconds(ours), seconds(eager)) for _ in range(_ROUNDS)]
    ours_ms, eager_ms = (round(1e3 * statistics.median(column), 3) for column in zip(*times, strict=True))
    return {
        "ours_ms": ours_ms, "eager_ms": eager_ms, "ran": ran, "tokens": len(pack.completion_ids),
        "vocabulary": vocabulary,
    }  # fmt: skip


def _needed(config: gk.GRPOLossConfig, pack: Pack) -> dict[str, Tensor]:
    """Reference log-probs, if the loss reads any."""
    if config.beta == 0:
        return {}
    return {"ref_per_token_logps": torch.full_like(pack.completion_ids, -1.0, dtype=torch.float32)}
