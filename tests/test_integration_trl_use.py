"""One micro-batch of FusedGRPOTrainer: what it passes on, scales, compares and warns of."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import warnings
from typing import Any, ClassVar

import pytest
import torch
from hf_multimodal import IMAGE, gemma3, with_images
from integration_support import batch, build, causal_lm, put_into_batches, scoring
from torch import Tensor, nn
from trl import GRPOTrainer
from trl.trainer.utils import FusedCausalLMOutput

import grpo_kernels as gk
from grpo_kernels.integrations import trl as integration
from grpo_kernels.integrations.trl import FusedGRPOTrainer, patch_trainer


def part(inputs: dict[str, Any], row: int) -> dict[str, Any]:
    """One row of a batch, as a micro-batch of it."""
    return {name: value if value.ndim == 0 else value[row : row + 1] for name, value in inputs.items()}


def loss_and_gradient(trainer: Any, inputs: dict[str, Any]) -> tuple[float, Tensor]:
    trainer.model.train()
    trainer.model.zero_grad()
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    return loss.item(), trainer.model.lm_head.weight.grad.clone()


def test_field_case_22_weights_scale_the_policy_gradient_and_not_the_kl() -> None:
    trainer = scoring()
    trainer.use_vllm = True
    plain, weighted = (
        loss_and_gradient(trainer, batch(importance_sampling_ratio=torch.full((2, 1), weight)))[1]
        for weight in (1.0, 0.01)
    )
    torch.testing.assert_close(weighted, 0.01 * plain, rtol=1e-5, atol=1e-9)
    trainer = scoring(beta=0.1)
    trainer.use_vllm = True
    inputs = batch(lengths=(1,), advantages=(1.0,))
    call = trainer._get_per_token_logps_and_entropies(
        trainer.model, torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1), torch.ones(1, 4), 1
    )
    inputs |= {"ref_per_token_logps": call[0].detach() + 0.5, "importance_sampling_ratio": torch.full((1, 1), 0.01)}
    assert loss_and_gradient(trainer, inputs)[0] == pytest.approx(-0.01 + 0.1 * 0.1487213, rel=1e-4)


def test_field_case_23_the_count_of_a_generation_is_rescaled_to_an_update() -> None:
    trainer, inputs = scoring(), batch()
    whole, _ = loss_and_gradient(trainer, inputs)
    assert whole == pytest.approx(1 / 3, rel=1e-5)
    trainer.args.steps_per_generation = trainer.current_gradient_accumulation_steps = 2
    parts = [loss_and_gradient(trainer, part(inputs, row))[0] for row in (0, 1)]
    assert parts == pytest.approx([-1 / 3, 2 / 3], rel=1e-5)
    trainer.args.steps_per_generation = 4
    assert loss_and_gradient(trainer, part(inputs, 0))[0] == pytest.approx(-2 / 3, rel=1e-5)


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "bnpo", "dr_grpo", "luspo", "cispo", "sapo", "vespo"])
def test_field_case_24_the_steps_of_an_update_divide_once(loss_type: str) -> None:
    """Gradients of four micro-batches sum up to that of the one batch: ratio 1.000, not 0.25."""
    trainer = scoring(loss_type=loss_type, epsilon_high=5.0)
    inputs = batch(lengths=(3, 3, 3, 3), advantages=(1.0, -0.5, 0.3, -0.8))  # bnpo's own count: equal lengths
    _, whole = loss_and_gradient(trainer, inputs)
    trainer.args.steps_per_generation = trainer.current_gradient_accumulation_steps = 4
    parts = sum(loss_and_gradient(trainer, part(inputs, row))[1] for row in range(4))
    assert float(whole.norm()) > 0.01
    torch.testing.assert_close(parts, whole, rtol=1e-4, atol=1e-6)


def test_field_case_24_the_trainer_does_not_divide_again() -> None:
    trainer = scoring()
    trainer.model_accepts_loss_kwargs = False
    steps: list[Tensor] = []
    trainer.accelerator.backward = lambda loss, **_: steps.append(loss.detach())
    put_into_batches(trainer, lambda _: None)
    trainer._prepare_inputs = lambda inputs: inputs
    loss = trainer.training_step(trainer.model, batch(), None)
    assert torch.equal(steps[0], loss)
    assert float(loss) == pytest.approx(1 / 3, rel=1e-5)


@pytest.mark.parametrize("option", ["router_aux_loss_coef", "entropy_coef", "top_entropy_quantile"])
def test_field_case_44_an_extra_term_is_honoured_or_refused(option: str) -> None:
    """Each moves the gradient as it moves TRL's; see the training runs for the values."""
    kind = {"num_local_experts": 4} if option == "router_aux_loss_coef" else {}
    model = causal_lm("Mixtral" if kind else "Qwen2", **kind)
    gradients = []
    for value in ({"router_aux_loss_coef": 0.0} if kind else {}, {option: 0.5}):
        trainer = build(FusedGRPOTrainer, model, **value)
        trainer.args.steps_per_generation = trainer.current_gradient_accumulation_steps = 1
        trainer.model.train()
        trainer._compute_loss(trainer.model, batch()).backward()
        gradients.append(torch.cat([p.grad.flatten() for p in trainer.model.parameters() if p.grad is not None]))
    assert not torch.allclose(*gradients, rtol=1e-3)


