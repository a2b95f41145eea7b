"""The most memory that a step holds beyond what was there before it."""

from __future__ import annotations

import torch
from torch.profiler import ProfilerActivity, profile

from .timing import Make


def peak_bytes(make: Make, device: torch.device) -> int:
    """Bytes of torch's allocator at most, from a run of its own."""
    step = make()
    if device.type == "cpu":
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
            step()
        held = most = 0
        events = recorded.profiler.kineto_results.events()
        for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
            held += event.nbytes()
            most = max(most, held)
        return most
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    step()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def largest(budget: int, few: tuple[int, int], many: tuple[int, int]) -> int:
    """Tokens that fit a budget of bytes, by the line through two pairs of tokens and bytes."""
    slope = (many[1] - few[1]) / (many[0] - few[0])
    return int((budget - few[1]) / slope + few[0])
