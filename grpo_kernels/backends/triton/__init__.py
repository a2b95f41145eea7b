"""The Triton kernels: row statistics, their gradient, and the whole token-level loss in one pass."""

from __future__ import annotations

from ...ops import schema
from . import launch

schema.implement("triton", launch.row_stats, launch.row_grad_into)
schema.implement_loss("triton", launch.loss_stats, launch.loss_grad_, launch.row_scale_)
INTERPRETED = launch.INTERPRETED
