"""Training never sees a held-out prompt, and a task is a function of its settings and the seed."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

from grpo_kernels.training.config import ConfigError, TaskConfig
from grpo_kernels.training.tasks import Example, Task, make_task

SUMS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}  # about 16 000 prompts
DIGITS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}  # 200 prompts: "a + b" and "a - b"


def sums(seed: int = 0, **changes: Any) -> Task:
    settings = {"name": "chain_sum", "options": SUMS, "prompt": "{metadata[expression]} =", **changes}
    return make_task(TaskConfig(**settings), seed)


@pytest.mark.parametrize("seed", [0, 1, 12345])
@pytest.mark.parametrize(
    ("options", "held_out"),
    [(SUMS, 400), (DIGITS, 150)],
    ids=["most prompts are new", "most are held out"],
)
def test_held_out_prompts_are_distinct_and_never_trained_on(options: dict[str, Any], held_out: int, seed: int):
    task = sums(seed, options=options, held_out=held_out)
    kept = {example.prompt for example in task.held_out}
    assert len(task.held_out) == len(kept) == held_out
    trained = {task.train_example(index).prompt for index in range(3000)}
    assert len(trained) > 40
    assert not trained & kept


def test_the_stream_is_a_function_of_the_seed_and_the_index():
    one, two, other = (sums(seed, held_out=50) for seed in (0, 0, 1))
    indices = [*range(100), 511, 512, 10**6, 2**40]
    shuffled = random.Random(0).sample(indices, len(indices))
    forward = {index: one.train_example(index) for index in indices}
    assert {index: two.train_example(index) for index in shuffled} == forward
    assert one.held_out == two.held_out
    differing = sum(other.train_example(index) != forward[index] for index in range(100))
    assert differing > 90
    assert {e.prompt for e in other.held_out} != {e.prompt for e in one.held_out}


def test_seeds_that_are_neighbours_do_not_share_their_stream():
    # reasoning-gym draws entry i with seed + i: used as it is, seed 1 would be seed 0 shifted by one
    streams = [[sums(seed, held_out=1).train_example(i).prompt for i in range(200)] for seed in (0, 1)]
    longest = max(sum(a == b for a, b in zip(streams[0][shift:], streams[1], strict=False)) for shift in range(100))
    assert longest < 40


def test_reasoning_gym_scores_its_own_answers():
    task = sums(held_out=20)
    answers = [example.entry["answer"] for example in task.held_out]
    assert task.name == "chain_sum"
    assert task.solved_at == 1.0
    assert task.score(task.held_out, [f" {answer}\n" for answer in answers]) == [1.0] * 20
    assert task.score(task.held_out, [f"<answer>{answer}</answer>" for answer in answers]) == [1.0] * 20
    wrong = task.score(task.held_out, [f"{int(answer) + 1000}" for answer in answers])
    assert max(wrong) < 1.0
    for example, answer in zip(task.held_out, answers, strict=True):
        left, sign, right = example.entry["metadata"]["expression"].split()
        assert int(answer) == (int(left) + int(right) if sign == "+" else int(left) - int(right))


def test_prompts_follow_the_template():
    task = sums(held_out=5)
    for example in [*task.held_out, task.train_example(0)]:
        assert example.prompt == f"{example.entry['metadata']['expression']} ="
    plain = sums(prompt="", held_out=5)
    assert plain.train_example(0).prompt == plain.train_example(0).entry["question"]


def test_prompts_that_the_template_makes_equal_are_one_prompt(tmp_path: Path):
    write(tmp_path, [{"prompt": f"p{i}", "topic": f"t{i % 3}", "answer": i} for i in range(30)])
    task = make_task(jsonl(tmp_path, prompt="About {topic}", held_out=1), seed=0)
    prompts = {task.train_example(index).prompt for index in range(50)} | {task.held_out[0].prompt}
    assert prompts == {"About t0", "About t1", "About t2"}
    assert task.held_out[0].prompt not in {task.train_example(index).prompt for index in range(50)}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"name": "chain_sums", "options": {}, "prompt": ""}, "task.name .*'chain_sums'.* Did you mean 'chain_sum'"),
        ({"options": {"min_term": 2}}, "task.options must suit reasoning-gym, got .*min_term"),
        ({"options": {"min_terms": 5, "max_terms": 2}}, "max_terms must be >= min_terms"),
        ({"options": {"seed": 3}}, "task.options must leave out seed"),
        ({"options": {"size": 3, "seed": 3}}, "task.options must leave out seed and size"),
        ({"options": DIGITS, "held_out": 201}, "task.held_out must be fewer .* got 201 where about 200 exist"),
        ({"options": DIGITS, "held_out": 200}, "task.held_out must leave prompts to train on, got 200"),
        ({"prompt": "{expression} ="}, r"task.prompt must be a template over answer, metadata, question.*KeyError"),
        ({"prompt": "{metadata[expression]"}, "task.prompt must be a template .*ValueError"),
        ({"reward": "code"}, 'task.reward must be "builtin" or "module:function" for reasoning_gym, got "code"'),
        ({"reward": "no_such_module:f"}, "reward must name an importable module"),
    ],
)
def test_settings_that_cannot_serve_are_refused(changes: dict[str, Any], text: str):
    with pytest.raises(ConfigError, match=text):
        sums(**changes)


def test_calls_that_make_no_sense_are_refused():
    task = sums(held_out=3)
    with pytest.raises(ValueError, match="train_example: index must be at least 0, got -1"):
        task.train_example(-1)
    with pytest.raises(ValueError, match="score: completions must be as many as examples, got 1 and 3"):
        task.score(task.held_out, ["1"])


# --- files ------------------------------------------------------------------------------------------------------------


def write(folder: Path, entries: list[Any], name: str = "data.jsonl") -> None:
    lines = [entry if isinstance(entry, str) else json.dumps(entry) for entry in entries]
    (folder / name).write_text("\n".join(lines) + "\n", encoding="utf-8")


def jsonl(folder: Path, **changes: Any) -> TaskConfig:
    return TaskConfig(**{"kind": "jsonl", "path": str(folder / "data.jsonl"), "prompt": "", "held_out": 2, **changes})


def test_a_file_is_split_and_read_in_a_new_order_each_epoch(tmp_path: Path):
    write(
        tmp_path,
        [{"prompt": f"{i} + {i}", "answer": 2 * i} for i in range(12)] + ["", {"prompt": " 3 + 3\n", "answer": 0}],
    )
    task = make_task(jsonl(tmp_path), seed=0)
    kept = {example.prompt for example in task.held_out}
    epochs = [[task.train_example(10 * epoch + i).prompt for i in range(10)] for epoch in range(4)]
    everything = {f"{i} + {i}" for i in range(12)}
    assert len(kept) == 2
    for epoch in epochs:
        assert set(epoch) == everything - kept
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert epochs == [
        [make_task(jsonl(tmp_path), seed=0).train_example(10 * e + i).prompt for i in range(10)] for e in range(4)
    ]
    splits = {tuple(sorted(e.prompt for e in make_task(jsonl(tmp_path), seed).held_out)) for seed in range(8)}
    assert len(splits) > 3


def test_the_builtin_reward_of_a_file_is_mathematical(tmp_path: Path):
    write(tmp_path, [{"prompt": f"half of {i}", "answer": f"{i}/2"} for i in range(1, 5)])
    task = make_task(jsonl(tmp_path, held_out=1), seed=0)
    example = task.train_example(0)
    number = int(example.prompt.split()[-1])
    assert task.score([example] * 3, [f"${number / 2}$", rf"\boxed{{\frac{{{number}}}{{2}}}}", str(number)]) == [
        1,
        1,
        0,
    ]


def test_a_function_scores_the_columns_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "length_reward_of_a_file.py").write_text(
        "def f(completions, target, **_):\n"
        "    return [None if t is None else -abs(len(c) - t) for c, t in zip(completions, target)]"
    )
    write(
        tmp_path,
        [{"prompt": "a", "target": 3}, {"prompt": "b", "target": 3}, {"prompt": "c", "target": 3}, {"prompt": "d"}],
    )
    task = make_task(jsonl(tmp_path, held_out=1, reward="length_reward_of_a_file:f"), seed=0)
    with_target, without = Example("a", {"target": 3}), Example("d", {})
    rewards = task.score([with_target, with_target, without], ["abc", "a", "a"])
    assert rewards[:2] == [0.0, -2.0]
    assert math.isnan(rewards[2])


@pytest.mark.parametrize(
    ("entries", "changes", "text"),
    [
        ([{"prompt": "a", "answer": 1}, "{'prompt': 'b'}"], {}, "data.jsonl line 2 must be an example"),
        ([{"question": "a", "answer": 1}], {}, 'line 1 .*An example is an object with "prompt"'),
        ([{"prompt": " ", "answer": 1}], {}, 'line 1 .*An example is an object with "prompt"'),
        (["[1]"], {}, 'line 1 .*An example is an object with "prompt"'),
        ([{"prompt": "a"}], {}, 'line 1 .*The built-in reward needs "answer"'),
        ([{"prompt": "a", "answer": " "}], {}, 'line 1 .*The built-in reward needs "answer"'),
        ([{"prompt": "a", "answer": True}], {}, 'line 1 .*The built-in reward needs "answer"'),
        ([{"prompt": "a", "answer": 1}], {"reward": "code"}, "line 1 .*an entry must have test_cases"),
        ([{"prompt": "a", "test_code": "assert ("}], {"reward": "code"}, "line 1 .*test_code must be Python"),
        ([{"prompt": p, "answer": 1} for p in "aab"], {}, "task.held_out must be fewer than the 2 distinct prompts"),
        ([{"prompt": "a", "answer": 1}], {"path": "/no/such/file"}, "task.path must be a readable UTF-8 file"),
        ([{"prompt": p, "answer": 1} for p in "abc"], {"prompt": "{topic}"}, "task.prompt must be a template"),
    ],
)  # fmt: skip
def test_files_that_cannot_serve_are_refused(tmp_path: Path, entries: list[Any], changes: dict[str, Any], text: str):
    write(tmp_path, entries)
    with pytest.raises(ConfigError, match=text):
        make_task(jsonl(tmp_path, **changes), seed=0)
