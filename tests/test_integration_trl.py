"""Real training runs of TRL's GRPOTrainer and of ours: same seeds, same completions, same logs to 1e-5."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from integration_support import build, causal_lm, put_into_batches, train, worst_of
from peft import LoraConfig
from trl import GRPOTrainer

from grpo_kernels.integrations.trl import OLDEST, FusedGRPOTrainer, patch_trainer

RTOL = 1e-5
LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


def floor_of(loss_type: str = "dapo", **_: Any) -> float:
    """How near 0 a mean of advantages, which cancel, may be compared: to 1e-7, and 1e-6 where tokens are summed."""
    return 0.1 if loss_type == "luspo" else 0.01


def assert_same_run(model: Any = None, prepare: Any = None, steps: int = 3, **options: Any) -> list[dict[str, Any]]:
    """The logs of both trainers agree, and are worth comparing."""
    model = causal_lm() if model is None else model
    options = {"max_completion_length": 10, "max_steps": steps} | options
    logs = []
    for cls in (GRPOTrainer, FusedGRPOTrainer):
        trainer = build(cls, model, **options)
        logs.append(train(trainer if prepare is None else put_into_batches(trainer, prepare)))
    gap, where = worst_of(*logs, floor=floor_of(**options))
    assert gap <= RTOL, where
    losses = [entry["loss"] for entry in logs[0] if "loss" in entry]
    assert len(losses) == steps
    assert any(entry["grad_norm"] > 0.01 for entry in logs[0] if "loss" in entry)
    return logs[0]


CASES = [
    pytest.param(
        {"loss_type": loss_type, "beta": beta, "num_iterations": iterations, "importance_sampling_level": level},
        id=f"{loss_type}-{beta}-{level}-{iterations}",
    )
    for loss_type in ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo")
    for beta in (0.0, 0.04)
    for level, iterations in (("token", 2), ("sequence", 1))
    if level == "token" or loss_type not in ("cispo", "vespo")
]


@pytest.mark.parametrize("options", CASES)
def test_every_loss_type(options: dict[str, Any]) -> None:
    cap = {"epsilon_high": 5.0 if options["loss_type"] == "cispo" else 0.28}
    log = assert_same_run(**options, **cap)
    assert ("kl" in log[0]) == (options["beta"] > 0)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"loss_type": "dapo", "beta": 0.04, "num_iterations": 2}, id="dapo"),
        pytest.param({"loss_type": "grpo", "importance_sampling_level": "sequence", "num_iterations": 2}, id="gspo"),
        pytest.param({"loss_type": "dapo", "beta": 0.04, "peft_config": LORA, "learning_rate": 0.2}, id="lora"),
    ],
)
def test_twenty_steps(options: dict[str, Any]) -> None:
    assert_same_run(steps=20, **options)


TIGHT = {"epsilon": 0.01, "epsilon_high": 0.02, "num_iterations": 3}
ADAPTIVE = {"use_adaptive_entropy": True, "entropy_coef": 0.01, "entropy_target": 5.0}
FOUR = {"gradient_accumulation_steps": 4, "per_device_train_batch_size": 2}


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(FOUR | {"loss_type": "dapo", "num_iterations": 2, "beta": 0.04}, id="dapo-four-parts"),
        pytest.param(FOUR | {"loss_type": "bnpo"}, id="bnpo-four-parts"),
        pytest.param(FOUR | {"loss_type": "dr_grpo", "num_iterations": 2}, id="dr_grpo-four-parts"),
        pytest.param(FOUR | {"loss_type": "luspo", "entropy_coef": 0.02}, id="luspo-four-parts-entropy"),
        pytest.param({"gradient_accumulation_steps": 2, "steps_per_generation": 4}, id="half-a-generation"),
        pytest.param({"gradient_accumulation_steps": 4, "steps_per_generation": 2}, id="two-generations"),
        pytest.param({"entropy_coef": 0.02, "beta": 0.04}, id="entropy-bonus"),
        pytest.param(FOUR | ADAPTIVE, id="adaptive-entropy"),
        pytest.param({"top_entropy_quantile": 0.4, "beta": 0.04}, id="top-entropy"),
        pytest.param({"top_entropy_quantile": 0.4, "entropy_coef": 0.02, **FOUR}, id="top-entropy-bonus"),
        pytest.param({"delta": 1.1, "num_iterations": 2}, id="two-sided-clip"),
        pytest.param({"off_policy_mask_threshold": 0.001, "num_iterations": 2}, id="off-policy-mask"),
        pytest.param({"use_bias_correction_kl": False, "beta": 0.04, "num_iterations": 2}, id="plain-kl"),
        pytest.param({"temperature": 0.7, "num_iterations": 2}, id="temperature"),
        pytest.param({"peft_config": LORA, "learning_rate": 1.0, "num_iterations": 2}, id="lora"),
        pytest.param({"activation_checkpointing": True, "num_iterations": 2}, id="checkpointing"),
        pytest.param({"cast_lm_head_to_fp32": True}, id="float32-head"),
        pytest.param(TIGHT | {"importance_sampling_level": "sequence"}, id="tight-clip"),
    ],
)
def test_options(options: dict[str, Any]) -> None:
    assert_same_run(**options)


def test_evaluation() -> None:
    prompts = Dataset.from_dict({"prompt": ["abc", "hello"]})
    options = {"eval_strategy": "steps", "eval_steps": 1, "eval_dataset": prompts, "beta": 0.04}
    log = assert_same_run(steps=2, per_device_eval_batch_size=8, num_generations_eval=4, **FOUR, **options)
    assert sum("eval_kl" in entry for entry in log) == 2


def with_tools(batch: dict[str, Any]) -> None:
    """Some tokens of each completion come from a tool; one completion is the tool's alone."""
    mask = torch.ones_like(batch["completion_mask"])
    mask[:, 2:5] = 0
    mask[1] = 0
    batch["tool_mask"] = mask


