"""Gradients of hidden states and head summed over chunks, and the power of 2 that leaves float16 its digits."""

from __future__ import annotations

import torch
from torch import Tensor

from .head import Head
from .slabs import Gradient


def lift_of(values: Tensor, exponent: int) -> Tensor:
    """The power of 2 that brings the largest value to about 2^exponent, 0-d; 1 if there is none, or no number."""
    largest = values.abs().amax() if values.numel() else values.new_zeros(())
    _, own = torch.frexp(largest)
    power = torch.ldexp(torch.ones_like(largest), (exponent - own).clamp(-100, 100))
    return torch.where(torch.isfinite(largest) & (largest > 0), power, 1.0)


class Sums:
    """The gradients that are wanted, over chunks."""

    def __init__(self, head: Head, needs: tuple[bool, ...], late_scale: Tensor | None) -> None:
        self._head, self._scale = head, late_scale
        device = head.hidden.device
        rows = head.hidden.shape[:-1].numel()
        half = needs[0] and head.hidden.dtype == torch.float16
        self.unit = torch.ones(rows, dtype=head.sums, device=device) if half else None  # what 1 in a row stands for
        self.hidden = torch.zeros(head.hidden.shape, dtype=head.hidden.dtype, device=device) if needs[0] else None
        self.weight = torch.empty(head.weight.shape, dtype=head.sums, device=device) if needs[1] else None
        self.bias = torch.zeros(head.vocabulary, dtype=head.sums, device=device) if needs[2] else None
        self._first = True

    def stored(self) -> tuple[Tensor | None, ...]:
        """1 / Z if the sums lack it, what 1 in a row of the hidden states' gradient stands for, and the gradients."""
        if self.weight is not None and self._first:
            self.weight.zero_()
        return self._scale, self.unit, self.hidden, self.weight, self.bias

    def add(self, grad: Gradient) -> None:
        """One chunk's."""
        if self.hidden is not None:
            self._add_hidden(self.hidden, grad)
        rows = grad.hidden if grad.factor is None else grad.hidden * grad.factor.unsqueeze(1)
        if self.weight is not None:
            self._head.add_weight_grad(self.weight, grad.logits, rows, first=self._first)
            self._first = False
            if grad.target_grad is not None:
                self.weight.index_add_(0, grad.targets, grad.hidden * grad.target_grad.unsqueeze(1))
        if self.bias is not None:
            logits = grad.logits
            if grad.factor is not None and grad.target_grad is not None:  # last of all, so over them
                logits.mul_(grad.factor.unsqueeze(1))
                self.bias.index_add_(0, grad.targets, grad.target_grad)
            self.bias += logits.sum(0, dtype=self.bias.dtype)

    def _add_hidden(self, hidden: Tensor, grad: Gradient) -> None:
        own = self._head.hidden_grad(grad.logits)
        if grad.factor is not None and grad.target_grad is not None:
            own.mul_(grad.factor.unsqueeze(1))
            own.addcmul_(self._head.of_targets(grad.targets), grad.target_grad.unsqueeze(1))
        if self._scale is not None:
            own.mul_(self._scale)
        if self.unit is not None:
            _, exponent = torch.frexp(own.abs().amax(1))
            unit = torch.ldexp(torch.ones_like(own[:, 0]), (exponent - 14).clamp(min=-100))
            self.unit[grad.positions] = unit
            own.div_(unit.unsqueeze(1))
        hidden.view(-1, own.shape[1]).index_copy_(0, grad.positions, own.to(hidden.dtype))
