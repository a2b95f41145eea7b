"""What a GPU can do, by its maker's numbers, and which of its units bounds a loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

LANES: Final = 32


@dataclass(frozen=True)
class GPU:
    """Peak rates of one GPU. Real ones are lower: clocks fall under load, a copy reaches some 90 % of the memory's."""

    name: str  # as CUDA gives it, or a part of that
    target: str  # an entry of the launch tables
    multiprocessors: int
    clock: float  # Hz
    memory: float  # bytes/s
    tensor: float  # FLOP/s, dense, of 16-bit operands
    l2: int  # bytes
    issued: int = 4  # warp instructions a clock and multiprocessor
    special: int = 16  # results of the special function unit a clock and multiprocessor
    source: str = ""


# Issue slots and special function units: CUDA C++ Programming Guide, table "Throughput of Native Arithmetic
# Instructions", 9.0 and 10.0. Multiprocessors, L2: cudaDeviceProp of the SXM parts. Clock: the highest that nvidia-smi
# names; with it 256 FLOP a clock and multiprocessor are the float32 rate of the data sheets.
GPUS: Final = (
    GPU("H100", "sm_90", 132, 1.98e9, 3.35e12, 989e12, 50 * 2**20, source="NVIDIA H100 data sheet, SXM"),
    GPU("H200", "sm_90", 132, 1.98e9, 4.8e12, 989e12, 60 * 2**20, source="NVIDIA H200 data sheet, SXM"),
    GPU("B200", "sm_100", 148, 1.965e9, 8.0e12, 2250e12, 126 * 2**20, source="NVIDIA DGX B200 data sheet"),
)


class Bound(NamedTuple):
    """Which unit a loop waits for, and the share of the memory's peak rate that it leaves possible."""

    unit: str  # "HBM", "issue" or "MUFU"
    share: float


def bound(gpu: GPU, instructions: float, special: float, traffic: float) -> Bound:
    """The slowest unit for a loop of so many instructions, special ones among them, and bytes of memory per element."""
    clocks = gpu.multiprocessors * gpu.clock
    seconds = {
        "HBM": traffic / gpu.memory,
        "issue": instructions / (gpu.issued * LANES * clocks),
        "MUFU": special / (gpu.special * clocks),
    }
    unit = max(seconds, key=lambda name: seconds[name])
    return Bound(unit, seconds["HBM"] / seconds[unit])


def gpu_of(device_name: str) -> GPU | None:
    """The entry of a device that CUDA names so; None for one that is not in the table."""
    return next((gpu for gpu in GPUS if gpu.name in device_name), None)