def test_field_case_44_an_unknown_loss_type_is_refused() -> None:
    trainer = build(GRPOTrainer, causal_lm())
    trainer.loss_type = "zzzz"
    with pytest.raises(ValueError, match="loss_type must be one of"):
        patch_trainer(trainer)


def test_an_aux_loss_that_is_asked_for_comes_also_without_a_weight() -> None:
    model = causal_lm("Mixtral", num_local_experts=4)
    ids = torch.randint(3, 29, (3, 9), generator=torch.Generator().manual_seed(0))
    losses = []
    for cls in (GRPOTrainer, FusedGRPOTrainer):
        trainer = build(cls, model, router_aux_loss_coef=0.0)
        losses.append(
            trainer._get_per_token_logps_and_entropies(
                trainer.model, ids, torch.ones_like(ids), 4, compute_aux_loss=True
            )[2]
        )
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-6, atol=0)
    assert losses[0] > 0


def test_field_case_45_inputs_of_the_model_arrive_as_they_are() -> None:
    """`pixel_values` and `mm_token_type_ids` in both passes: the old policy's and the update's."""
    seen: list[dict[str, Any]] = []
    trainer = build(FusedGRPOTrainer, causal_lm())
    trainer.args.steps_per_generation = trainer.current_gradient_accumulation_steps = 1
    backbone = trainer.model.model
    forward = backbone.forward

    def sees(pixel_values: Tensor, mm_token_type_ids: Tensor, **kwargs: Any) -> Any:
        seen.append({"pixel_values": pixel_values, "mm_token_type_ids": mm_token_type_ids})
        return forward(**kwargs)

    backbone.forward = sees
    inputs = batch()
    images = {"pixel_values": torch.randn(2, 3, 4, 4), "mm_token_type_ids": torch.randint(0, 2, (2, 7))}
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    old, _, _ = trainer._get_per_token_logps_and_entropies(
        trainer.model, ids, attention, 4, num_images=[1, 1], **images
    )  # fmt: skip
    trainer._compute_loss(trainer.model, inputs | images | {"num_images": [1, 1], "old_per_token_logps": old.detach()})
    assert len(seen) == 2
    for arrived in seen:
        assert all(torch.equal(arrived[name], value) for name, value in images.items())


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_a_multimodal_model_is_checked_on_its_first_batch(softcap: float | None) -> None:
    """Gemma 3 with images leaves out the cap of its text config."""
    trainer = scoring()
    model = gemma3(text_final_logit_softcapping=softcap).float()
    given, images = with_images()
    ids, attention = given["input_ids"], given["attention_mask"]
    inputs: dict[str, Any] = {"pixel_values": images.float(), "token_type_ids": (ids == IMAGE).long()}
    with contextlib.ExitStack() as refused:
        if softcap is not None:
            refused.enter_context(pytest.raises(ValueError, match=r"by the config's scale \(1\) and softcap \(2.0\)"))
        ours, _, _ = trainer._get_per_token_logps_and_entropies(model, ids, attention, 5, num_images=[1] * 3, **inputs)
        logits = model(input_ids=ids, attention_mask=attention, **inputs).logits[:, 3:-1]
        theirs = logits.log_softmax(-1).gather(-1, ids[:, 4:, None])[..., 0]
        live = given["completion_mask"] != 0
        torch.testing.assert_close(ours[live], theirs[live], rtol=1e-5, atol=1e-5)


