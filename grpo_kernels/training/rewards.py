"""Verifiers: what scores a completion. NaN means unscored: left out of the group's statistics, advantage 0."""

from __future__ import annotations

import importlib
import math
import os
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

from .bounds import ConfigError
from .extras import import_extra
from .sandbox import Case, Limits, Verdict, check_assertions, check_output, check_test_code, require_sandbox


@dataclass(frozen=True)
class Example:
    """A prompt and what its data set says about it, the answer among it."""

    prompt: str
    entry: dict[str, Any]


class Verifier(Protocol):
    """Gives each completion its reward."""

    def __call__(self, examples: Sequence[Example], completions: Sequence[str]) -> list[float]:
        """The reward of `completions[i]` as an answer to `examples[i]`; NaN where it cannot be scored."""


def extract_answer(completion: str) -> str:
    """The content of the last <answer>...</answer>, else the whole text, without surrounding white space."""
    tagged = re.findall(r"<answer>(.*?)</answer>", completion, flags=re.DOTALL)
    return str(tagged[-1] if tagged else completion).strip()


def extract_code(completion: str) -> str:
    """The last fenced block marked python, py or python3, else the last fenced block, else the whole text."""
    fence = r"^[ \t]*```[ \t]*(\w*)[^\n]*\n(.*?)^[ \t]*```[ \t]*$"
    blocks = re.findall(fence, completion, flags=re.DOTALL | re.MULTILINE)
    python = [block for block in blocks if block[0].lower() in ("python", "py", "python3")]
    return str((python or blocks or [("", completion)])[-1][1])


class ScorerReward:
    """A data set's own scorer, `score(answer, entry) -> float` (reasoning-gym's `score_answer`), on extracted answers.

    Some scorers raise on text that they cannot read (`int("twelve")`): such an answer gets 0, with a warning.
    """

    def __init__(self, score: Callable[[str, dict[str, Any]], float]) -> None:
        self._score = score

    def __call__(self, examples: Sequence[Example], completions: Sequence[str]) -> list[float]:
        """What the scorer gives."""
        return [self._one(extract_answer(text), e.entry) for e, text in zip(examples, completions, strict=True)]

    def _one(self, answer: str, entry: dict[str, Any]) -> float:
        try:
            return float(self._score(answer, entry))
        except Exception as error:  # noqa: BLE001 - a scorer may raise anything on text that it did not expect
            kind = type(error).__name__
            warnings.warn(f"ScorerReward: the scorer raised {kind} on an answer, which gets 0", stacklevel=2)
            return 0.0


class MathReward:
    """1 when the final answer equals the entry's `answer`, as text or symbolically (math-verify), else 0.

    An answer that takes math-verify longer than 5 s is wrong. Its clock is SIGALRM: main thread only.
    """

    def __init__(self) -> None:
        self._math_verify = import_extra("math_verify")

    def __call__(self, examples: Sequence[Example], completions: Sequence[str]) -> list[float]:
        """1 or 0."""
        truths = (str(example.entry["answer"]).strip() for example in examples)
        return [self._one(text, truth) for text, truth in zip(completions, truths, strict=True)]

    def _one(self, completion: str, truth: str) -> float:
        answer = extract_answer(completion)
        if answer == truth:
            return 1.0
        # Inside answer tags all is answer; elsewhere math-verify looks for it.
        candidate = _as_latex(answer) if answer != completion.strip() else answer
        parse, verify = self._math_verify.parse, self._math_verify.verify
        return float(verify(parse(_as_latex(truth)), parse(candidate)))


def _as_latex(answer: str) -> str:
    """math-verify reads bare numbers, but anything else only between delimiters."""
    return answer if re.search(r"\$|\\boxed|\\\(|\\\[", answer) else f"${answer}$"


