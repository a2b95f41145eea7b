"""The short way of `per_token_logps` in C++, and the look at the tokens: both give what the full checks give."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from cpp_support import needs_cpp, row_op
from hypothesis import given
from hypothesis import strategies as st
from support import same_bits
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels import screening
from grpo_kernels.ops.schema import DEAD

pytestmark = needs_cpp
NAN, INF = math.nan, math.inf
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
TRANSFORM = {"temperature": 0.7, "logit_scale": 1.3, "softcap": 5.0}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the ways that calls have gone."""
    found: list[str] = []
    usual = screening.live_targets
    monkeypatch.setattr("grpo_kernels.functional.live_targets", lambda *a, **k: found.append("full") or usual(*a, **k))
    return found


def rows(dtype: torch.dtype, shape: tuple[int, ...] = (2, 3)) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(*shape, 37, generator=generator)
    return logits.to(dtype), torch.randint(-1, 37, shape, generator=generator)


def ran(logits: Tensor, *arguments: Any, **options: Any) -> tuple[Tensor, ...]:
    leaf = logits.detach().clone().requires_grad_()
    out = gk.per_token_logps(leaf, *arguments, **options)
    wanted = out.logps * 0.3 if out.entropy is None else out.logps * 0.3 + out.entropy
    wanted.sum().backward()
    found = [out.logps, out.lse, leaf.grad] + ([] if out.entropy is None else [out.entropy])
    return tuple(t.detach() for t in found if t is not None)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("transform", [{}, TRANSFORM], ids=["plain", "transformed"])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("shape", [(6,), (2, 3)], ids=str)
def test_both_ways_have_the_same_bits(
    calls: list[str], dtype: torch.dtype, entropy: bool, transform: dict[str, float], masked: bool, shape: Any
) -> None:
    logits, ids = rows(dtype, shape)
    mask = torch.arange(6).reshape(shape) % 3 if masked else None
    quick = ran(logits, ids, mask=mask, entropy=entropy, **transform)
    assert calls == []
    heat = torch.tensor(transform.get("temperature", 1.0), dtype=torch.float64)
    full = ran(logits, ids, mask=mask, entropy=entropy, **(transform | {"temperature": heat}))
    assert calls == ["full"]
    assert all(same_bits(a, b) for a, b in zip(quick, full, strict=True)) and len(quick) == 3 + entropy


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_log_prob_given_back_makes_the_ratio_exactly_one(dtype: torch.dtype) -> None:
    """Whatever the temperature is in float32, both functions divide by the same number."""
    logits, ids = rows(dtype)
    old = gk.per_token_logps(logits, ids, **TRANSFORM).logps
    config = gk.GRPOLossConfig(**TRANSFORM)
    metrics = gk.grpo_loss(logits, ids, config=config, advantages=torch.ones(2), old_per_token_logps=old).metrics
    assert metrics["ratio/min"] == metrics["ratio/max"] == 1


def test_a_later_change_of_the_targets_changes_nothing() -> None:
    logits, ids = rows(torch.float32)
    expected = ran(logits, ids)[2]
    leaf = logits.requires_grad_()
    logps = gk.per_token_logps(leaf, ids).logps
    ids.fill_(3)
    (0.3 * logps).sum().backward()
    assert same_bits(leaf.grad, expected)


def test_the_environment_is_asked_at_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, ids = rows(torch.float32)
    for asked, expected in (("", "cpp"), ("torch", "torch"), ("cpp", "cpp"), ("auto", "cpp")):
        monkeypatch.setenv(gk.backends.ENVIRONMENT, asked)
        gk.per_token_logps(logits, ids)
        assert gk.backends.last_used() == expected
    monkeypatch.setenv(gk.backends.ENVIRONMENT, "gpu")
    with pytest.raises(ValueError, match="GRPO_KERNELS_BACKEND must be one of"):
        gk.per_token_logps(logits, ids)


def test_numbers_are_told_from_flags_though_python_holds_them_equal() -> None:
    logits, ids = rows(torch.float32)
    for good, bad in (({"temperature": 1}, {"temperature": True}), ({"entropy": True}, {"entropy": 1})):
        gk.per_token_logps(logits, ids, **good)
        with pytest.raises(TypeError, match=next(iter(bad))):
            gk.per_token_logps(logits, ids, **bad)


