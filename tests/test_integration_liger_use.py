"""Liger's losses in use: which options count, completions of one token, infinities, bad arguments by their names."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from parity_support import assert_equal
from test_integration_liger import both_modules, function_batch, hidden_batch

import grpo_kernels as gk
from grpo_kernels.integrations import liger as ours
from grpo_kernels.integrations.given_logps import token_losses_of_logps

REFUSED: list[dict[str, Any]] = [
    {"delta": 2.0, "loss_type": "cispo"}, {"importance_sampling_level": "sequence", "loss_type": "vespo"},
    {"loss_type": "grpoo"}, {"epsilon_low": -0.5}, {"sapo_temperature_pos": -1.0}, {"sapo_temperature_neg": 0.0},
]  # fmt: skip


@pytest.mark.parametrize("option", REFUSED, ids=str)
def test_options_out_of_range_or_of_no_meaning_are_refused(option: dict[str, Any]) -> None:
    logits, arguments = function_batch({})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a cap of cispo below 1
        field = next(iter(option)).removesuffix("_low")
        text = f"GRPOLossConfig: {field} must be"
        with pytest.raises(ValueError, match=text):
            ours.LigerFusedLinearGRPOLoss(**option)
        option = {name.replace("epsilon_", "eps_"): value for name, value in option.items()}
        with pytest.raises(ValueError, match=text):
            ours.triton_grpo_loss(logits, **arguments, **option)


IGNORED: list[dict[str, Any]] = [
    {"loss_type": "dapo", "sapo_temperature_pos": 0.3}, {"loss_type": "dapo", "vespo_k_pos": 9.0},
    {"loss_type": "grpo", "max_completion_length": 7}, {"loss_type": "sapo", "epsilon_low": 0.01, "epsilon_high": 5.0},
    {"loss_type": "cispo", "epsilon_low": 0.01, "epsilon_high": 5.0},
]  # fmt: skip


@pytest.mark.parametrize("option", IGNORED, ids=str)
def test_options_without_effect_in_liger_have_none_here(option: dict[str, Any]) -> None:
    theirs, our = both_modules(hidden_batch(), **option)
    keep = ("loss_type", "epsilon_high") if option["loss_type"] == "cispo" else ("loss_type",)
    _, plain = both_modules(hidden_batch(), **{name: option[name] for name in keep})
    assert torch.equal(our[0], plain[0])
    assert_equal(our[0], theirs[0], str(option), rtol=1e-5)


@pytest.mark.parametrize("far", [False, True])
@pytest.mark.parametrize("low", [1.0, 3.0])
def test_a_lower_clip_that_no_ratio_reaches_is_ligers(low: float, far: bool) -> None:
    given_ = hidden_batch()
    given_["advantages"] = torch.tensor([-1.0, 0.5, -2.0])
    if far:  # a ratio below the least that a float tells from 1 - epsilon
        given_["old_per_token_logps"] = given_["old_per_token_logps"].clone()
        given_["old_per_token_logps"][2] += 45.0
    theirs, our = both_modules(given_, epsilon_low=low)
    for a, b in zip((our[0], *our[1], *our[2:]), (theirs[0], *theirs[1], *theirs[2:]), strict=True):
        assert_equal(a, b, f"{low}", rtol=1e-5)


@pytest.mark.parametrize("reduce", [False, True])
@pytest.mark.parametrize("shape", ["[B]", "[B, 1]"])
@pytest.mark.parametrize("loss_type", ["vespo", "dapo"])
def test_the_weight_of_a_completion_of_one_token(loss_type: str, shape: str, reduce: bool) -> None:
    rng = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 2, 7, generator=rng, dtype=torch.float64)
    ids, advantages = torch.tensor([[1], [0], [5]]), torch.tensor([1.0, -0.5, 0.25], dtype=torch.float64)
    weight = torch.tensor([[0.5], [1.0], [2.0]], dtype=torch.float64)
    out = ours.triton_grpo_loss(
        logits, None, None, ids, advantages, temperature=1.0, beta=0.0, loss_type=loss_type, reduce=reduce,
        vllm_is_ratio=weight.squeeze(1) if shape == "[B]" else weight,
    )[0]  # fmt: skip
    config = gk.GRPOLossConfig.preset("liger", loss_type=loss_type, beta=0.0)
    wanted = gk.reference.grpo_loss(logits[:, :-1], ids, config, advantages, importance_sampling_ratio=weight)
    torch.testing.assert_close(out if reduce else out.mean(), wanted, rtol=1e-9, atol=0)


@pytest.mark.parametrize("reduce", [False, True])
def test_advantages_of_tokens_are_taken_as_they_are(reduce: bool) -> None:
    logits, arguments = function_batch({})
    plain = ours.triton_grpo_loss(logits, reduce=reduce, delta=1.6, **arguments)
    arguments["advantages"] = arguments["advantages"][:, None].expand(3, 4)
    by_token = ours.triton_grpo_loss(logits, reduce=reduce, delta=1.6, **arguments)
    torch.testing.assert_close(by_token, plain, rtol=0, atol=0)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a_second_derivative_of_token_losses_raises(level: str) -> None:
    logits, arguments = function_batch({})
    leaf = logits.double().requires_grad_()
    losses = ours.triton_grpo_loss(leaf * 1.0, importance_sampling_level=level, beta=0.3, **arguments)[0]
    (grad,) = torch.autograd.grad(losses.sum(), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward is not supported"):
        torch.autograd.grad(grad.square().sum(), leaf)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a_second_derivative_in_the_log_probs_raises(level: str) -> None:
    logps = torch.full((2, 3), -1.0, requires_grad=True)
    config = gk.GRPOLossConfig(importance_sampling_level=level)
    losses, _, _ = token_losses_of_logps(
        "here", config, logps, torch.ones(2, 3), advantages=torch.tensor([1.0, -1.0]), old=torch.full((2, 3), -1.1)
    )
    (grad,) = torch.autograd.grad(losses.sum(), logps, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward is not supported"):
        torch.autograd.grad(grad.square().sum(), logps)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_an_infinite_log_prob_on_policy_has_a_ratio_of_1(level: str) -> None:
    logps = torch.tensor([[-1.0, -torch.inf], [-0.5, -2.0]], requires_grad=True)
    losses, _, ratio = token_losses_of_logps(
        "here", gk.GRPOLossConfig(importance_sampling_level=level), logps, torch.ones(2, 2),
        advantages=torch.tensor([1.0, -1.0]), old=None,
    )  # fmt: skip
    assert torch.equal(losses.detach(), torch.tensor([[-1.0, -1.0], [1.0, 1.0]]))
    assert torch.equal(ratio, torch.ones(2, 2))
    (grad,) = torch.autograd.grad(losses.sum(), logps)
    assert torch.equal(grad, torch.tensor([[-1.0, -1.0], [1.0, 1.0]]))


ZEROS = torch.zeros(3, 4)
BAD_CALLS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "as many rows as ids": (
        {"logits": torch.zeros(3, 4, 23)}, ValueError, r"logits must be \[3, 5, V\], got \[3, 4, 23\]",
    ),
    "flat logits": ({"logits": torch.zeros(15, 23)}, ValueError, r"logits must be \[3, 5, V\], got \[15, 23\]"),
    "flat ids": ({"completion_ids": torch.zeros(4, dtype=torch.int64)}, ValueError, r"completion_ids must be \[B, T\]"),
    "ids that are numbers": ({"completion_ids": ZEROS}, TypeError, "completion_ids must hold int32 or int64 ids"),
    "a longer mask": ({"completion_mask": torch.ones(3, 5)}, ValueError, r"completion_mask must .*, got \[3, 5\]"),
    "a negative mask": ({"completion_mask": -torch.ones(3, 4)}, ValueError, "completion_mask must be finite and >= 0"),
    "a shorter old": ({"old_logp": torch.zeros(3, 3)}, ValueError, r"old_logp must .*, got \[3, 3\]"),
    "an old of -inf": ({"old_logp": ZEROS - torch.inf}, ValueError, "old_logp must be finite at live tokens"),
    "a NaN in the reference": ({"ref_logp": ZEROS + torch.nan}, ValueError, "ref_logp must be finite at live tokens"),
    "no reference": ({"ref_logp": None}, ValueError, r"ref_logp must be given with beta=0\.04, got None"),
    "advantages of T": ({"advantages": torch.ones(4)}, ValueError, r"advantages must .*, got \[4\]"),
    "weights of T": ({"vllm_is_ratio": torch.ones(4)}, ValueError, r"vllm_is_ratio must .*, got \[4\]"),
}  # fmt: skip


@pytest.mark.parametrize("reduce", [False, True])
@pytest.mark.parametrize("case", BAD_CALLS)
def test_a_bad_argument_of_the_function_is_refused_by_its_name_in_liger(case: str, reduce: bool) -> None:
    change, error, text = BAD_CALLS[case]
    logits, arguments = function_batch({})
    with pytest.raises(error, match=f"triton_grpo_loss: {text}"):
        ours.triton_grpo_loss(**({"logits": logits} | arguments | change), reduce=reduce)
