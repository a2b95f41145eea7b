"""The C++ row kernels for CPU tensors: loads the extension, which registers them as the ops of ops/schema.py."""

from __future__ import annotations

import ctypes
import functools
import hashlib
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Final

import torch

from ..ops import schema

# beside this package and nowhere else: an import hook would find that of another installation
PACKAGE: Final = Path(__file__).parents[1]


@functools.lru_cache
def load() -> str | None:
    """Load the extension if there is one; why there is none, or why it cannot be loaded, else None."""
    found = next(filter(Path.exists, (PACKAGE / f"_cpp{suffix}" for suffix in EXTENSION_SUFFIXES)), None)
    if found is None:
        return (
            "the C++ kernels were not built: this is the pure wheel, made without torch or a compiler at hand "
            "(pip install --no-build-isolation builds them, GRPO_KERNELS_BUILD_CPP=1 insists)"
        )
    try:
        torch.ops.load_library(str(found))
    except OSError as error:  # another torch, another platform
        return f"the C++ kernels cannot be loaded: {error}"
    if _formulas_of(found) != hashlib.sha256((PACKAGE / "formulas.py").read_bytes()).hexdigest():
        return "the C++ kernels were built from other formulas than those of formulas.py: build them again"
    schema.declare("cpp")
    return None


def _formulas_of(library: Path) -> str:
    """The digest of the formulas that a library was built from (csrc/translate.py)."""
    ask = ctypes.CDLL(str(library)).grpo_kernels_formulas
    ask.restype = ctypes.c_char_p
    digest: bytes = ask()
    return digest.decode()
