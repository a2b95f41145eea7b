"""Exact, fused losses and log-probabilities for GRPO and its family. `import grpo_kernels as gk`."""

from __future__ import annotations

import importlib
from typing import Any

from . import backends, reference
from .advantages import group_advantages
from .autograd import GRPOLossFunction, PerTokenLogpsFunction
from .autograd_linear import LinearGRPOLossFunction
from .config import GRPOLossConfig
from .functional import grpo_loss, per_token_logps
from .functional_linear import linear_grpo_loss, linear_per_token_logps
from .modules import GRPOLoss, LinearGRPOLoss
from .outputs import GRPOLossOutput, LogpsOutput, PerToken
from .rollout_check import RolloutCheck, check_rollout_logps

__all__ = [
    "GRPOLoss",
    "GRPOLossConfig",
    "GRPOLossFunction",
    "GRPOLossOutput",
    "LinearGRPOLoss",
    "LinearGRPOLossFunction",
    "LogpsOutput",
    "PerToken",
    "PerTokenLogpsFunction",
    "RolloutCheck",
    "backends",
    "check_rollout_logps",
    "group_advantages",
    "grpo_loss",
    "linear_grpo_loss",
    "linear_per_token_logps",
    "per_token_logps",
    "reference",
]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name in ("integrations", "lab", "training"):  # they bring what a loss needs not: for those who ask
        return importlib.import_module(f".{name}", __name__)
    if name == "parallel":
        raise NotImplementedError("grpo_kernels.parallel is not built yet.")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
