"""The options of a GRPO-family loss: one frozen object, checked when it is made."""

from __future__ import annotations

import dataclasses
import difflib
import warnings
from dataclasses import dataclass
from typing import Any, Final

LOSS_TYPES: Final = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo")
PLANNED_LOSS_TYPES: Final = (
    "luspo", "sapo", "vespo", "gmpo", "gpg", "dppo_tv", "dppo_kl", "dro", "clip_cov", "kl_cov",
)  # fmt: skip
KL_ESTIMATORS: Final = ("k1", "k2", "k3")
PLANNED_KL_ESTIMATORS: Final = ("abs", "k1+", "abs+", "k2+", "k3+")
RATIO_LEVELS: Final = ("token", "sequence")
PRESETS: Final = ("trl", "liger", "verl", "openrlhf")

_NAME: Final = "GRPOLossConfig"
LARGEST: Final = 3.4028234663852886e38  # float32, in which the options are used
SMALLEST: Final = 1.1754943508222875e-38


@dataclass(frozen=True, slots=True, kw_only=True)
class GRPOLossConfig:
    """Options of `grpo_loss`. The defaults are TRL 1.16's, but the KL is the paper's plain k3.

    Log-probabilities are in nats, ratios are `r = exp(logp - old)`, clip bounds are distances from 1.

    Raises:
        ValueError: a value out of its range, or two options that contradict each other.
        TypeError: a value of the wrong kind.
        NotImplementedError: an option of the contract that this version does not build yet, by its name.
    """

    loss_type: str = "dapo"
    """`grpo` (arXiv 2402.03300), `bnpo`, `dr_grpo` (2503.20783), `dapo` (2503.14476), `cispo` (2506.13585)."""
    aggregation: str | None = None
    """None: the loss_type's own. Overrides are not built yet."""

    epsilon: float = 0.2
    """Lower clip: the ratio is clipped at `1 - epsilon`. In [0, 1)."""
    epsilon_high: float | None = None
    """Upper clip at `1 + epsilon_high`; None: epsilon. For `cispo` the absolute cap of the weight."""
    delta: float | None = None
    """Two-sided clip: the unclipped branch uses `min(r, delta)`, with gradient 0 above."""
    dual_clip: float | None = None
    """For negative advantages the loss is at most `-dual_clip * advantage`. Above 1."""
    importance_sampling_level: str = "token"
    """`token`, or `sequence` (GSPO, arXiv 2507.18071: `exp(mean log-ratio)` for every token of a sequence)."""
    log_ratio_clamp: float | None = None
    """Not built yet."""

    beta: float = 0.0
    """Weight of the KL against the reference."""
    kl_estimator: str = "k3"
    """`k1`, `k2` or `k3` of Schulman's "Approximating KL divergence", of `d = ref - logp`."""
    kl_clamp: tuple[float | None, float | None] = (None, None)
    """Not built yet."""
    use_bias_correction_kl: bool = False
    """Multiply the KL by the ratio (before any clip, differentiable). TRL 1.16 sets it."""
    kl_weighted_by_rollout: bool = False
    """Not built yet."""

    temperature: float = 1.0
    """Divides the logits, after logit_scale and softcap. Give the sampler's temperature."""
    softcap: float | None = None
    """`softcap * tanh(z / softcap)` (Gemma 2); None: no cap."""
    logit_scale: float = 1.0
    """Multiplies the logits first (Cohere)."""
    max_completion_length: int | None = None
    """The constant length that `dr_grpo` divides by."""

    entropy: bool = False
    """Report the mean entropy of the live tokens."""
    entropy_coef: float = 0.0
    """`loss - entropy_coef * mean entropy`, differentiable."""
    top_entropy_quantile: float = 1.0
    """Not built yet."""

    off_policy_mask_threshold: float | None = None
    """Not built yet."""
    rollout_correction: str = "none"
    """Not built yet: give a finished weight as `importance_sampling_ratio`."""
    rollout_clip_max: float = 3.0
    """Not built yet."""
    rollout_clip_min: float | None = None
    """Not built yet."""
    rollout_sequence_mean: str = "product"
    """Not built yet."""
    rollout_veto: float | None = None
    """Not built yet."""

    cispo_bounds: str = "absolute"
    """`absolute`: the weight of `cispo` is `min(r, epsilon_high)`. Other bounds are not built yet."""
    sapo_temperature_pos: float = 1.0
    """Not built yet."""
    sapo_temperature_neg: float = 1.05
    """Not built yet."""
    vespo_k_pos: float = 2.0
    """Not built yet."""
    vespo_lambda_pos: float = 3.0
    """Not built yet."""
    vespo_k_neg: float = 3.0
    """Not built yet."""
    vespo_lambda_neg: float = 2.0
    """Not built yet."""
    dro_beta: float | None = None
    """Not built yet."""
    cov_ratio: float = 2e-4
    """Not built yet."""
    cov_bounds: tuple[float, float] = (1.0, 5.0)
    """Not built yet."""
    cov_coef: float = 0.1
    """Not built yet."""

    def __post_init__(self) -> None:
        _refuse_unbuilt(self)
        _choice("loss_type", self.loss_type, LOSS_TYPES, PLANNED_LOSS_TYPES)
        _choice("kl_estimator", self.kl_estimator, KL_ESTIMATORS, PLANNED_KL_ESTIMATORS)
        _choice("importance_sampling_level", self.importance_sampling_level, RATIO_LEVELS, ("sequence_token",))
        _check_clip(self)
        _positive("temperature", self.temperature)
        _positive("logit_scale", self.logit_scale)
        if self.softcap is not None:
            _positive("softcap", self.softcap)
        _number("beta", self.beta)
        _number("entropy_coef", self.entropy_coef)
        _flag("entropy", self.entropy)
        _flag("use_bias_correction_kl", self.use_bias_correction_kl)
        _check_length(self)

    @property
    def upper_bound(self) -> float:
        """The ratio above which a positive advantage stops pulling; for `cispo` the cap of the weight."""
        high = self.epsilon if self.epsilon_high is None else self.epsilon_high
        return float(high) if self.loss_type == "cispo" else 1.0 + high

    @property
    def lower_bound(self) -> float:
        """The ratio below which a negative advantage stops pushing."""
        return 1.0 - self.epsilon

    @property
    def needs_entropy(self) -> bool:
        """Whether the entropy is computed at all."""
        return self.entropy or self.entropy_coef != 0

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> GRPOLossConfig:
        """The conventions of one project ("trl", "liger", "verl", "openrlhf"). Not built yet."""
        if name not in PRESETS:
            raise ValueError(
                f"{_NAME}.preset: name must be one of {', '.join(PRESETS)}, got {name!r}.{_match(name, PRESETS)}"
            )
        settings = ", ".join([repr(name), *(f"{field}={value!r}" for field, value in overrides.items())])
        raise NotImplementedError(f"{_NAME}.preset({settings}): presets are not built yet. Set the fields themselves.")


