"""The table, the lines and the curves show the numbers they were given, on a terminal, in a file, and as a PNG."""

from __future__ import annotations

import io
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

image = pytest.importorskip("PIL.Image")
rich_console = pytest.importorskip("rich.console")

from grpo_kernels.training.display import LiveTable, format_row, print_summary  # noqa: E402
from grpo_kernels.training.plots import save_curves, smooth  # noqa: E402

ROW = {
    "step": 7,
    "reward": 0.53125,
    "solve_rate": 0.5,
    "kl": 0.00123,
    "entropy": 1.2,
    "clip": 0.021,
    "tokens_per_second": 12345.6,
    "memory_mb": 1812.2,
    "loss": -0.01234,
    "grad_norm": 0.4,
}
SUMMARY = {
    "task": "chain_sum",
    "seed": 3,
    "steps": 60,
    "held_out_prompts": 400,
    "solve_rate_before": 0.34,
    "solve_rate_after": 0.525,
    "seconds": {"warm_up": 16.24, "sampling": 71.0, "scoring": 0.25},
    "peak_memory_mb": 1812,
    "parameters": 912_345,
    "device": "cpu",
    "loss_step": {"ours_ms": 3.81, "eager_ms": 7.5, "ran": "cpp fast", "tokens": 578, "vocabulary": 32_000},
    "settings": {"output_dir": "runs/sums"},
}


def history(steps: int, **changes: Any) -> list[dict[str, float]]:
    return [{**ROW, "step": step + 1, "reward": 0.3 + 0.004 * step, **changes} for step in range(steps)]


def test_cells_of_a_row():
    assert format_row(ROW) == ["7", "0.531", "50.0%", "0.0012", "1.200", "2.1%", "12,346", "1,812", "-0.0123"]
    assert format_row({"step": 1, "reward": math.nan, "loss": math.inf}) == ["1", *"-------", "+inf"]


def test_without_a_terminal_each_step_is_one_aligned_line():
    file = io.StringIO()
    with LiveTable(3, rich_console.Console(file=file, width=20)) as table:
        header = file.getvalue()
        for row in [ROW, {**ROW, "step": 8, "kl": math.nan, "loss": 12.5}]:
            table.update(row)
            assert file.getvalue().endswith("\n")
    lines = file.getvalue().splitlines()
    assert header == lines[0] + "\n"
    assert lines[0].split() == ["step", "reward", "solved", "kl", "entropy", "clip", "tokens/s", "MiB", "loss"]
    assert lines[1].split() == format_row(ROW)
    assert lines[2].split()[3] == "-"
    assert len(lines) == 3
    assert len({len(line) for line in lines}) == 1
    assert "\x1b" not in file.getvalue()


def test_on_a_terminal_the_last_ten_steps_and_the_progress_stay():
    file = io.StringIO()
    console = rich_console.Console(
        file=file, width=80, height=40, force_terminal=True, color_system=None, legacy_windows=False
    )
    with LiveTable(25, console) as table:
        for step in range(1, 15):
            table.update({**ROW, "step": step, "loss": step / 100})
    frame = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", file.getvalue().split("\x1b[2K")[-1])
    losses = re.findall(r"\+0\.\d{4}", frame)
    assert losses == [f"+{step / 100:.4f}" for step in range(5, 15)]
    assert "14/25" in frame
    assert "tokens/s" in frame
    assert "…" not in frame


def test_the_summary_says_what_was_gained(capsys: pytest.CaptureFixture[str]):
    print_summary(SUMMARY)
    text = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert "held-out solved 34.0% -> 52.5% (+18.5 points, 400 prompts, greedy)" in text
    assert "time 1 min 27 s: warm-up 16.2 s, sampling 1 min 11 s, scoring 0.2 s" in text
    assert "0.9 M parameters on cpu" in text
    assert "peak memory 1,812 MiB" in text
    assert "loss step 3.81 ms (cpp fast), eager torch 7.50 ms; 578 tokens, V = 32,000, with gradients" in text
    assert "runs/sums: curves.png" in text


def test_neighbours_are_averaged_without_nan():
    assert smooth([1.0, 2.0, 4.0]) == [1.0, 2.0, 4.0]
    ramp = [float(step) for step in range(60)]
    assert smooth(ramp)[0] == 1.0  # 0, 1, 2
    assert smooth(ramp)[30] == 30.0  # 28 ... 32
    ramp[29] = math.nan
    assert smooth(ramp)[30] == (28 + 30 + 31 + 32) / 4
    assert math.isnan(smooth([math.nan])[0])


@pytest.mark.parametrize(
    "rows",
    [history(60), history(60, kl=0.0, clip=0.0), history(1), history(5, reward=math.nan, kl=math.nan), history(2000)],
    ids=["all curves", "on-policy", "one step", "with NaN", "long"],
)
def test_curves_are_a_small_png(rows: list[dict[str, float]], tmp_path: Path):
    save_curves(rows, SUMMARY, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size < 100_000
    with image.open(tmp_path / "curves.png") as picture:
        assert picture.format == "PNG"
        assert picture.width > 1000
        assert len(picture.convert("RGB").getcolors(1 << 20)) > 20


def test_curves_show_their_values(tmp_path: Path):
    def pixels(name: str, rows: list[dict[str, float]], **summary: float) -> bytes:
        save_curves(rows, {**SUMMARY, **summary}, tmp_path / name)
        return image.open(tmp_path / name).convert("RGB").tobytes()

    base = pixels("a", history(20))
    assert pixels("b", history(20)) == base
    for key in ("solve_rate", "kl", "entropy", "clip"):
        rows = history(20)
        rows[10] = {**rows[10], key: 3 * rows[10][key]}
        assert pixels("c", rows) != base, key
    assert pixels("d", history(20), solve_rate_before=0.1) != base
    assert pixels("e", history(20), solve_rate_after=0.9) != base


@pytest.mark.parametrize(
    ("package", "use"),
    [
        ("rich", lambda folder: LiveTable(3)),
        ("rich", lambda folder: print_summary(SUMMARY)),
        ("matplotlib", lambda folder: save_curves(history(3), SUMMARY, folder / "curves.png")),
    ],
    ids=["table", "summary", "curves"],
)
def test_missing_packages_are_named_with_their_command(
    package: str, use: Callable[[Path], object], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ModuleNotFoundError, match=rf"{package} must be installed.*pip install 'grpo-kernels\[train\]'"):
        use(tmp_path)
