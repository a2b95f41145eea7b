"""verl's losses called by hand with ours beside them: 16 bits, infinities, clips that never bind, bad arguments."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from parity_projects import wide
from parity_support import Result, assert_equal
from torch import Tensor
from verl_support import ours, verl

__all__ = ["ours", "verl"]


def batch_of(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """The tensors of a loss, `[8, 1001]`: more tokens than 16 bits count; one advantage per row."""
    rng = torch.Generator().manual_seed(0)
    log_prob = -3 * torch.rand(8, 1001, generator=rng)
    old = (log_prob + 0.3 * torch.randn(8, 1001, generator=rng)).clamp(max=-1e-3)
    advantages = torch.randn(8, 1, generator=rng).expand(8, 1001)
    mask = torch.ones(8, 1001, dtype=torch.bool)
    mask[0, 200:] = False
    floats = {"old_log_prob": old, "log_prob": log_prob, "advantages": advantages}
    return {name: values.to(dtype) for name, values in floats.items()} | {"response_mask": mask}


def run(verl: ModuleType, name: str, batch: dict[str, Tensor], **options: Any) -> Result:
    """The registered loss `name`, called by hand."""
    leaf = batch["log_prob"].clone().requires_grad_()
    config = verl.actor_config(name, policy={"dro_beta": 0.1}, **options)
    loss, metrics = verl.VERL.core.get_policy_loss_fn(name)(**(batch | {"log_prob": leaf}), config=config)
    return Result(loss.detach(), torch.autograd.grad(loss, leaf)[0], metrics)


def assert_same(our: Result, their: Result, where: str, rtol: float = 1e-9) -> None:
    assert_equal(our.loss, their.loss, f"{where} loss", rtol=rtol)
    assert_equal(our.grad, their.grad, f"{where} gradient", rtol=rtol)
    assert set(our.metrics) == set(their.metrics)
    for metric, value in their.metrics.items():
        assert_equal(our.metrics[metric], value, f"{where} {metric}", rtol=max(rtol, 1e-6))


WIDE_CLIPS: dict[str, tuple[str, float, float]] = {
    "the recipe of cispo": ("cispo", 10.0, 0.2),
    "cispo, at 1": ("cispo", 1.0, 4.0),
    "vanilla, at 1": ("vanilla", 1.0, 0.2),
    "vanilla": ("vanilla", 3.0, 0.2),
    "gspo": ("gspo", 1.0, 0.2),
    "geo_mean": ("geo_mean", 1.5, 1.5),
    "dppo_tv, off": ("dppo_tv", 1.0, 1.0),
    "dppo_kl": ("dppo_kl", 1.5, 2.0),
}


@pytest.mark.parametrize("far", [False, True])
@pytest.mark.parametrize("case", WIDE_CLIPS)
def test_a_lower_clip_that_no_ratio_reaches_is_verls(verl: ModuleType, ours: ModuleType, case: str, far: bool) -> None:
    """Also where the ratio of a whole sequence is less than the least that a float tells from 1 - epsilon."""
    name, low, high = WIDE_CLIPS[case]
    batch = batch_of()
    if far:
        batch["log_prob"][3] -= 45.0
    batch = {key: wide(value) if value.is_floating_point() else value for key, value in batch.items()}
    options = {"clip_ratio_low": low, "clip_ratio_high": high}
    their = run(verl, name, batch, **options)
    assert abs(float(their.loss)) > 0.01
    assert_same(run(verl, f"gk_{name}", batch, **options), their, case)


def test_clip_cov_without_a_lower_clip_is_verls(verl: ModuleType, ours: ModuleType) -> None:
    batch = {key: wide(value) if value.is_floating_point() else value for key, value in batch_of().items()}
    results = []
    for name in ("clip_cov", "gk_clip_cov"):
        torch.manual_seed(0)
        results.append(run(verl, name, batch, clip_ratio_low=1.0))
    assert_same(results[1], results[0], "clip_cov")


def test_an_option_that_is_no_clip_is_refused(verl: ModuleType, ours: ModuleType) -> None:
    for name in ("vanilla", "cispo", "geo_mean"):
        with pytest.raises(ValueError, match=r"epsilon must be .*, got -0.2"):
            run(verl, f"gk_{name}", batch_of(), clip_ratio_low=-0.2)


SIXTEEN_BITS = ["vanilla", "gspo", "sapo", "cispo", "gpg", "dro", "dppo_tv", "dppo_kl", "geo_mean"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", SIXTEEN_BITS)
def test_16_bits_are_read_as_what_they_hold(verl: ModuleType, ours: ModuleType, name: str, dtype: torch.dtype) -> None:
    """verl's own in float64 on the same numbers; in 16 bits it loses a percent of a count."""
    batch = batch_of(dtype)
    exact = {key: wide(value.double()) if value.is_floating_point() else value for key, value in batch.items()}
    our = run(verl, f"gk_{name}", batch | {"response_mask": batch["response_mask"].to(dtype)})
    their = run(verl, name, exact)
    assert_equal(our.loss, their.loss, "loss", rtol=1e-5)
    assert_equal(our.grad.double(), their.grad, "gradient", rtol=1e-2)  # of the 16-bit log-probs
    for metric, value in their.metrics.items():
        assert_equal(our.metrics[metric], value, metric, rtol=1e-5)


