"""What a GRPOTrainer gives the fused loss: config and arguments of one micro-batch, as TRL 1.16 computes them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..config import GRPOLossConfig
from ..layout import PaddedLayout
from ..objective import shares

_TOKEN_LOSSES = ("cispo", "dapo", "vespo")


def completion_mask(inputs: dict[str, Any]) -> Tensor:
    """`[B, T]`: completion tokens that the model wrote itself."""
    mask: Tensor = inputs["completion_mask"]
    return mask * inputs["tool_mask"] if "tool_mask" in inputs else mask


def accumulation(trainer: Any) -> float:
    """What TRL divides the loss by: micro-batches of an update in training, 1 in evaluation."""
    return float(trainer.current_gradient_accumulation_steps) if trainer.model.training else 1.0


def loss_config(trainer: Any, softcap: float | None, logit_scale: float, parts: float = 1.0) -> GRPOLossConfig:
    """The trainer's options, with the entropy coefficient that it applies to this micro-batch, one of `parts`."""
    args, loss_type = trainer.args, trainer.loss_type
    fields: dict[str, Any] = {}
    if loss_type not in ("sapo", "vespo"):
        fields |= {"epsilon_high": trainer.epsilon_high}
        if loss_type != "cispo":
            fields |= {"epsilon": trainer.epsilon_low, "delta": args.delta}
    if loss_type == "dr_grpo":
        fields["max_completion_length"] = trainer.max_completion_length
    if loss_type in ("sapo", "vespo"):
        fields |= {name: getattr(args, name) for name in vars(args) if name.startswith(f"{loss_type}_")}
    coef = trainer.entropy_coef if trainer._entropy_bonus_enabled else 0.0
    if trainer.use_adaptive_entropy and not trainer._last_world_entropy <= args.entropy_target:
        coef = 0.0
    return GRPOLossConfig(
        loss_type=loss_type, importance_sampling_level=trainer.importance_sampling_level, beta=trainer.beta,
        use_bias_correction_kl=args.use_bias_correction_kl, temperature=trainer.temperature, softcap=softcap,
        logit_scale=logit_scale, entropy=True,  # TRL always reports it
        entropy_coef=coef / parts, top_entropy_quantile=trainer.top_entropy_quantile,
        off_policy_mask_threshold=trainer.off_policy_mask_threshold, **fields,
    )  # fmt: skip


def normalizer(trainer: Any, inputs: dict[str, Any]) -> float | Tensor:
    """Z of the aggregation, times the micro-batches of an update: the loss is not divided again."""
    rows = len(inputs["completion_ids"])
    if trainer.loss_type in _TOKEN_LOSSES:
        tokens: Tensor = inputs["num_items_in_batch"].clamp(min=1.0) / trainer.accelerator.num_processes
        # the tokens of a whole generation, of which an update sees a part; an evaluation sees all of it
        return tokens * accumulation(trainer) / trainer.args.steps_per_generation if trainer.model.training else tokens
    if trainer.loss_type == "bnpo":
        live: Tensor = completion_mask(inputs).sum().clamp(min=1.0)
        return live * accumulation(trainer)
    if trainer.loss_type == "dr_grpo":
        rows *= trainer.max_completion_length
    return rows * accumulation(trainer)


def loss_arguments(trainer: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """The keywords of `linear_grpo_loss` but for hidden states and head."""
    weighted = trainer.use_vllm and trainer.vllm_importance_sampling_correction
    weight = inputs.get("importance_sampling_ratio") if weighted or trainer.loss_type == "vespo" else None
    filtered = trainer.off_policy_mask_threshold is not None
    return {
        "advantages": inputs["advantages"],
        "completion_mask": completion_mask(inputs),
        "old_per_token_logps": inputs.get("old_per_token_logps"),
        "ref_per_token_logps": inputs["ref_per_token_logps"] if trainer.beta != 0 else None,
        "rollout_per_token_logps": inputs.get("sampling_per_token_logps") if filtered else None,
        "importance_sampling_ratio": weight,
        "normalizer": normalizer(trainer, inputs),
    }


def size_of_terms(config: GRPOLossConfig, token_loss: Tensor, live: Tensor, normalizer: float | Tensor) -> Tensor:
    """What the policy's and the KL's terms come to if none cancels another: the scale of the loss's rounding."""
    layout = PaddedLayout(token_loss.shape)
    z = torch.as_tensor(normalizer, dtype=token_loss.dtype, device=token_loss.device)
    weights, scale, _ = shares(config, False, layout, layout.sum(live.to(token_loss.dtype)), z, None)
    return (weights * token_loss.abs()).sum() * scale
