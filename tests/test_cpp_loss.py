"""The one-pass loss of the C++ kernels: formulas made from the Python copy, and the gradient while a row is at hand."""

from __future__ import annotations

import math
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from cpp_support import instruction_set, needs_cpp, row_op, rows_like
from support import same_bits
from torch import Tensor

import grpo_kernels
from grpo_kernels import formulas

__all__ = ["instruction_set"]
ROOT = Path(__file__).parents[1]
INF, NAN = math.inf, math.nan
TRANSLATE = runpy.run_path(str(ROOT / "csrc" / "translate.py"))


def sides(count: int, seed: int) -> dict[str, Tensor]:
    """Advantages, old and reference log-probs beside ours, and weights, with the awkward values among them."""
    generator = torch.Generator().manual_seed(seed)
    a, o, f, w = torch.randn(4, count, generator=generator, dtype=torch.float64)
    a[::5], w[::7] = 0.0, 0.0
    o[3::11], w[5::13] = 200.0, INF
    return {"advantages": a, "old": -5 + 0.5 * o, "ref": -5 + 0.5 * f, "weight": w.abs()}


SURROGATES = {
    "clip": (0.8, 1.28), "cispo": (0.5, 1.5), "sapo": (0.8, 1.28), "gpg": (0.8, 1.28), "dro": (0.8, 1.28),
    "dppo_tv": (0.05, 0.1), "dppo_kl": (0.01, 0.02),
}  # fmt: skip


@needs_cpp
@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("surrogate", SURROGATES)
@pytest.mark.parametrize("kl", ["none", "k1", "abs+", "k2", "k3", "k3+"])
@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize("given", [("old",), ("weight",), ("old", "weight"), ()])
def test_terms_are_those_of_the_python_formulas(
    surrogate: str, kl: str, corrected: bool, bounded: bool, given: tuple[str, ...]
) -> None:
    logits = torch.randn(64, 40, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    ids, heat, extra = torch.arange(64) % 40, torch.ones((), dtype=torch.float64), sides(64, 2)
    old, weight = (extra[name] if name in given else None for name in ("old", "weight"))
    most = (0.3, 0.1, 0.4, 0.2) if bounded else (INF, 0.1, INF, INF)
    limits = (*SURROGATES[surrogate], 3.0, 5.0, 1.0, 1.05, *most)
    one = torch.ones((), dtype=torch.float64)
    found = row_op("loss")(
        logits, ids, heat, 1.0, None, False, extra["advantages"], old, extra["ref"], weight, None, limits, surrogate,
        kl, corrected, bounded, "", one, one, None,
    )  # fmt: skip
    logp = found[0]
    ratio, loss, slope, own, value = formulas.token_terms(
        torch.zeros_like(logp) if old is None else logp - old, extra["advantages"], logp, weight, extra["ref"], *limits,
        surrogate, bounded, weight is not None, kl.removesuffix("+"), kl.endswith("+"), bounded, corrected,
        bounded and weight is not None,
    )  # fmt: skip
    expected = {"ratio": ratio, "loss": loss, "kl": value, "coef": slope + own}
    for (name, theirs), ours in zip(expected.items(), found[5:9], strict=True):
        torch.testing.assert_close(
            ours, theirs.expand_as(ours), rtol=1e-12, atol=1e-14, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}"
        )


