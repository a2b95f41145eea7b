"""The checks of GRPOLossConfig: every option is honoured or refused with the reason."""

from __future__ import annotations

import difflib
import warnings
from typing import TYPE_CHECKING, Any, Final

from .loss_types import AGGREGATIONS, LOSS_TYPES, OWN_OPTIONS, RATIO_LEVELS

if TYPE_CHECKING:
    from .config import GRPOLossConfig

KL_ESTIMATORS: Final = ("k1", "abs", "k2", "k3", "k1+", "abs+", "k2+", "k3+")
ROLLOUT_CORRECTIONS: Final = ("none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
CISPO_BOUNDS: Final = ("absolute", "relative", "relative_upper")
LARGEST: Final = 3.4028234663852886e38  # float32, in which the options are used
SMALLEST: Final = 1.1754943508222875e-38
MOST_SCALE: Final = 1e18  # of temperature, softcap and logit_scale; their quotients need room in float32 too

NAME: Final = "GRPOLossConfig"
_OTHER_BOUNDS: Final = ("log_ratio", "divergence")
_EXAMPLE: Final = "epsilon_high=0.28 means a clip at 1.28: give the distance from 1, not the bound itself."


def check(config: GRPOLossConfig) -> None:
    """All fields of a config; see its `Raises`."""
    _choice("loss_type", config.loss_type, LOSS_TYPES)
    _choice("importance_sampling_level", config.importance_sampling_level, RATIO_LEVELS)
    if config.aggregation is not None:
        _choice("aggregation", config.aggregation, AGGREGATIONS)
    _check_clip(config)
    _check_own_numbers(config)
    _check_own_options(config)
    _check_kl(config)
    for field in ("temperature", "logit_scale"):
        _scale(field, getattr(config, field))
    if config.softcap is not None:
        _scale("softcap", config.softcap)
    if config.log_ratio_clamp is not None:
        _positive("log_ratio_clamp", config.log_ratio_clamp)
    _flag("entropy", config.entropy)
    _number("entropy_coef", config.entropy_coef)
    if not 0 < _number("top_entropy_quantile", config.top_entropy_quantile) <= 1:
        advice = "It is the share of tokens that keep a policy term: 0.2 keeps a fifth."
        raise _bad("top_entropy_quantile", "must be in (0, 1]", config.top_entropy_quantile, advice)
    if config.off_policy_mask_threshold is not None:
        _number("off_policy_mask_threshold", config.off_policy_mask_threshold)
    _check_rollout(config)
    _check_length(config)


def match(value: object, choices: tuple[str, ...]) -> str:
    """ " Did you mean ...?" with the closest of the choices; "" if none is close."""
    close = difflib.get_close_matches(str(value).lower(), choices, n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def _bad(field: str, requirement: str, value: object, advice: str) -> ValueError:
    return ValueError(f"{NAME}: {field} {requirement}, got {value!r}. {advice}")


def _choice(field: str, value: object, choices: tuple[str, ...]) -> None:
    if not isinstance(value, str):
        raise TypeError(f"{NAME}: {field} must be a string, got {type(value).__name__}. One of {', '.join(choices)}.")
    if value not in choices:
        hint = (match(value, choices) or " Choose one of these.").strip()
        raise _bad(field, f"must be one of {', '.join(choices)}", value, hint)


def _number(field: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{NAME}: {field} must be a number, got {type(value).__name__}. Convert it with float().")
    if not -LARGEST <= value <= LARGEST:
        raise _bad(field, "must be finite", value, "Give a finite number.")
    return value


def _positive(field: str, value: object) -> None:
    if not _number(field, value) >= SMALLEST:
        raise _bad(field, "must be > 0, in float32 too", value, "Give a positive number.")


def _scale(field: str, value: object) -> None:
    _positive(field, value)
    if not 1 / MOST_SCALE <= _number(field, value) <= MOST_SCALE:
        wanted = f"must be from {1 / MOST_SCALE:g} to {MOST_SCALE:g}"
        raise _bad(field, wanted, value, "A quotient with another option would leave float32.")


def _flag(field: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{NAME}: {field} must be True or False, got {value!r}. Give a bool.")


def _pair(field: str, value: Any) -> tuple[Any, Any]:
    if not isinstance(value, tuple) or len(value) != 2:
        raise TypeError(f"{NAME}: {field} must be a pair, got {value!r}. Give two values.")
    return value


def _check_clip(config: GRPOLossConfig) -> None:
    low, bounds = _number("epsilon", config.epsilon), config.row.bounds
    if bounds in _OTHER_BOUNDS and low < 0:  # these are no distance from 1
        advice = f"It bounds a {bounds.replace('_', '-')} with loss_type={config.loss_type!r}."
        raise _bad("epsilon", "must be >= 0", low, advice)
    if bounds not in _OTHER_BOUNDS and not 0 <= low < 1:
        raise _bad("epsilon", "must be in [0, 1)", low, _EXAMPLE)
    if config.epsilon_high is not None and _number("epsilon_high", config.epsilon_high) < 0:
        raise _bad("epsilon_high", "must be >= 0", config.epsilon_high, _EXAMPLE)
    if config.delta is not None:
        _positive("delta", config.delta)
    if config.dual_clip is not None and not _number("dual_clip", config.dual_clip) > 1:
        raise _bad("dual_clip", "must be > 1", config.dual_clip, "The usual value is 3.")


def _check_own_numbers(config: GRPOLossConfig) -> None:
    """The options that some losses alone have: their ranges."""
    _choice("cispo_bounds", config.cispo_bounds, CISPO_BOUNDS)
    for field in ("sapo_temperature_pos", "sapo_temperature_neg", "dppo_cap"):
        _positive(field, getattr(config, field))
    for field in ("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg", "cov_coef"):
        _number(field, getattr(config, field))
    if config.dro_beta is not None:
        _positive("dro_beta", config.dro_beta)
    if not 0 < _number("cov_ratio", config.cov_ratio) <= 1:
        raise _bad("cov_ratio", "must be in (0, 1]", config.cov_ratio, "It is a share of the live tokens.")
    low, high = (_number("cov_bounds", value) for value in _pair("cov_bounds", config.cov_bounds))
    if not low < high:
        raise _bad("cov_bounds", "must rise", config.cov_bounds, "Give (lower, upper).")


def _check_own_options(config: GRPOLossConfig) -> None:
    """What a loss does not use, it refuses."""
    row = config.row
    for field, owners in OWN_OPTIONS.items():
        default = type(config).__dataclass_fields__[field].default
        value = getattr(config, field)
        if config.loss_type not in owners and value != default:
            wanted = f"must be {default!r} with loss_type={config.loss_type!r}"
            raise _bad(field, wanted, value, f"That loss does not use it; {', '.join(owners)} would.")
    if config.importance_sampling_level not in row.levels:
        wanted = f"must be {' or '.join(map(repr, row.levels))} with loss_type={config.loss_type!r}"
        advice = "Its formula has ratios of single tokens."
        if config.loss_type in ("vespo", "gmpo"):
            advice = "It has a weight of the sequence of its own."
        raise _bad("importance_sampling_level", wanted, config.importance_sampling_level, advice)
    if config.loss_type == "dro" and config.dro_beta is None:
        raise _bad("dro_beta", "must be given with loss_type='dro'", None, "It weighs the quadratic penalty.")
    if config.loss_type == "cispo" and config.upper_bound < 1:
        warnings.warn(
            f"{NAME}: cispo caps the weight at epsilon_high itself, here {config.upper_bound}, so that even an "
            "unchanged policy is scaled down. The usual cap is 5.0 (a clip at 1.28 is epsilon_high=1.28 here).",
            stacklevel=5,
        )


def _check_kl(config: GRPOLossConfig) -> None:
    _number("beta", config.beta)
    _choice("kl_estimator", config.kl_estimator, KL_ESTIMATORS)
    _flag("use_bias_correction_kl", config.use_bias_correction_kl)
    _flag("kl_weighted_by_rollout", config.kl_weighted_by_rollout)
    for bound in _pair("kl_clamp", config.kl_clamp):
        if bound is not None:
            _positive("kl_clamp", bound)


def _check_rollout(config: GRPOLossConfig) -> None:
    _choice("rollout_correction", config.rollout_correction, ROLLOUT_CORRECTIONS)
    _choice("rollout_sequence_mean", config.rollout_sequence_mean, ("product", "geometric"))
    low, high = config.rollout_clip_min, config.rollout_clip_max
    for field, bound in (("rollout_clip_min", low), ("rollout_clip_max", high), ("rollout_veto", config.rollout_veto)):
        if bound is not None:
            _positive(field, bound)
    if low is not None and high is not None and not low < high:
        raise _bad("rollout_clip_min", f"must be below rollout_clip_max, {high}", low, "Give the floor of the weight.")
    correction = config.rollout_correction
    for field in ("rollout_clip_max", "rollout_clip_min", "rollout_sequence_mean", "rollout_veto"):
        default = type(config).__dataclass_fields__[field].default
        if correction == "none" and getattr(config, field) != default:
            wanted = f"must be {default!r} with rollout_correction='none'"
            raise _bad(field, wanted, getattr(config, field), "There is no weight; choose a rollout_correction.")
    if config.rollout_sequence_mean != "product" and not correction.startswith("sequence"):
        wanted = f"must be 'product' with rollout_correction={correction!r}"
        raise _bad("rollout_sequence_mean", wanted, config.rollout_sequence_mean, "There tokens have their own weight.")
    if config.loss_type == "vespo" and correction.startswith("sequence"):
        wanted = "must be of tokens with loss_type='vespo'"
        raise _bad("rollout_correction", wanted, correction, "VESPO multiplies the weights of a sequence's tokens.")


def _check_length(config: GRPOLossConfig) -> None:
    length = config.max_completion_length
    if length is None:
        if config.aggregation_mode == "seq_mean_token_sum_norm":
            chosen = "aggregation='seq_mean_token_sum_norm'" if config.aggregation else "loss_type='dr_grpo'"
            advice = "Give the constant that lengths are divided by, usually the sampler's limit."
            raise _bad("max_completion_length", f"must be given with {chosen}", None, advice)
        return
    if isinstance(length, bool) or not isinstance(length, int):
        raise TypeError(f"{NAME}: max_completion_length must be an int, got {type(length).__name__}. Convert it.")
    if not 1 <= length < 2**31:
        raise _bad("max_completion_length", "must be >= 1 and below 2^31", length, "Give the sampler's limit.")
