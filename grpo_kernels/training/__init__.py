"""The compact training loop: `train(load_config("run.toml"))`, or `grpo-kernels train` on the command line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .bounds import ConfigError
from .config import TrainConfig, load_config

if TYPE_CHECKING:
    from .loop import train

__all__ = ["ConfigError", "TrainConfig", "load_config", "train"]


def __getattr__(name: str) -> Any:
    if name == "train":  # brings transformers and accelerate: reading settings should not
        from .loop import train

        return train
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
