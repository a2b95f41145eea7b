"""Values at the edge of what float32, a config file or a tracer can carry: honoured, or refused in the one format."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

import grpo_kernels as gk

IDS = torch.tensor([[0, 3, 1], [2, 4, 0]])
LOGITS = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0))
ADVANTAGES = torch.tensor([0.0, 1.0])


def call(**options: Any) -> gk.GRPOLossOutput:
    return gk.grpo_loss(LOGITS, IDS, **({"advantages": ADVANTAGES} | options))


@pytest.mark.parametrize("value", [1e-46, 1e-40, 1e39, 10**400, -1.0, math.nan, math.inf])
@pytest.mark.parametrize("argument", ["temperature", "normalizer", "entropy_normalizer"])
def test_numbers_that_float32_does_not_hold_are_refused(argument: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"grpo_loss: {argument} must be finite and > 0"):
        call(**{argument: value})


@pytest.mark.parametrize("value", [1e-60, 1e39, 0.0])
@pytest.mark.parametrize("argument", ["temperature", "normalizer", "entropy_normalizer"])
def test_tensors_are_judged_in_the_dtype_they_are_used_in(argument: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"grpo_loss: {argument} must be finite and > 0"):
        call(**{argument: torch.tensor(value, dtype=torch.float64)})


@pytest.mark.parametrize("field", ["temperature", "logit_scale", "softcap", "delta", "beta", "epsilon_high"])
def test_a_config_refuses_them_too(field: str) -> None:
    with pytest.raises(ValueError, match=f"GRPOLossConfig: {field}"):
        gk.GRPOLossConfig(**{field: 10**400})


def test_a_config_survives_json() -> None:
    config = gk.GRPOLossConfig(beta=0.1, epsilon_high=0.28)
    again = gk.GRPOLossConfig(**json.loads(json.dumps(dataclasses.asdict(config))))
    assert again.beta == config.beta
    assert again.epsilon_high == config.epsilon_high


def test_a_silent_token_stays_silent_under_an_infinite_weight() -> None:
    weight = torch.tensor([math.inf, 1.0])
    logits = LOGITS.clone().requires_grad_()
    out = gk.grpo_loss(logits, IDS, advantages=ADVANTAGES, importance_sampling_ratio=weight)
    out.loss.backward()
    assert out.loss.item() == pytest.approx(-0.5)
    assert logits.grad is not None
    assert (logits.grad[0] == 0).all()
    assert logits.grad[1].isfinite().all()


def test_rewards_of_any_size_have_their_advantages() -> None:
    assert gk.group_advantages(torch.tensor([1e20, -1e20])).tolist() == pytest.approx([2**-0.5, -(2**-0.5)])
    small = gk.group_advantages(torch.tensor([1e-25, 2e-25]), eps=0.0)
    assert small.tolist() == pytest.approx([-(2**-0.5), 2**-0.5])


def test_missing_values_of_our_own_are_reported() -> None:
    engine = torch.full((4,), -1.0)
    with pytest.warns(UserWarning, match="disagree"):
        result = gk.check_rollout_logps(engine, torch.tensor([-1.0, math.nan, -1.0, -math.inf]))
    assert (result.missing, result.agree) == (2, False)
    with pytest.raises(TypeError, match="check_rollout_logps: engine must be a tensor"):
        gk.check_rollout_logps(None, engine)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [math.nan, -math.inf, math.inf, -1.0])
def test_an_additive_attention_mask_is_refused(value: float) -> None:
    mask = torch.tensor([[0.0, 0.0, value], [0.0, 0.0, 0.0]])
    with pytest.raises(ValueError, match="completion_mask must be finite and >= 0"):
        call(completion_mask=mask)


def test_flags_are_bools() -> None:
    with pytest.raises(TypeError, match="per_token_logps: entropy must be True or False, got 1"):
        gk.per_token_logps(LOGITS, IDS, entropy=1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="grpo_loss: inplace must be True or False, got 'no'"):
        call(inplace="no")


def test_one_flat_sequence_may_have_its_temperature_as_a_sequence() -> None:
    flat = gk.per_token_logps(LOGITS[0], IDS[0], temperature=torch.full((1, 1), 0.5))
    assert torch.equal(flat.logps, gk.per_token_logps(LOGITS[0], IDS[0], temperature=0.5).logps)


def test_a_temperature_made_in_inference_mode_can_be_trained_with() -> None:
    with torch.inference_mode():
        temperature = torch.tensor(0.5)
    logits = LOGITS.clone().requires_grad_()
    gk.grpo_loss(logits, IDS, advantages=ADVANTAGES, temperature=temperature).loss.backward()
    assert logits.grad is not None


def test_fake_tensors_have_shapes() -> None:
    with FakeTensorMode():
        out = gk.grpo_loss(torch.randn(2, 3, 5), torch.zeros(2, 3, dtype=torch.int64), advantages=torch.ones(2))
    assert out.loss.shape == ()


def test_retained_gradients_of_logits_given_away_do_not_crash() -> None:
    logits = LOGITS.clone().requires_grad_() * 1
    logits.retain_grad()
    gk.grpo_loss(logits, IDS, advantages=ADVANTAGES, inplace=True).loss.backward()


def test_an_empty_environment_variable_is_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(gk.backends.ENVIRONMENT, "")
    assert call().loss.isfinite()


def test_side_inputs_of_the_bare_function_get_no_gradient() -> None:
    advantages = ADVANTAGES.clone().requires_grad_()
    loss, _ = gk.GRPOLossFunction.apply(LOGITS, IDS, advantages, None, None, None, gk.GRPOLossConfig())
    assert not loss.requires_grad


def test_many_short_sliced_sequences_are_read_by_token() -> None:
    """`[B, T]` slices with few tokens and many sequences go through T matrices, not B."""
    from grpo_kernels.ops import rows

    wide = torch.randn(50, 3, 9)
    view, ids = wide[:, :-1], torch.randint(0, 9, (50, 2))
    assert len(rows._matrices(view, rows._split(view))) == 2
    ours, theirs = (gk.per_token_logps(x, ids, entropy=True) for x in (view, view.contiguous()))
    assert torch.equal(ours.logps, theirs.logps)
    leaf = wide.clone().requires_grad_()
    mask = torch.rand(50, 2) > 0.5
    gk.per_token_logps(leaf[:, :-1], ids, mask=mask).logps.sum().backward()
    other = view.contiguous().requires_grad_()
    gk.per_token_logps(other, ids, mask=mask).logps.sum().backward()
    assert leaf.grad is not None
    assert other.grad is not None
    assert torch.equal(leaf.grad[:, :-1], other.grad)
