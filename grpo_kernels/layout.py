"""Which token belongs to which sequence: padded rows, or a packed run with offsets."""

from __future__ import annotations

import torch
from torch import Tensor


class PaddedLayout:
    """`[B, T]`: sequence i is row i."""

    def __init__(self, shape: torch.Size) -> None:
        self.num_sequences, self._width = shape[0], shape[1]

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


class PackedLayout:
    """`[N]` with `offsets [S + 1]`: sequence i is `offsets[i]:offsets[i + 1]`; what lies outside belongs to none."""

    def __init__(self, offsets: Tensor, num_tokens: int) -> None:
        self.num_sequences = offsets.shape[0] - 1
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


def make_layout(shape: torch.Size, cu_seqlens: Tensor | None) -> Layout:
    """The layout of a token tensor of this shape."""
    return PaddedLayout(shape) if cu_seqlens is None else PackedLayout(cu_seqlens, shape[0])
