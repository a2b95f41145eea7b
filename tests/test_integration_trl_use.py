"""FusedGRPOTrainer and patch_trainer: what they refuse, pass on, warn of and take back."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from integration_support import build, causal_lm, put_into_batches, quiet, train
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from torch import Tensor, nn
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import FusedCausalLMOutput

import grpo_kernels as gk
from grpo_kernels.integrations import trl as integration
from grpo_kernels.integrations import trl_options
from grpo_kernels.integrations.trl import FusedGRPOTrainer, patch_trainer

# every option has its place


def test_every_field_of_the_config_is_in_one_table() -> None:
    fields = {field.name for field in dataclasses.fields(GRPOConfig)}
    tables = [set(trl_options.HONOURED), set(trl_options.IRRELEVANT)]
    known = tables[0] | tables[1] | set(trl_options.REFUSED)
    assert fields <= known, f"neither honoured, refused nor irrelevant: {sorted(fields - known)}"
    assert known <= fields, f"not TRL's any more: {sorted(known - fields)}"
    assert not tables[0] & tables[1]
    assert not set(trl_options.REFUSED) & tables[1]


def test_every_honoured_field_of_the_loss_reaches_it() -> None:
    """What is said to become a field of the config does: with another value, the config is another one."""
    head = SimpleNamespace(softcap=None, logit_scale=1.0)
    others = {
        "beta": 0.5, "delta": 2.0, "entropy_coef": 0.3, "epsilon": 0.1, "epsilon_high": 0.5, "loss_type": "bnpo",
        "importance_sampling_level": "sequence", "max_completion_length": 7, "off_policy_mask_threshold": 0.5,
        "sapo_temperature_neg": 3.0, "sapo_temperature_pos": 3.0, "temperature": 0.5, "top_entropy_quantile": 0.5,
        "use_bias_correction_kl": False, "vespo_k_neg": 0.5, "vespo_k_pos": 0.5, "vespo_lambda_neg": 0.5,
        "vespo_lambda_pos": 0.5,
    }  # fmt: skip
    said = {name for name, how in trl_options.HONOURED.items() if how.startswith("config.")}
    assert said == set(others)
    for name, value in others.items():
        base = {"sapo": "sapo", "vesp": "vespo", "max_": "dr_grpo"}.get(name[:4], "dapo")
        options = [{"loss_type": base}, {"loss_type": base, name: value}]
        usual, changed = (
            integration.loss_config(build(GRPOTrainer, causal_lm(), **extra), head) for extra in options
        )  # fmt: skip
        assert getattr(usual, name) != getattr(changed, name) == value, name


def test_an_option_of_a_newer_release_is_refused_by_name() -> None:
    @dataclasses.dataclass
    class Newer(GRPOConfig):  # type: ignore[misc]
        clip_everything: float = 0.0

    trainer = build(GRPOTrainer, causal_lm())
    trainer.args = Newer(output_dir=trainer.args.output_dir, use_cpu=True, bf16=False, activation_checkpointing=False)
    patch_trainer(trainer).undo()
    trainer.args.clip_everything = 0.5
    with pytest.raises(ValueError, match=r"clip_everything is 0\.5: .*leave it unset"):
        patch_trainer(trainer)


def split(how: str) -> SimpleNamespace:
    return SimpleNamespace(**{f"{name}_enabled": name == how for name in ("cp", "sp", "tp")})


LEVEL = "importance_sampling_level='token'"
LIGER = {"use_liger_kernel": True, "liger_kernel_config": {"fused_linear_cross_entropy": True}}
REFUSALS = {
    "cispo by sequence": ({"loss_type": "cispo", "importance_sampling_level": "sequence"}, {}, LEVEL),
    "vespo by sequence": ({"loss_type": "vespo", "importance_sampling_level": "sequence"}, {}, LEVEL),
    "compiled": ({}, {"torch_compile": True}, "compile the backbone"),
    "context parallel": ({}, {"parallelism_config": split("cp")}, "data parallelism"),
    "tensor parallel": ({}, {"parallelism_config": split("tp")}, "data parallelism"),
    "Liger's loss": ({}, LIGER, "False"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refused_options(case: str) -> None:
    options, later, advice = REFUSALS[case]
    trainer = build(GRPOTrainer, causal_lm(), epsilon_high=5.0, **options)
    for name, value in later.items():
        object.__setattr__(trainer.args, name, value)
    with pytest.raises(ValueError, match="patch_trainer: args must") as refusal:
        patch_trainer(trainer)
    assert advice in str(refusal.value)
    assert "_compute_loss" not in vars(trainer)


def test_a_quantile_over_processes_is_refused() -> None:
    trainer = build(GRPOTrainer, causal_lm(), top_entropy_quantile=0.5)
    trainer.accelerator = SimpleNamespace(num_processes=2)
    with pytest.raises(ValueError, match=r"top_entropy_quantile is 0\.5: TRL takes the quantile over all processes"):
        patch_trainer(trainer)


# models and classes


def test_an_adapter_on_the_head_is_refused() -> None:
    trainer = build(GRPOTrainer, causal_lm())
    with quiet():
        trainer.model = get_peft_model(trainer.model, LoraConfig(target_modules=["lm_head"], task_type="CAUSAL_LM"))
    with pytest.raises(ValueError, match=r"no adapter on its head.*modules_to_save"):
        patch_trainer(trainer)


def test_prompt_learning_is_refused() -> None:
    trainer = build(GRPOTrainer, causal_lm())
    prompts = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2, token_dim=16, num_layers=2)
    with quiet():
        trainer.model = get_peft_model(trainer.model, prompts)
    with pytest.raises(ValueError, match=r"must not learn prompts.*PromptTuningConfig.*Use LoRA"):
        patch_trainer(trainer)


METHODS = [
    "_compute_loss", "compute_loss", "_get_per_token_logps_and_entropies", "get_gamma_weights", "get_off_policy_mask",
    "get_high_entropy_mask",
]  # fmt: skip


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("base", [GRPOTrainer, FusedGRPOTrainer])
def test_a_subclass_with_its_own_loss_is_refused(method: str, base: type) -> None:
    def own(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(super(cls, self), method)(*args, **kwargs)

    cls = type("Mine", (base,), {method: own})
    with pytest.raises(ValueError, match=rf"must leave {method} to TRL, got Mine\.{method}. Write that loss with gk\."):
        patch_trainer(build(cls, causal_lm())) if base is GRPOTrainer else build(cls, causal_lm())


def test_a_subclass_that_leaves_the_loss_alone_is_taken() -> None:
    class Mine(GRPOTrainer):  # type: ignore[misc]
        def log(self, *args: Any, **kwargs: Any) -> None:
            super().log(*args, **kwargs)

    class Both(FusedGRPOTrainer, Mine):
        pass

    patch_trainer(build(Mine, causal_lm())).undo()
    assert len(train(build(Both, causal_lm(), max_steps=1))) == 2


def test_only_a_grpo_trainer_is_taken() -> None:
    with pytest.raises(TypeError, match=r"trainer must be a GRPOTrainer, got Linear. Build it"):
        patch_trainer(nn.Linear(1, 1))


def test_a_head_that_is_none_of_ours_is_refused() -> None:
    model = causal_lm("RecurrentGemma", logits_soft_cap=2.0, head_dim=8, lru_width=16)
    with pytest.raises(ValueError, match=r"a linear head, a scale and a softcap alone, got RecurrentGemmaForCausalLM"):
        build(FusedGRPOTrainer, model)


# there and back


def test_a_patch_is_taken_back(capsys: pytest.CaptureFixture[str]) -> None:
    trainer = build(GRPOTrainer, causal_lm())
    before = trainer._compute_loss, trainer._get_per_token_logps_and_entropies
    patch = patch_trainer(trainer)
    printed = capsys.readouterr().out
    assert all(name in printed for name in ("_compute_loss", "_get_per_token_logps_and_entropies", "GRPOTrainer"))
    assert printed.count("\n") == 1
    with pytest.raises(ValueError, match=r"must not be patched, got a patched GRPOTrainer. .*undo\(\)"):
        patch_trainer(trainer)
    patch.undo()
    patch.undo()
    assert (trainer._compute_loss, trainer._get_per_token_logps_and_entropies) == before
    patch_trainer(trainer)


def test_our_own_trainer_needs_no_patch() -> None:
    with pytest.raises(ValueError, match=r"must not be patched, got a patched FusedGRPOTrainer"):
        patch_trainer(build(FusedGRPOTrainer, causal_lm()))


def test_the_models_forward_is_left_as_it_was() -> None:
    trainer = build(FusedGRPOTrainer, causal_lm())
    before = trainer.model.forward
    inputs = batch()
    trainer._compute_loss(trainer.model, inputs)
    assert trainer.model.forward == before
    inputs["advantages"] = inputs["advantages"][:1]
    with pytest.raises(ValueError, match="advantages"):
        trainer._compute_loss(trainer.model, inputs)
    assert trainer.model.forward == before


# versions


@pytest.mark.parametrize(("package", "version"), [("trl", "1.14.2"), ("transformers", "4.57.0")])
def test_old_versions_are_refused(package: str, version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = build(GRPOTrainer, causal_lm())
    monkeypatch.setattr(getattr(integration, package), "__version__", version)
    with pytest.raises(ImportError, match=rf"or newer, got {version}. pip install -U {package}"):
        patch_trainer(trainer)


def test_newer_versions_are_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = build(GRPOTrainer, causal_lm())
    monkeypatch.setattr(integration.trl, "__version__", "1.17.0")
    with pytest.warns(RuntimeWarning, match=r"tested with TRL 1\.15 to 1\.16, not with 1\.17\.0"):
        patch_trainer(trainer)


# one micro-batch


def batch(
    lengths: tuple[int, ...] = (2, 4), advantages: tuple[float, ...] = (1.0, -1.0), **more: Any
) -> dict[str, Any]:
    """What TRL hands to the loss."""
    rng = torch.Generator().manual_seed(0)
    rows, width = len(lengths), max(lengths)
    mask = (torch.arange(width) < torch.tensor(lengths)[:, None]).long()
    return {
        "prompt_ids": torch.randint(3, 30, (rows, 3), generator=rng),
        "prompt_mask": torch.ones(rows, 3, dtype=torch.int64),
        "completion_ids": torch.randint(3, 30, (rows, width), generator=rng),
        "completion_mask": mask,
        "advantages": torch.tensor(advantages),
        "num_items_in_batch": mask.sum(),
    } | more


def part(inputs: dict[str, Any], row: int) -> dict[str, Any]:
    """One row of a batch, as a micro-batch of it."""
    return {name: value if value.ndim == 0 else value[row : row + 1] for name, value in inputs.items()}


def loss_and_gradient(trainer: Any, inputs: dict[str, Any]) -> tuple[float, Tensor]:
    trainer.model.train()
    trainer.model.zero_grad()
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    return loss.item(), trainer.model.lm_head.weight.grad.clone()


def scoring(**options: Any) -> Any:
    trainer = build(FusedGRPOTrainer, causal_lm(), **{"loss_type": "dapo"} | options)
    trainer.args.steps_per_generation = trainer.current_gradient_accumulation_steps = 1
    return trainer


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


@pytest.mark.parametrize("option", ["router_aux_loss_coef", "entropy_coef", "top_entropy_quantile", "loss_type"])
def test_field_case_44_an_extra_term_is_honoured_or_refused(option: str) -> None:
    """Each moves the gradient as it moves TRL's; see the training runs for the values."""
    if option == "loss_type":
        trainer = build(GRPOTrainer, causal_lm())
        trainer.loss_type = "zzzz"
        patch_trainer(trainer)
        with pytest.raises(ValueError, match="loss_type must be one of"):
            trainer._compute_loss(trainer.model, batch())
        return
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


def test_log_probs_of_both_policies_are_the_same_numbers() -> None:
    trainer = scoring()
    trainer.model.train()
    inputs = stale(trainer, 0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss = trainer._compute_loss(trainer.model, inputs)
    assert loss.item() == pytest.approx(1 / 3, rel=1e-6)  # every ratio is 1
    assert trainer._metrics["train"]["clip_ratio/region_mean"] == [0.0]


def test_a_loss_that_is_not_trls_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if TRL had an option that the integration does not know of."""
    trainer = scoring(delta=1.5)
    config = integration.loss_config

    def without_delta(*arguments: Any) -> gk.GRPOLossConfig:
        return dataclasses.replace(config(*arguments), delta=None)

    monkeypatch.setattr(integration, "loss_config", without_delta)
    inputs = batch(advantages=(-1.0, -1.0))
    with pytest.warns(RuntimeWarning, match=r"the loss is .*TRL's own of the same log-probs is"):
        trainer._compute_loss(trainer.model, inputs | {"old_per_token_logps": torch.full((2, 4), -9.0)})


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
