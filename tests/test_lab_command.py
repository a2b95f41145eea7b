"""`grpo-kernels lab`: advice from files with its exit codes, and studies that write JSON, CSV and a figure."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from grpo_kernels import cli, lab
from grpo_kernels.lab import draw_pilot

ATOMS = lab.make_bandit()


@pytest.fixture
def files(tmp_path: Path) -> Path:
    rewards, scores = draw_pilot(ATOMS, 1024, 16, 0)
    np.save(tmp_path / "r.npy", rewards.numpy())
    np.save(tmp_path / "s.npy", scores.numpy())
    small, of_small = draw_pilot(ATOMS, 24, 6, 1)
    np.save(tmp_path / "small-r.npy", small.numpy())
    np.save(tmp_path / "small-s.npy", of_small.numpy())
    np.save(tmp_path / "small-k.npy", np.einsum("pad,qbd->paqb", of_small.numpy(), of_small.numpy()))
    return tmp_path


def advise(files: Path, *options: str, prefix: str = "") -> int:
    return cli.main(["lab", "advise", "--rewards", str(files / f"{prefix}r.npy"), *options])


def test_advice_of_a_good_pilot_in_words(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert advise(files, "--scores", str(files / "s.npy"), "--budget", "256") == 0
    out = capsys.readouterr().out
    constants = lab.estimate_constants(np.load(files / "r.npy"), np.load(files / "s.npy"))
    assert f"Use G = {lab.optimal_group_size(constants).g_int}:" in out
    assert f"Vb     {constants.Vb:.6g}" in out


def test_flagged_advice_has_exit_code_2(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert advise(files, "--scores", str(files / "s.npy"), "--budget", "4", "--json") == 2
    found = json.loads(capsys.readouterr().out)
    assert found["advice"]["flags"] == ["N_LT_G"]
    assert found["advice"]["g_int"] == 4
    assert found["constants"]["n"] == 1024


def test_a_gram_matrix_gives_the_advice_of_the_scores(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    codes, found = [], []
    for kind in ("scores", "gram"):
        path = str(files / f"small-{'s' if kind == 'scores' else 'k'}.npy")
        codes.append(advise(files, f"--{kind}", path, "--json", prefix="small-"))
        found.append(json.loads(capsys.readouterr().out))
    assert codes[0] == codes[1]
    for name, value in found[0]["constants"].items():
        assert found[1]["constants"][name] == (value if value is None else pytest.approx(value, rel=1e-9)), name
    assert found[0]["advice"]["flags"] == found[1]["advice"]["flags"]


def test_costs_and_limits_reach_the_advice(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scores = ("--scores", str(files / "s.npy"), "--json")
    sizes = []
    for options in ("", "--cprompt 16", "--cprompt 16 --cresp 4", "--g-max 5", "--multiple-of 16"):
        advise(files, *scores, *options.split())
        sizes.append(json.loads(capsys.readouterr().out)["advice"]["g_int"])
    assert sizes[1] > sizes[2] > sizes[0] > sizes[3] == 5
    assert sizes[4] == 16


def test_what_cannot_be_read_is_one_line(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for options in (("--scores", "missing.npy"), (), ("--scores", str(files / "r.npy"))):
        assert advise(files, *options) == 64
        text = capsys.readouterr().err
        assert text.startswith("grpo-kernels lab: ")
        assert "Traceback" not in text


def test_a_study_writes_its_record_its_rows_and_its_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["lab", "mse-curve", "--task", "bandit", "--groups", "2,8,32", "--N", "64", "--reps", "3000"]
    assert cli.main([*arguments, "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "FAIL" not in out
    assert out.count("ok    ") >= 5
    record = json.loads((tmp_path / "mse-curve-bandit.json").read_text())
    assert record["settings"]["groups"] == [2, 8, 32]
    with open(tmp_path / "mse-curve-bandit.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["predicted"]) for row in rows] == [row["predicted"] for row in record["rows"]]
    image = pytest.importorskip("PIL.Image")
    with image.open(tmp_path / "mse-curve-bandit.png") as picture:
        assert picture.width > 900
        assert len(picture.convert("RGB").getcolors(1 << 20)) > 20
    assert (tmp_path / "mse-curve-bandit.png").stat().st_size < 100_000
    again = tmp_path / "again"
    assert cli.main([*arguments, "--out", str(again), "--no-plot"]) == 0
    assert json.loads((again / "mse-curve-bandit.json").read_text())["rows"] == record["rows"]
    assert not (again / "mse-curve-bandit.png").exists()


def test_a_claim_that_fails_is_exit_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["lab", "mse-curve", "--task", "bandit", "--groups", "2,4", "--N", "4", "--reps", "20", "--no-plot"]
    assert cli.main([*arguments, "--out", str(tmp_path)]) == 1
    assert "FAIL  " in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        ["budget-sweep", "--task", "bandit", "--budgets", "64,128", "--groups", "2,8,32", "--reps", "1500"],
        ["gap", "--cells", "2x4", "--chains", "1500"],
        ["train-sweep", "--N", "32", "--G", "4,16", "--iters", "2", "--seeds", "2", "--sft-steps", "20"],
        ["pilot", "--n", "64", "--G", "8", "--seeds", "2", "--n-boot", "20"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_every_study_runs(arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = cli.main(["lab", *arguments, "--out", str(tmp_path)])
    out = capsys.readouterr().out
    assert code == int("FAIL" in out)
    (record,) = tmp_path.glob("*.json")
    claims = json.loads(record.read_text())["claims"]
    assert claims
    assert all(isinstance(item["holds"], bool) for item in claims)
    assert len(list(tmp_path.glob("*.csv"))) == 1
    assert len(list(tmp_path.glob("*.png"))) == int(arguments[0] != "pilot")
    assert ("G*(theta) on the way" in out) == (arguments[0] == "train-sweep")


def test_selftest(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert cli.main(["lab", "selftest"]) == 0
    assert capsys.readouterr().out.count("ok    ") == 7
    monkeypatch.setattr("grpo_kernels.lab.selftest.silent_rate", lambda p, G: 0.5)
    assert cli.main(["lab", "selftest"]) == 1
    assert "FAIL  silent groups" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["mse-curve", "--group", "2"], "Did you mean --groups?"),
        (["mse-curve", "--groups", "2,x"], "argument --groups"),
        (["mse-curve", "--groups", "0,2"], "must be counts of at least 2 such as 2,4,8"),
        (["gap", "--cells", "2"], "like 2x2,1x8, got '2'"),
        (["mse-curve", "--task", "pears"], "invalid choice: 'pears'"),
        (["train-sweep", "--task", "bandit"], "invalid choice: 'bandit'"),
        (["advize"], "invalid choice: 'advize'"),
        (["advise", "--budget", "many", "--rewards", "r.npy"], "argument --budget"),
        (["mse-curve", "--groups", "1,2"], "must be counts of at least 2"),
        (["budget-sweep", "--budgets", "64,"], "argument --budgets: must be counts of at least 1"),
        (["pilot", "--seeds", "0"], "argument --seeds: must be a whole number of at least 1, got '0'"),
        (["train-sweep", "--seeds", "1"], "argument --seeds: must be a whole number of at least 2, got '1'"),
        (["mse-curve", "--reps", "-5"], "argument --reps"),
        (["gap", "--cells", "2x1"], "2 or more responses"),
        (["gap", "--cells", "2x2x2"], "like 2x2,1x8"),
        ([], "COMMAND"),
    ],
)
def test_bad_options(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["lab", *arguments])
    assert stop.value.code == 64
    assert text in capsys.readouterr().err


def test_settings_that_do_not_fit_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["lab", "mse-curve", "--task", "bandit", "--groups", "3", "--N", "64", "--out", str(tmp_path)]
    assert cli.main(arguments) == 64
    assert "N must be a multiple of G = 3, got 64" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["budget-sweep", "--budgets", "4", "--groups", "8,16"], "N must be at least the least G, 8, got 4"),
        (["budget-sweep", "--budgets", "12", "--groups", "8"], "N must be a multiple of G = 8, got 12"),
        (["train-sweep", "--N", "2", "--G", "4"], "N must be a multiple of G = 4, got 2"),
        (["train-sweep", "--champion", "3"], "champion must be one of"),
        (["pilot", "--task", "pair", "--G", "3"], "G must be >= 4, got 3"),
        (["gap", "--eta", "-1"], "eta must be > 0, got -1.0"),
        (["gap", "--beta", "0"], "beta must be > 0, got 0.0"),
        (["gap", "--out", "{file}"], "--out must be a folder to write to"),
        (["mse-curve", "--out", "{file}/below"], "--out must be a folder to write to"),
    ],
)
def test_what_cannot_be_done_is_found_before_the_study(
    arguments: list[str], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def started(*_given: object, **_options: object) -> None:
        raise AssertionError("the study ran")

    monkeypatch.setattr("grpo_kernels.lab.studies.warm_up", started)
    monkeypatch.setattr("grpo_kernels.lab.gap_law.noise_covariance", started)
    file = tmp_path / "file"
    file.write_text("")
    arguments = [part.format(file=file) for part in arguments]
    out = [] if "--out" in arguments else ["--out", str(tmp_path / "out")]
    assert cli.main(["lab", *arguments, *out]) == 64
    error = capsys.readouterr().err
    assert text in error
    assert error.count("\n") == 1


def test_files_that_hold_no_pilot_are_one_line(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (files / "empty.npy").write_bytes(b"")
    (files / "text.npy").write_text("1 2 3")
    np.savez(files / "many.npz", r=np.zeros(3))
    spoilt = np.load(files / "s.npy")
    spoilt[0, 0, 0] = np.nan
    np.save(files / "spoilt.npy", spoilt)
    for name, text in (
        ("empty.npy", "--scores must be a .npy file"),
        ("text.npy", "--scores must be a .npy file"),
        ("many.npz", "an archive"),
        ("spoilt.npy", "scores must be finite, got nan"),
        (".", "--scores must be a .npy file"),
    ):
        assert advise(files, "--scores", str(files / name)) == 64
        error = capsys.readouterr().err
        assert text in error
        assert error.count("\n") == 1
    assert advise(files, "--scores", str(files / "s.npy"), "--loo-sum-sq", "3") == 64
    assert "loo_sum_sq must be None with scores" in capsys.readouterr().err
    assert advise(files, "--scores", str(files / "s.npy"), "--budget", "1") == 64
    assert "N must be >= 2, got 1" in capsys.readouterr().err


def test_each_command_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("advise", "mse-curve", "budget-sweep", "train-sweep", "pilot", "gap", "selftest"):
        with pytest.raises(SystemExit):
            cli.main(["lab", command, "--help"])
        assert f"example: grpo-kernels lab {command}" in " ".join(capsys.readouterr().out.split())


def test_the_lab_needs_torch_alone() -> None:
    program = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("matplotlib", "numpy", "rich", "PIL", "transformers"):
            raise ModuleNotFoundError("absent: " + name, name=name)
sys.meta_path.insert(0, Absent())
import warnings; warnings.simplefilter("ignore")  # torch misses numpy
from grpo_kernels import cli, lab
constants = lab.estimate_constants([[1, 0, 1, 0]] * 2, [[[1.0], [0], [2], [1]], [[0.0], [1], [1], [3]]], n_boot=0)
print(round(constants.A, 3), cli.main(["lab", "selftest"]), cli.main(["lab", "gap"]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1].split()[1:] == ["0", "64"]
    assert "rich must be installed for the lab's progress bars" in done.stderr
    assert "pip install 'grpo-kernels[lab]'" in done.stderr
