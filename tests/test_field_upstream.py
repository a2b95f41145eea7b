"""The gradient that comes from above the loss, and the one that leaves it: scales, layouts, gradcheck, who gets one."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
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
    same_bits,
    setting,
    tensor,
    uniform,
)
from torch import Tensor

import grpo_kernels as gk

NAN = math.nan
FULL = full_options()


# the upstream gradient


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("loss_type", "level"), OBJECTIVES)
def test_the_upstream_gradient_is_honoured(dtype: torch.dtype, loss_type: str, level: str) -> None:
    logits, loss = setting(dtype, full_options(loss_type, level))
    leaf = logits.requires_grad_()
    (plain,) = torch.autograd.grad(loss(leaf).loss, leaf)
    (tripled,) = torch.autograd.grad(loss(leaf).loss * 3, leaf)
    # each is rounded to its dtype once, from numbers that differ by the factor
    torch.testing.assert_close(tripled.double(), 3 * plain.double(), rtol=torch.finfo(dtype).eps * 2, atol=1e-7)
    (nothing,) = torch.autograd.grad(loss(leaf).loss * 0, leaf)
    assert (nothing == 0).all()


def test_a_scaled_float16_loss_keeps_small_gradients() -> None:
    """A mean over 1e8 tokens is below float16's smallest number: the loss scale must reach the gradient in float32."""
    ids = torch.zeros(1, 2, dtype=torch.long)
    logits = uniform(1, 2, dtype=torch.float16).requires_grad_()
    (gk.grpo_loss(logits, ids, advantages=torch.ones(1), normalizer=1e8).loss * 2.0**16).backward()
    assert logits.grad is not None
    np.testing.assert_allclose(logits.grad.float()[0, :, 0].numpy(), -0.75 * 2**16 / 1e8, rtol=1e-3)


def test_grad_scaler_and_autocast_give_the_plain_step() -> None:
    torch.manual_seed(0)
    results = []
    for scaled in (False, True):
        layer = torch.nn.Linear(6, 11)
        with torch.no_grad():
            layer.weight.copy_(normal_rows(11, 6) * 0.3)
            layer.bias.zero_()
        optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
        scaler = torch.amp.GradScaler("cpu", enabled=scaled)
        loss = gk.grpo_loss(
            layer(normal_rows(8, 6, seed=5)[None]), torch.arange(8)[None], advantages=torch.tensor([0.7])
        ).loss
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        results.append(layer.weight.detach())
    torch.testing.assert_close(results[0], results[1], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_does_not_change_the_loss(dtype: torch.dtype) -> None:
    logits, loss = setting(opt=full_options("grpo"))
    leaf = logits.requires_grad_()
    plain = loss(leaf)
    with torch.autocast("cpu", dtype=dtype):
        cast = loss(leaf)
    assert same_bits(plain.loss, cast.loss)
    (a,), (b,) = torch.autograd.grad(plain.loss, leaf), torch.autograd.grad(cast.loss, leaf)
    assert same_bits(a, b)


@pytest.mark.parametrize("form", ["sum", "mean", "expanded", "strided", "one element", "only entropy"])
def test_every_layout_of_the_upstream_gradient(form: str) -> None:
    """`.sum()` sends a stride-0 gradient: reading past its one element is a known fault."""
    raw, ids = normal_rows(12, 9, torch.float64).reshape(3, 4, 9), torch.arange(12).reshape(3, 4) % 9

    def total(logps: Tensor, entropy: Tensor) -> Tensor:
        weights = torch.arange(1.0, 25.0, dtype=torch.float64).reshape(3, 8)[:, ::2]
        return {
            "sum": logps.sum() + entropy.sum(), "mean": logps.mean(),
            "expanded": (logps * torch.tensor([[1.0], [2.0], [3.0]], dtype=torch.float64).expand(3, 4)).sum(),
            "strided": (logps * weights).sum() + (entropy * weights.T.contiguous().T).sum(),
            "one element": logps[1, 2], "only entropy": entropy.sum(),
        }[form]  # fmt: skip

    leaf, plain = raw.clone().requires_grad_(), raw.clone().requires_grad_()
    with poisoned():
        out = gk.per_token_logps(leaf, ids, entropy=True)
        total(out.logps, out.entropy).backward()
    logp = plain.log_softmax(-1)
    total(logp.gather(-1, ids[..., None])[..., 0], -(logp.exp() * logp).sum(-1)).backward()
    torch.testing.assert_close(leaf.grad, plain.grad, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("loss_type", "level"), [x for x in OBJECTIVES if x[0] != "cispo"])
def test_gradcheck_of_the_loss(loss_type: str, level: str, layout: str) -> None:
    """cispo is no gradient of its value (its weight is detached): the oracle covers it."""
    opt = full_options(loss_type, level, softcap=3.0, logit_scale=1.2, epsilon_high=0.28, use_bias_correction_kl=True)
    logits, loss = setting(torch.float64, opt, lengths=(2, 3), vocab=4, layout=layout)
    logits = torch.nan_to_num(logits)  # the packed tail: gradcheck perturbs what is never read
    assert torch.autograd.gradcheck(lambda x: loss(x).loss, (logits.requires_grad_(),))


def test_gradcheck_of_the_log_probs() -> None:
    raw = normal_rows(6, 5, torch.float64).reshape(2, 3, 5)
    ids, mask = torch.tensor([[0, 1, 4], [2, -100, 3]]), torch.tensor([[1, 1, 0], [1, 1, 1]])

    def score(x: Tensor) -> tuple[Tensor, Tensor]:
        out = gk.per_token_logps(x, ids, mask=mask, temperature=torch.tensor([[0.7], [1.3]]), softcap=2.0, entropy=True)
        return out.logps, out.entropy

    assert torch.autograd.gradcheck(score, (raw.requires_grad_(),))


def test_only_the_logits_get_a_gradient() -> None:
    batch = make_batch(seed=34, weight="token")
    arguments = loss_inputs(batch, torch.float32)
    side = [
        arguments[k].requires_grad_() for k in arguments if k != "completion_mask" and isinstance(arguments[k], Tensor)
    ]
    assert len(side) == 4
    out = gk.grpo_loss(
        tensor(batch.logits, torch.float32).requires_grad_(), tensor(batch.ids), config=config_of(FULL), **arguments
    )
    out.loss.backward()
    assert all(x.grad is None for x in side)
    frozen = gk.grpo_loss(tensor(batch.logits, torch.float32), tensor(batch.ids), config=config_of(FULL), **arguments)
    assert not frozen.loss.requires_grad
    assert same_bits(frozen.loss, out.loss)


def test_lse_is_not_differentiable() -> None:
    out = gk.per_token_logps(uniform(1, 2).requires_grad_(), torch.zeros(1, 2, dtype=torch.long), entropy=True)
    assert out.logps.requires_grad and out.entropy.requires_grad and not out.lse.requires_grad
    assert gk.per_token_logps(uniform(1, 2), torch.zeros(1, 2, dtype=torch.long)).entropy is None


def test_no_grad_saves_nothing_and_gives_the_same_loss() -> None:
    logits, loss = setting()
    leaf = logits.requires_grad_()
    with_grad = loss(leaf)
    with torch.no_grad():
        without = loss(leaf)
    assert same_bits(with_grad.loss, without.loss) and not without.loss.requires_grad
