"""Sequences to model inputs: without padding where the attention can, exactly in every layout.

Three layouts, one meaning. `rows` says which hidden rows (of the flattened `[b * L]`) predict the completion tokens, so
that whoever reads the logits need not know the layout. The last token of a completion predicts nothing and is not fed.

* `block`: one row. Each prompt stands once, followed by its completions; the mask lets a completion see its own prompt
  and itself. G completions of one prompt cost one prompt, not G.
* `varlen`: one row, sequence after sequence; positions that start again at 0 tell flash attention where one begins.
* `padded`: a row per sequence, padded on the right; for models that cannot pack.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

import torch
from torch import Tensor

Layout = Literal["block", "varlen", "padded"]


@dataclass(frozen=True, slots=True)
class Pack:
    """One forward's worth of sequences, S of them with n completion tokens in all.

    `sequences` and `tokens` are the slices of the batch's sequences and of its completion tokens that are in here.
    """

    input_ids: Tensor  # (b, L)
    position_ids: Tensor  # (b, L)
    attention_mask: Tensor | None  # (b, L) padded, (1, 1, L, L) bool block, None varlen
    rows: Tensor  # (n,)
    completion_ids: Tensor  # (n,)
    cu_seqlens: Tensor  # (S + 1,) int32
    sequences: slice
    tokens: slice


def make_packs(
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    *,
    layout: Layout,
    max_tokens: int,
    device: torch.device,
    first: int = 0,
    last: int | None = None,
) -> list[Pack]:
    """Packs of the sequences first <= i < last, in order; no sequence is cut.

    Args:
        prompts: token ids of each group's prompt, P of them.
        completions: token ids of the responses, P * G of them, a group's next to each other; none is empty.
        max_tokens: input tokens of one pack, padding included. A longer sequence is a pack of its own.
        first, last: the range of sequences; last=None: to the end.
    """
    last = len(completions) if last is None else last
    group_size = len(completions) // len(prompts)
    starts = [0, *accumulate(len(completion) for completion in completions)]
    packs = []
    while first < last:
        end = _pack_end(prompts, completions, group_size, layout, max_tokens, first, last)
        members = [(prompts[i // group_size], completions[i], i // group_size) for i in range(first, end)]
        input_ids, position_ids, attention_mask, rows = _BUILD[layout](members)
        packs.append(
            Pack(
                input_ids=input_ids.to(device),
                position_ids=position_ids.to(device),
                attention_mask=None if attention_mask is None else attention_mask.to(device),
                rows=torch.tensor(rows, device=device),
                completion_ids=torch.tensor([t for c in completions[first:end] for t in c], device=device),
                cu_seqlens=torch.tensor(starts[first : end + 1], dtype=torch.int32, device=device) - starts[first],
                sequences=slice(first, end),
                tokens=slice(starts[first], starts[end]),
            )
        )
        first = end
    return packs


_Member = tuple[Sequence[int], Sequence[int], int]  # prompt, completion, group
_Inputs = tuple[Tensor, Tensor, Tensor | None, list[int]]  # input_ids, position_ids, attention_mask, rows


def _pack_end(
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    group_size: int,
    layout: Layout,
    max_tokens: int,
    first: int,
    last: int,
) -> int:
    """The longest run of sequences from `first` on that stays within max_tokens, at least one."""
    used = longest = 0
    for i in range(first, last):
        prompt, completion = len(prompts[i // group_size]), len(completions[i]) - 1
        longest = max(longest, prompt + completion)
        if layout == "padded":
            used = longest * (i + 1 - first)
        elif layout == "block" and i > first and i % group_size != 0:
            used += completion  # its prompt is there already
        else:
            used += prompt + completion
        if used > max_tokens and i > first:
            return i
    return last


def _build_block(members: Sequence[_Member]) -> _Inputs:
    ids: list[int] = []
    positions: list[int] = []
    groups: list[int] = []
    branches: list[int] = []  # 0: the prompt, seen by the whole group; k: the k-th completion, seen by itself
    rows: list[int] = []
    prompt_end = 0
    for branch, (prompt, completion, group) in enumerate(members, start=1):
        if not groups or groups[-1] != group:
            ids += prompt
            positions += range(len(prompt))
            groups += [group] * len(prompt)
            branches += [0] * len(prompt)
            prompt_end = len(ids)
        rows += [prompt_end - 1, *range(len(ids), len(ids) + len(completion) - 1)]
        ids += completion[:-1]
        positions += range(len(prompt), len(prompt) + len(completion) - 1)
        groups += [group] * (len(completion) - 1)
        branches += [branch] * (len(completion) - 1)
    of_group, of_branch = torch.tensor(groups), torch.tensor(branches)
    mask = (of_group[:, None] == of_group) & ((of_branch[:, None] == of_branch) | (of_branch == 0))
    return torch.tensor([ids]), torch.tensor([positions]), mask.tril()[None, None], rows


def _build_varlen(members: Sequence[_Member]) -> _Inputs:
    ids: list[int] = []
    positions: list[int] = []
    rows: list[int] = []
    for prompt, completion, _ in members:
        rows += range(len(ids) + len(prompt) - 1, len(ids) + len(prompt) + len(completion) - 1)
        positions += range(len(prompt) + len(completion) - 1)
        ids += [*prompt, *completion[:-1]]
    return torch.tensor([ids]), torch.tensor([positions]), None, rows


def _build_padded(members: Sequence[_Member]) -> _Inputs:
    width = max(len(prompt) + len(completion) - 1 for prompt, completion, _ in members)
    ids = torch.zeros(len(members), width, dtype=torch.int64)
    mask = torch.zeros(len(members), width, dtype=torch.int64)
    rows: list[int] = []
    for i, (prompt, completion, _) in enumerate(members):
        length = len(prompt) + len(completion) - 1
        ids[i, :length] = torch.tensor([*prompt, *completion[:-1]])
        mask[i, :length] = 1
        rows += range(i * width + len(prompt) - 1, i * width + length)
    return ids, torch.arange(width).expand(len(members), width), mask, rows


_BUILD = {"block": _build_block, "varlen": _build_varlen, "padded": _build_padded}