class CodeReward:
    """1 when the code in a completion passes the entry's tests in the sandbox, else 0; NaN if the tests cannot be run.

    An entry has `test_cases`, a list of {"input": text, "output": text} that the program is run on, or `test_code`,
    Python that checks what the answer defines (sandbox.check_assertions), or both. Runs `workers` programs at a time.
    Raises RuntimeError where the sandbox cannot work.
    """

    def __init__(self, limits: Limits, workers: int) -> None:
        require_sandbox(limits)
        self._limits, self._workers = limits, workers

    @staticmethod
    def check_entry(entry: dict[str, Any]) -> None:
        """Raises ValueError for an entry without usable tests."""
        cases, code = entry.get("test_cases") or [], entry.get("test_code") or ""
        well_formed = isinstance(cases, list) and all(
            isinstance(case, dict) and isinstance(case.get("input"), str) and isinstance(case.get("output"), str)
            for case in cases
        )
        if not well_formed or not isinstance(code, str) or not (cases or code):
            raise ValueError(
                'CodeReward: an entry must have test_cases, a list of {"input": text, "output": text}, or test_code, '
                f"Python text, got {sorted(entry)}. Add tests or choose another reward."
            )
        if code:
            check_test_code(code)

    def __call__(self, examples: Sequence[Example], completions: Sequence[str]) -> list[float]:
        """1, 0 or NaN."""
        # Equal answers to one prompt are common in a group: each is run once.
        keys = [(extract_code(text), id(e.entry)) for e, text in zip(examples, completions, strict=True)]
        jobs = dict(zip(keys, examples, strict=True))
        with ThreadPoolExecutor(self._workers) as pool:
            results = pool.map(lambda key, example: self._run(key[0], example.entry), jobs.keys(), jobs.values())
            verdicts = dict(zip(jobs, results, strict=True))
        for key, verdict in verdicts.items():
            if verdict.passed is None:
                prompt = jobs[key].prompt
                warnings.warn(f"CodeReward: the tests of {prompt[:80]!r} cannot be run: {verdict.reason}", stacklevel=2)
        rewards = {
            key: math.nan if verdict.passed is None else float(verdict.passed) for key, verdict in verdicts.items()
        }
        return [rewards[key] for key in keys]

    def _run(self, source: str, entry: dict[str, Any]) -> Verdict:
        cases = [Case(case["input"], case["output"]) for case in entry.get("test_cases") or []]
        verdict = check_output(source, cases, self._limits)
        if verdict.passed and entry.get("test_code"):
            verdict = check_assertions(source, entry["test_code"], self._limits)
        return verdict


class FunctionReward:
    """A user's function in TRL's form: `f(prompts, completions, **columns) -> list[float | None]`; None means unscored.

    Each column is a list with one value per completion, None where an entry lacks it. Every call is checked: ValueError
    or TypeError for a result of the wrong length or with anything but finite numbers, NaN and None, RuntimeError with
    the function's own exception as its cause.
    """

    def __init__(self, path: str) -> None:
        self._name = path
        self._function = _import_function(path)

    def __call__(self, examples: Sequence[Example], completions: Sequence[str]) -> list[float]:
        """What the function returns, checked."""
        entries = [example.entry for example in examples]
        names = {name for entry in entries for name in entry}
        columns = {name: [entry.get(name) for entry in entries] for name in sorted(names - _OWN_ARGUMENTS)}
        prompts = [example.prompt for example in examples]
        try:
            rewards = self._function(prompts=prompts, completions=list(completions), **columns)
        except Exception as error:
            raise RuntimeError(
                f"FunctionReward: {self._name} must not raise, got {error!r}. "
                "It is called as f(prompts=..., completions=..., **columns): take the columns you need and **kwargs."
            ) from error
        if isinstance(rewards, (str, bytes)) or not hasattr(rewards, "__len__") or not hasattr(rewards, "__iter__"):
            raise TypeError(
                f"FunctionReward: {self._name} must return a list of numbers, got {type(rewards).__name__}. "
                "Return one number or None per completion."
            )
        if len(rewards) != len(completions):
            raise ValueError(
                f"FunctionReward: {self._name} must return {len(completions)} rewards, got {len(rewards)}. "
                "Return one number or None per completion, in their order."
            )
        return [self._number(reward) for reward in rewards]

    def _number(self, reward: Any) -> float:
        if reward is None:
            return math.nan
        if isinstance(reward, (str, bytes)) or not hasattr(reward, "__float__"):
            raise TypeError(
                f"FunctionReward: {self._name} must return numbers or None, got {reward!r}. "
                "Convert rewards with float()."
            )
        number = float(reward)
        if math.isinf(number):
            raise ValueError(
                f"FunctionReward: {self._name} must return finite rewards, got {number}. "
                "Return None for completions that cannot be scored."
            )
        return number


_OWN_ARGUMENTS = {"prompt", "prompts", "completion", "completions"}


def _import_function(path: str) -> Callable[..., Any]:
    module_name, _, function_name = path.partition(":")
    if not module_name or not function_name:
        raise ConfigError(
            f'FunctionReward: reward must be "module:function", got {path!r}. Name an importable function.'
        )
    if os.getcwd() not in sys.path:
        # An installed command, unlike `python -m`, does not look in the working folder, where such functions live.
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise ConfigError(
            f"FunctionReward: reward must name an importable module, got {path!r}. "
            f"There is no module {error.name} in {os.getcwd()} or on the Python path."
        ) from None
    function: Callable[..., Any] | None = getattr(module, function_name, None)
    if not callable(function):
        raise ConfigError(
            f"FunctionReward: reward must name a function, got {path!r}. "
            f"{module_name} has no function {function_name!r}."
        )
    return function
