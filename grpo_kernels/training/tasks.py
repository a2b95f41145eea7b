"""Tasks: where prompts come from and what verifies an answer.

A task is a function of its settings and the seed: the stream of training examples can be read at any index, in any
order, and never shows a prompt that is held out.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any

from .bounds import ConfigError
from .config import TaskConfig
from .extras import import_extra
from .rewards import CodeReward, Example, FunctionReward, MathReward, ScorerReward, Verifier
from .sandbox import Limits

__all__ = ["Example", "Task", "make_task"]

_BLOCK = 512  # entries per reasoning-gym data set: some generate all of them when they are made
_RETRY_STRIDE = 1 << 22  # where the stream looks instead of at a held-out prompt; a multiple of _BLOCK
_MAX_RETRIES = 1000


class Task:
    """Prompts and their verifier. `held_out` shares no prompt with `train_example`."""

    def __init__(
        self, name: str, solved_at: float, held_out: list[Example], stream: Callable[[int], Example], verifier: Verifier
    ) -> None:
        self.name = name
        self.solved_at = solved_at
        self.held_out = held_out
        self._stream = stream
        self._verifier = verifier

    def train_example(self, index: int) -> Example:
        """Example `index >= 0` of an endless stream; the same index always gives the same example."""
        if index < 0:
            raise ValueError(f"train_example: index must be at least 0, got {index}. Count from 0.")
        return self._stream(index)

    def score(self, examples: Sequence[Example], completions: Sequence[str]) -> list[float]:
        """The reward of each completion for the example at its place; NaN where it could not be scored."""
        if len(examples) != len(completions):
            raise ValueError(
                f"score: completions must be as many as examples, got {len(completions)} and {len(examples)}. "
                "Repeat an example for each of its completions."
            )
        return self._verifier(examples, completions)


def make_task(config: TaskConfig, seed: int) -> Task:
    """The task that the settings describe. Raises ConfigError for data that cannot serve it."""
    return _make_reasoning_gym(config, seed) if config.kind == "reasoning_gym" else _make_jsonl(config, seed)


def _prompt(config: TaskConfig, entry: dict[str, Any], own: str) -> str:
    """The entry's own prompt, or the one that task.prompt makes of its columns."""
    if not config.prompt:
        return own
    try:
        return config.prompt.format(**entry)
    except (LookupError, ValueError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"make_task: task.prompt must be a template over {', '.join(sorted(entry))}, got {config.prompt!r}: "
            f'{error!r}. Write {{column}}, or "" for the data set\'s own prompt.'
        ) from error


def _make_verifier(config: TaskConfig, builtin: Callable[[], Verifier]) -> Verifier:
    if config.reward == "builtin":
        return builtin()
    if config.reward == "code":
        return CodeReward(Limits(time_s=config.time_limit_s, memory_mb=config.memory_limit_mb), config.workers)
    return FunctionReward(config.reward)


def _make_reasoning_gym(config: TaskConfig, seed: int) -> Task:
    if config.reward == "code":
        raise ConfigError(
            'make_task: task.reward must be "builtin" or "module:function" for reasoning_gym, got "code". '
            "Its entries have no test cases."
        )
    if reserved := {"seed", "size"} & set(config.options):
        raise ConfigError(
            f"make_task: task.options must leave out {' and '.join(sorted(reserved))}, got {config.options}. "
            "The run's seed decides which entries are drawn."
        )
    # Training draws with seeds below 2**31, the held-out prompts come from above.
    train = _Entries(config, Random(f"train {seed}").randrange(1 << 30))
    other = _Entries(config, (1 << 31) + Random(f"held out {seed}").randrange(1 << 30))

    held_out: dict[str, Example] = {}
    for index in range(20 * config.held_out):
        example = other[index]
        held_out.setdefault(example.prompt, example)
        if len(held_out) == config.held_out:
            break
    else:
        raise ConfigError(
            f"make_task: task.held_out must be fewer than the prompts of {config.name}, got {config.held_out} "
            f"where about {len(held_out)} exist. Lower task.held_out or widen task.options."
        )

    def stream(index: int) -> Example:
        for retry in range(_MAX_RETRIES):
            example = train[index + retry * _RETRY_STRIDE]
            if example.prompt not in held_out:
                return example
        raise ConfigError(
            f"make_task: task.held_out must leave prompts to train on, got {config.held_out} for {config.name}. "
            "Lower task.held_out or widen task.options."
        )

    stream(0)
    verifier = _make_verifier(config, lambda: ScorerReward(train.score_answer))
    return Task(config.name, config.solved_at, list(held_out.values()), stream, verifier)


