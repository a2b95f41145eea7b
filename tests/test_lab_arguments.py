"""Arguments of the lab in every layout and number type, and errors in words."""

from __future__ import annotations

import dataclasses
import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch

from grpo_kernels import lab

BANDIT = lab.GradConstants(Vb=0.0133302, A=0.658886, B2=0.745568, J2=0.0395002, A0=0.981529)
ATOMS: dict[str, Any] = {"P": [[0.5, 0.5]], "R": [[1.0, 0.0]], "S": [[[1.0], [-1.0]]]}


def pilot(P: int = 10, G: int = 6, d: int = 4, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.rand(P, G, generator=generator, dtype=torch.float64)
    return rewards, torch.randn(P, G, d, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize(
    ("call", "kind", "text"),
    [
        (
            lambda r, s: lab.estimate_constants(r, gram=torch.einsum("pad,qbd->paqb", s, s), mask=r[:2]),
            ValueError,
            "estimate_constants: mask must have the shape",
        ),
        (lambda r, s: lab.group_ustats(r, s[:, :, :0]), ValueError, "scores must have the shape .* and d >= 1"),
        (lambda r, s: lab.group_ustats(r[:, :0], s[:, :0]), ValueError, "rewards must have responses"),
        (lambda r, s: lab.group_ustats(r, s.to(torch.complex64)), TypeError, "scores must be real"),
        (lambda r, s: lab.ghost_gram(s.unsqueeze(3)[..., :0], s[:, :1].unsqueeze(3)), ValueError, "h must have"),
        (lambda r, s: lab.group_ustats(np.ma.array(r, mask=r < 0.1), s), TypeError, "its mask would be lost"),
        (lambda r, s: lab.estimate_constants(r, s, seed=1.5), TypeError, "seed must be an int, got float"),
        (lambda r, s: lab.sketch(s, 2, seed="a"), TypeError, "sketch: seed must be an int, got str"),
        (lambda r, s: lab.HeadScores(4, 2, seed="a"), TypeError, "HeadScores: seed must be an int"),
        (lambda r, s: lab.make_bandit(seed=1 << 70), ValueError, "make_bandit: seed must have at most 64 bits"),
        (lambda r, s: lab.draw_pilot(lab.make_bandit(), 0, 4, 0), ValueError, "draw_pilot: n must be >= 1"),
        (lambda r, s: lab.exact_constants([[1.0]], [[1.0]], {}), TypeError, "S must be an array, got dict"),
        (lambda r, s: lab.optimal_group_size({"Vb": 1}), TypeError, "constants must be GradConstants, got dict"),
        (lambda r, s: lab.optimal_group_size(BANDIT, multiple_of=True), TypeError, "multiple_of must be an int"),
        (lambda r, s: lab.binary_weight("loo", 1, 0.5), ValueError, "binary_weight: G must be >= 2"),
        (lambda r, s: lab.binary_weight("std0", 2, 0.5, eps=math.inf), ValueError, "eps must be at least 0"),
        (lambda r, s: lab.binary_second_moment("loo", 4, 0.5, 1, -1, 1), ValueError, "m1 must be finite and at"),
        (lambda r, s: lab.silent_rate(1.5, 4), ValueError, r"silent_rate: p must be in \[0, 1\]"),
        (lambda r, s: lab.silent_rate(math.nan, 4), ValueError, r"p must be in \[0, 1\], got nan"),
        (lambda r, s: lab.silent_rate(0.5, 0), ValueError, "silent_rate: G must be whole numbers >= 1"),
        (lambda r, s: lab.silent_rate(0.5, [2.5]), ValueError, r"G must be whole numbers >= 1, got \[2.5\]"),
    ],
)
def test_errors_have_words_and_the_right_name(call: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        call(*pilot())


def test_numpy_of_any_layout_comes_in_and_goes_out() -> None:
    rewards, scores = (value.numpy() for value in pilot())
    right = lab.estimate_constants(rewards, scores)
    frozen = scores.copy()
    frozen.setflags(write=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for other in (scores[:, :, ::-1], scores.astype(">f8"), np.asfortranarray(scores), frozen):
            assert pytest.approx(right.A, rel=1e-12) == lab.estimate_constants(rewards, other).A
        assert pytest.approx(right.A, rel=1e-12) == lab.estimate_constants(rewards[::-1], scores[::-1]).A
    stats = lab.group_ustats(rewards, scores)
    assert all(isinstance(getattr(stats, field.name), np.ndarray) for field in dataclasses.fields(stats))
    assert stats.kept.all()
    assert isinstance(lab.group_ustats(torch.tensor(rewards), scores).a2, torch.Tensor)


def test_numpys_whole_numbers_are_whole_numbers() -> None:
    two, eight = np.int64(2), np.int32(8)
    assert lab.optimal_group_size(BANDIT, N=np.int64(64), g_min=two, g_max=eight).g_int == 8
    assert lab.sketch(np.zeros((2, 2, 3)), two, seed=eight).shape == (2, 2, 2)
    assert lab.binary_weight("loo", eight, 0.5) == pytest.approx(1)
    assert lab.make_bandit(M=two).P.shape[0] == 2
    assert lab.simulate_mse(**ATOMS, n=two, G=two, reps=eight, seed=two)
    assert lab.HeadScores(eight, two, k=two).group_size == 2
    assert lab.GroupSizeMonitor(every=two, g_max=eight).due(4)
    assert lab.estimate_constants(*pilot(), n_boot=eight, seed=two).boot is not None


def test_second_moments_broadcast() -> None:
    rates, ones = np.array([0.2, 0.5]), np.array([1.0, 2.0])
    found = lab.binary_second_moment("std1", 8, rates, 0.1, ones, 3.0)
    assert isinstance(found, np.ndarray)
    single = [lab.binary_second_moment("std1", 8, p, 0.1, m1, 3.0) for p, m1 in zip(rates, ones, strict=True)]
    assert found == pytest.approx(single)


def test_what_holds_tensors_can_be_compared() -> None:
    one, other = (lab.estimate_constants(*pilot(), seed=3) for _ in range(2))
    assert one == other
    assert one != dataclasses.replace(other, Vb=0.0)
    assert lab.make_bandit() != lab.make_bandit()
    stats = lab.group_ustats(*pilot())
    assert stats == stats


def test_a_silent_group_gives_exactly_nothing() -> None:
    _, scores = pilot(P=2, G=7)
    stats = lab.group_ustats(torch.full((2, 7), 0.1, dtype=torch.float64), scores)
    assert stats.silent.all()
    for name in ("a2", "a3", "a4", "loo", "optimal"):
        assert (getattr(stats, name) == 0).all(), name


def test_a_common_part_of_the_scores_takes_no_digits() -> None:
    rewards, scores = pilot()
    right, far = (lab.group_ustats(rewards, scores + shift) for shift in (0.0, 1e6))
    for name in ("a2", "a3", "a4", "loo"):
        torch.testing.assert_close(getattr(far, name), getattr(right, name), rtol=1e-7, atol=1e-8)
