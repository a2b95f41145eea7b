"""verl's own actor loss, through its own registry, with our policy losses in place of its: the same numbers."""

from __future__ import annotations

import importlib
import inspect
from types import ModuleType
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from parity_projects import stand_ins, wide
from parity_support import Draw, Result, assert_equal, draws, loud, run_theirs
from test_parity_verl import AGGREGATIONS, MODES, OPTIONS, verls
from torch import Tensor
from verl_support import ours, verl

__all__ = ["ours", "verl"]

fewer = hypothesis.settings(draws, max_examples=60)


def both(verl: ModuleType, mode: str, seed: int, options: dict[str, Any]) -> tuple[Result, Result]:
    """`(verl's, ours)`: verl's `ppo_loss` with loss_mode `mode`, and with ours of that name."""
    dp_size, tokens, sequences = options["global"] or (1, None, None)

    def run(loss_mode: str) -> Any:
        def loss(batch: Draw, logps: Tensor, entropy: Tensor) -> tuple[Tensor, dict[str, float]]:
            weights = None if options["rollout"] is None else verl.rollout_weights(batch, *options["rollout"])
            torch.manual_seed(seed)  # clip_cov draws from the global generator
            return verl.loss(
                verls(verl, loss_mode, options), batch, logps, entropy, dp_size=dp_size,
                batch_num_tokens=tokens, global_batch_size=sequences, weights=weights,
            )  # fmt: skip

        return loss

    batch, theirs = loud(run(mode), seed, tokens=3, **options["shape"])
    return theirs, run_theirs(batch, run(f"gk_{mode}"))


@pytest.mark.parametrize("mode", MODES)
@fewer
@given(seed=st.integers(0, 10**6), options=st.fixed_dictionaries(OPTIONS))
def test_our_losses_are_verls(
    verl: ModuleType, ours: ModuleType, mode: str, seed: int, options: dict[str, Any]
) -> None:
    """Loss, gradient and every metric, with every option of verl's, its aggregation, KL and entropy around it."""
    if mode == "kl_cov":  # the tokens of one sequence have one covariance, and the largest is anyone's choice
        options = options | {"shape": options["shape"] | {"token_advantages": True}}
    if mode == "geo_mean":
        options = options | {"shape": options["shape"] | {"token_advantages": False}}
    theirs, our = both(verl, mode, seed, options)
    assert_equal(our.loss, theirs.loss, f"{options} loss")
    assert_equal(our.grad, theirs.grad, f"{options} gradient")
    assert set(our.metrics) == set(theirs.metrics)
    for name, value in theirs.metrics.items():
        assert_equal(our.metrics[name], value, f"{options} {name}", rtol=1e-6)  # some pass through float32


def test_every_loss_of_verl_is_registered(verl: ModuleType, ours: ModuleType) -> None:
    registry = verl.VERL.core.POLICY_LOSS_REGISTRY
    assert set(ours.POLICY_LOSSES) == {name for name in registry if not name.startswith("gk_")} - {"bypass_mode"}
    for name in ours.POLICY_LOSSES:
        theirs, our = (
            inspect.signature(verl.VERL.core.get_policy_loss_fn(key)).parameters for key in (name, f"gk_{name}")
        )
        assert {k: p.default for k, p in our.items()} == {k: p.default for k, p in theirs.items()}, name
        assert list(our) == list(theirs)


@pytest.mark.parametrize("agg", AGGREGATIONS)
def test_parts_of_a_global_batch_add_up(verl: ModuleType, ours: ModuleType, agg: str) -> None:
    """Field case 24: micro-batches on two ranks, whose gradients are averaged, give the loss of the whole."""
    rng = torch.Generator().manual_seed(0)
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 1, 0], [1, 1, 1, 0]])
    logps, old, advantages = (torch.randn(4, 4, generator=rng, dtype=torch.float64) for _ in range(3))

    def loss(rows: slice, **info: Any) -> Tensor:
        config = verl.actor_config("gk_vanilla", loss_agg_mode=agg, loss_scale_factor=4)
        config.global_batch_info.update(info, loss_scale_factor=4)
        function = verl.VERL.core.get_policy_loss_fn("gk_vanilla")
        value, _ = function(
            old_log_prob=old[rows] * 0.1, log_prob=logps[rows] * 0.1, advantages=advantages[rows],
            response_mask=mask[rows], loss_agg_mode=agg, config=config,
        )  # fmt: skip
        return torch.as_tensor(value)

    whole = loss(slice(0, 4))
    info = {"dp_size": 2, "batch_num_tokens": 11, "global_batch_size": 4}
    ranks = [loss(slice(0, 1), **info) + loss(slice(1, 2), **info), loss(slice(2, 4), **info)]
    torch.testing.assert_close(sum(ranks) / 2, whole, rtol=1e-12, atol=0)
    if agg != "token-sum":
        with pytest.raises(ValueError, match="must be given when dp_size > 1"):
            loss(slice(0, 1), dp_size=2)