class _Entries:
    """An endless reasoning-gym data set, made in blocks.

    Entry i of a data set with seed s is drawn with s + i, so blocks are a block's length of seeds apart.
    """

    def __init__(self, config: TaskConfig, first_seed: int) -> None:
        self._reasoning_gym = import_extra("reasoning_gym")
        self._config = config
        self._first_seed = first_seed
        self._block = lru_cache(maxsize=16)(self._make_block)

    def __getitem__(self, index: int) -> Example:
        block = index // _BLOCK % ((1 << 30) // _BLOCK)
        entry = self._block(block)[index % _BLOCK]
        return Example(_prompt(self._config, entry, entry["question"]), entry)

    def score_answer(self, answer: str, entry: dict[str, Any]) -> float:
        return float(self._block(0).score_answer(answer, entry))

    def _make_block(self, block: int) -> Any:
        name, options = self._config.name, self._config.options
        try:
            seed = self._first_seed + block * _BLOCK
            return self._reasoning_gym.create_dataset(name, seed=seed, size=_BLOCK, **options)
        except (ValueError, TypeError, AssertionError) as error:
            close = difflib.get_close_matches(name, self._reasoning_gym.factory.DATASETS, n=1)
            hint = f"Did you mean {close[0]!r}?" if close and close[0] != name else "See the data set's own settings."
            raise ConfigError(
                f"make_task: task.name and task.options must suit reasoning-gym, got {name!r} and {options}: {error}. "
                f"{hint}"
            ) from error


def _make_jsonl(config: TaskConfig, seed: int) -> Task:
    path = Path(config.path)
    examples = _read_jsonl(path, config)
    Random(f"held out {seed}").shuffle(examples)
    held_out, train = examples[: config.held_out], examples[config.held_out :]
    if not train:
        raise ConfigError(
            f"make_task: task.held_out must be fewer than the {len(examples)} distinct prompts of {path}, "
            f"got {config.held_out}. Lower task.held_out."
        )

    @lru_cache(maxsize=2)
    def order(epoch: int) -> list[int]:
        return Random(f"epoch {epoch} {seed}").sample(range(len(train)), len(train))

    def stream(index: int) -> Example:
        epoch, place = divmod(index, len(train))
        return train[order(epoch)[place]]

    return Task(path.stem, config.solved_at, held_out, stream, _make_verifier(config, MathReward))


def _read_jsonl(path: Path, config: TaskConfig) -> list[Example]:
    """The examples of a file, the first of each prompt; every entry is checked for what its reward needs."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"make_task: task.path must be a readable UTF-8 file, got {path}. {error}") from error
    examples: dict[str, Example] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            _check_entry(entry, config.reward)
        except ValueError as error:
            raise ConfigError(
                f"make_task: {path} line {number} must be an example, got {line[:80]!r}. {error}"
            ) from error
        prompt = _prompt(config, entry, entry["prompt"])
        examples.setdefault(prompt.strip(), Example(prompt, entry))
    return list(examples.values())


def _check_entry(entry: Any, reward: str) -> None:
    if not isinstance(entry, dict) or not isinstance(entry.get("prompt"), str) or not entry["prompt"].strip():
        raise ValueError('An example is an object with "prompt", a text that is not empty.')
    if reward == "code":
        CodeReward.check_entry(entry)
    elif reward == "builtin":
        answer = entry.get("answer")
        if isinstance(answer, bool) or not isinstance(answer, (str, int, float)) or not str(answer).strip():
            raise ValueError('The built-in reward needs "answer", a text or a number.')
