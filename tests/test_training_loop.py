"""The compact loop: it learns, repeats, honours every setting or says why not, and its updates are one gradient."""

from __future__ import annotations

import faulthandler
import json
import os
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import transformers
from accelerate import Accelerator
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker
from runs import assert_same_run, fresh_accelerator, history, run, settings, weights  # noqa: F401
from test_packing import COMPLETIONS, PROMPTS, qwen2
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels.training import ConfigError, loop, start
from grpo_kernels.training.config import LoraConfig, ModelConfig, UpdateConfig, config_from_dict
from grpo_kernels.training.packing import make_packs
from grpo_kernels.training.policy import Policy, choose_attention
from grpo_kernels.training.update import (
    Experience,
    completion_logps,
    learning_rate,
    make_loss_config,
    normalizer,
    policy_loss,
    split_groups,
    update_policy,
)

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft's
CPU = torch.device("cpu")
ADVANTAGES = torch.tensor([1.0, -1.0, 0.5, -0.5, 2.0, -2.0])
SGD_STEP = UpdateConfig(learning_rate=1.0, lr_warmup_updates=0, max_grad_norm=0)  # the step is the gradient


def experience(
    policy: Policy, max_tokens: int, first: int = 0, last: int | None = None, **logps: Tensor | None
) -> Experience:
    packs = make_packs(
        PROMPTS, COMPLETIONS, layout=policy.layout, max_tokens=max_tokens, device=CPU, first=first, last=last
    )
    old, ref = logps.get("old"), logps.get("ref")
    return Experience([packs], ADVANTAGES, old, ref)


