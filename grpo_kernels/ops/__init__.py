"""The V-sized work as `torch.library` ops: one schema, one op per implementation, no autograd of their own."""

from __future__ import annotations

from . import rows, schema, weights

schema.implement("torch", rows.row_stats, rows.row_grad_into)
schema.implement_weights("torch", weights.row_weights_)
