"""Sampling: G responses per prompt with a KV cache, finished responses leave the batch.

Plain temperature sampling from the whole distribution. Top-k and top-p are left out on purpose: they would make the
sampler another policy than the one whose log-probabilities the loss computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from .policy import Policy

# Dropping finished rows copies the cache of the others; below this share of live rows the copy is cheaper than
# decoding the dead ones on.
COMPACT_BELOW = 0.9


@torch.no_grad()
def sample(
    policy: Policy,
    prompts: Sequence[Sequence[int]],
    *,
    num_generations: int,
    max_completion_length: int,
    temperature: float,
    end_ids: Sequence[int],
    generator: torch.Generator | None = None,
    max_sequences: int = 0,
) -> list[list[int]]:
    """y ~ softmax(logits / temperature), token by token, until an end token or max_completion_length.

    Args:
        prompts: token ids, P of them, any lengths.
        temperature: 0 takes the most likely token.
        generator: on the policy's device; None only at temperature 0.
        max_sequences: decode at most so many at once (whole groups, at least one); 0: all.
    Returns:
        P * G lists of token ids, a prompt's responses next to each other. The end token is kept; a response without
        one was cut at max_completion_length.
    """
    groups_at_once = max(1, max_sequences // num_generations) if max_sequences else len(prompts)
    responses: list[list[int]] = []
    for start in range(0, len(prompts), groups_at_once):
        responses += _decode(
            policy,
            prompts[start : start + groups_at_once],
            num_generations,
            max_completion_length,
            temperature,
            torch.tensor(end_ids, device=policy.device),
            generator,
        )
    return responses


def _decode(
    policy: Policy,
    prompts: Sequence[Sequence[int]],
    num_generations: int,
    max_completion_length: int,
    temperature: float,
    end_ids: Tensor,
    generator: torch.Generator | None,
) -> list[list[int]]:
    device = policy.device
    width = max(len(prompt) for prompt in prompts)
    input_ids = torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts], device=device)  # (P, width)
    mask = torch.tensor(
        [[0] * (width - len(p)) + [1] * (len(p) + max_completion_length) for p in prompts], device=device
    )

    cache = policy.new_cache()
    logits = policy.next_logits(input_ids, mask[:, :width], cache)  # (P, V): each prompt is read once
    rows = torch.arange(len(prompts), device=device).repeat_interleave(num_generations)  # (B,)
    _select(cache, rows)
    logits, mask = logits[rows], mask[rows]

    tokens = torch.empty(len(rows), max_completion_length, dtype=torch.int64, device=device)  # (B, T)
    lengths = torch.full((len(rows),), max_completion_length, device=device)  # (B,)
    live = torch.arange(len(rows), device=device)  # rows of `tokens` that are still decoded
    running = torch.ones(len(rows), dtype=torch.bool, device=device)  # of those, the ones that have not ended
    for t in range(max_completion_length):
        drawn = _draw(logits, temperature, generator)  # (b,)
        tokens[live, t] = drawn
        ended = running & torch.isin(drawn, end_ids)
        lengths[live[ended]] = t + 1
        running &= ~ended
        count = int(running.sum())
        if count == 0 or t + 1 == max_completion_length:
            break
        if count <= COMPACT_BELOW * len(live):
            kept = running.nonzero().squeeze(1)
            _select(cache, kept)
            live, mask, drawn, running = live[kept], mask[kept], drawn[kept], running[kept]
        logits = policy.next_logits(drawn[:, None], mask[:, : width + t + 1], cache)  # (b, V)
    return [row[:length] for row, length in zip(tokens.tolist(), lengths.tolist(), strict=True)]


def _select(cache: Cache, rows: Tensor) -> None:
    """Keep the cache's `rows`, in that order; a row may be kept several times."""
    cache.reorder_cache(cast(torch.LongTensor, rows))


def _draw(logits: Tensor, temperature: float, generator: torch.Generator | None) -> Tensor:
    if temperature == 0:
        return logits.argmax(dim=-1)
    probabilities = torch.softmax(logits.float() / temperature, dim=-1)
    return torch.multinomial(probabilities, 1, generator=generator).squeeze(1)
