"""The linear form in use: graphs kept and shared, scales from above, no grad, hooks, tied weights."""

from __future__ import annotations

import pytest
import torch
from linear_support import FULL, MODES, logps_of, loss_of, make_problem, run_linear
from support import config_of, default_impl, full_options, loss_inputs, same_bits, tensor
from torch import Tensor

import grpo_kernels as gk

# Graphs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_a_kept_graph_gives_the_same_gradients_twice(mode: str, dtype: torch.dtype) -> None:
    operands, loss = loss_of(dtype=dtype)
    out = loss(*operands, mode=mode).loss
    first = torch.autograd.grad(out, operands, retain_graph=True)
    kept = [grad.clone() for grad in first]
    for grad in first:
        grad.mul_(-7)  # what a caller does to his gradients is his own affair
    tripled = torch.autograd.grad(out * 3, operands, retain_graph=True)
    again = torch.autograd.grad(out, operands)
    for a, b, c in zip(kept, again, tripled, strict=True):
        assert same_bits(a, b)
        torch.testing.assert_close(c.double(), 3 * a.double(), rtol=2 * torch.finfo(dtype).eps, atol=1e-7)
    with pytest.raises(RuntimeError):
        torch.autograd.grad(out, operands)


def test_a_kept_graph_of_log_probs_gives_the_same_gradients_twice() -> None:
    operands, _ = loss_of()
    total = logps_of(operands).logps.square().sum()
    first = torch.autograd.grad(total, operands, retain_graph=True)
    assert all(same_bits(a, b) for a, b in zip(first, torch.autograd.grad(total, operands), strict=True))


@pytest.mark.parametrize("modes", [("fast", "fast"), ("fast", "lean"), ("lean", "lean")], ids="+".join)
def test_two_losses_on_one_hidden_add_up(modes: tuple[str, str]) -> None:
    """Ours twice, and a plain loss on the same hidden states."""
    operands, loss = loss_of(dtype=torch.float64)
    _, other = loss_of(full_options("dapo"), seed=61, dtype=torch.float64)
    parts = [
        lambda: loss(*operands, mode=modes[0]).loss,
        lambda: other(*operands, mode=modes[1]).loss,
        lambda: (operands[0] @ operands[1].T + operands[2]).square().mean(),
    ]
    separate = [torch.autograd.grad(part(), operands) for part in parts]
    for order in (parts, parts[::-1]):
        together = torch.autograd.grad(sum(part() for part in order), operands)
        for grad, *pieces in zip(together, *separate, strict=True):
            torch.testing.assert_close(grad, sum(pieces), rtol=1e-12, atol=1e-13)


def test_gradients_accumulate_over_micro_batches() -> None:
    operands, loss = loss_of(dtype=torch.float64)
    for scale in (1.0, 0.5):
        (loss(*operands).loss * scale).backward()
    once = torch.autograd.grad(loss(*operands).loss, operands)
    for leaf, grad in zip(operands, once, strict=True):
        torch.testing.assert_close(leaf.grad, 1.5 * grad, rtol=1e-12, atol=1e-14)


# The gradient from above


