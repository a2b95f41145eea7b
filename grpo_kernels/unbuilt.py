"""Names of the public contract that this version does not build yet: each says so when used."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import nn


def _refuse(name: str) -> NoReturn:
    raise NotImplementedError(f"{name} is not built yet. Use per_token_logps or grpo_loss on logits.")


def linear_per_token_logps(*_arguments: Any, **_options: Any) -> NoReturn:
    """Log-probs from hidden states, without logits. Not built yet."""
    _refuse("linear_per_token_logps")


def linear_grpo_loss(*_arguments: Any, **_options: Any) -> NoReturn:
    """The loss from hidden states, without logits. Not built yet."""
    _refuse("linear_grpo_loss")


class LinearGRPOLoss(nn.Module):
    """Module form of linear_grpo_loss. Not built yet."""

    def __init__(self, *_arguments: Any, **_options: Any) -> None:
        _refuse("LinearGRPOLoss")


class LinearGRPOLossFunction(torch.autograd.Function):
    """Function form of linear_grpo_loss. Not built yet."""

    @staticmethod
    def forward(_ctx: Any, *_arguments: Any, **_options: Any) -> NoReturn:
        """Not built yet."""
        _refuse("LinearGRPOLossFunction")
