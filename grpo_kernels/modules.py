"""`nn.Module` forms of the losses: no logic of their own."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from .checks import check_config
from .config import GRPOLossConfig
from .functional import grpo_loss
from .outputs import GRPOLossOutput


class GRPOLoss(nn.Module):
    """`grpo_loss` with a fixed config: `GRPOLoss(config)(logits, completion_ids, advantages=...)`."""

    def __init__(self, config: GRPOLossConfig | None = None) -> None:
        super().__init__()
        self.config = GRPOLossConfig() if config is None else check_config("GRPOLoss", config)

    def forward(self, logits: Tensor, completion_ids: Tensor, **arguments: Any) -> GRPOLossOutput:
        """`grpo_loss(logits, completion_ids, config=self.config, **arguments)`."""
        return grpo_loss(logits, completion_ids, config=self.config, **arguments)

    def extra_repr(self) -> str:
        """The config."""
        return repr(self.config)
