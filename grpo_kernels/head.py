"""The language-model head a slab at a time: which rows meet the weight, and the three matrix products.

Sums are float32 whatever the operands (float64 for float64): logits, unless `logits_dtype="input"`, both gradients,
always. Where a product of 16-bit operands cannot come out wider (the CPU, whose 16-bit products are slow as well) the
operands are widened: hidden states by the chunk, the weight by slices of its vocabulary, never as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from . import backends

_NARROW = 64  # columns of the vocabulary under which a product in backward does not pay


class Sizes(NamedTuple):
    """Rows of a slab and of one forward product, and what the slab may take."""

    height: int
    panel: int
    budget: int


class Head:
    """One head with the dtypes and sizes of one call."""

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        logits_dtype: str,
        chunk_bytes: int | None,
        operand: torch.dtype | None = None,
    ) -> None:
        self.hidden, self.weight, self.bias = hidden, weight, bias
        device = hidden.device
        if operand is None:
            operand = torch.promote_types(hidden.dtype, weight.dtype)
            on_device = device.type != "meta"  # which autocast does not know
            if on_device and torch.is_autocast_enabled(device.type) and operand != torch.float64:
                operand = torch.get_autocast_dtype(device.type)  # what the head itself would compute in
        self.operand = operand
        self.sums = torch.float64 if operand == torch.float64 else torch.float32
        self.logits_dtype = operand if logits_dtype == "input" else self.sums
        native = backends.multiplies_into_wider(device) or operand == self.sums
        self.product = operand if native else self.sums  # what the operands of a product are converted to
        self._forward = operand if self.logits_dtype == operand else self.product
        self.in_place = self.product == self.logits_dtype or not native  # the gradient overwrites the logits
        self.sizes = self._sizes(chunk_bytes)

    @property
    def vocabulary(self) -> int:
        """V."""
        return self.weight.shape[0]

    def _sizes(self, chunk_bytes: int | None) -> Sizes:
        budget = backends.slab_bytes(self.hidden.device) if chunk_bytes is None else chunk_bytes
        per_row = self.vocabulary * (self.logits_dtype.itemsize + (0 if self.in_place else self.operand.itemsize))
        fitting = max(1, budget // per_row)
        panel = min(backends.panel_rows(self.hidden.device), fitting)
        rows = self.hidden.shape[:-1].numel()
        if chunk_bytes is None:
            fitting = min(fitting, backends.slab_rows(self.hidden.device, self.vocabulary))
            budget = fitting * per_row
        height = min(fitting // panel, -(-rows // panel)) * panel
        return Sizes(max(panel, height), panel, max(budget, per_row))

    def rows(self, index: Tensor, height: int | None = None) -> Tensor:
        """Hidden states at flat positions, ready for a product, `[len(index), H]`; zeros up to `height`."""
        flat = self._flat()
        if flat is None:
            length = self.hidden.shape[1]
            rows = self.hidden[index // length, index % length]
        else:
            rows = flat.index_select(0, index)
        rows = self._ready(rows, self.product)
        missing = 0 if height is None else height - rows.shape[0]
        return torch.cat([rows, rows.new_zeros(missing, rows.shape[1])]) if missing else rows

    def _flat(self) -> Tensor | None:
        """The hidden states as `[N, H]` without a copy, if their strides allow it."""
        if self.hidden.ndim == 2:
            return self.hidden
        batch, length = self.hidden.shape[:2]
        if batch == 1 or length == 1 or self.hidden.stride(0) == length * self.hidden.stride(1):
            return self.hidden[:, 0] if length == 1 else self.hidden.flatten(0, 1)
        return None

    def all_rows(self) -> Tensor | None:
        """All hidden states as operands of a product, if that takes no copy."""
        return self._flat() if self.hidden.dtype == self.operand == self.product else None

    def _ready(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        return tensor.to(self.operand).to(dtype)

    def columns(self, most: int | None = None, dtype: torch.dtype | None = None) -> Iterator[tuple[slice, Tensor]]:
        """The weight by slices of the vocabulary, as operands of a product; whole where it needs no conversion.

        A slice that is converted is valid until the next one.
        """
        dtype = dtype or self.product
        step = self.vocabulary if most is None else most
        converted = self.weight.dtype != dtype or self.operand != dtype
        if converted:
            step = min(step, self._most_columns(dtype))
            buffer = self.weight.new_empty(min(step, self.vocabulary), self.weight.shape[1], dtype=dtype)
        for start in range(0, self.vocabulary, step):
            part = slice(start, min(start + step, self.vocabulary))
            weight = self.weight[part]
            if converted:
                weight = buffer[: weight.shape[0]].copy_(weight.to(self.operand))
            yield part, weight

    def _most_columns(self, dtype: torch.dtype) -> int:
        """Of a slice of the weight, or of its gradient, in a dtype of its own: within the budget, never most of it."""
        eighth = max(_NARROW, -(-self.vocabulary // 8))
        return max(1, min(eighth, self.sizes.budget // (self.weight.shape[1] * dtype.itemsize)))

    def logits_(self, rows: Tensor, slab: Tensor) -> None:
        """slab = rows @ weight.T + bias, `[R, H] -> [R, V]`, R a multiple of the panel's height."""
        rows = rows.to(self._forward)
        for part, weight in self.columns(dtype=self._forward):
            for start in range(0, rows.shape[0], self.sizes.panel):
                panel = slice(start, start + self.sizes.panel)
                self.product_(rows[panel], weight, part, slab[panel, part])

    def product_(self, rows: Tensor, weight: Tensor, part: slice, out: Tensor) -> None:
        """out = rows @ weight.T + bias[part]."""
        if weight.dtype != self._forward:  # widened for a gradient; exact
            rows, weight = rows.to(self._forward), weight.to(self._forward)
        bias = None
        if self.bias is not None:
            rounded = self.operand.itemsize < torch.promote_types(self.hidden.dtype, self.weight.dtype).itemsize
            bias = self._ready(self.bias[part], out.dtype) if rounded else self.bias[part].to(out.dtype)
        if bias is not None and out.dtype == weight.dtype:
            torch.addmm(bias, rows, weight.t(), out=out)
            return
        _multiply(rows, weight.t(), out, add=False)
        if bias is not None:
            out.add_(bias)

    def hidden_grad(self, grad: Tensor) -> Tensor:
        """grad @ weight, `[R, V] -> [R, H]`, float32."""
        out = torch.empty(grad.shape[0], self.weight.shape[1], dtype=self.sums, device=grad.device)
        for part, weight in self.columns():
            self.add_hidden_grad(out, grad[:, part], weight, first=part.start == 0)
        return out

    def of_targets(self, targets: Tensor) -> Tensor:
        """The weight's rows of some ids, `[R, H]`, as the products take them."""
        return self._ready(self.weight.index_select(0, targets), self.product)

    def add_hidden_grad(self, out: Tensor, grad: Tensor, weight: Tensor, *, first: bool = False) -> None:
        """out = (0 if first else out) + grad @ weight, for a slice of the vocabulary."""
        _multiply(grad.to(weight.dtype), weight, out, add=not first)

    def add_weight_grad(self, out: Tensor, grad: Tensor, rows: Tensor, *, first: bool = False) -> None:
        """out = (0 if first else out) + grad.T @ rows, `[R, V] x [R, H] -> [V, H]`, float32."""
        for part in self._converted(grad, rows.dtype):
            _multiply(grad[:, part].to(rows.dtype).t(), rows, out[part], add=not first)

    def _converted(self, grad: Tensor, dtype: torch.dtype) -> Iterator[slice]:
        """Slices of the vocabulary whose conversion stays small; one where none is needed."""
        width = grad.shape[1]
        step = width if grad.dtype == dtype else max(_NARROW, width // 16)
        return (slice(start, min(start + step, width)) for start in range(0, width, step))

    @property
    def grad_dtype(self) -> torch.dtype:
        """Of the gradient of the logits."""
        return self.logits_dtype if self.in_place else self.product

    def tiles(self, rows: int, gathered: bool) -> tuple[int, int]:
        """Rows and columns of a tile of logits in a recomputing backward: all rows if that leaves enough columns.

        Gathered rows are copies, which count too. A slice of a 16-bit weight's gradient, summed in float32, is no
        larger than a tile may be.
        """
        element = self.logits_dtype.itemsize + (0 if self.in_place else self.operand.itemsize)
        budget, height = self.sizes.budget, rows
        if gathered:
            per_row = self.hidden.shape[-1] * self.product.itemsize
            height = max(1, min(rows, budget // 8 // max(1, per_row)))
            budget -= min(budget // 2, height * per_row)
        elements = max(1, budget // element)
        width = min(self.vocabulary, max(1, elements // max(1, height)))
        if self.weight.dtype != self.sums:
            width = min(width, self._most_columns(self.sums))
        if width < min(_NARROW, self.vocabulary):
            width = min(_NARROW, self.vocabulary, elements)
            height = max(1, min(height, elements // width))
        return height, width


def _multiply(a: Tensor, b: Tensor, out: Tensor, *, add: bool) -> None:
    """out = (out if add else 0) + a @ b, summed in the dtype of out."""
    if out.dtype == a.dtype:
        if add:
            torch.addmm(out, a, b, out=out)
        else:
            torch.mm(a, b, out=out)
    elif add:
        torch.addmm(out, a, b, out.dtype, out=out)
    else:
        torch.mm(a, b, out.dtype, out=out)
