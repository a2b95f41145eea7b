"""What must notice a mutant: small float64 batches against `grpo_kernels.reference`, hand arithmetic, plain sums.

The reference shares no line with the files that are mutated. Each check is a function of its name in CHECKS; it raises
AssertionError where it is not satisfied.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels import formulas

CHECKS: dict[str, Callable[[], None]] = {}
DOUBLE = torch.float64


def check(function: Callable[[], None]) -> Callable[[], None]:
    CHECKS[function.__name__] = function
    return function


def rows(*values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=DOUBLE)


# Ratios on both sides of every bound, for advantages of both signs and none; holes, and a row without a token.
LOGITS = torch.tensor([[(7 * i + 3 * j + i * j) % 5 * 0.4 for j in range(3)] for i in range(30)], dtype=DOUBLE)
LOGITS = LOGITS.reshape(5, 6, 3)
IDS = (torch.arange(30).reshape(5, 6) * 2 + 1) % 3
MASK = torch.tensor([[1, 1, 1, 1, 0, 1], [1] * 6, [1, 0, 1, 1, 0, 0], [0] * 6, [0, 1, 1, 1, 1, 1]])
GAP = rows(
    [-1.6, -0.35, -0.1, 0.12, 0.4, 1.7], [0.3, 1.9, -0.05, -0.4, 0.07, -1.2], [0.9, 0.1, -0.7, 0.05, 0.2, 0.3],
    [0.1] * 6, [0.15, -0.6, 0.45, 0.02, 1.1, -0.2],
)  # fmt: skip
LOGPS = LOGITS.log_softmax(-1).gather(-1, IDS[..., None])[..., 0]
ADVANTAGES = torch.tensor([1.3, -0.8, 0.0, 0.5, 0.6], dtype=DOUBLE)
TOKEN_ADVANTAGES = ADVANTAGES[:, None] * rows([1, -1, 2, 1, -2, 0.5]) + rows([0, 0.1, 0, 0, -0.3, 0])
INPUTS: dict[str, Any] = {
    "advantages": ADVANTAGES, "completion_mask": MASK, "old_per_token_logps": LOGPS - GAP,
    "ref_per_token_logps": LOGPS + GAP.flip(1) * 0.7, "rollout_per_token_logps": LOGPS - GAP + GAP.flip(0) * 0.4,
}  # fmt: skip


def scalar(value: float) -> Tensor:
    return torch.tensor(value, dtype=DOUBLE)


def config(**options: Any) -> gk.GRPOLossConfig:
    if options.get("loss_type") == "dr_grpo" or options.get("aggregation") == "seq_mean_token_sum_norm":
        options = {"max_completion_length": 9} | options
    return gk.GRPOLossConfig(**options)


def ours(options: dict[str, Any], **changes: Any) -> tuple[Any, Tensor]:
    leaf = changes.pop("logits", LOGITS).clone().requires_grad_()
    inputs = {"completion_mask": MASK} | INPUTS | changes
    ids = inputs.pop("ids", IDS)
    out = gk.grpo_loss(leaf, ids, config=config(**options), impl="torch", return_per_token=True, **inputs)
    out.loss.backward()
    assert leaf.grad is not None
    return out, leaf.grad


def close(mine: Any, true: Any, what: str) -> None:
    mine, true = (torch.as_tensor(x, dtype=DOUBLE) for x in (mine, true))
    assert mine.shape == true.shape, f"{what}: {list(mine.shape)} and {list(true.shape)}"
    worst = (mine - true).abs().max() if true.numel() else torch.zeros(())
    assert bool(worst <= 1e-10 * true.abs().max() + 1e-15), f"{what}: {mine} is not {true}"


def like_reference(*cases: dict[str, Any], random: bool = False, **changes: Any) -> None:
    """Loss and gradient of each set of options, on advantages of sequences and of tokens."""
    for options in cases:
        for advantages in (ADVANTAGES, TOKEN_ADVANTAGES):
            inputs = INPUTS | {"advantages": advantages} | changes
            draws = [{"generator": torch.Generator().manual_seed(3)} if random else {} for _ in range(2)]
            out, grad = ours(options, **inputs, **draws[0])
            leaf = LOGITS.clone().requires_grad_()
            true = gk.reference.grpo_loss(leaf, IDS, config(**options), **inputs, **draws[1])
            (slope,) = torch.autograd.grad(true, leaf)
            close(out.loss.detach(), true.detach(), f"{options} loss")
            close(grad, slope, f"{options} gradient")


# formulas


@check
def clip() -> None:
    like_reference({}, {"epsilon": 0.3, "epsilon_high": 0.1}, {"epsilon_high": 2.0})


@check
def ties() -> None:
    """A value on a bound is inside it: it passes the gradient, as in torch.clamp and torch.min."""
    inf = scalar(math.inf)
    for ratio, advantage, delta in ((1.25, 1.0, inf), (0.75, -1.0, inf), (2.0, -1.0, scalar(2.0))):
        loss, slope = formulas.clipped_surrogate(scalar(ratio), scalar(advantage), 0.75, 1.25, delta, inf)
        close((loss, slope), (-ratio * advantage, -ratio * advantage), f"{ratio} {advantage}")
    loss, slope = formulas.clipped_surrogate(scalar(1.25), scalar(-1.0), 0.75, 1.25, scalar(1.0), inf)
    close((loss, slope), (1.25, 1.25), "upper bound above delta")
    loss, slope = formulas.clipped_surrogate(scalar(3.0), scalar(-1.0), 0.75, 1.25, inf, scalar(3.0))
    close((loss, slope), (3.0, 3.0), "dual clip")
    for value in (2.0, -2.0):
        close(formulas.bounded(scalar(value), 2.0), (value, 0.0), "bounded")
    for advantage, log_ratio in ((1.0, 0.5), (-1.0, -0.25)):
        held = formulas.one_sided_log_ratio(scalar(log_ratio), scalar(advantage), -0.25, 0.5)
        close(held, (log_ratio, 0.0), "one-sided")
    p, q = scalar(0.5).log(), scalar(0.25).log()
    close(formulas.leaves_tv(p - q, scalar(1.0), p, 0.25, 0.25), 0.0, "total variation")


@check
def delta() -> None:
    like_reference({"delta": 1.1}, {"delta": 0.7}, {"delta": 3.0})


@check
def dual_clip() -> None:
    like_reference({"dual_clip": 1.5}, {"dual_clip": 3.0}, {"dual_clip": 1.2, "delta": 2.0})


@check
def cispo() -> None:
    for bounds in ("absolute", "relative", "relative_upper"):
        like_reference({"loss_type": "cispo", "epsilon_high": 1.3, "cispo_bounds": bounds})


@check
def sapo() -> None:
    like_reference({"loss_type": "sapo"})
    like_reference({"loss_type": "sapo", "sapo_temperature_pos": 0.6, "sapo_temperature_neg": 2.0})


@check
def vespo() -> None:
    like_reference({"loss_type": "vespo"}, {"loss_type": "vespo", "vespo_k_pos": 0.7, "vespo_lambda_pos": 0.4})
    like_reference({"loss_type": "vespo", "vespo_k_neg": 1.2, "vespo_lambda_neg": 0.0})
    like_reference({"loss_type": "vespo", "rollout_correction": "token_truncate"})
    like_reference({"loss_type": "vespo", "rollout_correction": "token_mask", "rollout_clip_max": 1.1})
    soft = {"vespo_k_pos": 0.1, "vespo_k_neg": 0.1, "vespo_lambda_neg": 0.3}
    like_reference({"loss_type": "vespo"} | soft, old_per_token_logps=LOGPS - GAP * 20)
    like_reference({"loss_type": "vespo"} | soft, old_per_token_logps=LOGPS - GAP.abs() * 2)


@check
def gmpo() -> None:
    like_reference({"loss_type": "gmpo"}, {"loss_type": "gmpo", "epsilon": 0.4, "epsilon_high": 0.05})


@check
def gpg() -> None:
    like_reference({"loss_type": "gpg"})


@check
def dro() -> None:
    like_reference({"loss_type": "dro", "dro_beta": 0.4}, {"loss_type": "dro", "dro_beta": 2.0})


@check
def dppo() -> None:
    for name in ("dppo_tv", "dppo_kl"):
        for low, high in ((0.05, 0.2), (0.2, 0.02), (0.0, 0.0)):
            like_reference({"loss_type": name, "epsilon": low, "epsilon_high": high, "dppo_cap": 1.4})


@check
def clip_cov() -> None:
    for ratio, bounds in ((1.0, (-0.1, 0.3)), (0.2, (-2.0, 2.0)), (1.0, (0.05, 9.0))):
        options = {"loss_type": "clip_cov", "cov_ratio": ratio, "cov_bounds": bounds}
        like_reference(options, random=True)


@check
def kl_cov() -> None:
    distinct = {"advantages": TOKEN_ADVANTAGES + GAP * 0.01}
    for ratio in (1e-3, 0.3, 1.0):
        like_reference({"loss_type": "kl_cov", "cov_ratio": ratio, "cov_coef": 0.7}, **distinct)


@check
def kl() -> None:
    for name in ("k1", "abs", "k2", "k3"):
        like_reference({"beta": 0.4, "kl_estimator": name}, {"beta": 0.4, "kl_estimator": f"{name}+"})


@check
def kl_near_zero() -> None:
    """k3 = d^2/2 + d^3/6 + d^4/24 + ..., which the difference of exponentials cannot hold."""
    for d in (1e-5, -1e-4, 0.01, -0.2, 0.2499):
        series = sum(d**n / math.factorial(n) for n in range(2, 18))
        value, slope = formulas.kl_k3(scalar(d))
        assert abs(float(value) - series) <= 1e-14 * series, d
        true = -sum(d**n / math.factorial(n) for n in range(1, 18))
        assert abs(float(slope) - true) <= 1e-14 * abs(true), d
    for d in (-4.0, -0.3, 0.3, 4.0):
        value, slope = formulas.kl_k3(scalar(d))
        assert abs(float(value) - (math.expm1(d) - d)) <= 1e-14 * float(value), d
        assert abs(float(slope) + math.expm1(d)) <= 1e-14 * abs(float(slope)), d


@check
def kl_clamp() -> None:
    for clamp in ((0.3, None), (None, 0.05), (0.5, 0.1)):
        for name in ("k1", "abs", "k2", "k3", "k3+"):
            like_reference({"beta": 0.4, "kl_estimator": name, "kl_clamp": clamp})


@check
def kl_corrected() -> None:
    for level in ("token", "sequence", "sequence_token"):
        for name in ("k1", "abs", "k3", "k3+"):
            options = {"beta": 0.4, "kl_estimator": name, "use_bias_correction_kl": True}
            like_reference(options | {"importance_sampling_level": level})
            like_reference(options | {"importance_sampling_level": level, "kl_clamp": (0.5, 0.2)})
            like_reference(options | {"importance_sampling_level": level, "log_ratio_clamp": 0.5})


@check
def kl_weighted() -> None:
    options = {"beta": 0.4, "rollout_correction": "token_truncate", "kl_weighted_by_rollout": True}
    like_reference(options, options | {"use_bias_correction_kl": True})
    like_reference(options | {"importance_sampling_level": "sequence", "use_bias_correction_kl": True})


@check
def infinities() -> None:
    """0 * inf: what a clip, a zero advantage or a zero weight discards leaves no trace."""
    ids, logits = torch.zeros(1, 1, dtype=torch.long), torch.zeros(1, 1, 4, dtype=DOUBLE)
    far = {"completion_mask": None, "ids": ids, "logits": logits, "old_per_token_logps": rows([-800.0])}
    far |= {"ref_per_token_logps": rows([0.0]), "rollout_per_token_logps": None}
    for advantage, options, loss in (
        (1.0, {}, -1.2), (0.0, {}, 0.0), (-1.0, {"delta": 4.0}, 4.0), (-1.0, {"dual_clip": 3.0}, 3.0),
        (1.0, {"loss_type": "cispo", "epsilon_high": 5.0}, 5 * math.log(4)),
        (0.0, {"loss_type": "cispo", "epsilon_high": 5.0}, 0.0),
        (1.0, {"loss_type": "sapo"}, -4.0), (-1.0, {"loss_type": "sapo"}, 4 / 1.05), (0.0, {"loss_type": "sapo"}, 0.0),
        (0.0, {"loss_type": "kl_cov", "cov_coef": 0.0}, 0.0),
    ):  # fmt: skip
        out, grad = ours({"loss_type": "dapo"} | options, **far, advantages=torch.tensor([advantage], dtype=DOUBLE))
        close(out.loss.detach(), loss, f"{advantage} {options}")
        assert torch.isfinite(grad).all(), f"{advantage} {options}"
        if options.get("loss_type") != "cispo" or advantage == 0:
            assert (grad == 0).all(), f"{advantage} {options}"
    weighted = far | {"importance_sampling_ratio": torch.zeros(1, dtype=DOUBLE)}
    out, grad = ours({"delta": None}, **weighted, advantages=torch.tensor([-1.0], dtype=DOUBLE))
    close(out.loss.detach(), 0.0, "weight 0")
    assert (grad == 0).all(), "weight 0"


# objective


@check
def levels() -> None:
    for level in ("token", "sequence", "sequence_token"):
        for name in ("dapo", "grpo", "sapo"):
            like_reference({"importance_sampling_level": level, "loss_type": name})
            like_reference({"importance_sampling_level": level, "loss_type": name, "log_ratio_clamp": 0.5})


@check
def log_ratio_clamp() -> None:
    for name in ("dapo", "cispo", "sapo", "gmpo", "dro", "kl_cov", "vespo"):
        more = {"cispo": {"epsilon_high": 3.0}, "dro": {"dro_beta": 0.5}}.get(name, {})
        inputs = {"advantages": TOKEN_ADVANTAGES + GAP * 0.01} if name == "kl_cov" else {}
        like_reference({"loss_type": name, "log_ratio_clamp": 0.5} | more, **inputs)


@check
def off_policy() -> None:
    for threshold in (0.0, 0.05, -0.2, 0.4):
        like_reference({"off_policy_mask_threshold": threshold})
        like_reference({"off_policy_mask_threshold": threshold}, rollout_per_token_logps=None)
    like_reference({"off_policy_mask_threshold": 0.0, "log_ratio_clamp": 0.3}, rollout_per_token_logps=None)
    like_reference({"off_policy_mask_threshold": 0.05, "top_entropy_quantile": 0.5})
    like_reference({"off_policy_mask_threshold": -0.5, "loss_type": "dro", "dro_beta": 0.5})  # acts at advantage 0
    missing = INPUTS["rollout_per_token_logps"].clone()
    missing[1, 2] = math.nan
    like_reference({"off_policy_mask_threshold": 0.05}, rollout_per_token_logps=missing)


@check
def top_entropy() -> None:
    for share in (0.2, 0.5, 0.9):
        like_reference({"top_entropy_quantile": share}, {"top_entropy_quantile": share, "entropy_coef": 0.3})
        like_reference({"top_entropy_quantile": share, "entropy_coef": 0.3}, entropy_normalizer=7.0)


@check
def entropy() -> None:
    like_reference({"entropy_coef": 0.3}, {"entropy_coef": -0.1, "loss_type": "grpo"})
    like_reference({"entropy_coef": 0.3}, entropy_normalizer=11.0)


@check
def rollout() -> None:
    for name in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"):
        for low, high in ((None, 1.2), (0.8, 1.3), (0.9, None)):
            limits = {"rollout_clip_min": low, "rollout_clip_max": high}
            like_reference({"rollout_correction": name, "beta": 0.2} | limits)
            if name.startswith("sequence"):
                like_reference({"rollout_correction": name, "rollout_sequence_mean": "geometric"} | limits)
    missing = INPUTS["rollout_per_token_logps"].clone()
    missing[0, 1] = math.nan
    like_reference({"rollout_correction": "sequence_truncate"}, rollout_per_token_logps=missing)
    like_reference({"rollout_correction": "token_truncate"}, old_per_token_logps=None)


@check
def veto() -> None:
    for floor in (0.6, 0.8, 0.95):
        like_reference({"rollout_correction": "token_truncate", "rollout_veto": floor})


@check
def given_weight() -> None:
    like_reference({"beta": 0.2}, importance_sampling_ratio=GAP.abs() + 0.2)
    like_reference({"beta": 0.2}, importance_sampling_ratio=ADVANTAGES.abs() + 0.2)


@check
def on_policy() -> None:
    for name in ("dapo", "grpo", "cispo", "gmpo"):
        like_reference({"loss_type": name, "beta": 0.2} | ({"epsilon_high": 5.0} if name == "cispo" else {}),
                       old_per_token_logps=None)  # fmt: skip


# aggregation


@check
def loss_types() -> None:
    one_token = MASK.clone()
    one_token[1, 1:] = 0
    for name in ("grpo", "bnpo", "dr_grpo", "dapo", "luspo"):
        like_reference({"loss_type": name})
        like_reference({"loss_type": name}, completion_mask=one_token)


@check
def aggregations() -> None:
    for name in ("seq_mean_token_mean", "token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm", "token_sum"):
        like_reference({"aggregation": name}, {"aggregation": name, "loss_type": "grpo"})
    like_reference({"aggregation": "prompt_mean"}, group_ids=torch.tensor([7, 2, 7, 9, 2]))


@check
def normalizer() -> None:
    for name in ("grpo", "dr_grpo", "dapo"):
        like_reference({"loss_type": name}, normalizer=13.0)
        like_reference({"loss_type": name}, normalizer=0.25)


@check
def nothing_alive() -> None:
    for name in ("grpo", "dapo", "luspo", "sapo", "vespo", "gmpo"):
        out, grad = ours({"loss_type": name, "beta": 0.1, "entropy_coef": 0.1}, completion_mask=torch.zeros_like(MASK))
        close(out.loss.detach(), 0.0, name)
        assert (grad == 0).all(), name
        assert all(torch.isfinite(value) for value in out.metrics.values()), name
