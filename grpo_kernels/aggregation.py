"""From token losses to one number: every aggregation is `sum_t c_i m_t l_t / Z`."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from .config import GRPOLossConfig

OF_LOSS_TYPE: Final = {
    "grpo": "seq_mean_token_mean",
    "bnpo": "token_mean",
    "dr_grpo": "seq_mean_token_sum_norm",
    "dapo": "token_mean",
    "cispo": "token_mean",
}


def counts_tokens(config: GRPOLossConfig) -> bool:
    """Whether the denominator is a count of tokens, which one process or micro-batch sees only in part."""
    return OF_LOSS_TYPE[config.loss_type] == "token_mean"


def sequence_weights(config: GRPOLossConfig, lengths: Tensor) -> Tensor:
    """c_i of each sequence from its number of live tokens n_i: `[B]` -> `[B]`; 1 / n_i or 1."""
    if OF_LOSS_TYPE[config.loss_type] == "seq_mean_token_mean":
        return 1.0 / lengths.clamp(min=1)
    return torch.ones_like(lengths)


def denominator(config: GRPOLossConfig, lengths: Tensor, normalizer: Tensor | None) -> Tensor:
    """Z, 0-d: the caller's, exactly as given, or what this batch shows, at least 1."""
    if normalizer is not None:
        return normalizer
    if counts_tokens(config):
        return lengths.sum().clamp(min=1)
    return lengths.new_full((), max(1, lengths.shape[0]) * _constant_length(config))


def _constant_length(config: GRPOLossConfig) -> int:
    if OF_LOSS_TYPE[config.loss_type] == "seq_mean_token_sum_norm" and config.max_completion_length is not None:
        return config.max_completion_length
    return 1
