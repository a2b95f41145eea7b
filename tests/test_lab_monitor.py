"""The group-size monitor: averages of unbiased statistics, and its panel in the compact loop."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
import torch
from runs import assert_same_run, fresh_accelerator, history, run, settings  # noqa: F401

from grpo_kernels import lab
from grpo_kernels.lab import draw_pilot
from grpo_kernels.training import ConfigError

ATOMS = lab.make_bandit()
NAMES = ("Vb", "A", "B2", "J2", "A0")


def test_the_average_is_of_the_statistics() -> None:
    monitor = lab.GroupSizeMonitor(every=3, ema=0.75)
    assert monitor.advice() is None
    assert [monitor.due(step) for step in range(4)] == [True, False, False, True]
    steps = [draw_pilot(ATOMS, 24, 6, seed) for seed in range(3)]
    single = [lab.estimate_constants(rewards, scores, n_boot=0) for rewards, scores in steps]
    for rewards, scores in steps:
        assert monitor.update(rewards, scores)
    weights = torch.tensor([0.75**2, 0.75, 1.0], dtype=torch.float64)
    constants = monitor.constants()
    assert constants is not None
    for name in NAMES:
        values = torch.tensor([getattr(one, name) for one in single], dtype=torch.float64)
        assert getattr(constants, name) == pytest.approx((weights @ values / weights.sum()).item()), name
    assert constants.n == 72
    advice = monitor.advice()
    assert advice is not None
    assert advice == lab.optimal_group_size(constants)


def test_many_small_steps_find_the_optimum() -> None:
    monitor = lab.GroupSizeMonitor(ema=0.995)
    for seed in range(400):
        monitor.update(*draw_pilot(ATOMS, 16, 8, seed))
    advice = monitor.advice()
    truth = lab.exact_constants(ATOMS.P, ATOMS.R, ATOMS.S)
    assert advice is not None
    assert advice.g_int is not None
    regret = lab.fixed_budget(truth, [advice.g_int])[0] / lab.fixed_budget(truth, [8])[0] - 1
    assert regret < 0.03


def test_steps_that_say_nothing_change_nothing() -> None:
    monitor = lab.GroupSizeMonitor()
    monitor.update(*draw_pilot(ATOMS, 16, 8, 0))
    before = monitor.state_dict()
    rewards, scores = draw_pilot(ATOMS, 16, 3, 1)
    assert monitor.update(rewards, scores) is False
    assert monitor.state_dict() == before


def test_state_goes_through_json() -> None:
    one, other = lab.GroupSizeMonitor(ema=0.5), lab.GroupSizeMonitor(ema=0.5)
    one.update(*draw_pilot(ATOMS, 16, 8, 0))
    other.load_state_dict(json.loads(json.dumps(one.state_dict())))
    for monitor in (one, other):
        monitor.update(*draw_pilot(ATOMS, 16, 8, 1))
    assert one.constants() == other.constants()


@pytest.mark.parametrize(("options", "text"), [({"every": 0}, "every must be >= 1"), ({"ema": 1.0}, "ema must be in")])
def test_refusals(options: dict[str, float], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        lab.GroupSizeMonitor(**options)  # type: ignore[arg-type]


def test_a_watched_run_is_the_same_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = run(tmp_path / "plain", steps=3)
    assert "group_size_advice" not in plain
    assert "Responses per prompt" not in capsys.readouterr().out
    watched = run(tmp_path / "watched", steps=3, monitor={"every": 2, "ema": 0.5, "sketch": 8})
    out = capsys.readouterr().out
    assert out.count("Responses per prompt: Here prompts differ by Vb") == 2  # steps 1 and 3
    assert_same_run(tmp_path / "plain", tmp_path / "watched")
    assert any("Vb" in line for line in watched["group_size_advice"])
    assert json.loads((tmp_path / "watched" / "summary.json").read_text())["group_size_advice"]


def test_a_resumed_run_goes_on_with_its_averages(tmp_path: Path) -> None:
    monitor = {"every": 1, "ema": 0.5, "sketch": 8}
    whole = run(tmp_path / "whole", steps=3, monitor=monitor)
    run(tmp_path / "parts", steps=2, monitor=monitor, save_every=2)
    resumed = run(tmp_path / "parts", steps=3, monitor=monitor, save_every=2, resume=True)
    assert resumed["group_size_advice"] == whole["group_size_advice"]


def test_the_panel_sees_the_heads_gradients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With as many signs as fit, the sketch's Gram matrix is near that of the explicit gradients of the head."""
    from grpo_kernels.training import group_size

    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    take = group_size.GroupSizeWatch.take

    def recorded(self: group_size.GroupSizeWatch, scores: lab.HeadScores, rewards: torch.Tensor) -> list[str]:
        seen.append((scores.scores, rewards))
        return take(self, scores, rewards)

    monkeypatch.setattr(group_size.GroupSizeWatch, "take", recorded)
    run(tmp_path, steps=1, monitor={"every": 1, "sketch": 64}, update={"num_minibatches": 2})
    ((scores, rewards),) = seen
    assert scores.shape == (2, 4, 64 * 16)  # the first of two minibatches: 2 of 4 prompts, 4 responses, width 16
    assert rewards.shape == (16,)
    assert (scores.square().sum(2) > 0).all()