@needs_cpp
@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("entropy", [False, True])
def test_the_gradient_in_one_pass_has_the_bits_of_two(dtype: torch.dtype, softcap: float | None, entropy: bool) -> None:
    logits = rows_like(2100, dtype)
    count = len(logits)
    extra = {name: values.to(torch.float64 if dtype == torch.float64 else torch.float32)
             for name, values in sides(count, 3).items()}  # fmt: skip
    wide = extra["advantages"].dtype
    ids = torch.arange(count) * 7
    ids[1] = -1
    heat = torch.tensor(0.8, dtype=wide)
    share, scale = torch.rand(count, dtype=wide), torch.tensor(1 / 3, dtype=wide)
    spread = torch.tensor(-0.01, dtype=wide) if entropy else None
    arguments = (
        ids, heat, 1.3, softcap, entropy, extra["advantages"], extra["old"], extra["ref"], None, None,
        (0.8, 1.2, INF, INF, 0.0, 0.0, INF, 0.1, INF, INF), "clip", "k3", False, False, "ratio", share, scale, spread,
    )  # fmt: skip
    two = row_op("loss")(logits, *arguments)
    coef = torch.where((two[8] == 0) | (ids < 0), 0.0, two[8] * scale)
    of_entropy = None if spread is None else torch.where(ids < 0, 0.0, spread.expand(count))
    expected = row_op("row_grad")(logits, ids, heat, 1.3, softcap, *two[1:5], coef, of_entropy)
    one = row_op("loss_")(logits, *arguments)
    assert all(same_bits(a, b) for a, b in zip(one, two, strict=True))
    assert same_bits(logits, expected) and (logits[1] == 0).all() and (logits[0] != 0).any()


@needs_cpp
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_a_gradient_is_scaled_in_place(dtype: torch.dtype) -> None:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    rows = torch.randn(3, 5, 70).to(dtype)[:, 1:4, :33]  # strided
    rows[0, 0] = 0
    before = rows.clone()
    scale = row_op("row_scale_")
    scale(rows, torch.tensor(1.0, dtype=wide))
    assert same_bits(rows, before)
    scale(rows, torch.tensor(0.3, dtype=wide))
    assert same_bits(rows, (before.to(wide) * torch.tensor(0.3, dtype=wide)).to(dtype))
    scale(rows, torch.tensor(INF, dtype=wide))
    assert (rows[0, 0] == 0).all() and not rows[1:].isfinite().any()


@needs_cpp
def test_limits_of_another_length_are_refused() -> None:
    rows, ids, one = torch.zeros(2, 5), torch.tensor([0, 1]), torch.ones(())
    with pytest.raises(RuntimeError, match="limits"):
        row_op("loss")(
            rows, ids, one, 1.0, None, False, torch.ones(2), None, None, None, None, (0.8, 1.2), "clip", "none", False,
            False, "ratio", one, one, None,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("def f(x):\n    return tl.tanh(x)\n", "tl.tanh"),
        ("def f(x):\n    while x > 0:\n        x = x - 1\n    return x\n", "while"),
        ("def f(x):\n    return x[0]\n", "x\\[0\\]"),
        ("def f(x):\n    return 0 < x < 1\n", "0 < x < 1"),
        ("def f(x):\n    return x ** 2\n", "x \\*\\* 2"),
    ],
)
def test_what_cannot_be_translated_is_refused(source: str, what: str) -> None:
    with pytest.raises(SyntaxError, match=f"f: cannot turn into C\\+\\+: {what}"):
        TRANSLATE["header"](source, "f")


def test_a_translation_holds_what_the_entry_calls_and_no_more() -> None:
    source = """
def a(x):
    return x
def b(x, kind, on):
    if on and kind == 'k':
        x = a(x)
    return x
def c(x):
    return x[0]
"""
    made = TRANSLATE["header"](source, "b")
    assert "inline double b(double x, std::string_view kind, bool on) {" in made
    assert "inline double a(double x)" in made and " c(" not in made


@needs_cpp
def test_a_library_of_other_formulas_is_refused(tmp_path: Path) -> None:
    """Formulas that changed after the build must not run in their old form."""
    package = tmp_path / "grpo_kernels"
    shutil.copytree(Path(grpo_kernels.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    program = "import grpo_kernels as gk; print(gk.backends.report()['cpp'])"

    def report() -> Any:
        command = [sys.executable, "-c", program]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout

    assert report().startswith("available")
    with (package / "formulas.py").open("a") as file:
        file.write("\n# another copy\n")
    assert "built from other formulas" in report()
