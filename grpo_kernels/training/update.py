"""The update: a step's packs through the loss, one optimiser step per minibatch, one normaliser per optimiser step."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

import grpo_kernels as gk
from grpo_kernels.lab import HeadScores

from .bounds import ConfigError
from .config import TrainConfig, UpdateConfig, check_known
from .group_size import watching
from .packing import Pack
from .policy import Policy

# Fields of the loss that the loop sets itself, and from what.
_SET_BY_LOOP = {
    "temperature": "it is sampling.temperature",
    "max_completion_length": "it is sampling.max_completion_length",
    "softcap": "the model's own head applies it",
    "logit_scale": "the model's own head applies it",
    "entropy": "it is always reported",
    "rollout_correction": "the policy that samples is the one that is trained, so there is nothing to correct",
    "top_entropy_quantile": "an update's tokens come in packs, and no pack sees the quantile of them all",
}
_NOT_OF_PACKS = {  # an update's sequences come in packs, and no pack sees them all
    "loss_type": (("clip_cov", "kl_cov"), "must need no token but a sequence's own"),
    "aggregation": (("prompt_mean", "token_sum"), "must be a mean over tokens or sequences"),
}


@dataclass(frozen=True, slots=True)
class Experience:
    """One step's responses as the loss needs them: B sequences with N completion tokens in all, packed.

    Old log-probs are None when no update is off-policy, reference ones when beta is 0.
    """

    minibatches: list[list[Pack]]
    advantages: Tensor  # (B,)
    old_per_token_logps: Tensor | None  # (N,)
    ref_per_token_logps: Tensor | None  # (N,)


def make_loss_config(config: TrainConfig) -> gk.GRPOLossConfig:
    """The loss of `config.loss`; ConfigError for fields it does not have, that the loop sets, or out of range."""
    for key in config.loss:
        check_known("loss.", key, [field.name for field in dataclasses.fields(gk.GRPOLossConfig)])
        if key in _SET_BY_LOOP:
            raise ConfigError(
                f"TrainConfig: loss.{key} must be left out, got {config.loss[key]!r}: {_SET_BY_LOOP[key]}. Remove it."
            )
    for key, (values, requirement) in _NOT_OF_PACKS.items():
        if config.loss.get(key) in values:
            raise ConfigError(
                f"TrainConfig: loss.{key} {requirement}, got {config.loss[key]!r}. The loop cuts a batch into packs."
            )
    try:
        return gk.GRPOLossConfig(
            **config.loss,
            temperature=config.sampling.temperature,
            max_completion_length=config.sampling.max_completion_length,
            entropy=True,
        )
    except (TypeError, ValueError, NotImplementedError) as error:
        raise ConfigError(f"TrainConfig: loss must be a valid loss, got {config.loss}. {error}") from error


def make_optimizer(policy: nn.Module, config: UpdateConfig) -> torch.optim.AdamW:
    """AdamW over the trainable parameters."""
    return torch.optim.AdamW(
        [parameter for parameter in policy.parameters() if parameter.requires_grad],
        lr=config.learning_rate,
        betas=(config.adam_beta1, config.adam_beta2),
        weight_decay=config.weight_decay,
    )


@torch.no_grad()
def completion_logps(policy: Policy, packs: Iterable[Pack], temperature: float) -> Tensor:
    """log pi(token) of every completion token, `[N]` in the packs' order, in nats, at the sampler's temperature."""
    head = policy.head()
    if head is None:
        scored = (gk.per_token_logps(policy(pack), pack.completion_ids, temperature=temperature) for pack in packs)
    else:
        scored = (
            gk.linear_per_token_logps(
                policy(pack), head.weight, pack.completion_ids, bias=head.bias, temperature=temperature
            )
            for pack in packs
        )
    return torch.cat([out.logps for out in scored])


def policy_loss(policy: Policy, rows: Tensor, pack: Pack, **arguments: Any) -> gk.GRPOLossOutput:
    """The loss of a pack from what the policy's forward gave."""
    head = policy.head()
    if head is None:
        return gk.grpo_loss(rows, pack.completion_ids, cu_seqlens=pack.cu_seqlens, inplace=True, **arguments)
    return gk.linear_grpo_loss(
        rows, head.weight, pack.completion_ids, bias=head.bias, cu_seqlens=pack.cu_seqlens, **arguments
    )


def normalizer(config: gk.GRPOLossConfig, num_sequences: float, num_tokens: float) -> float:
    """The loss's denominator Z for so many sequences and completion tokens."""
    if config.aggregation_mode == "token_mean":
        return num_tokens
    if config.aggregation_mode == "seq_mean_token_sum_norm" and config.max_completion_length is not None:
        return num_sequences * config.max_completion_length
    return num_sequences


