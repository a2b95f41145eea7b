"""Settings of the compact loop: frozen dataclasses, read from TOML and `key=value` overrides, checked before any work.

A key that no dataclass has is an error that names the closest key. The defaults are the embedded demonstration.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from .bounds import ConfigError, at_least, one_of, positive

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ATTENTION = ("auto", "sdpa", "eager", "flash_attention_2")
CHAT_TEMPLATE = ("auto", "always", "never")
DEVICES = ("auto", "cpu")
DTYPES = ("auto", "float32", "bfloat16")
MIXED_PRECISION = ("no", "bf16")
TASK_KINDS = ("reasoning_gym", "jsonl")

# The bare sum: the question's fixed wording would be nine tenths of what a character model reads.
_DEMO_PROMPT = "{metadata[expression]} ="
_DEMO_SUMS = {"min_terms": 3, "max_terms": 3, "min_digits": 1, "max_digits": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which policy is trained."""

    path: str = ""  # folder with a transformers causal LM and its tokenizer; "": the embedded model
    dtype: str = "float32"  # of the weights; "auto": as stored in the folder
    mixed_precision: str = "no"  # "bf16": autocast over sampling and updates, weights keep their dtype
    attn: str = "auto"  # "auto": flash_attention_2 on CUDA in bfloat16 where flash_attn is installed, else sdpa
    chat_template: str = "auto"  # "auto": wrap prompts when the tokenizer has a template
    system_prompt: str = ""  # with a chat template only

    def __post_init__(self) -> None:
        one_of("model.dtype", self.dtype, DTYPES)
        one_of("model.mixed_precision", self.mixed_precision, MIXED_PRECISION)
        one_of("model.attn", self.attn, ATTENTION)
        one_of("model.chat_template", self.chat_template, CHAT_TEMPLATE)


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedConfig:
    """The model made on the spot (Qwen2 architecture, one token per character) and its supervised warm-up."""

    hidden_size: int = 128
    num_layers: int = 3
    num_heads: int = 4
    warmup_steps: int = 500
    warmup_batch_size: int = 32  # examples
    warmup_learning_rate: float = 1e-3

    def __post_init__(self) -> None:
        for name in ("hidden_size", "num_layers", "num_heads", "warmup_batch_size"):
            at_least(f"embedded.{name}", getattr(self, name), 1)
        at_least("embedded.warmup_steps", self.warmup_steps, 0)
        positive("embedded.warmup_learning_rate", self.warmup_learning_rate)
        if self.hidden_size % (2 * self.num_heads) != 0:
            raise ConfigError(
                "TrainConfig: embedded.hidden_size must be a multiple of 2 * embedded.num_heads, "
                f"got {self.hidden_size} and {self.num_heads}. Rotary positions need heads of even width."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters (peft); `rank = 0` trains all weights."""

    rank: int = 0
    alpha: float = 32.0
    target_modules: tuple[str, ...] = ("all-linear",)

    def __post_init__(self) -> None:
        at_least("lora.rank", self.rank, 0)
        positive("lora.alpha", self.alpha)
        if not self.target_modules:
            raise ConfigError("TrainConfig: lora.target_modules must name a module, got []. Use 'all-linear'.")


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskConfig:
    """Where prompts come from and what verifies an answer."""

    kind: str = "reasoning_gym"
    name: str = "chain_sum"  # reasoning_gym: the data set's name
    options: dict[str, Any] = field(default_factory=lambda: dict(_DEMO_SUMS))  # its options; {} when `name` is set
    prompt: str = _DEMO_PROMPT  # a format string over the entry; "": the task's own question, as when `name` is set
    path: str = ""  # jsonl: one object a line with "prompt" and the columns the reward reads
    reward: str = "builtin"  # "builtin", "code" (answers run against test cases), or "module:function"
    held_out: int = 400  # prompts kept apart for the greedy solve rate
    solved_at: float = 1.0  # a reward of at least this counts as solved
    time_limit_s: float = 5.0  # "code": wall clock of one program
    memory_limit_mb: int = 512  # "code": address space of one program
    workers: int = 2  # "code": programs that run at once

    def __post_init__(self) -> None:
        one_of("task.kind", self.kind, TASK_KINDS)
        if self.kind == "jsonl" and not self.path:
            raise ConfigError('TrainConfig: task.path must name a file for task.kind = "jsonl", got "". Set task.path.')
        if self.kind != "jsonl" and self.path:
            raise ConfigError(f'TrainConfig: task.path needs task.kind = "jsonl", got {self.path!r}. Set task.kind.')
        if self.reward not in ("builtin", "code") and self.reward.count(":") != 1:
            raise ConfigError(
                f'TrainConfig: task.reward must be "builtin", "code" or "module:function", got {self.reward!r}. '
                "Give an importable function."
            )
        at_least("task.held_out", self.held_out, 1)
        at_least("task.memory_limit_mb", self.memory_limit_mb, 1)
        at_least("task.workers", self.workers, 1)
        positive("task.time_limit_s", self.time_limit_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingConfig:
    """How a step's responses are drawn: plain temperature sampling, the whole distribution."""

    prompts_per_step: int = 48  # per process
    num_generations: int = 16  # responses per prompt, G
    max_completion_length: int = 8  # tokens, the end token included
    temperature: float = 1.0
    max_sequences: int = 0  # sequences decoded at once, bounds the KV cache; 0: all of them

    def __post_init__(self) -> None:
        for name in ("prompts_per_step", "num_generations", "max_completion_length"):
            at_least(f"sampling.{name}", getattr(self, name), 1)
        at_least("sampling.max_sequences", self.max_sequences, 0)
        positive("sampling.temperature", self.temperature)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantagesConfig:
    """Arguments of `grpo_kernels.group_advantages`."""

    baseline: str = "mean"
    scale: str = "group"

    def __post_init__(self) -> None:
        one_of("advantages.baseline", self.baseline, ("mean", "leave_one_out", "none"))
        one_of("advantages.scale", self.scale, ("group", "batch", "none"))


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateConfig:
    """The optimiser (AdamW) and how a step's responses are turned into updates."""

    learning_rate: float = 1e-4
    lr_warmup_updates: int = 10  # linear, then constant
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.99
    max_grad_norm: float = 1.0  # 0: no clipping
    num_iterations: int = 1  # passes over a step's responses
    num_minibatches: int = 2  # updates per pass
    max_tokens_per_pack: int = 512  # tokens of one forward; an update accumulates over as many packs as it needs
    packing: str = "auto"  # "never": one padded row per sequence, whatever the attention can do

    def __post_init__(self) -> None:
        for name in ("num_iterations", "num_minibatches", "max_tokens_per_pack"):
            at_least(f"update.{name}", getattr(self, name), 1)
        one_of("update.packing", self.packing, ("auto", "never"))
        positive("update.learning_rate", self.learning_rate)
        for name in ("lr_warmup_updates", "weight_decay", "max_grad_norm"):
            at_least(f"update.{name}", getattr(self, name), 0)
        for name in ("adam_beta1", "adam_beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(
                    f"TrainConfig: update.{name} must be in [0, 1), got {getattr(self, name)}. Try 0.9 and 0.99."
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitorConfig:
    """A panel with the number of responses per prompt that the run's own gradients advise (grpo_kernels.lab)."""

    every: int = 0  # steps from one measurement to the next; 0: none
    ema: float = 0.9  # weight of the earlier measurements
    sketch: int = 32  # numbers kept of the head's scores on the vocabulary's side
    prompt_cost: float = 0.0  # of one more prompt, in responses: prefill, sandbox set-up

    def __post_init__(self) -> None:
        for name, low in (("every", 0), ("sketch", 1), ("prompt_cost", 0)):
            at_least(f"monitor.{name}", getattr(self, name), low)
        if not 0 <= self.ema < 1:
            raise ConfigError(f"TrainConfig: monitor.ema must be in [0, 1), got {self.ema}. Try 0.9.")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """Everything that decides a run. Two runs with equal settings on one machine are bitwise equal."""

    seed: int = 0
    steps: int = 80
    output_dir: str = "runs/sums"
    device: str = "auto"
    tracker: str = "none"  # any tracker of accelerate that is installed, e.g. "tensorboard"
    save_every: int = 0  # steps between checkpoints; 0: none
    model: ModelConfig = field(default_factory=ModelConfig)
    embedded: EmbeddedConfig = field(default_factory=EmbeddedConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    advantages: AdvantagesConfig = field(default_factory=AdvantagesConfig)
    loss: dict[str, Any] = field(default_factory=dict)  # fields of grpo_kernels.GRPOLossConfig
    update: UpdateConfig = field(default_factory=UpdateConfig)
    monitor: MonitorConfig = field(default_factory=MonitorConfig)

    def __post_init__(self) -> None:
        one_of("device", self.device, DEVICES)
        at_least("seed", self.seed, 0)
        at_least("steps", self.steps, 1)
        at_least("save_every", self.save_every, 0)
        if not self.output_dir:
            raise ConfigError('TrainConfig: output_dir must name a folder, got "". Set output_dir.')
        if self.update.num_minibatches > self.sampling.prompts_per_step:
            raise ConfigError(
                "TrainConfig: update.num_minibatches must be at most sampling.prompts_per_step, "
                f"got {self.update.num_minibatches} and {self.sampling.prompts_per_step}. Groups are never split."
            )
        first = self.sampling.prompts_per_step // self.update.num_minibatches
        if self.monitor.every and (self.sampling.num_generations < 4 or first < 2):
            raise ConfigError(
                "TrainConfig: monitor.every must be 0 without two prompts of four responses in the first minibatch, "
                f"got {first} of {self.sampling.num_generations}. Raise sampling.num_generations."
            )
        if self.model.path and self.embedded != EmbeddedConfig():
            raise ConfigError(
                f"TrainConfig: embedded must be left out when model.path is set, got model.path = {self.model.path!r}. "
                "It shapes the embedded model only."
            )
        if not self.model.path and (self.model.chat_template == "always" or self.model.system_prompt):
            raise ConfigError(
                "TrainConfig: model.chat_template and model.system_prompt must be left out for the embedded model. "
                "It has no chat template."
            )


def load_config(path: str | Path | None = None, overrides: Sequence[str] = ()) -> TrainConfig:
    """TrainConfig from a TOML file (.json: JSON; None: the defaults), then `section.key=value` overrides.

    An override's value is TOML; what is not TOML is taken as a string, so that `model.attn=sdpa` needs no quotes.
    Raises ConfigError for unknown keys, wrong types, values out of range and files that cannot be read.
    """
    table: dict[str, Any] = {}
    if path is not None:
        try:
            text = Path(path).read_text(encoding="utf-8")
            table = json.loads(text) if Path(path).suffix == ".json" else tomllib.loads(text)
        except (OSError, ValueError) as error:
            raise ConfigError(f"load_config: path must be a readable TOML file, got {path}. {error}") from error
    for override in overrides:
        key, separator, value = override.partition("=")
        if not separator:
            raise ConfigError(f"load_config: an override must be key=value, got {override!r}. Write steps=20.")
        *sections, last = key.strip().split(".")
        target = table
        for section in sections:
            target = target.setdefault(section, {})
            if not isinstance(target, dict):
                raise ConfigError(f"load_config: {section} must be a section, got {override!r}. Name one of its keys.")
        target[last] = _toml_value(value.strip())
    return config_from_dict(table)


def config_from_dict(table: Mapping[str, Any]) -> TrainConfig:
    """TrainConfig from nested tables, e.g. what `config_to_dict` gave."""
    return _build(TrainConfig, table, prefix="")


def config_to_dict(config: TrainConfig) -> dict[str, Any]:
    """Nested plain tables (JSON and TOML types) with every setting, defaults included."""
    table: dict[str, Any] = json.loads(
        json.dumps(dataclasses.asdict(config))
    )  # tuples become lists, as files have them
    return table


def describe_fields(cls: type[Any] = TrainConfig, prefix: str = "") -> list[tuple[str, Any]]:
    """(key, default) of every setting, sections written `section.key`, in the order they are declared."""
    described: list[tuple[str, Any]] = []
    default = cls()
    for item in dataclasses.fields(cls):
        value = getattr(default, item.name)
        if dataclasses.is_dataclass(value):
            described += describe_fields(type(value), prefix=f"{prefix}{item.name}.")
        else:
            described.append((prefix + item.name, value))
    return described


def check_known(where: str, key: str, known: Iterable[str]) -> None:
    """Raise ConfigError with the closest known key when `key` is not one of `known`."""
    names = sorted(known)
    if key in names:
        return
    close = difflib.get_close_matches(key, names, n=1, cutoff=0.5)
    hint = f"Did you mean {where}{close[0]}?" if close else f"Known: {', '.join(names)}."
    raise ConfigError(f"TrainConfig: {where}{key} is not a setting, got {where}{key}. {hint}")


_Config = TypeVar("_Config")


def _build(cls: type[_Config], table: Mapping[str, Any], prefix: str) -> _Config:
    types = get_type_hints(cls)
    for key in table:
        check_known(prefix, key, types)
    values = {key: _convert(prefix + key, value, types[key]) for key, value in table.items()}
    if cls is TaskConfig and ("name" in values or "kind" in values):
        values = {"options": {}, "prompt": "", **values}  # the demonstration's own belong to its data set alone
    return cls(**values)


def _convert(key: str, value: Any, kind: Any) -> Any:
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        if isinstance(value, Mapping):
            return _build(kind, value, prefix=f"{key}.")
    elif get_origin(kind) is dict:
        if isinstance(value, Mapping):
            return dict(value)
    elif get_origin(kind) is tuple:
        item = get_args(kind)[0]
        if isinstance(value, (list, tuple)) and all(isinstance(v, item) for v in value):
            return tuple(value)
    elif kind is float:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return float(value)
    elif isinstance(value, kind) and not (kind is int and isinstance(value, bool)):
        return value
    expected = "section" if dataclasses.is_dataclass(kind) else getattr(kind, "__name__", str(kind))
    raise ConfigError(f"TrainConfig: {key} must be of type {expected}, got {value!r}. Give a value of that type.")


def _toml_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