@pytest.mark.parametrize("scale", [0.0, 0.25, 65536.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize(("loss_type", "level"), [("dapo", "token"), ("cispo", "token"), ("grpo", "sequence")])
def test_the_upstream_scale_is_honoured(loss_type: str, level: str, dtype: torch.dtype, scale: float) -> None:
    opt = full_options(loss_type, level)
    problem = make_problem(seed=62, dtype=dtype)
    for mode in MODES if level == "token" else ["lean"]:
        plain, scaled = (run_linear(problem, opt, mode=mode, upstream=s) for s in (1.0, scale))
        for name, grad in scaled.grads.items():
            assert torch.isfinite(grad).all()
            if scale == 0:
                assert (grad == 0).all()
            eps = torch.finfo(dtype).eps
            torch.testing.assert_close(grad.double(), scale * plain.grads[name].double(), rtol=2 * eps, atol=1e-7)


@pytest.mark.parametrize("mode", MODES)
def test_the_loss_may_be_part_of_a_larger_one(mode: str) -> None:
    """An upstream gradient that is itself computed, and a loss used twice."""
    operands, loss = loss_of(dtype=torch.float64)
    out = loss(*operands, mode=mode).loss
    expected = torch.autograd.grad(out, operands, retain_graph=True)
    total = out.square() + 2 * out
    for grad, plain in zip(torch.autograd.grad(total, operands), expected, strict=True):
        torch.testing.assert_close(grad, plain * (2 * out.detach() + 2), rtol=1e-12, atol=1e-14)


# Without grad, frozen, precise


@pytest.mark.parametrize("mode", [*MODES, "auto"])
@pytest.mark.parametrize("how", ["no_grad", "inference_mode", "nothing requires grad"])
def test_without_grad_the_loss_is_the_same(how: str, mode: str) -> None:
    operands, loss = loss_of()
    with_grad = loss(*operands, mode=mode)
    if how == "nothing requires grad":
        without = loss(*(x.detach() for x in operands), mode=mode)
    else:
        with getattr(torch, how)():
            without = loss(*operands, mode=mode)
    assert gk.backends.last_used() == f"{default_impl()} forward"
    assert not without.loss.requires_grad
    torch.testing.assert_close(without.loss, with_grad.loss.detach(), rtol=1e-6, atol=1e-7)
    assert without.metrics.keys() == with_grad.metrics.keys()
    for name, value in with_grad.metrics.items():
        torch.testing.assert_close(without.metrics[name], value, rtol=1e-6, atol=1e-7)


def test_metrics_and_per_token_results_are_detached() -> None:
    operands, loss = loss_of()
    for mode in MODES:
        out = loss(*operands, mode=mode, return_per_token=True)
        assert out.loss.requires_grad and out.loss.shape == ()
        assert not any(x.requires_grad for x in (*out.metrics.values(), *out.per_token))
        assert loss(*operands, mode=mode).per_token is None


@pytest.mark.parametrize("mode", MODES)
def test_inputs_are_unchanged(mode: str) -> None:
    operands, loss = loss_of(dtype=torch.bfloat16)
    before = [(x.detach().clone(), x._version, x.dtype) for x in operands]
    loss(*operands, mode=mode).loss.backward()
    logps_of(operands).logps.sum().backward()
    for x, (values, version, dtype) in zip(operands, before, strict=True):
        assert same_bits(x, values) and x._version == version and x.dtype == dtype


@pytest.mark.parametrize("mode", MODES)
def test_side_inputs_that_require_grad_get_none(mode: str) -> None:
    operands, loss = loss_of()
    problem = make_problem(seed=60, weight="token")
    side = {
        name: value.requires_grad_()
        for name, value in loss_inputs(problem.batch, torch.float32).items()
        if isinstance(value, Tensor) and value.is_floating_point()
    }
    side["temperature"] = torch.tensor(0.8, requires_grad=True)
    assert len(side) == 5
    out = loss(*operands, mode=mode, **side)
    out.loss.backward()
    assert all(x.grad is None for x in side.values())
    assert all(x.grad is not None for x in operands)
    frozen = loss(*(x.detach() for x in operands), mode=mode, **side)
    assert not frozen.loss.requires_grad
    assert same_bits(frozen.loss, out.loss)


@pytest.mark.parametrize("mode", MODES)
def test_hooks_see_the_gradient_and_may_replace_it(mode: str) -> None:
    operands, loss = loss_of()
    (plain,) = torch.autograd.grad(loss(*operands, mode=mode).loss, operands[:1])
    seen: list[Tensor] = []
    hidden = operands[0] * 1.0
    hidden.retain_grad()
    hidden.register_hook(lambda grad: seen.append(grad.clone()))
    hidden.register_hook(lambda grad: grad * 2)
    loss(hidden, *operands[1:], mode=mode).loss.backward()
    assert len(seen) == 1 and same_bits(seen[0], plain)
    torch.testing.assert_close(operands[0].grad, 2 * plain)


# Tied weights


@pytest.mark.parametrize("mode", MODES)
def test_a_tied_weight_gets_both_gradients(mode: str) -> None:
    problem = make_problem(seed=64, dtype=torch.float64)
    arguments, ids = loss_inputs(problem.batch, torch.float64), tensor(problem.batch.ids)
    config = config_of(FULL)
    mix = torch.randn(11, 11, dtype=torch.float64)

    def body(weight: Tensor) -> Tensor:
        return torch.tanh(torch.nn.functional.embedding(ids, weight) @ mix)

    grads = []
    for fused in (True, False):
        weight = tensor(problem.weight).requires_grad_()
        if fused:
            out = gk.linear_grpo_loss(body(weight), weight, ids, config=config, mode=mode, **arguments)
        else:
            out = gk.grpo_loss(body(weight) @ weight.T, ids, config=config, **arguments)
        out.loss.backward()
        grads.append(weight.grad)
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-11, atol=1e-13)


# Once differentiable


@pytest.mark.parametrize("function", [*MODES, "logps"])
@pytest.mark.parametrize("way", ["create_graph", "hvp", "upstream"])
def test_a_second_derivative_raises(way: str, function: str) -> None:
    operands, loss = loss_of()

    def value(hidden: Tensor) -> Tensor:
        if function == "logps":
            return logps_of([hidden, *operands[1:]]).logps.mean()
        return loss(hidden, *operands[1:], mode=function).loss

    def differentiate() -> None:
        if way == "create_graph":
            (grad,) = torch.autograd.grad(value(torch.tanh(operands[0])), operands[:1], create_graph=True)
            torch.autograd.grad(grad.square().sum(), operands[0])
        elif way == "hvp":
            torch.autograd.functional.hvp(value, operands[0].detach(), torch.ones_like(operands[0]))
        else:
            scale = torch.ones((), requires_grad=True)
            (grad,) = torch.autograd.grad(value(operands[0]) * scale, operands[:1], create_graph=True)
            torch.autograd.grad(grad.sum(), scale)

    with pytest.raises(RuntimeError, match="double backward is not supported"):
        differentiate()


def test_a_second_derivative_in_the_weight_raises() -> None:
    operands, loss = loss_of()
    for mode in MODES:
        _, grad = torch.autograd.grad(loss(*operands, mode=mode).loss, operands[:2], create_graph=True)
        with pytest.raises(RuntimeError, match="double backward is not supported"):
            torch.autograd.grad(grad.square().sum(), operands[1])
