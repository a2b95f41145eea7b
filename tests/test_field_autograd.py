"""Autograd faults of public GRPO kernels, each with its kind; in place has its own file."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from oracle import Options
from support import (
    DTYPES,
    LAYOUTS,
    LOSS_TYPES,
    OBJECTIVES,
    assert_same_run,
    config_of,
    default_impl,
    full_options,
    loss_inputs,
    make_batch,
    normal_rows,
    poisoned,
    run,
    same_bits,
    setting,
    tensor,
    uniform,
)
from tolerance import as_array
from torch import Tensor

import grpo_kernels as gk

NAN = math.nan
FULL = full_options()


# Entropy that nobody differentiates


def test_entropy_metric_carries_no_graph() -> None:
    logits, loss = setting(opt=full_options("grpo", entropy_coef=0.0))
    out = loss(logits.requires_grad_(), return_per_token=True)
    assert out.metrics["entropy"].grad_fn is None
    assert all(value.grad_fn is None and not value.requires_grad for value in out.metrics.values())
    assert all(value.grad_fn is None for value in out.per_token if value is not None)
    assert out.loss.grad_fn is not None


def saved_bytes(call: Callable[[], Any]) -> int:
    """Bytes of distinct storages kept for backward."""
    seen: dict[int, int] = {}
    kept: list[Tensor] = []

    def pack(x: Tensor) -> Tensor:
        seen[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        kept.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = call()
    assert out is not None
    return sum(seen.values())


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_entropy_without_a_coefficient_saves_at_most_one_float_per_token(loss_type: str) -> None:
    used = []
    for entropy in (False, True):
        logits, loss = setting(opt=full_options(loss_type, entropy=entropy, entropy_coef=0.0), vocab=500)
        leaf = logits.requires_grad_()
        used.append(saved_bytes(lambda f=loss, x=leaf: f(x)))
    tokens = logits.shape[0] * logits.shape[1]
    assert used[1] - used[0] <= 4 * tokens
    assert used[1] < 1.5 * logits.nbytes, "one copy of the logits at most"


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_asking_for_entropy_changes_neither_loss_nor_gradient(loss_type: str) -> None:
    batch = make_batch(seed=32)
    without, asked = (run(batch, full_options(loss_type, entropy=e, entropy_coef=0.0)) for e in (False, True))
    assert same_bits(without.loss, asked.loss) and same_bits(without.grad, asked.grad)
    assert "entropy" in asked.metrics and "entropy" not in without.metrics


# The default never changes an input


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("loss_type", "level"), OBJECTIVES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_inputs_are_untouched_by_forward_and_backward(
    dtype: torch.dtype, loss_type: str, level: str, layout: str
) -> None:
    batch = make_batch(seed=33, dtype=dtype, layout=layout, weight="token")
    arguments = loss_inputs(batch, dtype) | {"completion_ids": tensor(batch.ids)}
    logits = tensor(batch.logits, dtype).requires_grad_()
    inputs = {k: v for k, v in arguments.items() if isinstance(v, Tensor)} | {"logits": logits}
    before = {k: (v.detach().clone(), v._version) for k, v in inputs.items()}
    gk.grpo_loss(logits, config=config_of(full_options(loss_type, level)), **arguments).loss.backward()
    for name, value in inputs.items():
        assert same_bits(value.detach(), before[name][0]), name
        assert value._version == before[name][1], name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("first", ["ours", "cross entropy"])
def test_two_losses_on_one_tensor_add_their_gradients(dtype: torch.dtype, first: str) -> None:
    logits, loss = setting(dtype)
    targets = torch.zeros(logits.shape[:2], dtype=torch.long)

    def ours(x: Tensor) -> Tensor:
        return loss(x).loss

    def other(x: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(x.flatten(0, 1), targets.flatten())

    apart = [torch.autograd.grad(f(x := logits.clone().requires_grad_()), x)[0] for f in (ours, other)]
    leaf = logits.clone().requires_grad_()
    hidden = leaf * 1.0
    a, b = ours(hidden), other(hidden)
    for value in (a, b) if first == "ours" else (b, a):
        value.backward(retain_graph=True)
    assert leaf.grad is not None
    torch.testing.assert_close(leaf.grad, apart[0] + apart[1])


def test_a_chain_through_log_softmax_matches_plain_torch() -> None:
    """The logits are themselves an output that autograd has saved."""
    raw, ids = normal_rows(6, 13, torch.float64)[None], torch.arange(6)[None]
    results = []
    for score in (
        lambda z: gk.per_token_logps(z, ids).logps,
        lambda z: z.log_softmax(-1).gather(-1, ids[..., None])[..., 0],
    ):
        leaf = raw.clone().requires_grad_()
        y = leaf.softmax(-1)
        z = y.exp() * 3.0
        (score(z).sum() + (y * z).sum()).backward()
        results.append(leaf.grad)
    torch.testing.assert_close(results[0], results[1], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("loss_type", "level"), OBJECTIVES)
def test_backward_twice_gives_the_same_gradient(dtype: torch.dtype, loss_type: str, level: str) -> None:
    logits, loss = setting(dtype, full_options(loss_type, level))
    leaf = logits.requires_grad_()
    out = loss(leaf)
    with poisoned():
        (once,) = torch.autograd.grad(out.loss, leaf, retain_graph=True)
        copy = once.clone()
        (twice,) = torch.autograd.grad(out.loss, leaf)
    assert same_bits(once, copy) and same_bits(once, twice)
    assert once.data_ptr() != twice.data_ptr()


def test_a_change_of_the_logits_between_forward_and_backward_is_caught() -> None:
    logits, loss = setting()
    leaf = logits.requires_grad_()
    hidden = leaf * 1.0
    out = loss(hidden)
    hidden.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.loss.backward()


@pytest.mark.parametrize("target", ["loss", "logps", "entropy"])
def test_double_backward_is_refused(target: str) -> None:
    logits, loss = setting(torch.float64)
    leaf = logits.requires_grad_()
    ids = torch.zeros(logits.shape[:2], dtype=torch.long)
    scores = gk.per_token_logps(leaf, ids, entropy=True)
    value = {"loss": loss(leaf).loss, "logps": scores.logps.sum(), "entropy": scores.entropy.sum()}[target]
    # a term that can be differentiated twice, so that dropping ours would go unnoticed
    (grad,) = torch.autograd.grad(value + leaf.pow(3).sum(), leaf, create_graph=True)
    with pytest.raises(RuntimeError):
        grad.pow(2).sum().backward()


# Clip bounds given in the wrong convention


@pytest.mark.parametrize("epsilon", [-0.1, 1.0, 1.2, -1.0, 1.28])
def test_epsilon_outside_its_range_is_explained(epsilon: float) -> None:
    with pytest.raises(ValueError, match=r"epsilon .*\[0, 1\)") as caught:
        gk.GRPOLossConfig(epsilon=epsilon)
    assert "1.28" in str(caught.value) and "epsilon_high=0.28" in str(caught.value)


@pytest.mark.parametrize("epsilon_high", [-0.1, -1.0])
def test_negative_epsilon_high_is_explained(epsilon_high: float) -> None:
    with pytest.raises(ValueError, match="epsilon_high") as caught:
        gk.GRPOLossConfig(epsilon_high=epsilon_high)
    assert "1.28" in str(caught.value) and "epsilon_high=0.28" in str(caught.value)


def test_the_reported_mapping_of_a_ratio_cap_is_refused() -> None:
    """eps_low = 1 - c and eps_high = c - 1 put both bounds at c."""
    cap = 5.0
    with pytest.raises(ValueError, match="epsilon"):
        gk.GRPOLossConfig(epsilon=1 - cap, epsilon_high=cap - 1)


# What None means


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("loss_type", "level"), OBJECTIVES)
def test_old_none_is_the_policy_itself(dtype: torch.dtype, loss_type: str, level: str) -> None:
    batch = make_batch(seed=36, dtype=dtype).but(old=None)
    opt = full_options(loss_type, level, use_bias_correction_kl=True)
    none = run(batch, opt, dtype)
    given = run(batch, opt, dtype, old_per_token_logps=none.per_token.logps)
    assert_same_run(given, none, "old = logp.detach()")
    assert none.grad.float().norm() > 1e-3


@pytest.mark.parametrize(("loss_type", "level"), OBJECTIVES)
@pytest.mark.parametrize("ref", ["absent", "NaN"])
def test_without_beta_the_reference_is_never_read(loss_type: str, level: str, ref: str) -> None:
    batch = make_batch(seed=37)
    opt = full_options(loss_type, level, beta=0.0)
    clean = run(batch, opt)
    value = None if ref == "absent" else np.full(batch.ids.shape, NAN)
    assert_same_run(run(batch.but(ref=value), opt), clean, f"ref {ref}")
    assert "kl" not in clean.metrics


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("beta", [0.1, -0.1])
def test_beta_without_a_reference_is_refused(loss_type: str, beta: float) -> None:
    with pytest.raises(ValueError, match="ref_per_token_logps"):
        run(make_batch(seed=38).but(ref=None), full_options(loss_type, beta=beta))


# The Functions themselves


def test_the_loss_function_by_apply() -> None:
    batch = make_batch(seed=39)
    opt = full_options("grpo")
    expected = run(batch, opt)
    arguments = loss_inputs(batch, torch.float32)
    logits = tensor(batch.logits, torch.float32).requires_grad_()
    loss, logps = gk.GRPOLossFunction.apply(
        logits,
        tensor(batch.ids),
        arguments["advantages"],
        arguments["old_per_token_logps"],
        arguments["ref_per_token_logps"],
        arguments["completion_mask"],
        config_of(opt),
    )
    assert same_bits(loss, expected.loss) and same_bits(logps, expected.per_token.logps)
    assert loss.requires_grad and not logps.requires_grad
    loss.backward()
    assert logits.grad is not None and same_bits(logits.grad, expected.grad)
    plain = tensor(batch.logits, torch.float32).requires_grad_()
    bare, _ = gk.GRPOLossFunction.apply(
        plain, tensor(batch.ids), arguments["advantages"], None, None, None, gk.GRPOLossConfig()
    )
    bare.backward()
    truth = oracle.grpo(batch.but(old=None, ref=None, mask=None), Options())
    np.testing.assert_allclose(as_array(plain.grad), truth.dlogits.astype(float), rtol=1e-5, atol=1e-7)


def test_the_log_prob_function_by_apply() -> None:
    logits, ids = normal_rows(6, 9)[None], torch.arange(6)[None]
    expected = gk.per_token_logps(logits, ids, temperature=0.7, softcap=4.0, entropy=True)
    leaf = logits.clone().requires_grad_()
    config = gk.GRPOLossConfig(softcap=4.0, entropy=True)
    logps, entropy, lse = gk.PerTokenLogpsFunction.apply(leaf, ids, None, 0.7, config)
    for ours, theirs in zip((logps, entropy, lse), expected, strict=True):
        assert same_bits(ours, theirs)
    (logps.sum() + entropy.sum()).backward()
    assert leaf.grad is not None and leaf.grad.abs().sum() > 0
    assert gk.PerTokenLogpsFunction.apply(leaf, ids, None, 0.7, gk.GRPOLossConfig())[1] is None


# Which implementation ran


@pytest.mark.parametrize("impl", ["auto", "torch"])
def test_the_implementation_that_ran_is_reported(impl: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(gk.backends.ENVIRONMENT, raising=False)
    expected = default_impl() if impl == "auto" else impl
    gk.per_token_logps(uniform(1, 1), torch.zeros(1, 1, dtype=torch.long), impl=impl)
    assert gk.backends.last_used() == expected
    gk.backends.record("nothing")
    a = run(make_batch(seed=40), FULL, impl=impl)
    assert str(gk.backends.last_used()).split()[0] == expected  # and by which route
    assert_same_run(a, run(make_batch(seed=40), FULL, impl=expected), impl)
    assert "torch" in str(gk.backends.report())
