"""A head that is not what `causal_lm_head` reads is refused: by its modules, its parameters, or its logits."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from hf_support import FAMILIES, SIZES, batch, causal_lm, from_logits
from torch import Tensor, nn

import grpo_kernels as gk
from grpo_kernels.integrations.hf import causal_lm_grpo_loss, causal_lm_head, check_head


@pytest.mark.parametrize("family", FAMILIES)
def test_the_head_is_checked_against_the_forward(family: str) -> None:
    kind, options, _, _ = FAMILIES[family]
    model = causal_lm(kind, **options)
    state = torch.get_rng_state()
    for checked in (model, copy.deepcopy(model).bfloat16()):
        check_head(checked)
        assert not checked.get_output_embeddings()._forward_hooks
        assert not checked.base_model._forward_hooks
    assert torch.equal(torch.get_rng_state(), state)


class Scaled(transformers.Qwen2ForCausalLM):  # type: ignore[misc]
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(*args, **kwargs)
        out.logits = out.logits * 1.01
        return out


class Cut(transformers.Qwen2ForCausalLM):  # type: ignore[misc]
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(*args, **kwargs)
        out.logits = out.logits[..., :-1]
        return out


class Projected(transformers.Qwen2ForCausalLM):  # type: ignore[misc]
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.lm_head.register_forward_pre_hook(lambda _, inputs: (inputs[0] * 2,))


class Nudged(transformers.Qwen2ForCausalLM):  # type: ignore[misc]
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.lm_head.register_forward_pre_hook(lambda _, inputs: (inputs[0] * 1.00001,))


@pytest.mark.parametrize("cls", [Scaled, Cut, Projected, Nudged])
def test_a_head_that_does_more_is_refused(cls: type) -> None:
    model = cls(transformers.Qwen2Config(**SIZES))
    with pytest.raises(ValueError, match=rf"a linear head, a scale and a softcap alone, got {cls.__name__}. Call"):
        causal_lm_grpo_loss(model, **batch())
    assert not model.base_model._forward_hooks


class ScaledHead(nn.Linear):
    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden) * 1.7


class LowRankHead(nn.Linear):
    """An adapter written by hand, as it starts: it adds 0."""

    def __init__(self, *sizes: int, **options: Any) -> None:
        super().__init__(*sizes, **options)
        self.a, self.b = nn.Parameter(torch.randn(2, sizes[0])), nn.Parameter(torch.zeros(sizes[1], 2))

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden) + hidden @ self.a.T @ self.b.T


def with_head(cls: type[nn.Linear]) -> Any:
    model = causal_lm("Qwen2")
    head = cls(16, 37, bias=False)
    head.weight = model.lm_head.weight
    model.lm_head = head.double()
    return model


def hooked() -> Any:
    model = causal_lm("Qwen2")
    model.lm_head.register_forward_hook(lambda _module, _inputs, output: output * 1.3)
    return model


def replaced() -> Any:
    model = causal_lm("Qwen2")
    own = model.lm_head.forward
    model.lm_head.forward = lambda hidden: own(hidden) + 10 * torch.arange(37.0)
    return model


@pytest.mark.parametrize("make", [lambda: with_head(ScaledHead), hooked, replaced], ids=["class", "hook", "instance"])
def test_a_head_that_is_linear_by_name_alone_is_refused(make: Any) -> None:
    with pytest.raises(ValueError, match=r"got Qwen2ForCausalLM. .*: \w+ does more than multiply by its weight\."):
        causal_lm_grpo_loss(make(), **batch())


def test_an_adapter_written_by_hand_is_refused_before_it_has_learned() -> None:
    with pytest.raises(ValueError, match=r"must have no adapter on its head: .*never be trained, got LowRankHead"):
        causal_lm_grpo_loss(with_head(LowRankHead), **batch())


def test_a_head_with_parametrized_weight_trains_its_own_parameters() -> None:
    model, given = causal_lm("Qwen2"), batch()
    nn.utils.parametrizations.weight_norm(model.lm_head)
    ours, theirs = causal_lm_grpo_loss(model, **given).loss, from_logits(model, gk.GRPOLossConfig(), given).loss
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=0)
    ours.backward()
    assert float(model.lm_head.parametrizations.weight.original0.grad.abs().max()) > 0


class Beyond(transformers.OPTForCausalLM):  # type: ignore[misc]
    """Goes around its backbone, and does more than that."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model.decoder.register_forward_hook(self._more)
        self.outer = False

    def _more(self, _module: nn.Module, _inputs: Any, output: Any) -> Any:
        output.last_hidden_state = output.last_hidden_state * (1.01 if self.outer else 1.0)
        return output

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.outer = True
        try:
            return super().forward(*args, **kwargs)
        finally:
            self.outer = False


