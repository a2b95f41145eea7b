"""The options of a GRPO-family loss: one frozen object, checked when it is made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from . import config_checks, presets
from .config_checks import KL_ESTIMATORS, LARGEST, SMALLEST
from .loss_types import LOSS_TYPES, TABLE, LossType
from .presets import PRESETS

__all__ = ["KL_ESTIMATORS", "LARGEST", "LOSS_TYPES", "PRESETS", "SMALLEST", "GRPOLossConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GRPOLossConfig:
    """Options of `grpo_loss`. The defaults are TRL 1.16's, but the KL is the paper's plain k3.

    Log-probabilities are in nats, ratios are `r = exp(logp - old)`, clip bounds are distances from 1. An option of a
    loss that is not chosen, or of a correction that is off, is refused when set; those of the KL wait for a beta.

    Raises:
        ValueError: a value out of its range, or two options that contradict each other.
        TypeError: a value of the wrong kind.
    """

    loss_type: str = "dapo"
    """Clipped: `grpo` (arXiv 2402.03300), `bnpo`, `dr_grpo` (2503.20783), `dapo` (2503.14476), `luspo`. Others: `cispo`
    (2506.13585), `sapo` (2511.20347), `vespo` (TRL 1.16), `gmpo` (2507.20673), `gpg` (2504.02546), `dppo_tv` and
    `dppo_kl` (2602.04879), `dro` (verl 0.9.1), `clip_cov` and `kl_cov` (2505.22617)."""
    aggregation: str | None = None
    """`seq_mean_token_mean`, `token_mean`, `seq_mean_token_sum`, `seq_mean_token_sum_norm`, `token_sum` or
    `prompt_mean` (mean over prompts of token means); None: the loss_type's own."""

    epsilon: float = 0.2
    """Lower clip: the ratio is clipped at `1 - epsilon`, in [0, 1). For `gmpo` the log-ratio at `-epsilon`; for
    `dppo_*` the divergence that a token may lose; both only >= 0."""
    epsilon_high: float | None = None
    """Upper clip at `1 + epsilon_high`; None: epsilon. For `cispo` see cispo_bounds; for `gmpo` in log space; for
    `dppo_*` the divergence that a token may gain."""
    delta: float | None = None
    """Two-sided clip: the unclipped branch uses `min(r, delta)`, with gradient 0 above."""
    dual_clip: float | None = None
    """For negative advantages the loss is at most `-dual_clip * advantage`. Above 1."""
    importance_sampling_level: str = "token"
    """`token`, `sequence` (GSPO, arXiv 2507.18071: `exp(mean log-ratio)` for every token of a sequence), or
    `sequence_token` (GSPO-token: the same value, each token's gradient its own)."""
    log_ratio_clamp: float | None = None
    """Bounds `logp - old` on both sides, with gradient 0 outside. verl and OpenRLHF: 20."""

    beta: float = 0.0
    """Weight of the KL against the reference."""
    kl_estimator: str = "k3"
    """`k1`, `k2` or `k3` of Schulman's "Approximating KL divergence", or `abs`, of `d = ref - logp`. With "+": the
    value of the name, the gradient of k2 (straight-through)."""
    kl_clamp: tuple[float | None, float | None] = (None, None)
    """Bounds on |d| before, and on the size of the value after, with gradient 0 outside; a "+" keeps its gradient."""
    use_bias_correction_kl: bool = False
    """Multiply the KL by the ratio (before any clip, differentiable). TRL 1.16 sets it."""
    kl_weighted_by_rollout: bool = False
    """The weight of the rollout multiplies the KL too (ms-swift)."""

    temperature: float = 1.0
    """Divides the logits, after logit_scale and softcap. Give the sampler's temperature."""
    softcap: float | None = None
    """`softcap * tanh(z / softcap)` (Gemma 2); None: no cap."""
    logit_scale: float = 1.0
    """Multiplies the logits first (Cohere)."""
    max_completion_length: int | None = None
    """The constant length that `dr_grpo` and `seq_mean_token_sum_norm` divide by."""

    entropy: bool = False
    """Report the mean entropy of the live tokens."""
    entropy_coef: float = 0.0
    """`loss - entropy_coef * mean entropy`, differentiable."""
    top_entropy_quantile: float = 1.0
    """The share of this call's live tokens, those of highest entropy, that keep a policy term and, as in TRL 1.16, an
    entropy bonus (arXiv 2506.01939)."""

    off_policy_mask_threshold: float | None = None
    """Keep the policy term where the advantage is >= 0 or the sequence's mean `rollout - logp` (`old - logp` without
    rollout log-probs) is at most this (DeepSeek-V3.2, arXiv 2512.02556 eq. 9)."""
    rollout_correction: str = "none"
    """Weight by `w = exp(old - rollout)`: `token_truncate`, `token_mask` (0 outside the bounds), `sequence_truncate`,
    `sequence_mask`. Needs `rollout_per_token_logps`; NaN there: missing, w = 1."""
    rollout_clip_max: float | None = 3.0
    """Cap of w; None: none."""
    rollout_clip_min: float | None = None
    """Floor of w; None: none."""
    rollout_sequence_mean: str = "product"
    """w of a sequence: `product` of its tokens' or their `geometric` mean."""
    rollout_veto: float | None = None
    """A sequence with a token of w below this has weight 0."""

    cispo_bounds: str = "absolute"
    """The weight of `cispo`: `absolute` min(r, epsilon_high); `relative` clip(r, 1 - epsilon, 1 + epsilon_high);
    `relative_upper` min(r, 1 + epsilon_high)."""
    sapo_temperature_pos: float = 1.0
    """Temperature of the soft gate of `sapo` for advantages > 0."""
    sapo_temperature_neg: float = 1.05
    """The same for the others."""
    vespo_k_pos: float = 2.0
    """Shape k of the gamma weight of `vespo` for advantages >= 0."""
    vespo_lambda_pos: float = 3.0
    """Rate lambda of the same, at least 1e-4."""
    vespo_k_neg: float = 3.0
    """k for negative advantages."""
    vespo_lambda_neg: float = 2.0
    """lambda for negative advantages."""
    dppo_cap: float = 20.0
    """Cap of the detached ratio that weighs a token of `dppo_*`. verl's actor sets 3."""
    dro_beta: float | None = None
    """Weight of the quadratic penalty of `dro`."""
    cov_ratio: float = 2e-4
    """Share of the live tokens that `clip_cov` and `kl_cov` select, at least one."""
    cov_bounds: tuple[float, float] = (1.0, 5.0)
    """`clip_cov` selects at random, by `generator`, among tokens whose covariance lies between these."""
    cov_coef: float = 0.1
    """Weight of `|logp - old|` on the tokens that `kl_cov` selects."""

    def __post_init__(self) -> None:
        for field in ("kl_clamp", "cov_bounds"):
            if isinstance(getattr(self, field), list):  # as JSON and TOML give it back
                object.__setattr__(self, field, tuple(getattr(self, field)))
        config_checks.check(self)

    @property
    def row(self) -> LossType:
        """The loss_type's row of the table of losses."""
        return TABLE[self.loss_type]

    @property
    def aggregation_mode(self) -> str:
        """The aggregation, overridden or the loss_type's own."""
        return self.aggregation or self.row.aggregation

    @property
    def upper_bound(self) -> float:
        """The ratio above which a positive advantage stops pulling; see `epsilon_high` for what else it bounds."""
        high = float(self.epsilon if self.epsilon_high is None else self.epsilon_high)
        bare = self.row.bounds in ("log_ratio", "divergence")
        bare = bare or (self.row.bounds == "cap" and self.cispo_bounds == "absolute")
        return high if bare else 1.0 + high

    @property
    def lower_bound(self) -> float:
        """The ratio below which a negative advantage stops pushing; see `epsilon` for what else it bounds."""
        if self.row.bounds == "log_ratio":
            return -self.epsilon
        if self.row.bounds == "divergence":
            return self.epsilon
        if self.row.bounds == "cap" and self.cispo_bounds != "relative":
            return 0.0
        return 1.0 - self.epsilon

    @property
    def needs_entropy(self) -> bool:
        """Whether the entropy is computed at all."""
        return self.entropy or self.entropy_coef != 0 or self.top_entropy_quantile < 1

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> GRPOLossConfig:
        """The conventions of one project: same inputs, same loss, gradient and metrics as its own code.

        Args:
            name: "trl" (1.16.0, `GRPOTrainer` and `GRPOConfig`), "liger" (0.8.5, `LigerFusedLinearGRPOLoss`), "verl"
                (0.9.1, `core_algos` with `ActorConfig`) or "openrlhf" (0.11.2, `PolicyLoss`).
            overrides: fields of this class. Some defaults follow from `loss_type`, `importance_sampling_level` and
                `rollout_correction`, as the project's own functions differ; what is given here always holds.

        The projects' sequence means count sequences with live tokens only (verl, OpenRLHF): give that count as
        `normalizer` where some have none. See `presets.py` for every value.

        Raises:
            ValueError: an unknown name, or fields that contradict each other.
        """
        return cls(**presets.settings(name, overrides))
