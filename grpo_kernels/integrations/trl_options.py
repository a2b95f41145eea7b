"""Every field of TRL's GRPOConfig: honoured, refused by name, or no concern of the loss.

What a field does before or after the loss (generation, rewards, optimiser, logging) stays TRL's own code, which the
integration calls unchanged: such fields work as ever.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Final

HONOURED: Final = {
    "beta": "config.beta; the reference's log-probs come from the same arithmetic",
    "bf16": "under autocast the head multiplies in its dtype",
    "cast_lm_head_to_fp32": "hidden states and head in float32, outside autocast",
    "delta": "config.delta",
    "disable_dropout": "the model's own modules",
    "entropy_coef": "config.entropy_coef",
    "entropy_coef_delta": "TRL's controller, before each loss",
    "entropy_coef_max": "TRL's controller",
    "entropy_coef_min": "TRL's controller",
    "entropy_target": "TRL's controller",
    "epsilon": "config.epsilon",
    "epsilon_high": "config.epsilon_high",
    "fp16": "under autocast the head multiplies in its dtype; GradScaler scales the gradient",
    "gradient_accumulation_steps": "in the normalizer, once",
    "gradient_checkpointing": "the backbone's own layers",
    "gradient_checkpointing_kwargs": "the backbone's own layers",
    "activation_checkpointing": "the backbone's own layers",
    "activation_checkpointing_kwargs": "the backbone's own layers",
    "importance_sampling_level": "config.importance_sampling_level",
    "loss_type": "config.loss_type",
    "max_completion_length": "config.max_completion_length",
    "num_iterations": "old_per_token_logps from the same arithmetic",
    "off_policy_mask_threshold": "config.off_policy_mask_threshold",
    "router_aux_loss_coef": "TRL's aux loss, added as TRL adds it",
    "sapo_temperature_neg": "config.sapo_temperature_neg",
    "sapo_temperature_pos": "config.sapo_temperature_pos",
    "steps_per_generation": "in the normalizer of token losses",
    "temperature": "config.temperature",
    "top_entropy_quantile": "config.top_entropy_quantile",
    "use_adaptive_entropy": "TRL's controller",
    "use_bias_correction_kl": "config.use_bias_correction_kl",
    "use_vllm": "importance_sampling_ratio",
    "vespo_k_neg": "config.vespo_k_neg",
    "vespo_k_pos": "config.vespo_k_pos",
    "vespo_lambda_neg": "config.vespo_lambda_neg",
    "vespo_lambda_pos": "config.vespo_lambda_pos",
    "vllm_importance_sampling_cap": "TRL's weights, in importance_sampling_ratio",
    "vllm_importance_sampling_clip_max": "TRL's weights, in importance_sampling_ratio",
    "vllm_importance_sampling_clip_min": "TRL's weights, in importance_sampling_ratio",
    "vllm_importance_sampling_correction": "importance_sampling_ratio",
    "vllm_importance_sampling_mode": "TRL's weights, in importance_sampling_ratio",
}
"""Fields that change the loss or its gradient, and what of this library they become."""

Refusal = Callable[[Any], str | None]
"""A trainer -> what to do instead; None: its value is fine."""


def _level(trainer: Any) -> str | None:
    if trainer.importance_sampling_level == "token" or trainer.loss_type not in ("cispo", "vespo"):
        return None
    return f"loss_type={trainer.loss_type!r} has token ratios alone: set importance_sampling_level='token'."


def _quantile(trainer: Any) -> str | None:
    if trainer.top_entropy_quantile == 1.0 or trainer.accelerator.num_processes == 1:
        return None
    return "TRL takes the quantile over all processes, a fused loss sees its own tokens: set it to 1.0, or use TRL's."


def _compiled(trainer: Any) -> str | None:
    advice = "The forward that it would compile is replaced: compile the backbone, model.base_model.compile()."
    return advice if trainer.args.torch_compile else None


def _parallel(trainer: Any) -> str | None:
    parallel = trainer.args.parallelism_config
    if parallel is None or not any(getattr(parallel, f"{how}_enabled", False) for how in ("cp", "sp", "tp")):
        return None
    return "Sequences or weights are split over processes: use data parallelism (DDP, FSDP, ZeRO) alone."


def _liger(trainer: Any) -> str | None:
    fused = (trainer.args.liger_kernel_config or {}).get("fused_linear_cross_entropy", False)
    if not (trainer.args.use_liger_kernel and fused):
        return None
    return "It replaces the model's forward: set it to {'fused_linear_cross_entropy': False}."


REFUSED: Final[dict[str, Refusal]] = {
    "importance_sampling_level": _level,
    "liger_kernel_config": _liger,
    "parallelism_config": _parallel,
    "top_entropy_quantile": _quantile,
    "torch_compile": _compiled,
}
"""Fields of which some values are refused."""

_OF_TRL: Final = """
model_init_kwargs trust_remote_code num_generations num_generations_eval ds3_gather_for_generation shuffle_dataset
pad_to_multiple_of generation_batch_size top_p top_k min_p generation_kwargs chat_template_kwargs repetition_penalty
cache_implementation vllm_mode vllm_model_impl vllm_enable_sleep_mode vllm_structured_outputs_regex
vllm_server_base_url vllm_server_host vllm_server_port vllm_server_timeout vllm_group_port
vllm_gpu_memory_utilization vllm_max_model_length vllm_tensor_parallel_size reward_weights
multi_objective_aggregation scale_rewards mask_truncated_completions sync_ref_model ref_model_mixup_alpha
ref_model_sync_steps max_tool_calling_iterations log_completions log_multimodal num_completions_to_print
log_unique_prompts log_completions_hub_repo use_transformers_continuous_batching
transformers_continuous_batching_config use_transformers_paged
"""  # models, generation, rewards, logging
_OF_TRANSFORMERS: Final = """
accelerator_config adam_beta1 adam_beta2 adam_epsilon auto_find_batch_size average_tokens_across_devices
batch_eval_metrics bf16_full_eval data_seed dataloader_drop_last dataloader_in_order
dataloader_multiprocessing_context dataloader_num_workers dataloader_persistent_workers dataloader_pin_memory
dataloader_prefetch_factor ddp_backend ddp_broadcast_buffers ddp_bucket_cap_mb ddp_find_unused_parameters
ddp_static_graph ddp_timeout debug deepspeed disable_tqdm do_eval do_predict do_train enable_jit_checkpoint
eval_accumulation_steps eval_delay eval_do_concat_batches eval_on_start eval_steps eval_strategy
eval_use_gather_object fp16_full_eval fsdp fsdp_config full_determinism greater_is_better hub_always_push
hub_model_id hub_private_repo hub_revision hub_strategy hub_token ignore_data_skip include_for_metrics
include_num_input_tokens_seen label_names label_smoothing_factor learning_rate length_column_name
load_best_model_at_end local_rank log_level log_level_replica log_on_each_node logging_first_step
logging_nan_inf_filter logging_steps logging_strategy lr_scheduler_kwargs lr_scheduler_type max_grad_norm max_steps
metric_for_best_model neftune_noise_alpha num_train_epochs optim optim_args optim_target_modules output_dir
per_device_eval_batch_size per_device_train_batch_size prediction_loss_only project push_to_hub
remove_unused_columns report_to restore_callback_states_from_checkpoint resume_from_checkpoint run_name
save_on_each_node save_only_model save_steps save_strategy save_total_limit seed skip_memory_metrics tf32
torch_compile_backend torch_compile_mode torch_empty_cache_steps trackio_bucket_id trackio_space_id
trackio_static_space_id train_sampling_strategy use_cache use_cpu use_liger_kernel warmup_steps weight_decay
"""  # data, optimiser, evaluation, checkpoints, logging; and its own loss, which GRPO does not use
IRRELEVANT: Final = frozenset((_OF_TRL + _OF_TRANSFORMERS).split())
"""Fields that act before or after the loss."""


def complaints(trainer: Any) -> list[str]:
    """`<field> is <value>: <what to do>` for every value that is refused, and every field that nobody here knows."""
    found = []
    for field in dataclasses.fields(trainer.args):
        value = getattr(trainer.args, field.name, None)
        if field.name in REFUSED:
            advice = REFUSED[field.name](trainer)
        elif field.name in HONOURED or field.name in IRRELEVANT or not _is_trl(field.name):
            advice = None
        else:
            usual = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
            advice = None if value == usual else "This version of TRL is newer than the integration: leave it unset."
        if advice is not None:
            found.append(f"{field.name} is {value!r}: {advice}")
    return found


def _is_trl(name: str) -> bool:
    """Whether a field is GRPOConfig's and not transformers' own."""
    from transformers import TrainingArguments

    return name not in {field.name for field in dataclasses.fields(TrainingArguments)}
