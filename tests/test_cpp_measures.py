"""The loss and the metrics that the C++ op makes itself: against the general route, which has them from torch."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from cpp_support import needs_cpp
from torch import Tensor

import grpo_kernels as gk

pytestmark = needs_cpp
NAN, INF = math.nan, math.inf
LOSSES: dict[str, dict[str, Any]] = {
    "grpo": {"delta": 1.5}, "bnpo": {"dual_clip": 1.2}, "dr_grpo": {"max_completion_length": 9}, "dapo": {},
    "luspo": {}, "cispo": {"epsilon_high": 1.28}, "sapo": {}, "gpg": {}, "dppo_tv": {"epsilon": 0.02},
    "dppo_kl": {"epsilon": 0.01}, "dro": {"dro_beta": 0.3},
}  # fmt: skip
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {}, "kl": {"beta": 0.2}, "entropy": {"entropy": True}, "bonus": {"entropy_coef": 0.1, "beta": 0.1},
}  # fmt: skip
GIVEN = [(), ("old",), ("old", "weight"), ("old", "rollout"), ("rollout", "weight")]


def batch(layout: str, given: tuple[str, ...], dtype: torch.dtype = torch.float64) -> tuple[Tensor, dict[str, Any]]:
    """Logits `[4, 5, 7]` and the rest; a whole sequence is dead, others have holes that hold NaN."""
    generator = torch.Generator().manual_seed(len(given))
    logits = torch.randn(4, 5, 7, generator=generator, dtype=dtype)
    ids = torch.randint(0, 7, (4, 5), generator=generator)
    mask = torch.rand(4, 5, generator=generator) < 0.7
    mask[2] = False
    sides = {name: -2 + 0.4 * torch.randn(4, 5, generator=generator, dtype=dtype) for name in ("old", "ref", "rollout")}
    sides["rollout"][1, 1] = NAN
    sides["weight"] = torch.rand(4, 5, generator=generator, dtype=dtype) + 0.5
    sides = {name: torch.where(mask, value, NAN) for name, value in sides.items()}
    rest: dict[str, Any] = {"completion_ids": ids, "completion_mask": mask, "ref_per_token_logps": sides["ref"]}
    for name, argument in (
        ("old", "old_per_token_logps"), ("weight", "importance_sampling_ratio"), ("rollout", "rollout_per_token_logps"),
    ):  # fmt: skip
        if name in given:
            rest[argument] = sides[name]
    if layout == "packed":
        logits = logits.flatten(0, 1)
        rest = {name: value.flatten() for name, value in rest.items()} | {"cu_seqlens": torch.tensor([0, 5, 5, 12, 18])}
    return logits, rest | {"advantages": torch.tensor([1.0, -1.0, 0.5, 0.0], dtype=dtype)}


def run(config: gk.GRPOLossConfig, impl: str, layout: str, given: tuple[str, ...], inplace: bool) -> Any:
    logits, rest = batch(layout, given)
    leaf = logits.requires_grad_()
    out = gk.grpo_loss(leaf * 1.0, config=config, impl=impl, inplace=inplace, return_per_token=True, **rest)
    ran = gk.backends.last_used()
    (1.7 * out.loss).backward()
    return out, leaf.grad, ran


@pytest.mark.parametrize("loss_type", LOSSES)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("given", GIVEN, ids="+".join)
@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_loss_metrics_and_tokens_are_those_of_the_general_route(
    loss_type: str, options: str, given: tuple[str, ...], layout: str
) -> None:
    config = gk.GRPOLossConfig(loss_type=loss_type, **LOSSES[loss_type], **OPTIONS[options])
    general, gradient, _ = run(config, "torch", layout, given, False)
    for inplace in (False, True):
        out, own_gradient, ran = run(config, "cpp", layout, given, inplace)
        assert ran == ("cpp one-kernel" if inplace else "cpp one-pass")
        close = {"rtol": 1e-12, "atol": 1e-14}
        torch.testing.assert_close(out.loss, general.loss, **close)
        torch.testing.assert_close(own_gradient, gradient, **close)
        assert list(out.metrics) == list(general.metrics)
        for name, value in general.metrics.items():
            torch.testing.assert_close(out.metrics[name], value, msg=lambda m, n=name: f"{n}: {m}", **close)
        for name, value in general.per_token._asdict().items():
            ours = getattr(out.per_token, name)
            assert (ours is None) == (value is None), name
            if value is not None:
                torch.testing.assert_close(ours, value.expand_as(ours), msg=lambda m, n=name: f"{n}: {m}", **close)


def test_metrics_by_hand() -> None:
    """Two tokens of p = 1/2 whose ratios are 2 and 1/2, and a dead one."""
    half = math.log(0.5)
    old = torch.tensor([[math.log(0.25), math.log(1.0), NAN]])
    out = gk.grpo_loss(
        torch.zeros(1, 3, 2), torch.tensor([[0, 1, -100]]), advantages=torch.ones(1), old_per_token_logps=old,
        rollout_per_token_logps=torch.tensor([[half, NAN, 7.0]]), impl="cpp",
        config=gk.GRPOLossConfig(loss_type="dapo", epsilon=0.2, epsilon_high=0.28, entropy=True),
    )  # fmt: skip
    expected = {
        "ratio/mean": 1.25, "entropy": -half, "clip_ratio/low_mean": 0.0, "clip_ratio/high_mean": 0.5,
        "clip_ratio/region_mean": 0.5, "ratio/min": 0.5, "ratio/max": 2.0, "sampling_logp_difference/mean": -half,
        "sampling_logp_difference/max": -half, "num_tokens": 2.0, "policy_loss": -(1.28 + 0.5) / 2,
    }  # fmt: skip
    assert {name: value.item() for name, value in out.metrics.items()} == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("inplace", [False, True])
def test_a_nan_shows_in_every_metric_that_it_reaches(inplace: bool) -> None:
    logits = torch.zeros(1, 3, 4)
    logits[0, 1] = NAN
    out = gk.grpo_loss(
        logits.requires_grad_() * 1, torch.zeros(1, 3, dtype=torch.long), advantages=torch.ones(1), impl="cpp",
        inplace=inplace, config=gk.GRPOLossConfig(entropy=True),
    )  # fmt: skip
    shown = {name for name, value in out.metrics.items() if value.isnan()}
    assert shown == {"ratio/mean", "entropy", "ratio/min", "ratio/max", "policy_loss"} and out.loss.isnan()


def test_no_live_token_reports_zeros() -> None:
    out = gk.grpo_loss(
        torch.zeros(2, 2, 4), torch.full((2, 2), -1), advantages=torch.ones(2), impl="cpp",
        rollout_per_token_logps=torch.full((2, 2), NAN), config=gk.GRPOLossConfig(entropy=True),
    )  # fmt: skip
    assert out.loss == 0 and all(value == 0 for value in out.metrics.values())


def test_the_fake_kernel_gives_as_many_metrics() -> None:
    for options in OPTIONS.values():
        for given in GIVEN:
            for loss_type, own in LOSSES.items():
                config = gk.GRPOLossConfig(loss_type=loss_type, **own, **options)
                logits, rest = batch("padded", given)
                eager = gk.grpo_loss(logits, config=config, impl="cpp", **rest).metrics
                with torch._subclasses.FakeTensorMode() as mode:
                    fakes = {name: mode.from_tensor(t) for name, t in (rest | {"logits": logits}).items()}
                    traced = gk.grpo_loss(config=config, impl="cpp", **fakes).metrics
                assert list(traced) == list(eager), (loss_type, given)