def test_a_share_of_many_float16_tokens_is_finite(verl: ModuleType, ours: ModuleType) -> None:
    half = torch.ones(40, 2000, dtype=torch.float16)  # more than float16 counts
    batch = {"old_log_prob": -1.5 * half, "log_prob": -half, "advantages": half, "response_mask": half.bool()}
    our = run(verl, "gk_vanilla", batch)
    assert our.metrics == {"actor/pg_clipfrac": 1.0, "actor/pg_clipfrac_lower": 0.0, "actor/ppo_kl": -0.5}
    assert float(our.loss) == pytest.approx(-1.2)


def test_geo_mean_weighs_sequences_of_16_bits_as_in_float64(verl: ModuleType, ours: ModuleType) -> None:
    batch = batch_of(torch.float16)
    weights = 0.5 + torch.rand(8, 1001, generator=torch.Generator().manual_seed(1)).half()
    weights[:, 0] = 0  # its logarithm needs the 1e-10 that float16 does not have
    exact = {key: wide(value.double()) if value.is_floating_point() else value for key, value in batch.items()}
    our = run(verl, "gk_geo_mean", batch | {"rollout_is_weights": weights})
    their = run(verl, "geo_mean", exact | {"rollout_is_weights": wide(weights.double())})
    assert_equal(our.loss, their.loss, "loss", rtol=1e-5)


@pytest.mark.parametrize("mode", ["token_mean", "token_sum", "seq_mean_token_mean", "prompt-mean", "foo", None])
def test_an_aggregation_that_verl_does_not_have_is_refused(verl: ModuleType, ours: ModuleType, mode: Any) -> None:
    for name in ours.POLICY_LOSSES:
        with pytest.raises(ValueError, match=rf"gk_{name}: loss_agg_mode must be one of token-mean, .*, got {mode!r}"):
            run(verl, f"gk_{name}", batch_of() | {"loss_agg_mode": mode})


@pytest.mark.parametrize("name", ["vanilla", "sapo"])
def test_an_infinite_log_prob_is_verls(verl: ModuleType, ours: ModuleType, name: str) -> None:
    batch = batch_of()
    batch["log_prob"][1, 1] = -torch.inf
    batch = {key: wide(value) if value.is_floating_point() else value for key, value in batch.items()}
    our, their = run(verl, f"gk_{name}", batch), run(verl, name, batch)
    assert_equal(our.loss, their.loss, "loss")
    assert_equal(our.grad, their.grad, "gradient")


def test_a_second_derivative_raises(verl: ModuleType, ours: ModuleType) -> None:
    small = {key: value[:2, :3] for key, value in batch_of().items()}
    leaf = small["log_prob"].requires_grad_()
    function = verl.VERL.core.get_policy_loss_fn("gk_vanilla")
    loss, _ = function(**(small | {"log_prob": leaf * 1.0}), config=verl.actor_config("gk_vanilla"))
    (grad,) = torch.autograd.grad(loss, leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward is not supported"):
        torch.autograd.grad(grad.square().sum(), leaf)


@pytest.mark.parametrize("name", ["vanilla", "geo_mean"])
def test_no_sequence_gives_no_loss(verl: ModuleType, ours: ModuleType, name: str) -> None:
    our = run(verl, f"gk_{name}", {key: value[:0] for key, value in batch_of().items()})
    assert (float(our.loss), our.grad.shape) == (0.0, (0, 1001))


BAD_CALLS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no config": ({"config": None}, TypeError, "config must be verl's ActorConfig, got None"),
    "old of another shape": (
        {"old_log_prob": torch.zeros(2, 2)}, ValueError,
        r"old_log_prob must have the shape of log_prob, \[3, 3\], got \[2, 2\]",
    ),
    "no old": ({"old_log_prob": None}, TypeError, "old_log_prob must be a tensor, got NoneType"),
    "old of integers": ({"old_log_prob": torch.zeros(3, 3, dtype=torch.int64)}, TypeError, "old_log_prob must hold"),
    "old not finite": (
        {"old_log_prob": torch.full((3, 3), -torch.inf)}, ValueError, "old_log_prob must be finite at live tokens",
    ),
    "one advantage per row, flat": (  # as wide as long: it would be taken for one per token
        {"advantages": torch.ones(3)}, ValueError, r"advantages must have the shape of log_prob, .*, got \[3\]",
    ),
    "a longer mask": ({"response_mask": torch.ones(3, 4)}, ValueError, r"response_mask must have .*, got \[3, 4\]"),
    "a negative mask": ({"response_mask": -torch.ones(3, 3)}, ValueError, "response_mask must be finite and >= 0"),
    "flat weights": (
        {"rollout_is_weights": torch.ones(3)}, ValueError, r"rollout_is_weights must have .*, got \[3\]",
    ),
    "flat log-probs": ({"log_prob": torch.zeros(3)}, ValueError, r"log_prob must be \[B, T\], got \[3\]"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_CALLS)
def test_a_bad_argument_is_refused_by_its_name_in_verl(verl: ModuleType, ours: ModuleType, case: str) -> None:
    change, error, text = BAD_CALLS[case]
    good = {key: value[1:4, :3] for key, value in batch_of().items()} | {"config": verl.actor_config("gk_vanilla")}
    with pytest.raises(error, match=f"gk_vanilla: {text}"):
        verl.VERL.core.get_policy_loss_fn("gk_vanilla")(**(good | change))


def test_one_advantage_per_sequence_is_broadcast_as_in_verl(verl: ModuleType, ours: ModuleType) -> None:
    batch = {key: wide(value) if value.is_floating_point() else value for key, value in batch_of().items()}
    batch["advantages"] = batch["advantages"][:, :1]
    assert_same(run(verl, "gk_vanilla", batch), run(verl, "vanilla", batch), "[B, 1]")
