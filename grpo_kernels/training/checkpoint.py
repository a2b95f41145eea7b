"""Checkpoints from which a run goes on bit for bit: weights, optimiser, every random state, step and history."""

from __future__ import annotations

import random
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import nn

from .bounds import ConfigError

_PREFIX = "checkpoint-"
_UNCHECKED = ("steps", "save_every", "tracker", "output_dir")  # may differ when a run goes on


def save_checkpoint(
    output_dir: Path,
    accelerator: Accelerator,
    policy: nn.Module,
    optimizer: torch.optim.Optimizer,
    generator: torch.Generator,
    progress: Mapping[str, Any],
) -> None:
    """Write `output_dir/checkpoint-<step>` and remove older ones; a reader never sees half a checkpoint.

    Args:
        policy: its trainable parameters are saved, the rest is the starting model's.
        progress: plain values, `step` and `config` among them, handed back by `load_checkpoint`.
    """
    final = output_dir / f"{_PREFIX}{progress['step']:06d}"
    folder = output_dir / f"{_PREFIX}unfinished"
    if accelerator.is_main_process:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    accelerator.wait_for_everyone()
    torch.save(_random_states(generator), folder / f"random-{accelerator.process_index}.pt")
    if accelerator.is_main_process:
        torch.save(
            {"weights": _trainable(policy), "optimizer": optimizer.state_dict(), "progress": dict(progress)},
            folder / "state.pt",
        )
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        folder.rename(final)
        for older in checkpoints(output_dir)[:-1]:
            shutil.rmtree(older)


def load_checkpoint(
    output_dir: Path,
    accelerator: Accelerator,
    policy: nn.Module,
    optimizer: torch.optim.Optimizer,
    generator: torch.Generator,
    config: Mapping[str, Any],
) -> dict[str, Any]:
    """Put the newest checkpoint's state into policy, optimizer, generator and the global random states.

    Returns the `progress` that was saved. ConfigError when the settings differ in anything but steps and outputs, or
    the number of processes has changed.
    """
    folder = newest_checkpoint(output_dir)
    state = torch.load(folder / "state.pt", map_location="cpu", weights_only=True)
    _check_same(state["progress"]["config"], config)
    random_states = folder / f"random-{accelerator.process_index}.pt"
    if len(list(folder.glob("random-*.pt"))) != accelerator.num_processes:
        raise ConfigError(
            f"load_checkpoint: the number of processes must be the checkpoint's, got {accelerator.num_processes}. "
            "Start as many as before."
        )
    weights = _trainable(policy)
    if weights.keys() != state["weights"].keys():
        raise ConfigError(f"load_checkpoint: {folder} must hold this model's parameters, got others. Check model.path.")
    with torch.no_grad():
        for name, parameter in weights.items():
            parameter.copy_(state["weights"][name])
    optimizer.load_state_dict(state["optimizer"])
    _restore_random_states(torch.load(random_states, map_location="cpu", weights_only=True), generator)
    progress: dict[str, Any] = state["progress"]
    return progress


def checkpoints(output_dir: Path) -> list[Path]:
    """The finished checkpoints of a run, oldest first."""
    return sorted(path for path in output_dir.glob(f"{_PREFIX}*") if path.name[len(_PREFIX) :].isdigit())


def newest_checkpoint(output_dir: Path) -> Path:
    """The last one; ConfigError when there is none."""
    found = checkpoints(output_dir)
    if not found:
        raise ConfigError(
            f"newest_checkpoint: output_dir must hold a checkpoint, got none in {output_dir}. "
            "Run with save_every first."
        )
    return found[-1]


def _trainable(policy: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in policy.named_parameters() if parameter.requires_grad}


def _check_same(saved: Mapping[str, Any], config: Mapping[str, Any], prefix: str = "") -> None:
    for key in sorted(saved.keys() | config.keys()):
        ours, theirs = config.get(key), saved.get(key)
        if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
            _check_same(theirs, ours, prefix=f"{prefix}{key}.")
        elif ours != theirs and prefix + key not in _UNCHECKED:
            raise ConfigError(
                f"load_checkpoint: {prefix}{key} must be the checkpoint's {theirs!r} to resume, got {ours!r}. "
                "Set it back, or start a new run in another output_dir."
            )


def _random_states(generator: torch.Generator) -> dict[str, Any]:
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(np.asarray(keys, dtype=np.int64)), position, has_gauss, cached),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "sampling": generator.get_state(),
    }


def _restore_random_states(states: Mapping[str, Any], generator: torch.Generator) -> None:
    random.setstate(states["python"])
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(states["torch"])
    if states["cuda"]:
        torch.cuda.set_rng_state_all(states["cuda"])
    generator.set_state(states["sampling"])
