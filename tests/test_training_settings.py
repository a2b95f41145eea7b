"""Settings: read from TOML, JSON and the command line, checked before any work, each error with what to do."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from grpo_kernels import cli
from grpo_kernels.training import ConfigError, TrainConfig, load_config
from grpo_kernels.training.config import config_from_dict, config_to_dict, describe_fields

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_the_demonstration_is_the_default() -> None:
    assert load_config(EXAMPLES / "sums.toml") == load_config() == TrainConfig()


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.toml")), ids=lambda path: path.name)
def test_examples_are_valid(path: Path) -> None:
    from grpo_kernels.training.update import make_loss_config

    assert make_loss_config(load_config(path)).temperature == 1.0


def test_toml_then_overrides(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('seed = 3\n[update]\nlearning_rate = 1\n[lora]\ntarget_modules = ["q_proj", "v_proj"]\n')
    config = load_config(path, ["seed=4", "update.num_iterations = 2", "model.attn=eager", "loss.beta=0.04"])
    assert (config.seed, config.update.learning_rate, config.update.num_iterations) == (4, 1.0, 2)
    assert isinstance(config.update.learning_rate, float)
    assert (config.model.attn, config.loss, config.lora.target_modules) == (
        "eager",
        {"beta": 0.04},
        ("q_proj", "v_proj"),
    )


def test_a_runs_config_json_gives_the_run_again(tmp_path: Path) -> None:
    config = load_config(None, ["loss.epsilon_high=0.28", 'lora.target_modules=["q_proj"]', "task.held_out=7"])
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config_to_dict(config)))
    assert load_config(path) == config == config_from_dict(config_to_dict(config))


@pytest.mark.parametrize("changes", [["task.name=countdown"], ["task.kind=jsonl", "task.path=x.jsonl"]])
def test_another_task_has_none_of_the_demonstrations_options(changes: list[str]) -> None:
    task = load_config(None, changes).task
    assert (task.options, task.prompt) == ({}, "")
    assert load_config(None, ["task.held_out=5"]).task.options == TrainConfig().task.options


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("stepz=3", "stepz is not a setting, got stepz. Did you mean steps?"),
        (
            "update.learning_rat=1",
            "update.learning_rat is not a setting, got update.learning_rat. Did you mean update.learning_rate?",
        ),
        ("optimizer.lr=1", "optimizer is not a setting, got optimizer."),
        ("steps=many", "steps must be of type int, got 'many'"),
        ("steps=1.5", "steps must be of type int, got 1.5"),
        ("steps=true", "steps must be of type int, got True"),
        ("update=3", "update must be of type section, got 3"),
        ("task.options=3", "task.options must be of type dict, got 3"),
        ("lora.target_modules=[1]", "lora.target_modules must be of type"),
        ("steps.x=3", "steps must be of type int, got {'x': 3}"),
        ("steps", "an override must be key=value, got 'steps'"),
        ("steps=0", "steps must be at least 1, got 0"),
        ("seed=-1", "seed must be at least 0, got -1"),
        ("output_dir=", "output_dir must name a folder"),
        ("device=cdua", "device must be one of auto, cpu, got 'cdua'"),
        ("model.attn=flash_attention", 'Did you mean "flash_attention_2"?'),
        ("model.dtype=float64", "model.dtype must be one of auto, float32, bfloat16, got 'float64'"),
        ("model.mixed_precision=fp16", "model.mixed_precision must be one of no, bf16, got 'fp16'"),
        (
            "model.chat_template=always",
            "model.chat_template and model.system_prompt must be left out for the embedded model",
        ),
        (
            "model.system_prompt=Hi",
            "model.chat_template and model.system_prompt must be left out for the embedded model",
        ),
        (
            "embedded.hidden_size=100",
            "embedded.hidden_size must be a multiple of 2 * embedded.num_heads, got 100 and 4",
        ),
        ("embedded.warmup_learning_rate=0", "embedded.warmup_learning_rate must be > 0"),
        ("lora.rank=-1", "lora.rank must be at least 0"),
        ("lora.alpha=nan", "lora.alpha must be > 0 and finite, got nan"),
        ("lora.target_modules=[]", "lora.target_modules must name a module"),
        ("task.kind=csv", "task.kind must be one of reasoning_gym, jsonl, got 'csv'"),
        ("task.kind=jsonl", "task.path must name a file"),
        ("task.path=x.jsonl", 'task.path needs task.kind = "jsonl"'),
        ("task.reward=score", 'task.reward must be "builtin", "code" or "module:function", got \'score\''),
        ("task.held_out=0", "task.held_out must be at least 1"),
        ("sampling.temperature=0", "sampling.temperature must be > 0"),
        ("sampling.num_generations=0", "sampling.num_generations must be at least 1"),
        ("advantages.scale=grup", "advantages.scale must be one of group, batch, none, got 'grup'. Did you mean"),
        ("update.adam_beta2=1.0", r"update.adam_beta2 must be in [0, 1), got 1.0"),
        ("update.packing=always", "update.packing must be one of auto, never"),
        (
            "update.num_minibatches=49",
            "update.num_minibatches must be at most sampling.prompts_per_step, got 49 and 48",
        ),
        ("update.max_grad_norm=inf", "update.max_grad_norm must be at least 0, got inf"),
    ],
)
def test_bad_settings(override: str, text: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(None, [override])
    assert text in str(error.value)


def test_embedded_settings_do_not_shape_a_model_of_ones_own() -> None:
    with pytest.raises(ConfigError, match=r"embedded must be left out when model\.path is set"):
        load_config(None, ["model.path=/models/qwen", "embedded.num_layers=2"])


@pytest.mark.parametrize("content", ["steps = ", "steps = 1\nsteps = 2", "\xff"])
def test_files_that_cannot_be_read(content: str, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(content, encoding="latin-1")
    with pytest.raises(ConfigError, match="path must be a readable TOML file"):
        load_config(path)
    with pytest.raises(ConfigError, match="path must be a readable TOML file"):
        load_config(tmp_path / "missing.toml")


def test_described_fields_are_the_settings() -> None:
    described = dict(describe_fields())
    assert described["update.learning_rate"] == TrainConfig().update.learning_rate
    assert len(described) == len(describe_fields()) > 40
    for key, default in described.items():
        if isinstance(default, (int, float)):
            assert load_config(None, [f"{key}={str(default).lower()}"]) == TrainConfig(), key


def test_help_has_an_example_and_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["train", "--help"])
    text = capsys.readouterr().out
    assert stop.value.code == 0
    assert text.count("example: grpo-kernels train --config examples/sums.toml") == 1
    assert all(f"--{key}" in text for key, _ in describe_fields() if key != "loss")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--stepz", "3"], "unknown option --stepz. Did you mean --steps?"),
        (["--output-dir", "x"], "unknown option --output-dir. Did you mean --output_dir?"),
        (["--loss.betta=1"], "unknown option --loss.betta. Did you mean --loss.beta?"),
        (["--zzzzzz"], "unknown option --zzzzzz. See --help."),
    ],
)
def test_unknown_options_name_the_closest(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["train", *arguments])
    assert stop.value.code == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--steps", "x"], "steps must be of type int, got 'x'"),
        (["--config", "missing.toml"], "path must be a readable TOML file, got missing.toml"),
        (["--loss.loss_type", "dapoo"], "loss_type must be one of"),
        (["--tracker", "nothing"], "tracker must be installed, got 'nothing'"),
    ],
)
def test_refused_settings_are_one_line_and_exit_code_2(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["train", *arguments]) == 2
    assert text in capsys.readouterr().err


def test_options_reach_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[TrainConfig, bool]] = []

    def train(config: TrainConfig, *, resume: bool) -> dict[str, Any]:
        seen.append((config, resume))
        return {}

    monkeypatch.setattr("grpo_kernels.training.loop.train", train)
    arguments = [
        "--seed",
        "2",
        "--output_dir",
        "2024",
        "--loss.epsilon_high",
        "0.28",
        "--loss.loss_type",
        "grpo",
        "--resume",
    ]
    assert cli.main(["train", *arguments]) == 0
    ((config, resume),) = seen
    assert resume
    assert (config.seed, config.output_dir, config.loss) == (2, "2024", {"epsilon_high": 0.28, "loss_type": "grpo"})


def test_settings_do_not_need_the_training_packages() -> None:
    code = (
        "import sys; from grpo_kernels.training import load_config; load_config(); "
        "print({'transformers', 'accelerate', 'rich'} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