@pytest.mark.parametrize(
    "bad", [{"temperature": [1.0]}, {"softcap": {}}, {"entropy": [1]}, {"logit_scale": set()}], ids=str
)
def test_what_cannot_be_remembered_gets_the_usual_text(bad: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=f"per_token_logps: {next(iter(bad))} must be"):
        gk.per_token_logps(*rows(torch.float32), **bad)


UNUSUAL = {
    "a parameter": lambda logits, ids: (torch.nn.Parameter(logits), ids, None),
    "a mask that requires grad": lambda logits, ids: (logits, ids, torch.ones(2, 3, requires_grad=True)),
}


@pytest.mark.parametrize("case", UNUSUAL)
def test_what_is_unusual_takes_the_full_checks(calls: list[str], case: str) -> None:
    logits, ids = rows(torch.float32)
    given_logits, given_ids, mask = UNUSUAL[case](logits, ids)
    assert same_bits(
        gk.per_token_logps(given_logits, given_ids, mask=mask).logps, gk.per_token_logps(logits, ids).logps
    )
    assert calls == ["full"]


def test_layouts_that_cannot_be_read_get_the_full_checks_message() -> None:
    logits, ids = rows(torch.float32)
    with pytest.raises(ValueError, match="must have stride 1 on the last axis"):
        gk.per_token_logps(logits.transpose(1, 2).contiguous().transpose(1, 2), ids)
    with pytest.raises(TypeError, match="must be dense"):
        gk.per_token_logps(logits.to_sparse(), ids)
    with pytest.raises(ValueError, match="targets must be on the device"):
        gk.per_token_logps(logits, ids.to("meta"))


def test_upstream_gradients_of_either_output_alone() -> None:
    logits, ids = rows(torch.float64)
    found = []
    for impl in ("cpp", "torch"):
        leaf = logits.clone().requires_grad_()
        out = gk.per_token_logps(leaf, ids, entropy=True, impl=impl)
        found.append(
            [torch.autograd.grad(value.sum(), leaf, retain_graph=True)[0] for value in (out.entropy, out.logps)]
        )
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)


MASKS = [None, torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, *DTYPES]
SIDES = ("old", "ref", "rollout")


@given(st.integers(0, 2**32), st.sampled_from(MASKS), st.sampled_from([torch.int32, torch.int64]), st.booleans())
def test_the_look_in_cpp_is_that_of_python(seed: int, mask_dtype: Any, ids_dtype: torch.dtype, spoil: bool) -> None:
    """The same targets, and the same verdict on masks, ids and log-probs that are bad, at live tokens or elsewhere."""
    generator = torch.Generator().manual_seed(seed)

    def choose(*values: float) -> Tensor:
        return torch.tensor(values)[torch.randint(0, len(values), (2, 4), generator=generator)]

    ids = choose(-100, -1, 0, 1, 2, 4, *([5] * (spoil and seed % 3 == 0))).to(ids_dtype)
    mask = None
    if mask_dtype is not None:
        bad = [] if not spoil or mask_dtype in (torch.bool, torch.uint8) or seed % 5 else [-1.0]
        bad += [NAN, INF] if spoil and mask_dtype in DTYPES and seed % 5 == 1 else []
        mask = choose(0, 0, 1, 1, 1, *bad).to(mask_dtype)
    sides = {
        name: choose(-1.5, -2.0, -0.1, *([NAN, INF] if spoil and seed % 7 == i else [])) for i, name in enumerate(SIDES)
    }
    if seed % 2:
        sides = {name: value.to(torch.bfloat16) for name, value in sides.items()}
    inside = [None, 8, 5, 0][seed % 4]
    if inside is not None:
        ids, mask = ids.flatten(), None if mask is None else mask.flatten()
        sides = {name: value.flatten() for name, value in sides.items()}

    def look(impl: str) -> Tensor:
        return screening.live_targets("f", impl, "ids", ids, "mask", mask, 5, inside=inside, **sides)

    targets, fine = row_op("live_targets")(ids, mask, 5, ids.numel() if inside is None else inside, *sides.values())
    if fine:
        expected = look("torch")
        assert torch.equal(targets, expected) and torch.equal(look("cpp"), expected)
        assert targets.dtype == ids.dtype and (targets[targets < 0] == DEAD).all()
        return
    said = []
    for impl in ("torch", "cpp"):
        with pytest.raises(ValueError, match="f: ") as refusal:
            look(impl)
        said.append(str(refusal.value))
    assert said[0] == said[1]