_UNBUILT: Final = (
    "aggregation", "log_ratio_clamp", "kl_clamp", "kl_weighted_by_rollout", "top_entropy_quantile",
    "off_policy_mask_threshold", "rollout_correction", "rollout_clip_max", "rollout_clip_min",
    "rollout_sequence_mean", "rollout_veto", "cispo_bounds", "sapo_temperature_pos", "sapo_temperature_neg",
    "vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg", "dro_beta", "cov_ratio", "cov_bounds",
    "cov_coef",
)  # fmt: skip


def _refuse_unbuilt(config: GRPOLossConfig) -> None:
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        value = tuple(value) if isinstance(value, list) else value  # as JSON gives it back
        if field.name in _UNBUILT and value != field.default:
            raise NotImplementedError(
                f"{_NAME}: {field.name} is not built yet, got {getattr(config, field.name)!r}. "
                f"Leave it at {field.default!r}."
            )


def _match(value: object, choices: tuple[str, ...]) -> str:
    close = difflib.get_close_matches(str(value).lower(), choices, n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def _choice(field: str, value: object, choices: tuple[str, ...], planned: tuple[str, ...]) -> None:
    if not isinstance(value, str):
        raise TypeError(f"{_NAME}: {field} must be a string, got {type(value).__name__}. One of {', '.join(choices)}.")
    if value in planned:
        raise NotImplementedError(f"{_NAME}: {field}={value!r} is not built yet. Use one of {', '.join(choices)}.")
    if value not in choices:
        hint = _match(value, choices + planned) or " Choose one of these."
        raise ValueError(f"{_NAME}: {field} must be one of {', '.join(choices)}, got {value!r}.{hint}")


def _number(field: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{_NAME}: {field} must be a number, got {type(value).__name__}. Convert it with float().")
    if not -LARGEST <= value <= LARGEST:
        raise ValueError(f"{_NAME}: {field} must be finite, got {value}. Give a finite number.")
    return value


def _positive(field: str, value: object) -> None:
    if not _number(field, value) >= SMALLEST:
        raise ValueError(f"{_NAME}: {field} must be > 0, in float32 too, got {value}. Give a positive number.")


def _flag(field: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{_NAME}: {field} must be True or False, got {value!r}. Give a bool.")


_EXAMPLE: Final = "epsilon_high=0.28 means a clip at 1.28: give the distance from 1, not the bound itself."


def _check_clip(config: GRPOLossConfig) -> None:
    if not 0 <= _number("epsilon", config.epsilon) < 1:
        raise ValueError(f"{_NAME}: epsilon must be in [0, 1), got {config.epsilon}. {_EXAMPLE}")
    if config.epsilon_high is not None and _number("epsilon_high", config.epsilon_high) < 0:
        raise ValueError(f"{_NAME}: epsilon_high must be >= 0, got {config.epsilon_high}. {_EXAMPLE}")
    if config.delta is not None:
        _positive("delta", config.delta)
    if config.dual_clip is not None and not _number("dual_clip", config.dual_clip) > 1:
        raise ValueError(f"{_NAME}: dual_clip must be > 1, got {config.dual_clip}. The usual value is 3.")
    if config.loss_type != "cispo":
        return
    for field in ("delta", "dual_clip"):
        if getattr(config, field) is not None:
            raise ValueError(
                f"{_NAME}: {field} must be None with loss_type='cispo', got {getattr(config, field)}. "
                "CISPO has one cap, epsilon_high."
            )
    if config.importance_sampling_level != "token":
        raise ValueError(
            f"{_NAME}: importance_sampling_level must be 'token' with loss_type='cispo', "
            f"got {config.importance_sampling_level!r}. CISPO weighs single tokens."
        )
    if config.upper_bound < 1:
        warnings.warn(
            f"{_NAME}: cispo caps the weight at epsilon_high itself, here {config.upper_bound}, so that even an "
            "unchanged policy is scaled down. The usual cap is 5.0 (a clip at 1.28 is epsilon_high=1.28 here).",
            stacklevel=4,
        )


def _check_length(config: GRPOLossConfig) -> None:
    length = config.max_completion_length
    if length is None:
        if config.loss_type == "dr_grpo":
            raise ValueError(
                f"{_NAME}: max_completion_length must be given with loss_type='dr_grpo', got None. "
                "Give the constant that lengths are divided by, usually the sampler's limit."
            )
        return
    if isinstance(length, bool) or not isinstance(length, int):
        raise TypeError(f"{_NAME}: max_completion_length must be an int, got {type(length).__name__}. Convert it.")
    if length < 1:
        raise ValueError(f"{_NAME}: max_completion_length must be >= 1, got {length}. Give the sampler's limit.")