def test_field_case_48_the_head_is_gathered_or_its_shard_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = scoring()
    weight = trainer.model.lm_head.weight
    full = weight.data.clone()
    weight.data = torch.empty(0)  # ZeRO-3 outside the forward of its module
    with pytest.raises(ValueError, match=r"must be a matrix \[V, H\], got \[0\]. .*sharded parameter; gather first"):
        trainer._compute_loss(trainer.model, batch())

    class Gathered:
        entered: ClassVar[list[Any]] = []

        def __init__(self, *parameters: Any) -> None:
            self.entered.append(parameters)

        def __enter__(self) -> None:
            weight.data = full

        def __exit__(self, *_: object) -> None:
            weight.data = torch.empty(0)

    monkeypatch.setattr(integration, "maybe_gather_lm_head_ctx", Gathered)
    assert trainer._compute_loss(trainer.model, batch()).item() == pytest.approx(1 / 3, rel=1e-5)
    assert Gathered.entered[0][0] is weight
    trainer.importance_sampling_level = "sequence"  # multiplies again in backward, when the head is gone
    with pytest.raises(ValueError, match=r"under ZeRO-3 .*importance_sampling_level='sequence' multiplies again"):
        trainer._compute_loss(trainer.model, batch())


# warnings


def stale(trainer: Any, error: float) -> dict[str, Any]:
    inputs = batch()
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    with torch.no_grad():
        old, _, _ = trainer._get_per_token_logps_and_entropies(trainer.model, ids, attention, 4)
    return inputs | {"old_per_token_logps": old + error}


def test_old_logps_of_another_precision_are_warned_of_once() -> None:
    trainer = scoring()
    trainer.model.train()
    with pytest.warns(RuntimeWarning, match=r"before the first update \|log-ratio\| is up to 0\.01"):
        trainer._compute_loss(trainer.model, stale(trainer, 0.01))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer._compute_loss(trainer.model, stale(trainer, 0.01))


def test_old_logps_after_an_update_are_not_warned_of() -> None:
    trainer = build(GRPOTrainer, causal_lm(), loss_type="dapo")
    trainer.args.steps_per_generation = trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    trainer._step = 1  # it learned something, and the policy moved away
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        patch_trainer(trainer)
        trainer._compute_loss(trainer.model, stale(trainer, 0.01))


def test_dropout_that_trl_leaves_on_is_told_by_its_name() -> None:
    trainer = build(FusedGRPOTrainer, causal_lm(attention_dropout=0.5), disable_dropout=True)
    trainer.args.steps_per_generation = trainer.current_gradient_accumulation_steps = 1
    inputs = stale(trainer, 0.0)
    trainer.model.train()
    with pytest.warns(RuntimeWarning, match=r"every dropout of the model's config to 0: disable_dropout reaches"):
        trainer._compute_loss(trainer.model, inputs)