@pytest.mark.parametrize(
    ("reward", "text"), [(1.0, "No group size to advise"), (float("inf"), "No step yet had two groups")]
)
@pytest.mark.filterwarnings("ignore:GroupSizeMonitor.update. this step is left out:RuntimeWarning")
def test_rewards_that_teach_nothing_do_not_end_a_run(
    reward: float, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from grpo_kernels.training import group_size

    take = group_size.GroupSizeWatch.take
    monkeypatch.setattr(
        group_size.GroupSizeWatch, "take",
        lambda self, scores, rewards: take(self, scores, torch.full_like(rewards, reward)),
    )  # fmt: skip
    summary = run(tmp_path, steps=1, monitor={"every": 1, "sketch": 8})
    assert text in summary["group_size_advice"][0]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"monitor": {"every": 1}, "sampling": {"num_generations": 3}}, "two prompts of four responses"),
        ({"monitor": {"every": 1}, "update": {"num_minibatches": 3}}, "got 1 of 4"),
        ({"monitor": {"every": -1}}, "monitor.every must be at least 0"),
        ({"monitor": {"sketch": 0}}, "monitor.sketch must be at least 1"),
        ({"monitor": {"ema": 1.0}}, r"monitor.ema must be in \[0, 1\)"),
        ({"monitor": {"prompt_cost": -1.0}}, "monitor.prompt_cost must be at least 0"),
    ],
)
def test_settings_are_checked(changes: dict[str, dict[str, float]], text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=text):
        settings(tmp_path, **changes)


def test_a_model_whose_head_never_shows_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from grpo_kernels.training.policy import Policy

    monkeypatch.setattr(Policy, "_head_is_separate", lambda self: False)
    with pytest.raises(ConfigError, match="its head is no plain linear layer"):
        run(tmp_path, monitor={"every": 1})


def test_on_a_terminal_the_note_is_a_panel() -> None:
    rich_console = pytest.importorskip("rich.console")
    from grpo_kernels.training.display import LiveTable

    file = io.StringIO()
    console = rich_console.Console(
        file=file, width=80, height=40, force_terminal=True, color_system=None, legacy_windows=False
    )
    with LiveTable(3, console) as table:
        table.note("Responses per prompt", ["Use G = 8: the optimum is 8.5."])
        table.update({"step": 1.0, "reward": 0.5})
    frame = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", file.getvalue().split("\x1b[2K")[-1])
    assert "Responses per prompt" in frame
    assert "Use G = 8: the optimum is 8.5." in frame
    assert "1/3" in frame
