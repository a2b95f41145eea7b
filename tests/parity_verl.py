"""verl's own actor loss: `ppo_loss` with its registered policy losses, its KL and its aggregation, on plain tensors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from parity_projects import need, verl, wide
from parity_support import Draw
from torch import Tensor

need("verl")

VERL = verl()


def no_weight_metrics() -> Any:
    """Without the metrics of the weights: the effective sample size divides by zero where every weight is 0."""
    return mock.patch.object(VERL.rollout, "compute_is_metrics", return_value={})


class Data(dict[str, Any]):
    """What the loss reads of a TensorDict, already padded."""

    def select(self, *names: str) -> Data:
        return Data({name: self[name] for name in names})

    def to_padded_tensor(self) -> Data:
        return self


def actor_config(loss_mode: str = "vanilla", *, policy: dict[str, Any] | None = None, **options: Any) -> Any:
    """verl's ActorConfig, with every other option at its default."""
    losses = VERL.config.PolicyLossConfig(loss_mode=loss_mode, **(policy or {}))
    return VERL.config.ActorConfig(
        strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, policy_loss=losses, **options
    )


def loss(
    config: Any, batch: Draw, logps: Tensor, entropy: Tensor | None, *, dp_size: int = 1,
    batch_num_tokens: int | None = None, global_batch_size: int | None = None, weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, float]]:  # fmt: skip
    """`ppo_loss` and its metrics."""
    data = Data(
        response_mask=batch.mask, old_log_probs=wide(batch.old), advantages=wide(batch.token_advantages()),
        ref_log_prob=wide(batch.ref), dp_size=dp_size, batch_num_tokens=batch_num_tokens,
        global_batch_size=global_batch_size,
    )  # fmt: skip
    if weights is not None:
        data["rollout_is_weights"] = weights
    output = {"log_probs": logps, "entropy": entropy}
    with mock.patch.object(VERL.losses, "no_padding_2_padding", lambda values, data: values):  # nothing is nested here
        value, metrics = VERL.losses.ppo_loss(config, output, data)
    numbers = {name: x.aggregate() if isinstance(x, VERL.losses.Metric) else x for name, x in metrics.items()}
    return value, {name: float(x) for name, x in numbers.items()}


def rollout_weights(batch: Draw, level: str, threshold: float | str) -> Tensor:
    """verl's weights of the training policy against the sampler."""
    with no_weight_metrics():
        weights, _ = VERL.rollout.compute_rollout_correction_weights(
            wide(batch.old - batch.rollout), batch.mask, rollout_is=level, rollout_is_threshold=threshold
        )
    return torch.as_tensor(weights).as_subclass(Tensor)


def bypass(loss_type: str, batch: Draw, logps: Tensor, **options: Any) -> Tensor:
    """The policy loss "bypass_mode", for which the sampler's log-probabilities are the old policy's."""
    clip = {name: options.pop(name) for name in list(options) if name.startswith("clip_")}
    correction = VERL.config.actor.RolloutCorrectionConfig(loss_type=loss_type, **options)
    config = actor_config("bypass_mode", policy={"rollout_correction": correction}, **clip)
    proto = SimpleNamespace(from_dict=lambda tensors: SimpleNamespace(batch=tensors))  # DataProto needs a TensorDict
    with mock.patch.object(VERL.rollout, "DataProto", proto), no_weight_metrics():
        value, _ = VERL.core.get_policy_loss_fn("bypass_mode")(
            old_log_prob=wide(batch.rollout), log_prob=logps, advantages=batch.token_advantages(),
            response_mask=batch.mask, config=config,
        )  # fmt: skip
    return value


def advantages(estimator: str, rewards: Tensor, mask: Tensor, group_ids: Tensor, **options: Any) -> Tensor:
    """`[B, T]` advantages of one of verl's registered estimators for rewards on the last token of each response."""
    token_rewards = torch.zeros(mask.shape, dtype=rewards.dtype)
    last = mask.shape[1] - 1 - mask.flip(1).argmax(1)
    token_rewards[torch.arange(len(rewards)), last] = rewards
    function = VERL.core.get_adv_estimator_fn(estimator)
    values, _ = function(
        token_level_rewards=wide(token_rewards), response_mask=mask, index=group_ids.numpy(), **options
    )
    return torch.as_tensor(values).as_subclass(Tensor)
