"""Verifiers give the reward that a careful reader would, and say clearly what is wrong with a user's own."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from grpo_kernels.training import rewards
from grpo_kernels.training.config import ConfigError
from grpo_kernels.training.extras import import_extra
from grpo_kernels.training.rewards import (
    CodeReward,
    Example,
    FunctionReward,
    MathReward,
    ScorerReward,
    extract_answer,
    extract_code,
)
from grpo_kernels.training.sandbox import Limits, Verdict


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("  42 \n", "42"),
        ("I think <answer>41</answer>, no: <answer>\n 42 </answer> done", "42"),
        ("<answer>42", "<answer>42"),
        ("", ""),
    ],
)
def test_answer_of_a_completion(completion: str, answer: str):
    assert extract_answer(completion) == answer


@pytest.mark.parametrize(
    ("completion", "code"),
    [
        ("print(1)", "print(1)"),
        ("First:\n```python\na = 1\n```\nBetter:\n```python\na = 2\n```\nOutput:\n```\n2\n```", "a = 2\n"),
        ("```\nplain\n```", "plain\n"),
        ("```py title=x\na = 1\n\nb = 2\n```", "a = 1\n\nb = 2\n"),
        ("```python\nnever closed", "```python\nnever closed"),
        ("x = '```python'\nprint(x)", "x = '```python'\nprint(x)"),
    ],
)
def test_code_of_a_completion(completion: str, code: str):
    assert extract_code(completion) == code


def test_a_scorer_that_raises_gives_zero_and_a_warning():
    def score(answer: str, entry: dict[str, int]) -> float:
        return float(int(answer) == entry["n"])

    example = Example("", {"n": 3})
    with pytest.warns(UserWarning, match="the scorer raised ValueError on an answer, which gets 0"):
        assert ScorerReward(score)([example] * 3, [" 3 ", "4", "three"]) == [1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("truth", "completion", "reward"),
    [
        ("42", "42", 1),
        (42, "The answer is 42.", 1),
        ("1/2", r"so it is $\frac{1}{2}$", 1),
        (r"\frac{1}{2}", "0.5", 1),
        (r"\sqrt{2}", r"\boxed{2^{1/2}}", 1),
        ("x + 1", r"$1 + x$", 1),
        ("(1, 2)", "$(1,2)$", 1),
        ("1,234", "<answer>1234</answer>", 1),
        (r"\frac{3}{4}", r"<answer>\frac{6}{8}</answer>", 1),
        ("Paris", " Paris\n", 1),
        ("42", "41", 0),
        ("42", "42, no, 41", 0),
        ("42", r"\boxed{41} or \boxed{42}", 0),
        ("42", "", 0),
        ("42", "-42", 0),
        ("1/2", "1", 0),
        ("Paris", "London", 0),
    ],
)
def test_mathematical_answers(truth: object, completion: str, reward: float):
    assert MathReward()([Example("", {"answer": truth})], [completion]) == [reward]


# --- code -------------------------------------------------------------------------------------------------------------

posix_only = pytest.mark.skipif(os.name != "posix", reason="the sandbox needs POSIX and says so elsewhere")


@posix_only
def test_code_must_pass_every_test_of_its_entry():
    both = Example(
        "double",
        {
            "test_cases": [{"input": "2", "output": "4"}, {"input": "5", "output": "10"}],
            "test_code": "assert double(3) == 6",
        },
    )
    right = "def double(n):\n    return 2 * n\n\nif __name__ == '__main__':\n    print(double(int(input())))"
    completions = [
        f"Here it is:\n```python\n{right}\n```",
        right.replace("2 * n", "n + 2"),
        right.replace("2 * n", "2 * n if n != 3 else 0"),
        "def double(n): return 2 * n",
        "",
    ]
    reward = CodeReward(Limits(time_s=20), workers=2)
    assert reward([both] * 5, completions) == [1, 0, 0, 0, 0]


@posix_only
def test_tests_that_cannot_be_run_leave_an_answer_unscored():
    example = Example("apply", {"test_code": "assert apply(lambda x: x, 1) == 1"})
    with pytest.warns(UserWarning, match="the tests of 'apply' cannot be run"):
        [reward] = CodeReward(Limits(time_s=20), workers=1)([example], ["def apply(f, x): return f(x)"])
    assert math.isnan(reward)


@posix_only
def test_equal_answers_to_a_prompt_are_run_once(monkeypatch: pytest.MonkeyPatch):
    reward = CodeReward(Limits(time_s=20), workers=2)
    runs: list[tuple[str, str]] = []

    def check_output(source: str, cases: list[tuple[str, str]], limits: Limits) -> Verdict:
        runs.append((source, cases[0][1]))
        return Verdict(source == cases[0][1], "")

    monkeypatch.setattr(rewards, "check_output", check_output)
    one, two = (Example("p", {"test_cases": [{"input": "", "output": name}]}) for name in "ab")
    assert reward([one, one, one, two], ["a", "b", "a", "a"]) == [1, 0, 1, 0]
    assert sorted(runs) == [("a", "a"), ("a", "b"), ("b", "a")]


@pytest.mark.parametrize(
    "entry",
    [{}, {"test_cases": []}, {"test_cases": [{"input": "1"}]}, {"test_cases": [["1", "2"]]}, {"test_code": 3}],
)  # fmt: skip
def test_entries_without_usable_tests_are_refused(entry: dict[str, object]):
    with pytest.raises(ValueError, match=r"CodeReward: an entry must have test_cases, .* Add tests"):
        CodeReward.check_entry(entry)


# --- a user's function ------------------------------------------------------------------------------------------------


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Writes a function `f` into a module of the working folder; the path to name it by."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", os.getcwd())])
    name = f"user_rewards_{tmp_path.name.replace('-', '_')}"

    def write(source: str) -> str:
        Path(f"{name}.py").write_text(source)
        monkeypatch.delitem(sys.modules, name, raising=False)
        return f"{name}:f"

    return write


EXAMPLES = [Example("1 + 1", {"prompt": "1 + 1", "answer": 2}), Example("1 + 2", {"answer": 3, "level": "hard"})]


def test_a_function_is_called_in_the_form_of_trl(user_module: Callable[[str], str]):
    source = """
