"""OpenRLHF's own actor step: `ActorPPOTrainer.training_step` up to the loss that it hands to DeepSpeed."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from parity_projects import need, openrlhf, wide
from parity_support import Draw
from torch import Tensor

need("openrlhf")

OPENRLHF = openrlhf()


def loss(
    batch: Draw, logps: Tensor, entropy: Tensor | None, *, kl_coef: float = 0.0, kl_estimator: str = "k1",
    unbiased_gradient: bool = False, entropy_coef: float | None = None, batch_info: Mapping[str, Any] | None = None,
    with_rollout: bool = False, **policy: Any,
) -> tuple[Tensor, dict[str, float]]:  # fmt: skip
    """The loss of one micro-batch and the metrics of its step; `policy` are the arguments of PolicyLoss."""
    trainer = OPENRLHF.actor.ActorPPOTrainer.__new__(OPENRLHF.actor.ActorPPOTrainer)
    handed: list[Tensor] = []
    trainer.strategy = SimpleNamespace(
        ring_attn_group=None, backward=lambda value, *_: handed.append(value), optimizer_step=lambda *_, **__: None,
        get_grad_norm=lambda _: 0.0,
    )  # fmt: skip
    trainer.args = SimpleNamespace(
        actor=SimpleNamespace(entropy_coef=entropy_coef, aux_loss_coef=0.0),
        train=SimpleNamespace(dynamic_batch_enable=False),
        algo=SimpleNamespace(
            kl=SimpleNamespace(
                use_loss=kl_coef > 0, init_coef=kl_coef, estimator=kl_estimator, unbiased_gradient=unbiased_gradient
            )
        ),
    )
    trainer.aux_loss, trainer.ema_model, trainer.replay_buffer = False, None, None
    trainer.actor_scheduler, trainer.actor_optim = SimpleNamespace(get_last_lr=lambda: [0.0]), None
    trainer.actor = Actor(logps, entropy)
    trainer.actor_loss_fn = OPENRLHF.loss.PolicyLoss(**policy)
    experience = OPENRLHF.actor.Experience(
        sequences=batch.ids, action_mask=batch.mask, attention_mask=batch.mask, action_log_probs=wide(batch.old),
        advantages=batch.token_advantages(), base_action_log_probs=wide(batch.ref),
        rollout_log_probs=wide(batch.rollout) if with_rollout else None,
    )  # fmt: skip
    trainer.training_step(experience, kl_coef, 0, loss_batch_info=batch_info)
    (value,) = handed
    return value, {name: float(x) for name, x in experience.info.items()}


class Actor:
    """A policy whose log-probabilities are known."""

    is_vlm = False

    def __init__(self, logps: Tensor, entropy: Tensor | None) -> None:
        self.logps, self.entropy = logps, entropy

    def train(self) -> None:
        pass

    def __call__(self, *_: Any, **__: Any) -> tuple[Tensor, Any]:
        return self.logps, SimpleNamespace(entropy=self.entropy)


def advantages(rewards: Tensor, mask: Tensor, group_size: int, estimator: str, no_std_norm: bool = False) -> Tensor:
    """`[B, T]` advantages of OpenRLHF's experience maker for consecutive groups, without a KL in the reward."""
    maker = OPENRLHF.maker.RemoteExperienceMaker.__new__(OPENRLHF.maker.RemoteExperienceMaker)
    algo = SimpleNamespace(estimator=estimator, gamma=1.0, lambd=1.0, no_std_norm=no_std_norm)
    args = SimpleNamespace(
        rollout=SimpleNamespace(n_samples_per_prompt=group_size), reward=SimpleNamespace(clip_range=None),
        algo=SimpleNamespace(advantage=algo),
    )  # fmt: skip
    maker.strategy, maker.advantage_estimator = SimpleNamespace(args=args), estimator
    maker.kl_ctl = SimpleNamespace(value=0.0)
    experience = OPENRLHF.actor.Experience(
        rewards=wide(rewards), index=list(range(len(rewards))), action_mask=mask,
        kl=wide(torch.zeros(mask.shape, dtype=torch.float64)),
    )  # fmt: skip
    (done,) = maker.compute_advantages_and_returns([experience])
    return torch.as_tensor(done.advantages).as_subclass(Tensor)
