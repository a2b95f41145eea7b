"""The head of any causal LM is its own forward's: logits, log-probs, loss and gradients of small random models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from hf_support import FAMILIES, batch, causal_lm, from_logits
from torch import nn

import grpo_kernels as gk
from grpo_kernels.integrations.hf import causal_lm_grpo_loss, causal_lm_head


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_are_those_of_the_models_own_logits(family: str, tied: bool) -> None:
    kind, options, softcap, logit_scale = FAMILIES[family]
    model, given = causal_lm(kind, tied, **options), batch(kind)
    head = causal_lm_head(model)
    assert head.softcap == softcap
    assert head.logit_scale == pytest.approx(logit_scale)
    assert head.weight is model.get_output_embeddings().weight
    assert (head.weight is model.get_input_embeddings().weight) == tied
    config = gk.GRPOLossConfig(entropy_coef=0.1, temperature=0.8)
    results = []
    for loss in (from_logits(model, config, given).loss, causal_lm_grpo_loss(model, config=config, **given).loss):
        model.zero_grad()
        loss.backward()
        results.append((loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}))
    (theirs, theirs_grads), (ours, ours_grads) = results
    assert abs(theirs) > 0.01
    torch.testing.assert_close(ours, theirs.to(ours.dtype), rtol=1e-6, atol=0)
    assert set(ours_grads) == set(theirs_grads)
    worst = max(float((ours_grads[name] - grad).abs().max()) for name, grad in theirs_grads.items())
    assert worst < 1e-6 * max(float(grad.abs().max()) for grad in theirs_grads.values())


def test_a_config_that_contradicts_the_head_is_refused() -> None:
    model = causal_lm("Gemma2", final_logit_softcapping=1.5, head_dim=8)
    own = gk.GRPOLossConfig(softcap=1.5)
    assert torch.equal(
        causal_lm_grpo_loss(model, config=own, **batch("Gemma2")).loss,
        causal_lm_grpo_loss(model, **batch("Gemma2")).loss,
    )
    with pytest.raises(ValueError, match=r"softcap is 1.5 in this model, got 2.0. Leave it out"):
        causal_lm_grpo_loss(model, config=gk.GRPOLossConfig(softcap=2.0), **batch())
    with pytest.raises(ValueError, match=r"logit_scale is 1.0 in this model, got 0.5"):
        causal_lm_grpo_loss(model, config=gk.GRPOLossConfig(logit_scale=0.5), **batch())


@pytest.mark.parametrize("width", [0, 9, 10])
def test_a_completion_needs_a_token_before_it(width: int) -> None:
    given = batch() | {"completion_mask": torch.ones(3, width)}
    with pytest.raises(ValueError, match=r"must be \[B, T\] with 0 < T < L"):
        causal_lm_grpo_loss(causal_lm("Qwen2"), **given)


def test_a_bias_is_taken() -> None:
    model, given = causal_lm("Qwen2"), batch()
    model.lm_head.bias = nn.Parameter(torch.randn(37, dtype=torch.float64))
    config = gk.GRPOLossConfig()
    ours, theirs = causal_lm_grpo_loss(model, config=config, **given).loss, from_logits(model, config, given).loss
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=0)
    ours.backward()
    assert float(model.lm_head.bias.grad.abs().max()) > 0


def test_the_forward_comes_back_also_after_an_error() -> None:
    model, given = causal_lm("Qwen2"), batch()
    with pytest.raises(ValueError, match="advantages"):
        causal_lm_grpo_loss(model, **given | {"advantages": torch.ones(2)})
    assert "forward" not in vars(model)
    assert model(given["input_ids"]).logits.shape == (3, 9, 37)


def test_other_inputs_of_the_model_are_passed_on() -> None:
    model, given = causal_lm("Qwen2"), batch()
    positions = (given["attention_mask"].cumsum(1) - 1).clamp(min=0) * 3
    plain = causal_lm_grpo_loss(model, **given).loss
    moved = causal_lm_grpo_loss(model, model_inputs={"position_ids": positions}, **given).loss
    assert not torch.allclose(plain, moved)
    logits = model(given["input_ids"], given["attention_mask"], position_ids=positions).logits
    rest = {name: given[name] for name in ("advantages", "old_per_token_logps", "completion_mask")}
    torch.testing.assert_close(
        moved, gk.grpo_loss(logits[:, 3:-1], given["input_ids"][:, 4:], **rest).loss, rtol=1e-9, atol=0
    )


@pytest.mark.parametrize(
    "inputs",
    [{"labels": torch.zeros(3, 9).long()}, {"logits_to_keep": 1}, {"return_dict": False}, {"heat": 0.5}],
    ids=str,
)
def test_inputs_that_the_head_alone_would_read_are_refused(inputs: dict[str, Any]) -> None:
    class Heated(transformers.Qwen2ForCausalLM):
        def forward(self, *args: Any, heat: float = 1.0, **kwargs: Any) -> Any:
            out = super().forward(*args, **kwargs)
            out.logits = out.logits / heat
            return out

    model = causal_lm("Qwen2")
    model.__class__ = Heated
    with pytest.raises(ValueError, match=f"{next(iter(inputs))} must be left out of model_inputs"):
        causal_lm_grpo_loss(model, model_inputs=inputs, **batch())


@pytest.mark.parametrize("name", ["input_ids", "attention_mask"])
def test_what_has_its_own_argument_is_refused_among_the_others(name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name} must be left out of model_inputs, got shape \[3, 9\]. Give it as"):
        causal_lm_grpo_loss(causal_lm("Qwen2"), model_inputs={name: batch()[name]}, **batch())


def test_a_model_that_returns_tuples_is_refused() -> None:
    model = causal_lm("Qwen2")
    model.config.return_dict = False
    with pytest.raises(ValueError, match=r"model must have config.return_dict=True, got False"):
        causal_lm_grpo_loss(model, **batch())


@pytest.mark.parametrize("shape", [(3, 5), (1, 9), (3, 12)])
def test_an_attention_mask_of_another_shape_is_refused(shape: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="attention_mask must have the shape of input_ids"):
        causal_lm_grpo_loss(causal_lm("Qwen2"), **batch() | {"attention_mask": torch.ones(shape).long()})
