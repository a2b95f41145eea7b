"""A run that stopped goes on bit for bit, and only as the run it was."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from runs import assert_same_run, fresh_accelerator, history, run, settings  # noqa: F401

from grpo_kernels.training import ConfigError, checkpoint
from grpo_kernels.training.checkpoint import checkpoints, load_checkpoint, newest_checkpoint, save_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft's

VARIANTS: dict[str, dict[str, Any]] = {
    "on-policy": {"update": {"num_minibatches": 1}},
    "off-policy, KL to the starting policy": {
        "update": {"num_minibatches": 2, "num_iterations": 2},
        "loss": {"beta": 0.1},
    },
    "LoRA, KL to the base": {"lora": {"rank": 2}, "loss": {"beta": 0.1}},
    "learning rate still rising": {"update": {"lr_warmup_updates": 20, "weight_decay": 0.1}},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_four_steps_equal_two_and_two_more(variant: str, tmp_path: Path) -> None:
    changes = VARIANTS[variant]
    straight = run(tmp_path / "straight", steps=4, **changes)
    run(tmp_path / "parts", steps=2, save_every=2, **changes)
    resumed = run(tmp_path / "parts", steps=4, save_every=2, resume=True, **changes)
    assert_same_run(tmp_path / "straight", tmp_path / "parts")
    for key in ("solve_rate_before", "solve_rate_after", "steps"):
        assert resumed[key] == straight[key]
    assert any(row["loss"] != 0 for row in history(tmp_path / "parts")[2:])
    assert [path.name for path in checkpoints(tmp_path / "parts")] == ["checkpoint-000004"]


def test_rows_after_the_checkpoint_are_done_again(tmp_path: Path) -> None:
    run(tmp_path / "run", steps=3, save_every=2)
    before = history(tmp_path / "run")
    run(tmp_path / "run", steps=3, save_every=2, resume=True)
    assert history(tmp_path / "run") == before


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"seed": 1}, "seed must be the checkpoint's 0 to resume, got 1"),
        ({"update": {"learning_rate": 2e-3}}, "update.learning_rate must be the checkpoint's 0.001"),
        ({"loss": {"beta": 0.1}}, "loss.beta must be the checkpoint's None"),
    ],
)
def test_other_settings_do_not_resume(changes: dict[str, Any], text: str, tmp_path: Path) -> None:
    run(tmp_path / "run", steps=1, save_every=1)
    with pytest.raises(ConfigError, match=text):
        run(tmp_path / "run", steps=2, save_every=1, resume=True, **changes)


def test_nothing_to_resume_and_nothing_to_overwrite(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="output_dir must hold a checkpoint, got none"):
        run(tmp_path / "run", resume=True)
    run(tmp_path / "run", steps=1, save_every=1)
    with pytest.raises(ConfigError, match="output_dir must hold no checkpoint of an earlier run"):
        run(tmp_path / "run", steps=1)
    (tmp_path / "run" / "checkpoint-unfinished").mkdir()
    assert newest_checkpoint(tmp_path / "run").name == "checkpoint-000001"


def saved_linear(folder: Path) -> tuple[torch.nn.Module, torch.optim.Optimizer, torch.Generator, Accelerator]:
    policy = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(policy.parameters())
    generator = torch.Generator().manual_seed(5)
    accelerator = Accelerator(cpu=True)
    save_checkpoint(folder, accelerator, policy, optimizer, generator, {"step": 1, "config": {"seed": 0}})
    return policy, optimizer, generator, accelerator


def test_every_random_state_comes_back(tmp_path: Path) -> None:
    policy, optimizer, generator, accelerator = saved_linear(tmp_path)

    def draws() -> list[float]:
        return [random.random(), np.random.rand(), torch.rand(()).item(), torch.rand((), generator=generator).item()]

    expected = draws()
    assert draws() != expected
    load_checkpoint(tmp_path, accelerator, policy, optimizer, generator, {"seed": 0})
    assert draws() == expected


def test_another_number_of_processes_is_refused(tmp_path: Path) -> None:
    policy, optimizer, generator, accelerator = saved_linear(tmp_path)
    folder = newest_checkpoint(tmp_path)
    (folder / "random-1.pt").write_bytes((folder / "random-0.pt").read_bytes())
    with pytest.raises(ConfigError, match="number of processes must be the checkpoint's, got 1"):
        load_checkpoint(tmp_path, accelerator, policy, optimizer, generator, {"seed": 0})


def test_a_run_that_dies_while_saving_keeps_the_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, optimizer, generator, accelerator = saved_linear(tmp_path)

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(checkpoint.torch, "save", fail)
    with pytest.raises(OSError, match="disk full"):
        save_checkpoint(tmp_path, accelerator, policy, optimizer, generator, {"step": 2, "config": {}})
    assert newest_checkpoint(tmp_path).name == "checkpoint-000001"