def test_geo_mean_takes_one_advantage_per_sequence(verl: ModuleType, ours: ModuleType) -> None:
    function = verl.VERL.core.get_policy_loss_fn("gk_geo_mean")
    one, advantages = torch.ones(1, 2), torch.tensor([[1.0, -1.0]])
    with pytest.raises(ValueError, match="advantages must be one per sequence"):
        function(-one, -one, advantages, one, "token-mean", verl.actor_config("gk_geo_mean"))
    function(-one, -one, advantages, torch.tensor([[1, 0]]), "token-mean", verl.actor_config("gk_geo_mean"))


# fused heads


def head() -> tuple[Tensor, Tensor, Tensor]:
    rng = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 5, 8, generator=rng)
    weight = torch.randn(33, 8, generator=rng)
    return hidden, weight, torch.randint(0, 33, (2, 5), generator=rng)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk_size", [3, 512])
@pytest.mark.parametrize("shape", ["[B, T]", "[N]"])
def test_the_fused_head_is_verls(
    verl: ModuleType, ours: ModuleType, temperature: float, chunk_size: int, shape: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    with stand_ins():
        module = importlib.import_module("verl.utils.experimental.torch_functional")
    monkeypatch.setattr(module, "_FLASH_ATTN_CROSS_ENTROPY_AVAILABLE", False)
    theirs_of = module.FusedLinearForPPO
    assert (
        inspect.signature(theirs_of.__init__).parameters.keys()
        == inspect.signature(ours.FusedLinearForPPO.__init__).parameters.keys()
    )
    results = []
    for cls in (theirs_of, ours.FusedLinearForPPO):
        hidden, weight, ids = head()
        if shape == "[N]":
            hidden, ids = hidden.flatten(0, 1), ids.flatten()
        hidden.requires_grad_()
        weight.requires_grad_()
        logps, entropy = cls(chunk_size=chunk_size)(hidden, weight, ids, temperature)
        loss = (logps * torch.arange(10.0).view_as(logps)).sum() + (entropy * 0.3).sum()
        results.append((logps.detach(), entropy.detach(), *torch.autograd.grad(loss, (hidden, weight))))
    for our, their in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(our, their, rtol=2e-5, atol=2e-5)


def test_the_dtypes_of_the_fused_head_are_verls(ours: ModuleType) -> None:
    hidden, weight, ids = head()
    logps, entropy = ours.FusedLinearForPPO()(hidden.bfloat16(), weight.bfloat16(), ids.int())
    assert (logps.dtype, entropy.dtype) == (torch.float32, torch.bfloat16)
    with pytest.raises(ValueError, match="impl_backend must be 'torch' or 'liger', got 'cuda'"):
        ours.FusedLinearForPPO(impl_backend="cuda")


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_linear_cross_entropy_gives_log_probs_and_entropy(ours: ModuleType, reduction: str) -> None:
    hidden, weight, ids = head()
    logps, entropy = ours.linear_cross_entropy(hidden.double(), weight.double(), ids, 0.7, reduction, None)
    log_p = (hidden.double() @ weight.double().T / 0.7).log_softmax(-1).flatten(0, 1)
    wanted = log_p.gather(-1, ids.flatten()[:, None]).squeeze(-1)
    wanted = wanted if reduction == "none" else getattr(wanted, reduction)()
    torch.testing.assert_close(logps, wanted, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(entropy, -(log_p.exp() * log_p).sum(-1), rtol=1e-9, atol=1e-12)
    with pytest.raises(ValueError, match="reduction must be none, sum or mean, got 'max'"):
        ours.linear_cross_entropy(hidden, weight, ids, 1.0, "max")


def test_a_split_vocabulary_is_refused(ours: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 2)
    with pytest.raises(NotImplementedError, match=r"a split vocabulary is not built yet\. Use verl's own"):
        ours.linear_cross_entropy(*head(), dist_process_group=object())


def test_a_nan_where_the_mask_is_0_reaches_nothing(verl: ModuleType, ours: ModuleType) -> None:
    leaf = torch.tensor([[-1.0, float("nan")], [-2.0, -0.5]], requires_grad=True)
    mask = torch.tensor([[1, 0], [1, 1]])
    function = verl.VERL.core.get_policy_loss_fn("gk_vanilla")
    old = torch.tensor([[-1.1, float("inf")], [-2.0, -0.6]])
    loss, metrics = function(old, leaf, torch.tensor([[1.0, float("nan")], [-1.0, -1.0]]), mask, "token-mean",
                             verl.actor_config("gk_vanilla"))  # fmt: skip
    loss.backward()
    assert leaf.grad is not None
    assert torch.isfinite(leaf.grad).all()
    assert leaf.grad[0, 1] == 0
    assert all(value == value for value in (loss.item(), *metrics.values()))


def test_gradients_are_none_of_the_other_inputs(verl: ModuleType, ours: ModuleType) -> None:
    values = [wide(torch.zeros(1, 2)).requires_grad_() for _ in range(3)]
    loss, _ = verl.VERL.core.get_policy_loss_fn("gk_vanilla")(
        *values, torch.ones(1, 2), "token-mean", verl.actor_config("gk_vanilla")
    )
    grads = torch.autograd.grad(loss, values, allow_unused=True)
    assert [grad is None for grad in grads] == [True, False, True]