def gradient_step(
    max_tokens: int, loss: gk.GRPOLossConfig, **logps: Tensor | None
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Gradients (as one SGD step makes them) and metrics of one update."""
    policy = Policy(qwen2())
    before = {name: parameter.detach().clone() for name, parameter in policy.named_parameters()}
    optimizer = torch.optim.SGD(policy.parameters(), lr=1.0)
    metrics = update_policy(
        policy, optimizer, Accelerator(cpu=True), experience(policy, max_tokens, **logps), loss, SGD_STEP, 0
    )
    return {name: before[name] - parameter.detach() for name, parameter in policy.named_parameters()}, metrics


OBJECTIVES = [
    gk.GRPOLossConfig(loss_type="dapo", beta=0.1, entropy=True, entropy_coef=0.05),
    gk.GRPOLossConfig(loss_type="bnpo", entropy=True),
    gk.GRPOLossConfig(loss_type="grpo", beta=0.1, entropy=True, importance_sampling_level="sequence"),
    gk.GRPOLossConfig(loss_type="dr_grpo", entropy=True, max_completion_length=8),
    gk.GRPOLossConfig(loss_type="cispo", epsilon_high=5.0, entropy=True),
]


@pytest.mark.parametrize("loss", OBJECTIVES, ids=lambda loss: loss.loss_type)
def test_accumulated_gradient_and_metrics_equal_those_of_one_batch(loss: gk.GRPOLossConfig) -> None:
    generator = torch.Generator().manual_seed(3)
    count = sum(map(len, COMPLETIONS))
    old, ref = (-4 + 0.5 * torch.randn(count, generator=generator) for _ in range(2))
    whole, expected = gradient_step(1000, loss, old=old, ref=ref)
    parts, metrics = gradient_step(8, loss, old=old, ref=ref)
    for name, gradient in whole.items():
        assert gradient.abs().max() > 1e-3, name
        torch.testing.assert_close(parts[name], gradient, rtol=1e-5, atol=1e-6, msg=name)
    assert abs(expected["loss"]) > 0.01
    assert metrics == pytest.approx(expected, rel=1e-5, abs=1e-7)
    assert metrics["clip"] > 0 or loss.loss_type == "cispo"


@pytest.mark.parametrize("loss", OBJECTIVES, ids=lambda loss: loss.loss_type)
def test_normalizer_is_what_the_loss_would_take_for_the_whole_batch(loss: gk.GRPOLossConfig) -> None:
    """One call without `normalizer` is the truth: its own count is global."""
    policy = Policy(qwen2())
    (pack,) = experience(policy, 1000).minibatches[0]
    ref = torch.full(pack.completion_ids.shape, -4.0)
    calls = [
        gk.grpo_loss(
            policy.logits(pack),
            pack.completion_ids,
            config=loss,
            advantages=ADVANTAGES,
            cu_seqlens=pack.cu_seqlens,
            ref_per_token_logps=ref,
            normalizer=denominator,
        ).loss
        for denominator in (None, normalizer(loss, len(COMPLETIONS), len(pack.completion_ids)))
    ]
    assert abs(calls[0].item()) > 0.01
    assert calls[0].item() == calls[1].item()


def test_normalizer_by_hand() -> None:
    values = [normalizer(loss, num_sequences=3, num_tokens=10) for loss in OBJECTIVES]
    assert values == [10, 10, 3, 24, 10]


def _update_on_a_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(120, exit=True)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="unused", MASTER_PORT="0")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"  # else gloo looks up the host's name
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2, timeout=timedelta(seconds=120)
    )
    accelerator = Accelerator(cpu=True)
    policy = Policy(qwen2())
    trained, optimizer = accelerator.prepare(policy, torch.optim.SGD(policy.parameters(), lr=1.0))
    share = experience(policy, 8 + 100 * rank, first=4 * rank, last=4 + 2 * rank)  # 4 and 2 sequences, 2 packs and 1
    metrics = update_policy(trained, optimizer, accelerator, share, OBJECTIVES[1], SGD_STEP, 0)
    torch.save((dict(policy.named_parameters()), metrics), f"{folder}/rank-{rank}.pt")
    torch.distributed.barrier()
    os._exit(0)  # taking the process group down at the interpreter's exit hangs now and then


def test_two_processes_with_uneven_shares_make_the_gradient_of_one(tmp_path: Path) -> None:
    expected, metrics = gradient_step(1000, OBJECTIVES[1])
    before = dict(Policy(qwen2()).named_parameters())
    torch.multiprocessing.spawn(_update_on_a_rank, (str(tmp_path),), nprocs=2)
    for rank in range(2):
        parameters, its_metrics = torch.load(tmp_path / f"rank-{rank}.pt", weights_only=False)
        for name, parameter in parameters.items():
            torch.testing.assert_close(before[name] - parameter, expected[name], rtol=1e-5, atol=1e-6, msg=name)
        for key in ("loss", "entropy", "clip"):
            assert its_metrics[key] == pytest.approx(metrics[key], rel=1e-5)


@pytest.mark.parametrize("options", [{}, {"entropy_coef": 0.1}, {"importance_sampling_level": "sequence"}], ids=str)
def test_old_logps_are_those_the_loss_sees_so_that_the_first_ratio_is_exactly_one(options: dict[str, Any]) -> None:
    policy = Policy(qwen2())
    packs = experience(policy, 8).minibatches[0]
    old = completion_logps(policy, packs, temperature=0.7)
    config = gk.GRPOLossConfig(temperature=0.7, entropy=True, **options)
    for pack in packs:
        metrics = policy_loss(
            policy, policy(pack), pack, config=config, advantages=ADVANTAGES[pack.sequences],
            old_per_token_logps=old[pack.tokens], normalizer=1.0,
        ).metrics  # fmt: skip
        assert (metrics["ratio/min"].item(), metrics["ratio/max"].item()) == (1.0, 1.0)


@pytest.mark.parametrize(
    ("changes", "calls"),
    [
        ({"update": {"num_minibatches": 1}}, 0),
        ({"update": {"num_minibatches": 2}}, 1),
        ({"update": {"num_minibatches": 1, "num_iterations": 2}}, 1),
        ({"update": {"num_minibatches": 1}, "loss": {"beta": 0.1}}, 1),
        ({"update": {"num_minibatches": 2}, "loss": {"beta": 0.1}}, 2),
    ],
)
def test_old_and_reference_logps_are_computed_only_when_needed(
    changes: dict[str, Any], calls: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = []

    def counting(policy: Policy, packs: Sequence, temperature: float) -> Tensor:
        counted.append(policy)
        return completion_logps(policy, packs, temperature)

    monkeypatch.setattr(loop, "completion_logps", counting)
    run(tmp_path, steps=3, **changes)
    assert len(counted) == 3 * calls


def test_the_reference_stays_the_policy_before_training() -> None:
    policy = Policy(qwen2())
    (pack,) = experience(policy, 1000).minibatches[0]
    with torch.no_grad():
        before = policy(pack)
        frozen = policy.frozen_copy()
        next(policy.parameters()).add_(1.0)
        with policy.reference(frozen) as reference:
            assert torch.equal(reference(pack), before)
        assert not torch.equal(policy(pack), before)


def test_with_lora_the_reference_is_the_base_with_its_adapters_off() -> None:
    policy = Policy(qwen2())
    (pack,) = experience(policy, 1000).minibatches[0]
    with torch.no_grad():
        before = policy(pack)
        policy.add_lora(LoraConfig(rank=2))
        trainable = [(name, p) for name, p in policy.named_parameters() if p.requires_grad]
        assert trainable and all("lora_" in name for name, _ in trainable)
        for _, parameter in trainable:
            parameter.add_(0.1)
        assert not torch.allclose(policy(pack), before)
        with policy.reference(None) as reference:
            assert torch.equal(reference(pack), before)
        assert not torch.allclose(policy(pack), before)


def test_it_learns(tmp_path: Path) -> None:
    run(
        tmp_path, steps=12, embedded={"warmup_steps": 0}, update={"learning_rate": 2e-2},
        sampling={"prompts_per_step": 8, "num_generations": 8},
    )  # fmt: skip
    rewards = [row["reward"] for row in history(tmp_path)]
    assert rewards[0] < 0.2  # the share of digits among bytes drawn at random is 4 %
    assert rewards[-1] > 0.8


@pytest.mark.parametrize("threads", [1, 2])
def test_a_seed_gives_one_run(threads: int, tmp_path: Path) -> None:
    torch.set_num_threads(threads)
    # wide enough for the kernels to use both threads
    changes: dict[str, Any] = {
        "embedded": {"hidden_size": 128},
        "sampling": {"prompts_per_step": 64},
        "update": {"max_tokens_per_pack": 4096, "num_minibatches": 1},
    }
    run(tmp_path / "a", **changes)
    run(tmp_path / "b", **changes)
    assert_same_run(tmp_path / "a", tmp_path / "b")
    run(tmp_path / "c", seed=1, **changes)
    assert history(tmp_path / "c") != history(tmp_path / "a")


HONOURED: list[dict[str, Any]] = [
    {"seed": 3},
    {"embedded": {"hidden_size": 32}},
    {"embedded": {"num_layers": 2}},
    {"embedded": {"num_heads": 1}},
    {"embedded": {"warmup_steps": 3}},
    {"embedded": {"warmup_batch_size": 4}},
    {"embedded": {"warmup_learning_rate": 1e-2}},
    {"model": {"dtype": "bfloat16"}},
    {"model": {"mixed_precision": "bf16"}},
    {"lora": {"rank": 2}},
    {"lora": {"rank": 2, "alpha": 64}},
    {"lora": {"rank": 2, "target_modules": ["q_proj"]}},
    {"task": {"options": {"min_terms": 3, "max_terms": 3}}},
    {"task": {"prompt": "{question}"}},
    {"task": {"held_out": 9}},
    {"task": {"reward": "builtin"}},
    {"task": {"solved_at": 0.1}},
    {"sampling": {"prompts_per_step": 5}},
    {"sampling": {"num_generations": 3}},
    {"sampling": {"max_completion_length": 4}},
    {"sampling": {"temperature": 0.8}},
    {"sampling": {"max_sequences": 4}},  # another order of draws
    {"advantages": {"baseline": "leave_one_out"}},
    {"advantages": {"scale": "batch"}},
    {"update": {"learning_rate": 2e-3}},
    {"update": {"lr_warmup_updates": 3}},
    {"update": {"weight_decay": 0.1}},
    {"update": {"adam_beta1": 0.5}},
    {"update": {"adam_beta2": 0.5}},
    {"update": {"max_grad_norm": 0.01}},
    {"update": {"num_iterations": 2}},
    {"update": {"num_minibatches": 1}},
    {"update": {"max_tokens_per_pack": 32}},
    {"update": {"packing": "never"}},
    {"model": {"attn": "eager"}},
    {"loss": {"beta": 0.1}},
    {"loss": {"beta": 0.1, "kl_estimator": "k1"}},
    {"loss": {"loss_type": "grpo"}},
    {"loss": {"loss_type": "dr_grpo"}},
    {"loss": {"entropy_coef": 0.01}},
    {"loss": {"epsilon": 0.0, "epsilon_high": 0.0}},
]


@pytest.fixture(scope="module")
def plain_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, float]], dict[str, Any]]:
    folder = tmp_path_factory.mktemp("plain")
    summary = run(folder)
    return history(folder), summary


@pytest.mark.parametrize("changes", HONOURED, ids=json.dumps)
def test_every_setting_changes_the_run(
    changes: dict[str, Any], plain_run: tuple[list[dict[str, float]], dict[str, Any]], tmp_path: Path
) -> None:
    expected, plain = plain_run
    summary = run(tmp_path, **changes)
    rows = history(tmp_path)
    keys = ("held_out_prompts", "attention", "packing", "parameters")
    assert rows != expected or [summary[key] for key in keys] != [plain[key] for key in keys]
    assert all(value == value for row in rows for value in row.values())  # no NaN


def test_what_a_run_leaves_behind(tmp_path: Path) -> None:
    summary = run(tmp_path / "run")
    files = {path.name for path in (tmp_path / "run").iterdir()}
    assert files == {"config.json", "history.jsonl", "summary.json", "curves.png", "model", "warmed_up"}
    rows = history(tmp_path / "run")
    assert [row["step"] for row in rows] == [1, 2]
    assert set(rows[0]) == {
        "step", "reward", "solve_rate", "loss", "grad_norm", "kl", "entropy", "clip", "completion_length",
    }  # fmt: skip
    assert json.loads((tmp_path / "run" / "summary.json").read_text()) == summary
    assert {"warm_up", "sampling", "scoring", "update", "evaluation"} == set(summary["seconds"])
    assert summary["versions"]["torch"] == torch.__version__
    loss_step = summary["loss_step"]
    assert loss_step["ours_ms"] > 0 and loss_step["eager_ms"] > 0 and loss_step["ran"].endswith(" fast")
    saved = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config_from_dict(saved) == settings(tmp_path / "run")

    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "run" / "model")
    text = "7 + 8 = 15\n-é"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    ids = tokenizer(["7 + 8 ="], return_tensors="pt")
    assert model.generate(**ids, max_new_tokens=3, do_sample=False).shape[0] == 1


def test_a_saved_model_is_a_model_to_start_from(tmp_path: Path) -> None:
    first = run(tmp_path / "first", steps=1)
    again = run(tmp_path / "again", steps=1, embedded=None, model={"path": str(tmp_path / "first" / "warmed_up")})
    assert again["solve_rate_before"] == first["solve_rate_before"]
    assert "warm_up" not in again["seconds"]
    assert weights(tmp_path / "again").keys() == weights(tmp_path / "first").keys()


def some_unscored(prompts: list[str], completions: list[str], **columns: Any) -> list[float | None]:
    return [None if i % 3 else float(i % 2) for i in range(len(completions))]


def none_scored(prompts: list[str], completions: list[str], **columns: Any) -> list[float | None]:
    return [None] * len(completions)


def test_unscored_responses_are_left_out(tmp_path: Path) -> None:
    run(tmp_path / "some", task={"reward": "test_training_loop:some_unscored"})
    row = history(tmp_path / "some")[0]
    assert (row["reward"], row["solve_rate"]) == (0.5, 0.5)  # of 0, 3, 6, 9, 12, 15
    assert row["grad_norm"] > 0
    run(tmp_path / "none", task={"reward": "test_training_loop:none_scored"})
    row = history(tmp_path / "none")[0]
    assert row["reward"] != row["reward"]
    assert (row["loss"], row["grad_norm"]) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"loss": {"temperature": 0.5}}, "loss.temperature must be left out, got 0.5: it is sampling.temperature"),
        ({"loss": {"epsilon": 2.0}}, r"epsilon must be in \[0, 1\), got 2.0"),
        ({"loss": {"epsilom": 0.1}}, "loss.epsilom is not a setting.* Did you mean loss.epsilon"),
        ({"loss": {"rollout_correction": "token_mask"}}, "loss.rollout_correction must be left out, got 'token_mask'"),
        ({"loss": {"loss_type": "kl_cov"}}, "loss.loss_type must need no token but .*, got 'kl_cov'"),
        ({"loss": {"aggregation": "prompt_mean"}}, "loss.aggregation must be a mean over .*, got 'prompt_mean'"),
        ({"tracker": "wandbb"}, "tracker must be installed, got 'wandbb', which is not one of accelerate's"),
        ({"tracker": "wandb"}, "tracker must be installed, got 'wandb', which is not installed"),
        ({"model": {"attn": "flash_attention_2"}}, "must have CUDA, flash_attn and bfloat16, got cpu"),
        (
            {"model": {"path": "/nowhere"}, "embedded": None},
            "model.path must be a folder with a transformers causal LM",
        ),
        ({"task": {"options": {"min_terms": 0}}}, "task.options must suit reasoning-gym"),
    ],
    ids=str,
)
def test_a_setting_that_cannot_be_honoured_is_refused(changes: dict[str, Any], text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=text):
        run(tmp_path, **changes)
    assert not list(tmp_path.rglob("history.jsonl"))


def test_choose_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, half, single = torch.device("cuda"), ModelConfig(dtype="bfloat16"), ModelConfig()
    for installed, expected in ((object(), "flash_attention_2"), (None, "sdpa")):
        monkeypatch.setattr("importlib.util.find_spec", lambda _, found=installed: found)
        assert choose_attention(half, cuda) == expected
        assert choose_attention(ModelConfig(mixed_precision="bf16"), cuda) == expected
        assert choose_attention(single, cuda) == choose_attention(half, CPU) == "sdpa"
        assert choose_attention(ModelConfig(attn="eager"), cuda) == "eager"


def test_learning_rate_and_minibatches_by_hand() -> None:
    rising = UpdateConfig(learning_rate=1.0, lr_warmup_updates=3)
    assert [learning_rate(rising, update) for update in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert [learning_rate(UpdateConfig(learning_rate=2.0, lr_warmup_updates=0), update) for update in range(2)] == [
        2.0,
        2.0,
    ]
    assert split_groups(7, 3) == [range(2), range(2, 4), range(4, 7)]


def test_loss_settings_reach_the_loss(tmp_path: Path) -> None:
    config = settings(
        tmp_path, loss={"loss_type": "dr_grpo", "beta": 0.04, "epsilon_high": 0.28}, sampling={"temperature": 0.9}
    )
    assert make_loss_config(config) == gk.GRPOLossConfig(
        loss_type="dr_grpo", beta=0.04, epsilon_high=0.28, temperature=0.9, max_completion_length=5, entropy=True
    )


class Recorder(GeneralTracker):
    """A tracker of accelerate's kind that keeps what it is told."""

    name = "recorder"
    requires_logging_directory = False
    told: ClassVar[list[tuple[int | None, dict[str, Any]]]] = []

    def __init__(self, run_name: str, **_: Any) -> None:
        super().__init__()
        self.run_name = run_name

    @property
    def tracker(self) -> Recorder:
        return self

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.told.append((None, values))

    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        self.told.append((step, values))


def test_a_tracker_is_told_settings_and_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "recorder", Recorder)
    monkeypatch.setattr(start, "get_available_trackers", lambda: ["recorder"])
    Recorder.told.clear()
    run(tmp_path, tracker="recorder")
    (_, told), *rows = Recorder.told
    assert config_from_dict(json.loads(told["settings"])) == settings(tmp_path, tracker="recorder")
    written = [json.loads(line) for line in (tmp_path / "history.jsonl").read_text().splitlines()]
    assert rows == [(1, written[0]), (2, written[1])]
