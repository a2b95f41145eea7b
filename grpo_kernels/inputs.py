"""What one call brings besides its config, and its side inputs as token tensors of one dtype."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from . import rollout
from .config import GRPOLossConfig
from .layout import Layout, make_layout
from .ops.schema import DEAD


class RowCall(NamedTuple):
    """How the row ops of one call run."""

    impl: str = "auto"
    inplace: bool = False
    screened: bool = False
    """The targets are those of `screening.live_targets`: the mask is in them."""


class LossCall(NamedTuple):
    """What one call of a loss has besides the arguments of its Function; shapes as in `grpo_loss`."""

    rows: RowCall = RowCall()
    temperature: Tensor | None = None
    cu_seqlens: Tensor | None = None
    importance_sampling_ratio: Tensor | None = None
    normalizer: Tensor | None = None
    entropy_normalizer: Tensor | None = None
    group_size: int = 0
    """> 0: the advantages are rewards, and the kernel normalises them in consecutive groups of this size."""
    rollout_per_token_logps: Tensor | None = None
    prompts: Tensor | None = None
    """Which prompt each sequence answers: `layout.prompt_index`."""
    generator: torch.Generator | None = None


def temperature_tensor(
    config: GRPOLossConfig, temperature: float | Tensor | None, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """The temperature of a call, or of its config, as a tensor."""
    if isinstance(temperature, Tensor):
        return temperature.to(dtype=dtype, device=device)
    number = config.temperature if temperature is None else temperature
    return torch.full((), number, dtype=dtype, device=device)


def live_rows(ids: Tensor, mask: Tensor | None, vocabulary: int) -> Tensor:
    """Rows that count: masked in, with an id of the vocabulary. Bool, like ids."""
    live = (ids >= 0) & (ids < vocabulary)
    return live if mask is None else live & (mask != 0)


class TokenData(NamedTuple):
    """The inputs of a loss, harmless finite numbers where a token is dead; shapes broadcastable to the ids."""

    layout: Layout
    live: Tensor
    targets: Tensor
    temperature: Tensor
    advantages: Tensor  # or rewards, as they came, if the kernel makes the advantages
    old: Tensor | None
    ref: Tensor | None
    weight: Tensor | None
    rollout: Tensor | None
    generator: torch.Generator | None


def token_inputs(
    config: GRPOLossConfig, call: LossCall, vocabulary: int, dtype: torch.dtype, completion_ids: Tensor,
    completion_mask: Tensor | None, advantages: Tensor, old: Tensor | None, ref: Tensor | None, *, clean: bool = True,
) -> TokenData:  # fmt: skip
    """Everything of a call as token tensors; without `clean` a dead token may hold anything."""
    layout = make_layout(completion_ids.shape, call.cu_seqlens, call.prompts)
    if call.rows.screened:
        targets = completion_ids
        live = targets >= 0
    else:
        live = live_rows(completion_ids, completion_mask, vocabulary)
        inside = layout.inside()
        live = live if inside is None else live & inside
        targets = torch.where(live, completion_ids, DEAD)
    temperature = temperature_tensor(config, call.temperature, dtype, completion_ids.device)
    if call.cu_seqlens is not None and temperature.ndim == 2:
        # tokens outside every sequence are dead: any positive number serves
        temperature = torch.where(live, layout.spread(temperature.squeeze(1)), 1.0)
    ref = ref if config.beta != 0 else None
    clean = clean or config.rollout_correction != "none"

    def cleaned(values: Tensor) -> Tensor:
        return torch.where(live, values.to(dtype), 0.0) if clean else values.to(dtype)

    old, ref, sampled = (None if t is None else cleaned(t) for t in (old, ref, call.rollout_per_token_logps))
    weight = call.importance_sampling_ratio
    weight = None if weight is None else cleaned(_token_values(weight, live, layout))
    if config.rollout_correction != "none":
        if sampled is None:
            raise ValueError(
                f"rollout_correction={config.rollout_correction!r} needs rollout_per_token_logps, got None. "
                "Use grpo_loss."
            )
        if old is not None:  # else it waits for the log-probs
            weight = rollout.correction(config, old, sampled, live, layout)
    return TokenData(
        layout,
        live,
        targets,
        temperature,
        advantages.to(dtype) if call.group_size > 0 else cleaned(_token_values(advantages, live, layout)),
        old,
        ref,
        weight,
        sampled,
        call.generator,
    )


def _token_values(values: Tensor, live: Tensor, layout: Layout) -> Tensor:
    """A sequence or token tensor as token values, broadcastable to the tokens."""
    if live.ndim == 1:  # packed: [N] or [N, 1] are tokens, [S] or [S, 1] sequences
        is_sequence = values.shape[0] == layout.num_sequences and not (
            values.ndim == 2 and layout.num_sequences == len(live)
        )
        values = values.reshape(-1)
        return layout.spread(values) if is_sequence else values
    return values.unsqueeze(1) if values.ndim == 1 else values
