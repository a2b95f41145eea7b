"""The C++ row kernels for CPU tensors: loads the extension, which registers them as the ops of ops/schema.py."""

from __future__ import annotations

import functools
import importlib.util

import torch

from ..ops import schema

EXTENSION = "grpo_kernels._cpp"


@functools.lru_cache
def load() -> str | None:
    """Load the extension if there is one; why there is none, or why it cannot be loaded, else None."""
    found = importlib.util.find_spec(EXTENSION)
    if found is None or found.origin is None:
        return (
            "the C++ kernels were not built: this is the pure wheel, made without torch or a compiler at hand "
            "(pip install --no-build-isolation builds them, GRPO_KERNELS_BUILD_CPP=1 insists)"
        )
    try:
        torch.ops.load_library(found.origin)
    except OSError as error:  # another torch, another platform
        return f"the C++ kernels cannot be loaded: {error}"
    schema.declare("cpp")
    return None
