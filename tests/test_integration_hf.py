"""The head of any causal LM is its own forward's: logits, log-probs, loss and gradients of small random models."""

from __future__ import annotations

import copy
import os
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers", reason="transformers is not installed; the extra [train] lists it")

import transformers
from torch.nn.parallel import DistributedDataParallel

import grpo_kernels as gk
from grpo_kernels.integrations.hf import causal_lm_grpo_loss, causal_lm_head, check_head

SIZES = {
    "vocab_size": 37, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any], float | None, float]] = {
    "plain": ("Qwen2", {}, None, 1.0),
    "softcap": ("Gemma2", {"final_logit_softcapping": 1.5, "head_dim": 8}, 1.5, 1.0),
    "logit_scale": ("Cohere", {"logit_scale": 0.3}, None, 0.3),
    "logits_scaling divides": ("Granite", {"logits_scaling": 2.5}, None, 0.4),
    "logits_scaling multiplies": ("HyperCLOVAX", {"logits_scaling": 2.5}, None, 2.5),
    "lm_head_multiplier": ("FalconH1", {"lm_head_multiplier": 0.7, "mamba_d_ssm": 16, "mamba_n_heads": 2}, None, 0.7),
    "experts": ("Mixtral", {"num_local_experts": 4}, None, 1.0),
    "other names": ("GPT2", {"n_positions": 32}, None, 1.0),
}


ATTENTION = {"Gemma2": "eager"}  # which makes NaN of padding on the left in float64


def causal_lm(kind: str, tied: bool = False, **options: Any) -> Any:
    """In float64, with logits large enough to be capped."""
    config = getattr(transformers, f"{kind}Config")(**SIZES | options | {"tie_word_embeddings": tied})
    experts = {"experts_implementation": "eager"} if kind == "Mixtral" else {}  # the grouped product has no float64
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation=ATTENTION.get(kind, "sdpa"), **experts
    )
    model = model.double().eval()
    with torch.no_grad():
        model.get_output_embeddings().weight.normal_(std=0.5)
    return model


def batch(kind: str = "Qwen2") -> dict[str, Any]:
    """Prompts padded on the left, completions on the right."""
    rng = torch.Generator().manual_seed(0)
    attention = torch.ones(3, 9, dtype=torch.int64)
    attention[0, : 0 if kind in ATTENTION else 2] = 0
    attention[1, 7:] = 0
    return {
        "input_ids": torch.randint(3, 37, (3, 9), generator=rng),
        "attention_mask": attention,
        "completion_mask": attention[:, 4:],
        "advantages": torch.tensor([1.0, -0.7, 0.3]),
        "old_per_token_logps": -3 + torch.rand(3, 5, generator=rng, dtype=torch.float64),
    }


def from_logits(model: Any, config: gk.GRPOLossConfig, given: dict[str, Any]) -> gk.GRPOLossOutput:
    """The same loss of what the model's own forward returns."""
    logits = model(input_ids=given["input_ids"], attention_mask=given["attention_mask"]).logits
    rest = {name: given[name] for name in ("advantages", "old_per_token_logps", "completion_mask")}
    return gk.grpo_loss(logits[:, 3:-1].double(), given["input_ids"][:, 4:], config=config, **rest)


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


@pytest.mark.parametrize("cls", [Scaled, Cut, Projected])
def test_a_head_that_does_more_is_refused(cls: type) -> None:
    model = cls(transformers.Qwen2Config(**SIZES))
    with pytest.raises(ValueError, match=rf"a linear head, a scale and a softcap alone, got {cls.__name__}. Call"):
        causal_lm_grpo_loss(model, **batch())
    assert not model.base_model._forward_hooks


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


@pytest.mark.parametrize("shape", [(3, 5), (1, 9), (3, 12)])
def test_an_attention_mask_of_another_shape_is_refused(shape: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="attention_mask must have the shape of input_ids"):
        causal_lm_grpo_loss(causal_lm("Qwen2"), **batch() | {"attention_mask": torch.ones(shape).long()})


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_lora_trains_and_its_head_is_the_base_models() -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed; the extra [train] lists it")
    model, given = causal_lm("Qwen2"), batch()
    wrapped = peft.get_peft_model(
        copy.deepcopy(model), peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    )
    loss = causal_lm_grpo_loss(wrapped, **given).loss
    torch.testing.assert_close(loss, from_logits(wrapped, gk.GRPOLossConfig(), given).loss, rtol=1e-9, atol=0)
    loss.backward()
    assert all(p.grad is not None for name, p in wrapped.named_parameters() if "lora_" in name)
    assert causal_lm_head(wrapped).weight.grad is None
    onto_the_head = peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(target_modules=["lm_head"]))
    with pytest.raises(ValueError, match=r"no adapter on its head.*got Linear. .*modules_to_save"):
        causal_lm_grpo_loss(onto_the_head, **given)
    saved = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"]))
    causal_lm_grpo_loss(saved, **given).loss.backward()
    assert causal_lm_head(saved).weight.grad is not None
    with saved.disable_adapter():
        assert causal_lm_head(saved).weight is saved.get_base_model().lm_head.original_module.weight


@pytest.fixture
def one_process() -> Iterator[None]:
    with tempfile.TemporaryDirectory() as folder:
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{os.path.join(folder, 'meeting')}", rank=0, world_size=1
        )
        yield
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"static_graph": True}])
def test_ddp_reduces_the_gradients(options: dict[str, bool], one_process: None) -> None:
    model, given = causal_lm("Qwen2"), batch()
    causal_lm_grpo_loss(model, **given).loss.backward()
    alone = [parameter.grad.clone() for parameter in model.parameters()]
    reduced: list[Tensor] = []
    parallel = DistributedDataParallel(model, **options)

    def halved(_: object, bucket: torch.distributed.GradBucket) -> torch.futures.Future[Tensor]:
        reduced.append(bucket.buffer())
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer() / 2)
        return done

    halved.__annotations__ |= {"bucket": torch.distributed.GradBucket, "return": torch.futures.Future[torch.Tensor]}
    parallel.register_comm_hook(None, halved)
    for _ in range(2):
        model.zero_grad()
        causal_lm_grpo_loss(parallel, **given).loss.backward()
    assert reduced
    for parameter, grad in zip(model.parameters(), alone, strict=True):
        torch.testing.assert_close(parameter.grad, grad / 2, rtol=1e-9, atol=1e-12)
