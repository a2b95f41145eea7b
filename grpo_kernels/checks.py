"""Checks of arguments, before any work starts: `<function>: <argument> <requirement>, got <value>. <what to do>`."""

from __future__ import annotations

import difflib
import itertools
import os
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from .config import LARGEST, SMALLEST, GRPOLossConfig
from .config_checks import MOST_SCALE

ENVIRONMENT: Final = "GRPO_KERNELS_CHECK"
FLOATS: Final = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
REALS: Final = (*FLOATS, torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_IDS: Final = (torch.int32, torch.int64)
INTEGERS: Final = REALS[4:]


def complain(function: str, argument: str, requirement: str, got: object, advice: str) -> str:
    """One message of the one format."""
    return f"{function}: {argument} {requirement}, got {got}. {advice}"


def reads_data(tensor: Tensor) -> bool:
    """Whether checks may look at values: always on the CPU, elsewhere with GRPO_KERNELS_CHECK=1; not while tracing."""
    if torch.compiler.is_compiling() or tensor.is_meta or type(tensor).__name__ == "FakeTensor":
        return False
    return tensor.device.type == "cpu" or os.environ.get(ENVIRONMENT, "0") == "1"


def shape_of(tensor: Tensor) -> list[int]:
    """The shape as a plain list, for messages."""
    return list(tensor.shape)


def check_tensor(function: str, argument: str, value: object, dtypes: Sequence[torch.dtype], kinds: str) -> Tensor:
    """A plain tensor of one of these dtypes; TypeError otherwise."""
    if not isinstance(value, Tensor):
        advice = f"Pass a tensor of {kinds}."
        raise TypeError(complain(function, argument, "must be a tensor", type(value).__name__, advice))
    if _is_dtensor(value):
        advice = "Pass full_tensor() of it, or to_local() where each rank holds whole rows."
        raise TypeError(complain(function, argument, "must be a plain tensor", "a DTensor", advice))
    if value.layout != torch.strided:
        raise TypeError(complain(function, argument, "must be dense", value.layout, "Call .to_dense() on it."))
    if value.dtype not in dtypes:
        raise TypeError(complain(function, argument, f"must hold {kinds}", value.dtype, "Convert it."))
    return value


def _is_dtensor(value: Tensor) -> bool:
    return type(value).__name__ == "DTensor"  # by name: importing the class costs, and torch.compile traces this


def check_logits(function: str, logits: object, ids_argument: str, ids: object) -> tuple[Tensor, Tensor]:
    """Logits `[B, T, V]` or `[N, V]` with ids of the leading shape."""
    logits = check_tensor(function, "logits", logits, FLOATS, "float16, bfloat16, float32 or float64")
    ids = check_tensor(function, ids_argument, ids, _IDS, "int32 or int64 ids")
    if logits.ndim not in (2, 3):
        raise ValueError(
            complain(
                function, "logits", "must be [B, T, V] or [N, V]", shape_of(logits), "Add or merge the leading axes."
            )
        )
    check_leading(function, "logits", logits, ids_argument, ids)
    if logits.shape[-1] == 0:
        raise ValueError(
            complain(function, "logits", "must have a vocabulary", shape_of(logits), "Pass V >= 1 columns.")
        )
    if logits.shape[-1] > 1 and logits.stride(-1) != 1:
        advice = "Call .contiguous() on it, or keep the vocabulary as the innermost axis."
        raise ValueError(complain(function, "logits", "must have stride 1 on the last axis", logits.stride(), advice))
    check_device(function, "logits", logits.device, {ids_argument: ids})
    return logits, ids


def check_hidden(
    function: str, hidden: object, weight: object, bias: object, ids_argument: str, ids: object
) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states `[B, T, H]` or `[N, H]` with a head `[V, H]`, its bias `[V]`, and ids of the leading shape."""
    kinds = "float16, bfloat16, float32 or float64"
    hidden = check_tensor(function, "hidden", hidden, FLOATS, kinds)
    if isinstance(weight, torch.nn.Module):
        advice = "Pass head.weight and head.bias."
        if hasattr(weight, "base_layer"):
            advice = "Of a LoRA-wrapped head the weight lacks the adapter: merge it, or use the loss on logits."
        raise TypeError(complain(function, "weight", "must be a tensor", type(weight).__name__, advice))
    weight = check_tensor(function, "weight", weight, FLOATS, kinds)
    ids = check_tensor(function, ids_argument, ids, _IDS, "int32 or int64 ids")
    if hidden.ndim not in (2, 3) or hidden.shape[-1] == 0:
        advice = "Add or merge the leading axes."
        raise ValueError(complain(function, "hidden", "must be [B, T, H] or [N, H]", shape_of(hidden), advice))
    if weight.ndim != 2 or weight.numel() == 0:
        advice = (
            "This looks like a sharded parameter; gather first: deepspeed.zero.GatheredParameters under ZeRO-3, "
            "summon_full_params under FSDP, full_tensor() of a DTensor."
        )
        raise ValueError(complain(function, "weight", "must be a whole [V, H]", shape_of(weight), advice))
    if hidden.shape[-1] != weight.shape[1]:
        got = f"hidden {shape_of(hidden)} with weight {shape_of(weight)}"
        raise ValueError(
            complain(function, "hidden", "must end with the H of weight [V, H]", got, "Pass both of one model.")
        )
    if bias is not None:
        bias = check_tensor(function, "bias", bias, FLOATS, kinds)
        if shape_of(bias) != [weight.shape[0]]:
            wanted = f"must be [{weight.shape[0]}], one per row of weight"
            raise ValueError(complain(function, "bias", wanted, shape_of(bias), "Pass the head's own, or None."))
    check_leading(function, "hidden", hidden, ids_argument, ids)
    if hidden.shape[-1] > 1 and hidden.stride(-1) != 1:
        advice = "Call .contiguous() on it, or keep H as the innermost axis."
        raise ValueError(complain(function, "hidden", "must have stride 1 on the last axis", hidden.stride(), advice))
    check_device(function, "hidden", hidden.device, {"weight": weight, "bias": bias, ids_argument: ids})
    return hidden, weight, ids


def check_leading(function: str, argument: str, states: Tensor, ids_argument: str, ids: Tensor) -> None:
    """Ids of the leading shape of logits or hidden states."""
    if ids.shape == states.shape[:-1]:
        return
    advice = f"Make {ids_argument} {shape_of(states)[:-1]}, or cut the {argument}."
    if ids.ndim == states.ndim - 1 and ids.ndim and states.shape[-2] == ids.shape[-1] + 1:
        advice = (
            f"Row t of {argument} must score id t: pass {argument}[:, :-1] (a view, no copy), which drops the last row."
        )
    got = f"{ids_argument} {shape_of(ids)} with {argument} {shape_of(states)}"
    raise ValueError(complain(function, ids_argument, f"must have the leading shape of {argument}", got, advice))


def check_device(function: str, anchor: str, device: torch.device, others: dict[str, Tensor | None]) -> None:
    """All tensors on the device of the one named `anchor`."""
    for argument, tensor in others.items():
        if tensor is not None and tensor.device != device:
            advice = f"Move it with .to({str(device)!r})."
            raise ValueError(
                complain(function, argument, f"must be on the device of {anchor}, {device}", tensor.device, advice)
            )


def check_count(function: str, argument: str, value: object, least: int, advice: str) -> None:
    """An int of at least this much."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(complain(function, argument, "must be an int", type(value).__name__, advice))
    if value < least:
        raise ValueError(complain(function, argument, f"must be >= {least}", value, advice))


def check_mask(function: str, argument: str, mask: object, ids_argument: str, ids: Tensor) -> Tensor | None:
    """A mask of the ids' shape: bool, integer or float; see `checks_data.check_mask_values`."""
    if mask is None:
        return None
    mask = check_tensor(function, argument, mask, REALS, "bool, integers or floats")
    if mask.shape != ids.shape:
        got = f"{argument} {shape_of(mask)} with {ids_argument} {shape_of(ids)}"
        advice = "Cut or pad one of them; nothing is broadcast."
        raise ValueError(complain(function, argument, f"must have the shape of {ids_argument}", got, advice))
    return mask.detach()


def check_token_tensor(function: str, argument: str, value: object, ids: Tensor) -> Tensor | None:
    """A float tensor of exactly the ids' shape, or None."""
    if value is None:
        return None
    value = check_tensor(function, argument, value, FLOATS, "floats")
    if value.shape != ids.shape:
        advice = "Give one value per token."
        raise ValueError(
            complain(function, argument, f"must have the shape of the ids, {shape_of(ids)}", shape_of(value), advice)
        )
    return value


def check_sequence_or_token(
    function: str, argument: str, value: object, ids: Tensor, num_sequences: int
) -> Tensor | None:
    """A sequence tensor `[B]` / `[B, 1]` or a token tensor; packed `[S]` / `[S, 1]`, `[N]` / `[N, 1]`."""
    if value is None:
        return None
    value = check_tensor(function, argument, value, (*FLOATS, *_IDS), "numbers")
    shapes = [[num_sequences], [num_sequences, 1], shape_of(ids)]
    if ids.ndim == 1:
        shapes.append([ids.shape[0], 1])
    if shape_of(value) not in shapes:
        wanted = f"must be one per sequence, {shapes[0]} or {shapes[1]}, or one per token, {shape_of(ids)}"
        raise ValueError(complain(function, argument, wanted, shape_of(value), "Reshape it; nothing is broadcast."))
    return value


def check_temperature(function: str, temperature: object, ids: Tensor, num_sequences: int | None) -> Tensor | float:
    """A number > 0, a 0-d tensor, `[B, 1]`, or one per token."""
    if not isinstance(temperature, Tensor):
        return check_scale(function, "temperature", temperature)
    check_tensor(function, "temperature", temperature, (*FLOATS, *_IDS), "numbers")
    shapes = [[], shape_of(ids)]
    if num_sequences is not None:
        shapes.append([num_sequences, 1])
    if shape_of(temperature) not in shapes:
        wanted = "must be a number, a 0-d tensor, [B, 1] or one per token"
        advice = "A [B] tensor could mean two things: pass temperature[:, None] for one per sequence."
        raise ValueError(complain(function, "temperature", wanted, f"shape {shape_of(temperature)}", advice))
    return temperature


def check_scale(function: str, argument: str, value: object) -> float:
    """A temperature, softcap or logit_scale that is a number."""
    number = check_positive(function, argument, value)
    if not 1 / MOST_SCALE <= number <= MOST_SCALE:
        wanted = f"must be from {1 / MOST_SCALE:g} to {MOST_SCALE:g}"
        advice = "A quotient with another option would leave float32."
        raise ValueError(complain(function, argument, wanted, number, advice))
    return number


def check_positive(function: str, argument: str, value: object) -> float:
    """A number > 0 that float32 holds: less would be 0 there, more infinite."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(
            complain(function, argument, "must be a number", type(value).__name__, "Convert it with float().")
        )
    if not SMALLEST <= value <= LARGEST:
        wanted = "must be finite and > 0, in float32 too"
        raise ValueError(complain(function, argument, wanted, value, "Give a positive number."))
    return float(value)


def check_flag(function: str, argument: str, value: object) -> None:
    """True or False, not something that is taken for it."""
    if not isinstance(value, bool):
        raise TypeError(complain(function, argument, "must be True or False", repr(value), "Give a bool."))


def check_normalizer(function: str, argument: str, value: object) -> Tensor | float | None:
    """A number > 0, a 0-d tensor, or None."""
    if value is None or not isinstance(value, Tensor):
        return None if value is None else check_positive(function, argument, value)
    check_tensor(function, argument, value, (*FLOATS, *_IDS), "a number")
    if value.ndim != 0:
        advice = "Pass its sum, or index the one element."
        raise ValueError(complain(function, argument, "must be a number or a 0-d tensor", shape_of(value), advice))
    return value


def check_config(function: str, config: object) -> GRPOLossConfig:
    """A GRPOLossConfig; what it holds was checked when it was made."""
    if not isinstance(config, GRPOLossConfig):
        advice = "Build one with its options by name."
        raise TypeError(complain(function, "config", "must be a GRPOLossConfig", type(config).__name__, advice))
    return config


def check_rewards(function: str, rewards: object, num_sequences: int) -> Tensor:
    """`[B]` or `[B, 1]` real numbers."""
    rewards = check_tensor(function, "rewards", rewards, REALS, "real numbers")
    if shape_of(rewards) not in ([num_sequences], [num_sequences, 1]):
        advice = "Give one reward per sequence."
        raise ValueError(complain(function, "rewards", f"must be [{num_sequences}]", shape_of(rewards), advice))
    return rewards


def check_choice(function: str, argument: str, value: object, choices: Sequence[str]) -> None:
    """One of a few words."""
    if value not in choices:
        close = difflib.get_close_matches(str(value), choices, n=1)
        advice = f"Did you mean {close[0]!r}?" if close else "Choose one of these."
        raise ValueError(complain(function, argument, f"must be one of {', '.join(choices)}", repr(value), advice))


def check_cu_seqlens(function: str, cu_seqlens: object, ids: Tensor) -> Tensor:
    """Offsets `[S + 1]` from 0, monotonic, within N."""
    offsets = check_tensor(function, "cu_seqlens", cu_seqlens, _IDS, "int32 or int64 offsets")
    if ids.ndim != 1:
        advice = "Pack the tokens into [N], or drop cu_seqlens."
        raise ValueError(complain(function, "cu_seqlens", "goes with packed [N] ids", f"ids {shape_of(ids)}", advice))
    if offsets.ndim != 1 or offsets.shape[0] < 1:
        raise ValueError(complain(function, "cu_seqlens", "must be [S + 1]", shape_of(offsets), "Start it with 0."))
    if reads_data(offsets):
        ends = offsets.tolist()
        if ends[0] != 0 or ends[-1] > ids.shape[0] or any(a > b for a, b in itertools.pairwise(ends)):
            wanted = f"must start at 0, never fall, and end within N = {ids.shape[0]}"
            shown = ends if len(ends) <= 8 else [*ends[:4], "...", *ends[-3:]]
            raise ValueError(complain(function, "cu_seqlens", wanted, shown, "Pass cumulative lengths."))
    return offsets


def check_inplace(function: str, logits: Tensor, inplace: bool) -> bool:
    """Whether the logits may be overwritten; they must be a non-leaf tensor that is no view. Without grad: no.

    Inside torch.compile neither: there an earlier use that saved them would silently read the gradient, and the
    compiler plans memory itself.
    """
    check_flag(function, "inplace", inplace)
    if not inplace or not torch.is_grad_enabled() or not logits.requires_grad or torch.compiler.is_compiling():
        return False
    advice = "Pass the tensor that the model's last operation made, or use inplace=False."
    if logits.is_leaf:
        raise ValueError(complain(function, "logits", "must not be a leaf tensor with inplace=True", "a leaf", advice))
    if logits._is_view():
        advice += " DistributedDataParallel and full backward hooks also return views."
        raise ValueError(complain(function, "logits", "must not be a view with inplace=True", "a view", advice))
    return True