@pytest.mark.parametrize("options", [{}, {"loss_type": "grpo", "beta": 0.04, "importance_sampling_level": "sequence"}])
def test_tool_masks(options: dict[str, Any]) -> None:
    assert_same_run(prepare=with_tools, num_iterations=2, **options)


@pytest.mark.parametrize("loss_type", ["dapo", "vespo"])
@pytest.mark.parametrize("shape", ["[B, T]", "[B, 1]"])
def test_weights_of_an_engine(loss_type: str, shape: str) -> None:
    if loss_type == "vespo" and shape == "[B, 1]":
        shape = "[B, T]"  # the only one that TRL allows

    def weighted(batch: dict[str, Any]) -> None:
        rng = torch.Generator().manual_seed(3)
        rows, width = batch["completion_ids"].shape
        batch["importance_sampling_ratio"] = 0.3 + torch.rand(
            rows, width if shape == "[B, T]" else 1, generator=rng
        ) * (batch["completion_mask"] if shape == "[B, T]" else 1)
        if shape == "[B, T]":
            batch["importance_sampling_ratio"][batch["completion_mask"] == 0] = 1.0
        batch["sampling_per_token_logps"] = -2 + torch.rand(rows, width, generator=rng)

    logs = []
    for cls in (GRPOTrainer, FusedGRPOTrainer):
        trainer = build(
            cls, causal_lm(), max_steps=3, max_completion_length=10, loss_type=loss_type, beta=0.04, num_iterations=2,
            off_policy_mask_threshold=0.2,
        )  # fmt: skip
        theirs = trainer._compute_loss

        def compute(model: Any, inputs: Any, trainer: Any = trainer, theirs: Any = theirs) -> Any:
            trainer.use_vllm = True  # for the loss alone: there is no engine here
            try:
                return theirs(model, inputs)
            finally:
                trainer.use_vllm = False

        trainer._compute_loss = compute
        logs.append(train(put_into_batches(trainer, weighted)))
    gap, where = worst_of(*logs, floor=floor_of())
    assert gap <= RTOL, where


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("Gemma2", {"final_logit_softcapping": 3.0, "head_dim": 8, "tie_word_embeddings": True}),
        ("Cohere", {"logit_scale": 0.3, "tie_word_embeddings": False}),
        ("Granite", {"logits_scaling": 2.0}),
        ("Mixtral", {"num_local_experts": 4, "router_aux_loss_coef": 0.1}),
    ],
)
def test_other_heads_and_experts(kind: str, config: dict[str, Any]) -> None:
    log = assert_same_run(causal_lm(kind, **config), num_iterations=2, beta=0.04, **FOUR)
    assert ("aux_loss" in log[0]) == (kind == "Mixtral")


def test_a_patched_trainer_is_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    logs = []
    for patched in (False, True):
        trainer = build(GRPOTrainer, causal_lm(), max_steps=3, num_iterations=2, beta=0.04)
        if patched:
            patch_trainer(trainer)
            assert "_compute_loss" in capsys.readouterr().out
        logs.append(train(trainer))
    gap, where = worst_of(*logs, floor=floor_of())
    assert 0 < gap <= RTOL, where  # 0: nothing was replaced


def test_two_processes() -> None:
    """DDP averages gradients and TRL's metrics are reduced: the logs are those of TRL's trainer there too."""
    if not torch.distributed.is_available() or sys.platform == "win32":
        pytest.skip("torch.distributed with gloo is not here")
    script = Path(__file__).with_name("trl_two_processes.py")
    run = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    results = [json.loads(line.removeprefix("LOGS ")) for line in run.stdout.splitlines() if line.startswith("LOGS ")]
    assert [result["processes"] for result in results] == [2, 2]
    for result in results:
        gap, where = worst_of(*result["logs"], floor=floor_of())
        assert gap <= RTOL, where


def test_the_oldest_release() -> None:
    """A few of the runs above, in a process that finds the oldest supported TRL first."""
    root = Path(__file__).parents[1]
    folder = root / "build" / f"trl-{OLDEST}"
    if not (folder / "trl").is_dir():
        pytest.skip(f"no TRL {OLDEST} here: pip install --no-deps --target {folder.relative_to(root)} trl=={OLDEST}.0")
    paths = os.pathsep.join([str(folder), str(root)])
    chosen = "(dapo-0.04-token-2 or gspo or adaptive or half-a-generation or lora or tool) and not (oldest or two_)"
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"{__file__}", "-k", chosen],
        cwd=root, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout
    assert " passed" in run.stdout
    assert " skipped" not in run.stdout
