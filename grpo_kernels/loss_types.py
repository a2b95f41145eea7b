"""The losses: each is one row of a table, over the formulas of formulas.py."""

from __future__ import annotations

from typing import Final, NamedTuple

RATIO_LEVELS: Final = ("token", "sequence", "sequence_token")
AGGREGATIONS: Final = (
    "seq_mean_token_mean", "token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm", "token_sum", "prompt_mean",
)  # fmt: skip


class LossType(NamedTuple):
    """What tells one loss from another."""

    surrogate: str
    """The formula of its policy term."""
    aggregation: str
    """How token losses become one number, unless the config overrides it."""
    bounds: str = ""
    """What epsilon and epsilon_high bound: "ratio", "cap", "log_ratio", "divergence"; "": nothing."""
    levels: tuple[str, ...] = ("token",)
    """Values of importance_sampling_level that mean something for it."""
    two_sided: bool = False
    """Whether delta and dual_clip act on it."""
    whole: bool = False
    """Whether the loss of a token depends on other tokens, whatever the options."""
    silent_at_zero: bool = True
    """Whether its policy term vanishes where the advantage is 0."""


def _clipped(aggregation: str) -> LossType:
    return LossType("clip", aggregation, "ratio", RATIO_LEVELS, two_sided=True)


TABLE: Final = {
    "grpo": _clipped("seq_mean_token_mean"),
    "bnpo": _clipped("token_mean"),
    "dr_grpo": _clipped("seq_mean_token_sum_norm"),
    "dapo": _clipped("token_mean"),
    "luspo": _clipped("seq_mean_token_sum"),
    "cispo": LossType("cispo", "token_mean", "cap"),
    "sapo": LossType("sapo", "seq_mean_token_mean", levels=RATIO_LEVELS),
    "vespo": LossType("vespo", "token_mean", whole=True),
    "gmpo": LossType("gmpo", "seq_mean_token_mean", "log_ratio", whole=True),
    "gpg": LossType("gpg", "token_mean"),
    "dppo_tv": LossType("dppo_tv", "token_mean", "divergence"),
    "dppo_kl": LossType("dppo_kl", "token_mean", "divergence"),
    "dro": LossType("dro", "token_mean", silent_at_zero=False),
    "clip_cov": LossType("clip", "token_mean", "ratio", two_sided=True, whole=True),
    "kl_cov": LossType("ratio", "token_mean", whole=True, silent_at_zero=False),
}
LOSS_TYPES: Final = tuple(TABLE)

OWN_OPTIONS: Final = {
    "cispo_bounds": ("cispo",),
    "sapo_temperature_pos": ("sapo",),
    "sapo_temperature_neg": ("sapo",),
    "vespo_k_pos": ("vespo",),
    "vespo_lambda_pos": ("vespo",),
    "vespo_k_neg": ("vespo",),
    "vespo_lambda_neg": ("vespo",),
    "dppo_cap": ("dppo_tv", "dppo_kl"),
    "dro_beta": ("dro",),
    "cov_ratio": ("clip_cov", "kl_cov"),
    "cov_bounds": ("clip_cov",),
    "cov_coef": ("kl_cov",),
    "epsilon": tuple(name for name, row in TABLE.items() if row.bounds),
    "epsilon_high": tuple(name for name, row in TABLE.items() if row.bounds),
    "delta": tuple(name for name, row in TABLE.items() if row.two_sided),
    "dual_clip": tuple(name for name, row in TABLE.items() if row.two_sided),
}
"""Options that some losses alone have."""
