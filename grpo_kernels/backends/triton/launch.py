"""The Triton ops of ops/schema.py: which tile for which device, and the launches."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.errors import OutOfResources

from ...advantages import EPS
from ...ops.schema import stats_dtype
from .gradient import row_grad_bwd_kernel, scale_kernel
from .loss import grpo_loss_fwd_kernel
from .statistics import row_stats_fwd_kernel

_log = logging.getLogger(__name__)
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"


class Tile(NamedTuple):
    """Shape of a program: `warps * warp_size` lanes, each with 16 bytes of a row a step."""

    warps: int
    blocks: int  # blocks of one backward program


# Fixed tables, never timed at run time: a timing run would corrupt in-place calls, and another choice changes bits.
# Compiled for each of these; not yet timed.
TILES: dict[str, Tile] = {
    "sm_80": Tile(warps=4, blocks=8),
    "sm_90": Tile(warps=4, blocks=8),
    "sm_100": Tile(warps=4, blocks=8),
    "sm_120": Tile(warps=4, blocks=8),
    "gfx942": Tile(warps=4, blocks=8),
}
SMALLEST = Tile(warps=1, blocks=4)


class Target(NamedTuple):
    """What a launch must know of the device."""

    name: str
    warp_size: int
    nvidia: bool


@functools.lru_cache
def device_target(index: int) -> Target:
    """The table entry of a device: the newest architecture that is not newer than it."""
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip is not None:
        return Target("gfx942", properties.warp_size, False)
    capability = properties.major * 10 + properties.minor
    known = [int(name[3:]) for name in TILES if name.startswith("sm_")]
    fitting = [arch for arch in known if arch <= capability]
    return Target(f"sm_{max(fitting, default=min(known))}", 32, True)


def target_of(logits: Tensor) -> Target:
    """The launch target of a tensor's device; the interpreter has few lanes where rows are short, to have blocks."""
    if _assumed is not None:
        return _assumed
    if INTERPRETED:
        return Target("sm_90", 2 if logits.shape[-1] <= 1024 else 256, False)
    if logits.device.type == "xpu":
        return Target("sm_90", 32, False)
    return device_target(logits.device.index or 0)


def lanes_and_vector(tile: Tile, target: Target, dtype: torch.dtype) -> tuple[int, int]:
    """Lanes of a program and elements of 16 bytes."""
    return tile.warps * target.warp_size, 16 // dtype.itemsize


def common_options(
    logits: Tensor, target: Target, tile: Tile, logit_scale: float, softcap: float | None, entropy: bool
) -> dict[str, Any]:
    """Compile-time arguments that every kernel has."""
    lanes, vector = lanes_and_vector(tile, target, logits.dtype)
    float64 = logits.dtype == torch.float64
    half = logits.dtype == torch.float16
    return {
        "factor": 1.0 if softcap is not None else logit_scale,
        "logit_scale": logit_scale,
        "softcap": 0.0 if softcap is None else softcap,
        "masked_below": torch.finfo(torch.float16 if half else torch.bfloat16).min,
        "ENTROPY": entropy,
        "SOFTCAP": softcap is not None,
        "FLOAT": tl.float64 if float64 else tl.float32,
        "LANES": lanes,
        "VEC": vector,
        "FUSED": not INTERPRETED,
        "NVIDIA": target.nvidia and not float64,
        "num_warps": tile.warps,
    }


def geometry(logits: Tensor) -> tuple[int, int, int]:
    """(T, batch stride, token stride) such that row n lies at `n // T * batch + n % T * token`."""
    if logits.ndim == 2:
        return max(1, logits.shape[0]), 0, logits.stride(0)
    return max(1, logits.shape[1]), logits.stride(0), logits.stride(1)


def aligned(*tensors: Tensor) -> bool:
    """Whether every row of every tensor begins on 16 elements, so that accesses are 128 bits wide."""
    return all(t.data_ptr() % 16 == 0 and all(s % 16 == 0 for s in t.stride()[:-1]) for t in tensors)


def flat(values: Tensor) -> Tensor:
    """A per-row tensor as `[N]`, contiguous."""
    return values.reshape(-1).contiguous()


