"""What FusedGRPOTrainer and patch_trainer refuse, before anything runs, and the way back from a patch."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
from integration_support import batch, build, causal_lm, quiet, train
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from torch import nn
from trl import GRPOConfig, GRPOTrainer

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
            integration.loss_config(build(GRPOTrainer, causal_lm(), **extra), None, 1.0) for extra in options
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


@pytest.mark.parametrize(
    "options",
    [
        {"epsilon": 1.0},
        {"epsilon_high": -0.1},
        {"delta": 0.0},
        {"top_entropy_quantile": 0.0},
        {"loss_type": "sapo", "sapo_temperature_pos": 0.0},
        {"loss_type": "dr_grpo", "max_completion_length": None, "generation_kwargs": {"max_new_tokens": 5}},
    ],
    ids=str,
)
def test_a_value_that_trl_takes_and_the_loss_does_not_is_refused_before_a_generation(options: dict[str, Any]) -> None:
    trainer = build(GRPOTrainer, causal_lm(), **options)
    name = next(name for name in options if name != "loss_type")
    with pytest.raises(ValueError, match=f"{name} must be"):
        patch_trainer(trainer)
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


def test_tokens_trained_in_a_tied_head_are_refused() -> None:
    tokens = LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM", trainable_token_indices=[3])
    with pytest.raises(ValueError, match=r"no adapter on its head.*trainable_token_indices"):
        build(FusedGRPOTrainer, causal_lm(tie_word_embeddings=True), peft_config=tokens)


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


@pytest.mark.parametrize("method", METHODS)
def test_a_method_of_the_instance_is_refused(method: str) -> None:
    trainer = build(GRPOTrainer, causal_lm())
    setattr(trainer, method, getattr(trainer, method))
    with pytest.raises(ValueError, match=rf"must leave {method} to TRL, got an instance's own {method}. Write that"):
        patch_trainer(trainer)


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


def test_a_head_that_was_changed_after_a_patch_is_checked_again() -> None:
    trainer = build(GRPOTrainer, causal_lm())
    patch_trainer(trainer).undo()
    trainer.model.lm_head.register_forward_hook(lambda _module, _inputs, output: output * 1.3)
    with pytest.raises(ValueError, match="Linear does more than multiply by its weight"):
        patch_trainer(trainer)


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


def test_an_old_handle_does_not_take_back_a_new_patch() -> None:
    trainer = build(GRPOTrainer, causal_lm())
    first = patch_trainer(trainer)
    first.undo()
    second = patch_trainer(trainer)
    first.undo()
    assert "_compute_loss" in vars(trainer)
    second.undo()
    assert "_compute_loss" not in vars(trainer)


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
