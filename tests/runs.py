"""Small runs of the training loop for the tests that share them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState

from grpo_kernels.training import TrainConfig, config
from grpo_kernels.training.loop import train

TIMED = {"tokens_per_second", "memory_mb", "sampling_seconds", "scoring_seconds", "update_seconds"}
SMALL: dict[str, Any] = {
    "device": "cpu",
    "steps": 2,
    "embedded": {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "warmup_steps": 2, "warmup_batch_size": 8},
    "task": {
        "name": "chain_sum",
        "options": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
        "prompt": "{metadata[expression]}=",
        "held_out": 8,
        "reward": "runs:digit_share",
    },
    "sampling": {"prompts_per_step": 4, "num_generations": 4, "max_completion_length": 5},
    "update": {"max_tokens_per_pack": 64, "lr_warmup_updates": 0, "learning_rate": 1e-3},
}


def digit_share(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    """A reward that differs within every group: the share of characters that are digits."""
    return [sum(c.isdigit() for c in text) / max(1, len(text)) for text in completions]


def settings(output_dir: Path, **changes: Any) -> TrainConfig:
    """SMALL, with `section={...}` or `key=value` replaced; `section=None` leaves it out."""
    table: dict[str, Any] = json.loads(json.dumps(SMALL))
    for key, value in changes.items():
        table[key] = {**table.get(key, {}), **value} if isinstance(value, dict) else value
    table = {key: value for key, value in table.items() if value is not None}
    return config.config_from_dict({**table, "output_dir": str(output_dir)})


def run(output_dir: Path, *, resume: bool = False, **changes: Any) -> dict[str, Any]:
    summary = train(settings(output_dir, **changes), resume=resume)
    AcceleratorState._reset_state(reset_partial_state=True)
    return summary


def history(output_dir: Path) -> list[dict[str, float]]:
    """A run's rows, without what the clock decides."""
    rows = [json.loads(line) for line in (output_dir / "history.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key not in TIMED} for row in rows]


def weights(output_dir: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    (path,) = (output_dir / "model").glob("*.safetensors")
    return load_file(path)


def assert_same_run(first: Path, second: Path) -> None:
    """History and weights bit for bit."""
    assert history(first) == history(second)
    ours, theirs = weights(first), weights(second)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.fixture(autouse=True)
def fresh_accelerator() -> Iterator[None]:
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