def update_policy(
    policy: nn.Module,
    optimizer: torch.optim.Optimizer,
    accelerator: Accelerator,
    experience: Experience,
    loss_config: gk.GRPOLossConfig,
    config: UpdateConfig,
    updates_done: int,
    scores: HeadScores | None = None,
) -> dict[str, float]:
    """num_iterations passes over the experience with an optimiser step per minibatch; returns the means of its metrics.

    Gradients accumulate over a minibatch's packs. Each pack divides by the minibatch's own Z over all processes, so
    that the sum is the gradient of the whole, however it is cut. `scores` sees the first of the updates.
    """
    totals = _Totals(accelerator, loss_config)
    schedule = [packs for _ in range(config.num_iterations) for packs in experience.minibatches]
    for update, packs in enumerate(schedule, start=updates_done):
        counts = torch.tensor(
            [sum(p.sequences.stop - p.sequences.start for p in packs), sum(len(p.completion_ids) for p in packs)],
            dtype=torch.float64 if accelerator.device.type != "mps" else torch.float32,
            device=accelerator.device,
        )
        # DDP averages gradients over the processes: a mean of sums over Z / processes is the sum over Z
        num_sequences, num_tokens = (accelerator.reduce(counts) / accelerator.num_processes).tolist()
        denominator = normalizer(loss_config, num_sequences, num_tokens)
        for pack in packs:
            with contextlib.nullcontext() if pack is packs[-1] else accelerator.no_sync(policy):
                rows = policy(pack)  # (n, H), or logits (n, V)
                with accelerator.autocast(), watching(scores if update == updates_done else None, pack):
                    output = policy_loss(
                        accelerator.unwrap_model(policy),
                        rows,
                        pack,
                        config=loss_config,
                        advantages=experience.advantages[pack.sequences],
                        old_per_token_logps=_part(experience.old_per_token_logps, pack),
                        ref_per_token_logps=_part(experience.ref_per_token_logps, pack),
                        normalizer=denominator,
                        entropy_normalizer=num_tokens,
                    )
                accelerator.backward(output.loss)
            totals.add(output, pack)
        limit = config.max_grad_norm if config.max_grad_norm > 0 else float("inf")
        totals.grad_norms.append(accelerator.clip_grad_norm_(policy.parameters(), limit))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config, update)
        optimizer.step()
        optimizer.zero_grad()
    return totals.means(len(schedule))


def learning_rate(config: UpdateConfig, update: int) -> float:
    """Rises linearly over the first `lr_warmup_updates` optimiser steps, then constant."""
    return config.learning_rate * min(1.0, (update + 1) / (config.lr_warmup_updates + 1))


def _part(values: Tensor | None, pack: Pack) -> Tensor | None:
    return None if values is None else values[pack.tokens]


class _Totals:
    """Sums of the packs' metrics, kept on the device until the step is over."""

    def __init__(self, accelerator: Accelerator, config: gk.GRPOLossConfig) -> None:
        self._accelerator = accelerator
        self._clip = "cispo_clip_ratio" if config.loss_type == "cispo" else "clip_ratio/region_mean"
        self._clips = bool(config.row.bounds)
        self._clip_counts_tokens = config.importance_sampling_level == "token"
        self._has_kl = config.beta != 0
        self._sums = torch.zeros(6, device=accelerator.device)  # loss, kl, entropy, clip, tokens, clip's count
        self.grad_norms: list[Tensor] = []

    def add(self, output: gk.GRPOLossOutput, pack: Pack) -> None:
        tokens = float(len(pack.completion_ids))
        flags = tokens if self._clip_counts_tokens else float(pack.sequences.stop - pack.sequences.start)
        metrics = output.metrics
        nothing = output.loss.new_zeros(())
        kl = metrics["kl"] if self._has_kl else nothing
        clip = metrics[self._clip] if self._clips else nothing
        sums = [output.loss.detach(), kl * tokens, metrics["entropy"] * tokens, clip * flags]
        self._sums += torch.cat([torch.stack(sums).float(), self._sums.new_tensor([tokens, flags])])

    def means(self, updates: int) -> dict[str, float]:
        loss, kl, entropy, clip, tokens, flags = self._accelerator.reduce(self._sums).tolist()
        return {
            "loss": loss / (updates * self._accelerator.num_processes),
            "grad_norm": torch.stack(self.grad_norms).mean().item(),
            "kl": kl / tokens,
            "entropy": entropy / tokens,
            "clip": clip / flags,
        }


def split_groups(num_groups: int, num_minibatches: int) -> list[range]:
    """Ranges of groups, as even as they come: the minibatches of a step."""
    edges = [num_groups * i // num_minibatches for i in range(num_minibatches + 1)]
    return [range(low, high) for low, high in pairwise(edges)]


def all_packs(minibatches: Sequence[Sequence[Pack]]) -> list[Pack]:
    """The packs of every minibatch, in order."""
    return [pack for packs in minibatches for pack in packs]
