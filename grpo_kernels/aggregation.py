"""From token losses to one number: every aggregation is `sum_t c_i m_t l_t / Z`."""

from __future__ import annotations

import torch
from torch import Tensor

from .config import GRPOLossConfig
from .layout import Layout


def counts_tokens(config: GRPOLossConfig) -> bool:
    """Whether the denominator is a count of tokens, which one process or micro-batch sees only in part."""
    return config.aggregation_mode == "token_mean"


def sequence_weights(config: GRPOLossConfig, layout: Layout, lengths: Tensor) -> Tensor:
    """c_i of each sequence from its number of live tokens n_i: `[B]` -> `[B]`; 1 / n_i, 1 / those of its prompt, or 1.

    c_i of a mean over sequences or prompts; a sequence or prompt without a live token counts all the same.
    """
    mode = config.aggregation_mode
    if mode == "seq_mean_token_mean":
        return 1.0 / lengths.clamp(min=1)
    if mode == "prompt_mean":
        return 1.0 / layout.sum_of_prompt(lengths).clamp(min=1)
    return torch.ones_like(lengths)


def denominator(config: GRPOLossConfig, layout: Layout, lengths: Tensor, normalizer: Tensor | None) -> Tensor:
    """Z, 0-d: the caller's, exactly as given, or what this batch shows, at least 1."""
    if normalizer is not None:
        return normalizer
    mode = config.aggregation_mode
    if mode == "token_mean":
        return lengths.sum().clamp(min=1)
    if mode == "prompt_mean":
        return layout.num_prompts(lengths).clamp(min=1)
    count = 1 if mode == "token_sum" else max(1, lengths.shape[0])
    if mode == "seq_mean_token_sum_norm" and config.max_completion_length is not None:
        count *= config.max_completion_length
    return lengths.new_full((), count)
