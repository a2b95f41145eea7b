"""Which token belongs to which sequence, padded rows or a packed run with offsets, and which sequence to a prompt."""

from __future__ import annotations

import torch
from torch import Tensor


class _Prompts:
    """Sequences that answer the same prompt: an index for each, `[B]`, 0, 1, 2, ...; None: nobody asks."""

    _prompts: Tensor | None = None

    def sum_of_prompt(self, sequences: Tensor) -> Tensor:
        """Sum over the sequences of the same prompt, given to each of them: `[B]` -> `[B]`."""
        prompts = self._known_prompts()
        return torch.zeros_like(sequences).index_add_(0, prompts, sequences)[prompts]

    def num_prompts(self, like: Tensor) -> Tensor:
        """How many prompts there are, 0-d, in the dtype of `like`."""
        prompts = self._known_prompts()
        return (prompts.amax() + 1).to(like.dtype) if len(prompts) else like.new_zeros(())

    def _known_prompts(self) -> Tensor:
        if self._prompts is None:
            raise ValueError("aggregation 'prompt_mean' needs group_size or group_ids, got neither. Pass one.")
        return self._prompts


class PaddedLayout(_Prompts):
    """`[B, T]`: sequence i is row i."""

    def __init__(self, shape: torch.Size, prompts: Tensor | None = None) -> None:
        self.num_sequences, self._width, self._prompts = shape[0], shape[1], prompts

    def sum(self, tokens: Tensor) -> Tensor:
        """Sum over each sequence: `[B, T]` -> `[B]`."""
        return tokens.sum(dim=1)

    def max(self, tokens: Tensor) -> Tensor:
        """Largest value of each sequence, `[B]`; -inf for an empty one."""
        if self._width == 0:
            return tokens.new_full((self.num_sequences,), -torch.inf)
        return tokens.amax(dim=1)

    def spread(self, sequences: Tensor) -> Tensor:
        """A value per sequence, `[B]`, given to each of its tokens (broadcastable to `[B, T]`)."""
        return sequences.unsqueeze(1)

    def inside(self) -> Tensor | None:
        """Tokens that belong to a sequence; None: all."""
        return None


class PackedLayout(_Prompts):
    """`[N]` with `offsets [S + 1]`: sequence i is `offsets[i]:offsets[i + 1]`; what lies outside belongs to none."""

    def __init__(self, offsets: Tensor, num_tokens: int, prompts: Tensor | None = None) -> None:
        self.num_sequences, self._prompts = offsets.shape[0] - 1, prompts
        self._offsets = offsets.to(torch.int64)
        position = torch.arange(num_tokens, device=offsets.device)
        self._sequence = torch.searchsorted(self._offsets[1:].contiguous(), position, right=True)

    def sum(self, tokens: Tensor) -> Tensor:
        """Sum over each sequence: `[N]` -> `[S]`."""
        # segment_reduce adds serially: in float32 a long sequence would lose digits
        wide = tokens if tokens.device.type == "mps" else tokens.double()
        return self._reduce(wide, "sum", 0.0).to(tokens.dtype)

    def max(self, tokens: Tensor) -> Tensor:
        """Largest value of each sequence, `[S]`; -inf for an empty one."""
        return self._reduce(tokens, "max", -torch.inf)

    def spread(self, sequences: Tensor) -> Tensor:
        """A value per sequence, `[S]`, given to each of its tokens, `[N]`; 0 outside."""
        padded = torch.cat([sequences, sequences.new_zeros(1)])
        return padded[self._sequence]

    def _reduce(self, tokens: Tensor, how: str, empty: float) -> Tensor:
        # unsafe=True spares a host sync: checks.py has seen the offsets where reading them is free
        return torch.segment_reduce(tokens, how, offsets=self._offsets, axis=0, initial=empty, unsafe=True)

    def inside(self) -> Tensor | None:
        """Tokens that belong to a sequence, `[N]` bool."""
        return self._sequence < self.num_sequences


Layout = PaddedLayout | PackedLayout


def make_layout(shape: torch.Size, cu_seqlens: Tensor | None, prompts: Tensor | None = None) -> Layout:
    """The layout of a token tensor of this shape; `prompts`: which prompt each sequence answers, see `prompt_index`."""
    return PaddedLayout(shape, prompts) if cu_seqlens is None else PackedLayout(cu_seqlens, shape[0], prompts)


def prompt_index(num_sequences: int, group_size: int | None, group_ids: Tensor | None, device: torch.device) -> Tensor:
    """A number 0, 1, 2, ... for the prompt of each sequence, `[B]`: consecutive groups, or equal ids."""
    if group_ids is None:
        return torch.arange(num_sequences, device=device) // max(1, group_size or num_sequences)
    # not torch.unique: its result's length would cost a host sync
    ordered, order = group_ids.sort()
    new = torch.ones_like(ordered)
    new[1:] = (ordered[1:] != ordered[:-1]).to(new.dtype)
    number = new.to(torch.int64).cumsum(0) - 1
    return torch.empty_like(number).scatter_(0, order, number)