def heat_of(temperature: Tensor, targets: Tensor) -> tuple[Tensor, int]:
    """Temperatures of the rows, and the stride between them: 0 for one of all."""
    if temperature.ndim == 0:
        return temperature.reshape(1), 0
    return flat(temperature.expand(targets.shape)), 1


def device_of(logits: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Launches go to the tensors' device, not to the current one."""
    if logits.device.type in ("cpu", "meta"):
        return contextlib.nullcontext()
    guard: contextlib.AbstractContextManager[Any] = getattr(torch, logits.device.type).device(logits.device)
    return guard


def launch(logits: Tensor, run: Callable[[Tile, Target], Any]) -> None:
    """Run with the tile of the table, or once more with the smallest where the device has too little of something."""
    target = target_of(logits)
    with device_of(logits):
        try:
            run(_fitting.get(target.name, TILES[target.name]), target)
        except OutOfResources as error:
            _log.warning("%s: %s; using a smaller tile from now on", target.name, error)
            _fitting[target.name] = SMALLEST
            run(SMALLEST, target)


_fitting: dict[str, Tile] = {}
_assumed: Target | None = None


@contextlib.contextmanager
def assuming(target: Target, tile: Tile) -> Iterator[None]:
    """Launch as on this target and with this tile, whatever the device: for compiling where there is none."""
    global _assumed  # noqa: PLW0603
    before = _assumed, _fitting.copy()
    _assumed, _fitting[target.name] = target, tile
    try:
        yield
    finally:
        _assumed = before[0]
        _fitting.clear()
        _fitting.update(before[1])


def row_stats(
    logits: Tensor, targets: Tensor, temperature: Tensor, logit_scale: float, softcap: float | None, entropy: bool
) -> tuple[Tensor, ...]:
    """See ops/schema.py."""
    dtype = stats_dtype(logits)
    outputs = [torch.empty(targets.shape, dtype=dtype, device=logits.device) for _ in range(6)]
    if not entropy:
        outputs[1] = torch.empty(0, dtype=dtype, device=logits.device)
    if targets.numel() == 0:
        return tuple(outputs)
    heat, heat_stride = heat_of(temperature, targets)
    length, batch_stride, token_stride = geometry(logits)

    def run(tile: Tile, target: Target) -> None:
        row_stats_fwd_kernel[(targets.numel(),)](
            logits, flat(targets), heat, *outputs, length, logits.shape[-1], batch_stride, token_stride, heat_stride,
            ALIGNED=aligned(logits), PAIRED=logits.dtype == torch.bfloat16,
            **common_options(logits, target, tile, logit_scale, softcap, entropy),
        )  # fmt: skip

    launch(logits, run)
    return tuple(outputs)


def loss_stats(
    logits: Tensor, targets: Tensor, temperature: Tensor, logit_scale: float, softcap: float | None, entropy: bool,
    advantages: Tensor, group_size: int, old: Tensor | None, ref: Tensor | None, weight: Tensor | None,
    limits: Sequence[float], surrogate: str, kl: str, corrected: bool, kl_weighted: bool,
    share: Tensor | None = None, scale: Tensor | None = None, entropy_scale: Tensor | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """See ops/schema.py. With `share` the gradient is written over the logits."""
    dtype = stats_dtype(logits)
    outputs = [torch.empty(targets.shape, dtype=dtype, device=logits.device) for _ in range(11)]
    if not entropy:
        outputs[1] = torch.empty(0, dtype=dtype, device=logits.device)
    if targets.numel() == 0:
        return tuple(outputs)
    advantages = advantages.contiguous() if group_size else advantages
    heat, heat_stride = heat_of(temperature, targets)
    length, batch_stride, token_stride = geometry(logits)
    sides = [advantages if value is None else value for value in (advantages, old, ref, weight)]
    strided = (None if group_size else advantages, old, ref, weight, share)
    strides = [stride for value in strided for stride in side_strides(value, targets)]
    scalars = _scalars((*limits, EPS, 0.0), dtype, logits.device)
    shares = scalars if share is None else share
    scales = scalars[-1:] if scale is None else scale.reshape(1)
    entropy_scales = scalars[-1:] if entropy_scale is None else entropy_scale.reshape(1)

    def run(tile: Tile, target: Target) -> None:
        grpo_loss_fwd_kernel[(targets.numel(),)](
            logits, flat(targets), heat, *sides, scalars, shares, scales, entropy_scales, *outputs,
            length, logits.shape[-1], batch_stride, token_stride, heat_stride, group_size, *strides,
            ON_POLICY=old is None, SURROGATE=surrogate, WEIGHTED=weight is not None,
            KL=kl.removesuffix("+"), STRAIGHT=kl.endswith("+"), CORRECTED=corrected,
            KL_WEIGHTED=kl_weighted and weight is not None and kl != "none",
            GROUP=triton.next_power_of_2(group_size) if group_size else 0, GRADIENT=share is not None,
            ALIGNED=aligned(logits), PAIRED=logits.dtype == torch.bfloat16,
            **common_options(logits, target, tile, logit_scale, softcap, entropy),
        )  # fmt: skip

    launch(logits, run)
    return tuple(outputs)


def loss_grad_(*arguments: Any) -> tuple[Tensor, ...]:
    """See ops/schema.py."""
    return loss_stats(*arguments)


def row_scale_(logits: Tensor, factor: Tensor) -> None:
    """See ops/schema.py."""
    if logits.numel() == 0:
        return
    length, batch_stride, token_stride = geometry(logits)
    rows = logits.numel() // logits.shape[-1]

    def run(tile: Tile, target: Target) -> None:
        lanes, vector = lanes_and_vector(tile, target, logits.dtype)
        block = lanes * vector
        scale_kernel[(rows, triton.cdiv(logits.shape[-1], block))](
            logits, factor.reshape(1), length, logits.shape[-1], batch_stride, token_stride,
            BLOCK=block, FUSED=not INTERPRETED, num_warps=tile.warps,
        )  # fmt: skip

    launch(logits, run)


def side_strides(values: Tensor | None, targets: Tensor) -> tuple[int, int]:
    """(batch stride, token stride) of a side input, broadcast to the targets; of one that is not read, 0."""
    if values is None:
        return 0, 0
    spread = values.expand(targets.shape)
    return (0, spread.stride(0)) if targets.ndim == 1 else (spread.stride(0), spread.stride(1))


@functools.lru_cache(maxsize=64)
def _scalars(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Options that change, as a tensor: as arguments they would be float32 even beside float64 logits."""
    pinned = device.type == "cuda"  # from other memory the copy would wait for the device
    return torch.tensor(values, dtype=dtype, pin_memory=pinned).to(device, non_blocking=True)


def row_grad_into(
    logits: Tensor, out: Tensor, targets: Tensor, temperature: Tensor, logit_scale: float, softcap: float | None,
    entropy: Tensor, row_max: Tensor, sum_exp: Tensor, sum_others: Tensor, grad_logps: Tensor,
    grad_entropy: Tensor | None,
) -> None:  # fmt: skip
    """See ops/schema.py."""
    if targets.numel() == 0:
        return
    heat, heat_stride = heat_of(temperature, targets)
    length, batch_stride, token_stride = geometry(logits)
    _, out_batch_stride, out_token_stride = geometry(out)
    rows = [flat(t) for t in (row_max, sum_exp, sum_others, grad_logps)]

    def run(tile: Tile, target: Target) -> None:
        lanes, vector = lanes_and_vector(tile, target, logits.dtype)
        chunks = triton.cdiv(logits.shape[-1], tile.blocks * lanes * vector)
        row_grad_bwd_kernel[(targets.numel(), chunks)](
            logits, out, flat(targets), heat, flat(entropy), *rows,
            rows[-1] if grad_entropy is None else flat(grad_entropy),
            length, logits.shape[-1], batch_stride, token_stride, out_batch_stride, out_token_stride, heat_stride,
            BLOCKS=tile.blocks, ALIGNED=aligned(logits, out),
            **common_options(logits, target, tile, logit_scale, softcap, grad_entropy is not None),
        )  # fmt: skip

    launch(logits, run)
