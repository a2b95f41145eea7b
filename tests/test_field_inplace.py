"""In-place mode: the same gradient in the logits' own storage, and every later use caught."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from oracle import Options
from support import (
    DTYPES,
    LAYOUTS,
    OBJECTIVES,
    config_of,
    full_options,
    loss_inputs,
    make_batch,
    normal_rows,
    poisoned,
    run,
    same_bits,
    setting,
    tensor,
)
from torch import Tensor

import grpo_kernels as gk

NAN = math.nan
FULL = full_options()


# In place


def inplace_setting(
    dtype: torch.dtype = torch.float32, opt: Options | None = None, **kwargs: Any
) -> tuple[Tensor, Tensor, Any]:
    logits, loss = setting(dtype, opt, **kwargs)
    leaf = logits.requires_grad_()
    return leaf, leaf * 1.0, loss


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("loss_type", "level"), OBJECTIVES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_inplace_gives_the_default_gradient(dtype: torch.dtype, loss_type: str, level: str, layout: str) -> None:
    opt = full_options(loss_type, level)
    leaf, hidden, loss = inplace_setting(dtype, opt, layout=layout)
    expected = loss(leaf)
    (gradient,) = torch.autograd.grad(expected.loss, leaf)
    version = hidden._version
    with poisoned():
        out = loss(hidden, inplace=True)
        assert hidden._version > version
        out.loss.backward()
    assert same_bits(out.loss, expected.loss)
    assert leaf.grad is not None
    assert same_bits(leaf.grad, gradient)
    for name, value in expected.metrics.items():
        assert same_bits(out.metrics[name], value), name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_inplace_log_probs_give_the_default_gradient(dtype: torch.dtype) -> None:
    raw, ids = normal_rows(6, 41, dtype)[None], torch.arange(6)[None]
    gradients = []
    for inplace in (False, True):
        leaf = raw.clone().requires_grad_()
        out = gk.per_token_logps(leaf * 1.0, ids, entropy=True, inplace=inplace)
        (out.logps.sum() + 0.3 * out.entropy.sum()).backward()
        gradients.append(leaf.grad)
    assert same_bits(gradients[0], gradients[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "cispo"])
def test_inplace_in_storage_of_another_order(dtype: torch.dtype, loss_type: str) -> None:
    """An operation on a transposed tensor keeps its strides: no view, and yet not contiguous."""
    batch = make_batch(seed=41, dtype=dtype)
    opt = full_options(loss_type)
    expected = run(batch, opt, dtype)
    leaf = tensor(batch.logits, dtype).transpose(0, 1).contiguous().requires_grad_()
    hidden = leaf.transpose(0, 1) * 1.0
    assert not hidden.is_contiguous()
    assert not hidden._is_view()
    with poisoned():
        out = gk.grpo_loss(hidden, tensor(batch.ids), config=config_of(opt), inplace=True, **loss_inputs(batch, dtype))
        out.loss.backward()
    assert leaf.grad is not None
    assert same_bits(out.loss, expected.loss)
    assert same_bits(leaf.grad.transpose(0, 1), expected.grad)


@pytest.mark.parametrize("scale", [3.0, -0.5, 0.0])
def test_inplace_honours_the_upstream_gradient(scale: float) -> None:
    leaf, hidden, loss = inplace_setting()
    (expected,) = torch.autograd.grad(loss(leaf).loss * scale, leaf)
    (loss(hidden, inplace=True).loss * scale).backward()
    assert leaf.grad is not None
    torch.testing.assert_close(leaf.grad, expected, rtol=1e-6, atol=1e-9)


def test_inplace_second_backward_raises() -> None:
    _, hidden, loss = inplace_setting()
    out = loss(hidden, inplace=True)
    out.loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError):
        out.loss.backward()


@pytest.mark.parametrize("later", ["sum", "another loss of ours", "cross entropy", "second inplace"])
@pytest.mark.parametrize("together", [True, False])
def test_inplace_then_another_differentiable_use_raises(later: str, together: bool) -> None:
    _, hidden, loss = inplace_setting()
    out = loss(hidden, inplace=True)

    def use_again() -> None:
        if later == "sum":
            other = hidden.sum()
        elif later == "cross entropy":
            other = torch.nn.functional.cross_entropy(hidden[0], torch.zeros(hidden.shape[1]).long())
        else:
            other = loss(hidden, inplace=later == "second inplace").loss
        (out.loss + other if together else other).backward()

    with pytest.raises(RuntimeError):
        use_again()


@pytest.mark.parametrize("order", ["saved before", "used before"])
def test_inplace_when_autograd_still_needs_the_old_values_raises(order: str) -> None:
    logits, loss = setting()
    leaf = logits.requires_grad_()
    hidden = leaf.exp() if order == "saved before" else leaf * 1.0
    extra = hidden.pow(2).sum() if order == "used before" else torch.zeros(())
    with pytest.raises(RuntimeError):
        (loss(hidden, inplace=True).loss + extra).backward()


def test_inplace_allows_plain_reads_and_a_detached_copy_made_before() -> None:
    leaf, hidden, loss = inplace_setting()
    kept = hidden.detach().clone()
    out = loss(hidden, inplace=True)
    hidden.detach().sum().item()
    out.loss.backward()
    assert same_bits(kept, (leaf * 1.0).detach())


@pytest.mark.parametrize("form", ["leaf", "slice", "narrow", "transpose", "reshape view"])
def test_inplace_refuses_leaves_and_views(form: str) -> None:
    logits, loss = setting()
    leaf = logits.requires_grad_()
    b, t, v = logits.shape
    wide = torch.cat([leaf, leaf[:, :1]], 1) * 1.0
    value = {
        "leaf": leaf,
        "slice": wide[:, :-1],
        "narrow": wide.narrow(1, 0, t),
        "reshape view": (leaf.reshape(b * t, v) * 1.0).view(b, t, v),
        "transpose": (leaf.transpose(0, 1) * 1.0).transpose(0, 1),
    }[form]
    before = value.detach().clone()
    with pytest.raises(ValueError, match="inplace"):
        loss(value, inplace=True)
    with pytest.raises(ValueError, match="inplace"):
        gk.per_token_logps(value, torch.zeros(b, t, dtype=torch.long), inplace=True)
    assert same_bits(value.detach(), before)


def test_inplace_without_grad_changes_nothing() -> None:
    logits, loss = setting()
    expected = loss(logits).loss
    for value in (logits.clone(), logits.clone().requires_grad_()):
        with torch.no_grad():
            out = loss(value, inplace=True)
        assert same_bits(value.detach(), logits) and value._version == 0
        assert same_bits(out.loss, expected)
    frozen = logits.clone()
    assert same_bits(loss(frozen, inplace=True).loss, expected)
    assert same_bits(frozen, logits)


def test_inplace_leaves_dead_rows_with_zero_gradient() -> None:
    logits, loss = setting()
    spoilt = logits.clone()
    batch = make_batch(seed=31, weight="token")
    dead = torch.as_tensor(~np.asarray(batch.mask))
    spoilt[dead] = NAN
    leaf = spoilt.requires_grad_()
    loss(leaf * 1.0, inplace=True).loss.backward()
    assert leaf.grad is not None
    assert (leaf.grad[dead] == 0).all() and torch.isfinite(leaf.grad).all()


@pytest.mark.parametrize(("loss_type", "level"), OBJECTIVES)
def test_inplace_without_a_live_token_gives_zero_gradient(loss_type: str, level: str) -> None:
    batch = make_batch(seed=35)
    arguments = loss_inputs(batch, torch.float32) | {"completion_mask": torch.zeros(batch.ids.shape)}
    leaf = tensor(batch.logits, torch.float32).requires_grad_()
    with poisoned():
        out = gk.grpo_loss(
            leaf * 1.0, tensor(batch.ids), config=config_of(full_options(loss_type, level)), inplace=True, **arguments
        )
        out.loss.backward()
    assert out.loss.item() == 0 and leaf.grad is not None and (leaf.grad == 0).all()
