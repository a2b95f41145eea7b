"""Which route each loss takes, and that all routes agree: one pass or general, from logits or from hidden states."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_objective_coefficients import OWN
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels import reference

B, T, V, H = 3, 3, 11, 5
BY_TOKEN = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "gpg", "dppo_tv", "dppo_kl", "dro")
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "everything of a token": {
        "beta": 0.3, "kl_estimator": "k3+", "kl_clamp": (0.6, 0.2), "use_bias_correction_kl": True,
        "log_ratio_clamp": 0.35, "kl_weighted_by_rollout": True, "rollout_correction": "token_truncate",
        "rollout_clip_max": 1.1, "entropy_coef": 0.1,
    },
    "abs": {"beta": 0.3, "kl_estimator": "abs", "kl_weighted_by_rollout": True, "rollout_correction": "token_mask"},
    "sequence weight": {"rollout_correction": "sequence_truncate", "rollout_veto": 0.1, "aggregation": "prompt_mean"},
    "mask": {"off_policy_mask_threshold": 0.0, "beta": 0.2},
    "entropy mask": {"top_entropy_quantile": 0.5, "entropy_coef": 0.1},
}  # fmt: skip
WHOLE = ("mask", "entropy mask")
CASES = [
    (name, case) for name in OWN for case in OPTIONS if (name, case) != ("vespo", "sequence weight")
]  # fmt: skip


def problem(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
    """hidden, weight, ids and the rest; hidden and weight are exact in float32."""
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    hidden, weight = normal(B, T, H), normal(V, H)
    ids = torch.randint(0, V, (B, T), generator=generator)
    mask = torch.ones(B, T, dtype=torch.bool)
    mask[0, 1], mask[2, 2] = False, False
    logps = reference.per_token_logps(hidden.double() @ weight.double().T, ids, mask)[0].float()
    old = (logps + 0.3 * normal(B, T)).clamp(max=-1e-3)
    sampled = old + 0.2 * normal(B, T)
    sampled[1, 1] = math.nan
    rest = {
        "advantages": torch.tensor([1.3, -0.7, 0.4]), "completion_mask": mask, "old_per_token_logps": old,
        "ref_per_token_logps": logps + 0.5 * normal(B, T), "rollout_per_token_logps": sampled,
    }  # fmt: skip
    cast = {name: value if value.dtype == torch.bool else value.to(dtype) for name, value in rest.items()}
    return hidden.to(dtype), weight.to(dtype), ids, cast


def arguments_of(config: gk.GRPOLossConfig, rest: dict[str, Any]) -> dict[str, Any]:
    given = rest | ({"group_ids": torch.tensor([7, 2, 7])} if config.aggregation_mode == "prompt_mean" else {})
    return given | ({"generator": torch.Generator().manual_seed(0)} if config.loss_type == "clip_cov" else {})


def gradients(loss: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """The loss and its gradients in hidden states and weight."""
    hidden, weight = (t.requires_grad_() for t in problem(dtype)[:2])
    value = loss(hidden, weight)
    return (value.detach(), *torch.autograd.grad(1.5 * value, (hidden, weight)))


def truth_of(config: gk.GRPOLossConfig, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    _, _, ids, rest = problem(dtype)
    given = arguments_of(config, rest)
    return gradients(lambda hidden, weight: reference.grpo_loss(hidden @ weight.T, ids, config, **given), dtype)


def from_logits(config: gk.GRPOLossConfig, impl: str, dtype: torch.dtype, **how: Any) -> tuple[Tensor, ...]:
    _, _, ids, rest = problem(dtype)
    given = arguments_of(config, rest)

    def loss(hidden: Tensor, weight: Tensor) -> Tensor:
        logits = (hidden @ weight.T).clone()
        return gk.grpo_loss(logits, ids, config=config, impl=impl, **given, **how).loss

    return gradients(loss, dtype)


def from_hidden(config: gk.GRPOLossConfig, mode: str, dtype: torch.dtype) -> tuple[Tensor, ...]:
    _, _, ids, rest = problem(dtype)
    given = arguments_of(config, rest)
    return gradients(
        lambda hidden, weight: gk.linear_grpo_loss(hidden, weight, ids, config=config, mode=mode, **given).loss, dtype
    )


def config_of(loss_type: str, case: str) -> gk.GRPOLossConfig:
    return gk.GRPOLossConfig(loss_type=loss_type, **OWN[loss_type] | OPTIONS[case])


def assert_all_close(got: tuple[Tensor, ...], truth: tuple[Tensor, ...]) -> None:
    for ours, expected in zip(got, truth, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(("loss_type", "case"), CASES)
def test_routes_from_logits_agree(loss_type: str, case: str) -> None:
    pytest.importorskip("triton")
    config = config_of(loss_type, case)
    truth = truth_of(config)
    assert abs(truth[0]) > 1e-3
    assert truth[1].abs().max() > 1e-3
    assert_all_close(from_logits(config, "torch", torch.float64), truth)
    by_token = loss_type in BY_TOKEN and case not in WHOLE
    assert_all_close(from_logits(config, "triton", torch.float64), truth)
    assert gk.backends.last_used() == ("triton one-pass" if by_token else "triton")
    assert_all_close(from_logits(config, "triton", torch.float64, inplace=True), truth)
    assert gk.backends.last_used() == ("triton one-kernel" if by_token else "triton")


@pytest.mark.parametrize(("loss_type", "case"), CASES)
def test_routes_from_hidden_states_agree(loss_type: str, case: str) -> None:
    config = config_of(loss_type, case)
    truth = truth_of(config)
    assert_all_close(from_hidden(config, "lean", torch.float64), truth)
    assert_all_close(from_hidden(config, "auto", torch.float64), truth)
    by_token = loss_type in BY_TOKEN and case not in WHOLE
    assert gk.backends.last_used().split()[-1] == ("fast" if by_token else "lean")
    if by_token:
        assert_all_close(from_hidden(config, "fast", torch.float64), truth)
    else:
        with pytest.raises(ValueError, match=r"^linear_grpo_loss: mode must not be 'fast' .* got 'fast' with \w+="):
            from_hidden(config, "fast", torch.float64)


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize(("loss_type", "case"), CASES[::2])
def test_float32_is_as_good_as_plain_torch(loss_type: str, case: str, impl: str) -> None:
    if impl == "triton":
        pytest.importorskip("triton")
    config = config_of(loss_type, case)
    truth, plain = truth_of(config), truth_of(config, torch.float32)
    for ours, theirs, exact in zip(from_logits(config, impl, torch.float32), plain, truth, strict=True):
        budget = (theirs - exact).abs().max() + 16 * torch.finfo(torch.float32).eps * exact.abs().max()
        assert (ours - exact).abs().max() <= budget


def test_on_policy_a_correction_needs_the_log_probs_first() -> None:
    pytest.importorskip("triton")
    config = gk.GRPOLossConfig(rollout_correction="token_truncate", beta=0.1)
    _, _, ids, rest = problem(torch.float64)
    rest |= {"old_per_token_logps": None}
    truth = gradients(lambda h, w: reference.grpo_loss(h @ w.T, ids, config, **rest), torch.float64)
    for impl in ("torch", "triton"):
        got = gradients(
            lambda h, w, impl=impl: gk.grpo_loss((h @ w.T).clone(), ids, config=config, impl=impl, **rest).loss,
            torch.float64,
        )
        assert gk.backends.last_used() == impl
        assert_all_close(got, truth)
    got = gradients(lambda h, w: gk.linear_grpo_loss(h, w, ids, config=config, **rest).loss, torch.float64)
    assert gk.backends.last_used().endswith("lean")
    assert_all_close(got, truth)
    with pytest.raises(ValueError, match="rollout_correction='token_truncate' and no old_per_token_logps"):
        gk.linear_grpo_loss(*problem(torch.float64)[:2], ids, config=config, mode="fast", **rest)


def test_the_functions_take_every_loss_that_needs_no_more() -> None:
    """The drop-in Functions choose the mode themselves, and say what they lack."""
    hidden, weight, ids, rest = problem(torch.float64)
    sides = [rest[name] for name in ("advantages", "old_per_token_logps", "ref_per_token_logps", "completion_mask")]
    for loss_type in OWN:
        if loss_type == "clip_cov":
            continue  # a random choice has no argument there
        config = config_of(loss_type, "plain")
        loss, _ = gk.LinearGRPOLossFunction.apply(hidden.requires_grad_(), weight, None, ids, *sides, config)
        plain, _ = gk.GRPOLossFunction.apply(hidden @ weight.T, ids, *sides, config)
        torch.testing.assert_close(loss, plain)
    with pytest.raises(ValueError, match="rollout_correction='token_mask' needs rollout_per_token_logps"):
        gk.GRPOLossFunction.apply(hidden @ weight.T, ids, *sides, gk.GRPOLossConfig(rollout_correction="token_mask"))
