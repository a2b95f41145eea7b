"""`nn.Module` forms of the losses: no logic of their own."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from .checks import check_config
from .config import GRPOLossConfig
from .functional import grpo_loss
from .functional_linear import linear_grpo_loss
from .outputs import GRPOLossOutput


class _Loss(nn.Module):
    """A config that a call is made with."""

    def __init__(self, config: GRPOLossConfig | None = None) -> None:
        super().__init__()
        self.config = GRPOLossConfig() if config is None else check_config(type(self).__name__, config)

    def extra_repr(self) -> str:
        """The config."""
        return repr(self.config)


class GRPOLoss(_Loss):
    """`grpo_loss` with a fixed config: `GRPOLoss(config)(logits, completion_ids, advantages=...)`."""

    def forward(self, logits: Tensor, completion_ids: Tensor, **arguments: Any) -> GRPOLossOutput:
        """`grpo_loss(logits, completion_ids, config=self.config, **arguments)`."""
        return grpo_loss(logits, completion_ids, config=self.config, **arguments)


class LinearGRPOLoss(_Loss):
    """`linear_grpo_loss` with a fixed config: `LinearGRPOLoss(config)(hidden, weight, ids, advantages=...)`."""

    def forward(self, hidden: Tensor, weight: Tensor, completion_ids: Tensor, **arguments: Any) -> GRPOLossOutput:
        """`linear_grpo_loss(hidden, weight, completion_ids, config=self.config, **arguments)`."""
        return linear_grpo_loss(hidden, weight, completion_ids, config=self.config, **arguments)