calls = []
def f(prompts, completions, answer, **columns):
    calls.append((prompts, completions, answer, columns))
    return [None if c == "skip" else float(int(c) == a) for c, a in zip(completions, answer)]
"""
    reward = FunctionReward(user_module(source))
    first, second = reward(EXAMPLES, ["2", "skip"])
    assert first == 1.0
    assert math.isnan(second)
    [call] = reward._function.__globals__["calls"]
    assert call == (["1 + 1", "1 + 2"], ["2", "skip"], [2, 3], {"level": [None, "hard"]})


@pytest.mark.parametrize("value", ["True", "1", "1.0", "torch.tensor(1)", "fractions.Fraction(1)"])
def test_whatever_is_a_number_is_a_reward(user_module: Callable[[str], str], value: str):
    reward = FunctionReward(user_module(f"import fractions, torch\ndef f(completions, **_): return [{value}, 0]"))
    result = reward(EXAMPLES, ["", ""])
    assert result == [1.0, 0.0]
    assert [type(number) for number in result] == [float, float]


def test_a_tensor_of_rewards_is_taken_and_nan_is_unscored(user_module: Callable[[str], str]):
    reward = FunctionReward(user_module("import torch\ndef f(completions, **_): return torch.tensor([2.5, torch.nan])"))
    scored, unscored = reward(EXAMPLES, ["", ""])
    assert scored == 2.5
    assert math.isnan(unscored)


@pytest.mark.parametrize(
    ("body", "kind", "text"),
    [
        ("return [1.0]", ValueError, r":f must return 2 rewards, got 1\. "),
        ("return [1.0, 'good']", TypeError, r":f must return numbers or None, got 'good'\. "),
        ("return [1.0, [0.0]]", TypeError, r":f must return numbers or None, got \[0\.0\]\. "),
        ("return [1.0, float('inf')]", ValueError, r":f must return finite rewards, got inf\. "),
        ("return 1.0", TypeError, r":f must return a list of numbers, got float\. "),
        ("return None", TypeError, r":f must return a list of numbers, got NoneType\. "),
        ("return '11'", TypeError, r":f must return a list of numbers, got str\. "),
        ("return {}['x']", RuntimeError, r":f must not raise, got KeyError\('x'\)\. "),
    ],
)
def test_what_is_wrong_with_a_function_is_said(
    user_module: Callable[[str], str], body: str, kind: type[Exception], text: str
):
    reward = FunctionReward(user_module(f"def f(prompts, completions, **_):\n    {body}"))
    with pytest.raises(kind, match=text):
        reward(EXAMPLES, ["", ""])


def test_a_function_that_takes_no_columns_is_told_so(user_module: Callable[[str], str]):
    reward = FunctionReward(user_module("def f(prompts, completions): return [0, 0]"))
    with pytest.raises(
        RuntimeError, match=r"unexpected keyword argument .*take the columns you need and \*\*kwargs"
    ) as e:
        reward(EXAMPLES, ["", ""])
    assert isinstance(e.value.__cause__, TypeError)


def test_paths_that_name_no_function_are_refused(user_module: Callable[[str], str]):
    path = user_module("f = 3")
    with pytest.raises(ConfigError, match=rf"reward must name a function, got '{path}'"):
        FunctionReward(path)
    with pytest.raises(ConfigError, match="reward must name an importable module, got 'no_such_module:f'"):
        FunctionReward("no_such_module:f")
    with pytest.raises(ConfigError, match=r"There is no module os\.nothing in"):
        FunctionReward("os.nothing:f")
    with pytest.raises(ConfigError, match="reward must be \"module:function\", got ':f'"):
        FunctionReward(":f")
    with pytest.raises(ModuleNotFoundError, match="not_installed"):
        FunctionReward(user_module("import not_installed\ndef f(): pass"))


def test_a_missing_extra_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(
        ModuleNotFoundError, match=r"math_verify must be installed.*pip install 'grpo-kernels\[train\]'"
    ):
        MathReward()


def test_a_package_that_an_extra_lacks_keeps_its_own_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "extra_with_a_hole.py").write_text("import not_installed_at_all")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="No module named 'not_installed_at_all'"):
        import_extra("extra_with_a_hole")