def test_log_probs_of_both_policies_are_the_same_numbers() -> None:
    trainer = scoring()
    trainer.model.train()
    inputs = stale(trainer, 0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss = trainer._compute_loss(trainer.model, inputs)
    assert loss.item() == pytest.approx(1 / 3, rel=1e-6)  # every ratio is 1
    assert trainer._metrics["train"]["clip_ratio/region_mean"] == [0.0]


def different(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if TRL had an option that the integration does not know of."""
    config = integration.loss_config

    def without_delta(*arguments: Any) -> gk.GRPOLossConfig:
        return dataclasses.replace(config(*arguments), delta=None)

    monkeypatch.setattr(integration, "loss_config", without_delta)


def test_a_loss_that_is_not_trls_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = scoring(delta=1.5)
    different(trainer, monkeypatch)
    inputs = batch(advantages=(-1.0, -1.0))
    with pytest.warns(RuntimeWarning, match=r"the loss is .*TRL's own of the same log-probs is"):
        trainer._compute_loss(trainer.model, inputs | {"old_per_token_logps": torch.full((2, 4), -9.0)})


def test_a_loss_that_is_small_is_compared_by_the_size_of_its_terms(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = scoring(delta=1.5, loss_type="dr_grpo", max_completion_length=10**7)
    different(trainer, monkeypatch)
    inputs = batch(advantages=(-1.0, -1.0)) | {"old_per_token_logps": torch.full((2, 4), -9.0)}
    with pytest.warns(RuntimeWarning, match=r"the loss is .*TRL's own of the same log-probs is"):
        loss = trainer._compute_loss(trainer.model, inputs)
    assert abs(loss.item()) < 1e-3


@pytest.mark.parametrize("option", [{}, {"beta": 0.1}, {"entropy_coef": 0.5}], ids=str)
@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "luspo"])
def test_large_terms_that_cancel_are_no_difference(loss_type: str, option: dict[str, Any]) -> None:
    trainer = scoring(loss_type=loss_type, **option)
    trainer.model.train()
    inputs = batch(lengths=(7, 3, 5, 4), advantages=(1e5, -1e5, 3.3e5, -3.3e5))
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    old, _, _ = trainer._get_per_token_logps_and_entropies(trainer.model, ids, torch.ones_like(ids), 7)
    inputs |= {"old_per_token_logps": old.detach(), "ref_per_token_logps": old.detach() + 0.1}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer._compute_loss(trainer.model, inputs)


def test_what_a_mask_hides_reaches_no_metric() -> None:
    """A tool's tokens may have had log-probs of -100: exp(0 - old) would overflow."""
    trainer = scoring(beta=0.1)
    trainer.model.train()
    inputs = stale(trainer, 0.0)
    tool = torch.ones_like(inputs["completion_mask"])
    tool[:, 1] = 0
    old = inputs["old_per_token_logps"].clone()
    old[:, 1] = -1e3
    ref = old.clone()
    loss = trainer._compute_loss(
        trainer.model, inputs | {"old_per_token_logps": old, "ref_per_token_logps": ref, "tool_mask": tool}
    )
    assert torch.isfinite(loss)
    logged = {name: values[0] for name, values in trainer._metrics["train"].items()}
    assert "kl" in logged
    assert all(value == value and abs(value) < 1e3 for value in logged.values()), logged


def test_the_wrapped_model_sees_the_call() -> None:
    """DDP and FSDP look for the loss in what the forward returns."""
    returned: list[Any] = []

    class Wrapper(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

        def forward(self, **kwargs: Any) -> Any:
            returned.append(self.module(**kwargs))
            return copy.copy(returned[-1])

    trainer = scoring()
    loss = trainer._compute_loss(Wrapper(trainer.model), batch())
    assert isinstance(returned[0], FusedCausalLMOutput)
    assert returned[0].loss is loss
    assert loss.requires_grad
    assert not returned[0].log_probs.requires_grad
