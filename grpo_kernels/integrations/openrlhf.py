"""OpenRLHF 0.11.2's `PolicyLoss`, by its own signature, on the arithmetic of this library.

from grpo_kernels.integrations.openrlhf import PolicyLoss  # in place of openrlhf.models.PolicyLoss
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..checks import FLOATS
from ..config import GRPOLossConfig
from .given_logps import check_alike, check_tokens, clipped, loss_of_logps, lower_clip, mean_over, widened

__all__ = ["PolicyLoss"]

_LEAST = 1e-6


class PolicyLoss(nn.Module):
    """PPO's clipped loss, or GSPO's, with OpenRLHF's correction for the sampler's log-probs.

    Raises:
        ValueError: an option out of its range, or two that contradict each other.
    """

    def __init__(
        self,
        clip_eps_low: float = 0.2,
        clip_eps_high: float = 0.2,
        dual_clip: float | None = None,
        token_level_loss: bool = True,
        policy_loss_type: str = "ppo",
        is_correction_level: str = "off",
        is_correction_mode: str = "mask",
        is_correction_gating: str = "ratio",
        is_correction_threshold: Sequence[float] = (0.5, 5.0),
    ) -> None:
        super().__init__()
        _choice("policy_loss_type", policy_loss_type, ("ppo", "gspo"))
        _choice("is_correction_level", is_correction_level, ("off", "token", "seq"))
        _choice("is_correction_mode", is_correction_mode, ("mask", "clip"))
        _choice("is_correction_gating", is_correction_gating, ("ratio", "binary_kl", "tv"))
        if is_correction_mode == "clip" and (is_correction_level == "seq" or is_correction_gating != "ratio"):
            got = f"'clip' with level {is_correction_level!r} and gating {is_correction_gating!r}"
            raise ValueError(
                f"PolicyLoss: is_correction_mode must be 'mask' but for token ratios, got {got}. Use 'mask'."
            )
        if is_correction_gating != "ratio" and is_correction_level != "off" and is_correction_threshold[0] > 0:
            raise ValueError(
                f"PolicyLoss: is_correction_threshold must start at 0 for a divergence, got {is_correction_threshold}. "
                "A divergence is bounded from above alone: give (0, delta)."
            )
        self.token_level_loss = token_level_loss and policy_loss_type != "gspo"
        self.policy_loss_type = policy_loss_type
        self.is_correction_level, self.is_correction_mode = is_correction_level, is_correction_mode
        self.is_correction_gating, self.is_correction_threshold = is_correction_gating, is_correction_threshold
        level = "sequence" if policy_loss_type == "gspo" else "token"
        self.config = GRPOLossConfig.preset(
            "openrlhf", loss_type="dapo" if self.token_level_loss else "grpo", epsilon=lower_clip(clip_eps_low),
            epsilon_high=clip_eps_high, dual_clip=dual_clip, importance_sampling_level=level,
        )  # fmt: skip

    def forward(
        self,
        log_probs: Tensor,
        old_log_probs: Tensor,
        advantages: Tensor,
        action_mask: Tensor | None = None,
        rollout_log_probs: Tensor | None = None,
        dp_size: int = 1,
        batch_num_tokens: float | None = None,
        global_batch_size: float | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
        """`(loss, clip_ratio, ppo_kl, vllm_kl, is_filter_ratio)` of `[B, T]` tensors; the last two: None without one.

        The advantages may be `[B, 1]`.

        Raises:
            ValueError: a correction without rollout_log_probs, shapes that differ, old log-probs that are not finite.
        """
        given = torch.ones_like(log_probs, dtype=torch.bool) if action_mask is None else action_mask
        corrected = self.is_correction_level != "off"
        if corrected and rollout_log_probs is None:
            raise ValueError(
                f"PolicyLoss: rollout_log_probs must be given with is_correction_level={self.is_correction_level!r}, "
                "got None. Pass the sampler's log-probs, or set the level to 'off'."
            )
        behind: tuple[str, Any] = "old_log_probs", old_log_probs
        other: tuple[str, Any] = "rollout_log_probs", rollout_log_probs
        if corrected and self.policy_loss_type == "gspo":  # the sampler is the old policy, and nothing is weighed
            behind, other = other, behind
        check_tokens("PolicyLoss", ("log_probs", log_probs), behind, ("action_mask", given), advantages=advantages)
        if corrected:
            check_alike("PolicyLoss", "log_probs", log_probs, dict([other]), dtypes=FLOATS)
        mask, weight, vllm_kl, filtered = given != 0, None, None, None
        trained = widened(old_log_probs.detach())
        if corrected and rollout_log_probs is not None and self.policy_loss_type == "ppo":
            sampled = widened(rollout_log_probs.detach())
            weight, filtered = self._correction(trained, sampled, mask)
            vllm_kl = mean_over(mask, sampled - trained)
        out = loss_of_logps(
            "PolicyLoss", self.config, log_probs, mask, advantages=advantages, old=behind[1], weight=weight,
            normalizer=self._normalizer(mask, dp_size, batch_num_tokens, global_batch_size),
        )  # fmt: skip
        if out.per_token is None:
            raise RuntimeError("PolicyLoss: the loss returned no token values.")
        clip_ratio = mean_over(mask, clipped(self.config, out.per_token.ratio, advantages).to(out.loss.dtype))
        ppo_kl = mean_over(mask, trained - widened(log_probs.detach()))
        return out.loss, clip_ratio, ppo_kl, vllm_kl, filtered

    def _normalizer(
        self, mask: Tensor, dp_size: int, num_tokens: float | None, num_sequences: float | None
    ) -> float | Tensor:
        """Global counts over processes, or those of this batch, where sequences without a token do not count."""
        if self.token_level_loss:
            return mask.sum().clamp(min=1) if num_tokens is None else num_tokens / dp_size
        return mask.any(-1).sum().clamp(min=1) if num_sequences is None else num_sequences / dp_size

    @torch.no_grad()
    def _correction(self, old: Tensor, rollout: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """The weight of each token, and the share of tokens (or sequences) outside the threshold."""
        low, high = self.is_correction_threshold
        by_sequence = self.is_correction_level == "seq"
        log_ratio = torch.where(mask, old - rollout, 0.0)
        if self.is_correction_gating == "ratio":
            gate = (_sequence_mean(log_ratio, mask) if by_sequence else log_ratio).exp()
        else:
            divergence = _divergence(self.is_correction_gating, rollout, old)
            gate = _sequence_mean(torch.where(mask, divergence, 0.0), mask) if by_sequence else divergence
        inside = (gate >= low) & (gate <= high)
        clip = self.is_correction_mode == "clip"
        weight = gate.clamp(low, high) if clip else torch.where(inside, log_ratio.exp(), 0.0)
        outside = (~inside).to(old.dtype)
        return weight, outside.mean() if by_sequence else mean_over(mask, outside)


def _choice(argument: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(
            f"PolicyLoss: {argument} must be one of {', '.join(choices)}, got {value!r}. Choose one of these."
        )


def _sequence_mean(values: Tensor, mask: Tensor) -> Tensor:
    """`[B, 1]`: the mean of live tokens; values are 0 where dead. NaN without one, as in OpenRLHF."""
    return (values.sum(-1) / mask.sum(-1)).unsqueeze(-1)


def _divergence(gating: str, rollout: Tensor, old: Tensor) -> Tensor:
    """Of the two probabilities of the sampled token: binary KL or total variation."""
    p, q = (values.exp().clamp(_LEAST, 1 - _LEAST) for values in (rollout, old))
    if gating == "tv":
        return (p - q).abs()
    return p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()