def test_what_enters_the_head_must_be_the_backbones() -> None:
    with pytest.raises(ValueError, match=r"got Beyond. .*: what enters its head is not what the backbone returns"):
        check_head(Beyond(transformers.OPTConfig(**SIZES, word_embed_proj_dim=16, ffn_dim=24)).eval())


def test_weights_that_are_not_there_yet_do_not_matter() -> None:
    """Processes that wait for the first one's weights hold anything, NaN too."""
    model = causal_lm("Gemma2", final_logit_softcapping=1.5, head_dim=8)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    check_head(model)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize(("tied", "where"), [(True, [3, 4]), (False, {"lm_head": [3, 4]})])
def test_tokens_that_peft_trains_in_the_head_are_refused(tied: bool, where: Any) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed; the extra [train] lists it")
    model = peft.get_peft_model(
        causal_lm("Qwen2", tied), peft.LoraConfig(target_modules=["q_proj"], trainable_token_indices=where)
    )
    with pytest.raises(ValueError, match=r"no adapter on its head.*got TrainableTokensWrapper. .*token_indices"):
        causal_lm_grpo_loss(model, **batch())


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_tokens_that_peft_trains_in_the_embeddings_alone_are_trained() -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed; the extra [train] lists it")
    options = peft.LoraConfig(target_modules=["q_proj"], trainable_token_indices={"embed_tokens": [3, 4, 5]})
    model, given = peft.get_peft_model(causal_lm("Qwen2"), options), batch()
    loss = causal_lm_grpo_loss(model, **given).loss
    torch.testing.assert_close(loss, from_logits(model, gk.GRPOLossConfig(), given).loss, rtol=1e-9, atol=0)
    loss.backward()
    deltas = [p for name, p in model.named_parameters() if "trainable_tokens_delta" in name]
    assert deltas
    assert all(p.grad is not None for p in deltas)


def test_a_softcap_by_another_name_is_refused() -> None:
    model = causal_lm("RecurrentGemma", logits_soft_cap=2.0, head_dim=8, lru_width=16)
    with pytest.raises(ValueError, match="RecurrentGemmaForCausalLM"):
        check_head(model)


def test_models_without_such_a_head_are_refused() -> None:
    with pytest.raises(TypeError, match=r"model must be a PreTrainedModel, got Linear. .*linear_grpo_loss"):
        causal_lm_head(nn.Linear(2, 2))
    encoder = transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=9, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    )
    with pytest.raises(ValueError, match="must be decoder-only, got T5ForConditionalGeneration"):
        causal_lm_head(encoder)
    model = causal_lm("Qwen2")
    model.lm_head = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 37))
    with pytest.raises(TypeError, match="must have a linear head in floating point, got Sequential"):
        causal_lm_head(model)


def test_field_case_48_a_sharded_head_is_refused() -> None:
    model = causal_lm("Qwen2")
    model.lm_head.weight.data = torch.empty(0, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"must be a matrix \[V, H\], got \[0\]. .*sharded parameter; gather first"):
        causal_lm_head(model)
    model.lm_head.weight.data = torch.empty(592, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"got \[592\]"):
        causal_lm_head(model)
