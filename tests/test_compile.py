"""The ops obey torch.library, and torch.compile sees through the Functions without a break."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import grpo_kernels as gk

# what torch.compile does by itself: it makes an instance of a traced Function, and inductor uses torch.jit
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit.*` is deprecated:DeprecationWarning"),
]

IDS = torch.tensor([[3, 0, 6], [5, -1, 2]])
MASK = torch.tensor([[1, 1, 0], [1, 1, 1]])
ADVANTAGES = torch.tensor([0.7, -1.2])


def row_problem(shape: tuple[int, ...], dtype: torch.dtype, entropy: bool) -> tuple[Any, ...]:
    logits = torch.randn(*shape, dtype=torch.float64).to(dtype)
    targets = torch.randint(-1, shape[-1], shape[:-1])
    side = torch.float64 if dtype == torch.float64 else torch.float32
    return logits, targets, torch.full((), 0.7, dtype=side), 1.3, 4.0, entropy


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(2, 3, 7), (5, 11)], ids=["padded", "packed"])
def test_opcheck(shape: tuple[int, ...], dtype: torch.dtype, entropy: bool) -> None:
    ops = torch.ops.grpo_kernels
    problem = row_problem(shape, dtype, entropy)
    logits, targets, temperature, logit_scale, softcap, _ = problem
    torch.library.opcheck(ops.row_stats_torch.default, problem)
    _, entropies, _, row_max, sum_exp, sum_others = ops.row_stats_torch(*problem)
    grads = torch.randn_like(row_max), torch.randn_like(row_max) if entropy else None
    arguments = (logits, targets, temperature, logit_scale, softcap, entropies, row_max, sum_exp, sum_others, *grads)
    torch.library.opcheck(ops.row_grad_torch.default, arguments)
    torch.library.opcheck(ops.row_grad_torch_.default, arguments)


def loss_step(config: gk.GRPOLossConfig, **options: Any) -> Callable[[Tensor, Tensor], tuple[Tensor, ...]]:
    old, ref = torch.randn(2, 2, 3).sub(2).unbind()

    def step(hidden: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        out = gk.grpo_loss(
            hidden @ weight, IDS, config=config, advantages=ADVANTAGES, completion_mask=MASK, old_per_token_logps=old,
            ref_per_token_logps=ref, **options,
        )  # fmt: skip
        return out.loss * 3, *out.metrics.values()

    return step


def logps_step(**options: Any) -> Callable[[Tensor, Tensor], tuple[Tensor, ...]]:
    upstream = torch.randn(2, 3)

    def step(hidden: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        out = gk.per_token_logps(hidden @ weight, IDS, mask=MASK, temperature=0.8, softcap=5.0, **options)
        total = (out.logps * upstream).sum()
        return total if out.entropy is None else total + out.entropy.sum(), out.logps, out.lse

    return step


CONFIGS = {
    "token": gk.GRPOLossConfig(beta=0.1, entropy_coef=0.1, delta=2.0),
    "sequence": gk.GRPOLossConfig(loss_type="grpo", importance_sampling_level="sequence", beta=0.1),
    "cispo": gk.GRPOLossConfig(loss_type="cispo", epsilon_high=5.0),
}


def steps(inplace: bool) -> dict[str, Callable[[Tensor, Tensor], tuple[Tensor, ...]]]:
    return {name: loss_step(config, inplace=inplace) for name, config in CONFIGS.items()} | {
        "normalizer": loss_step(CONFIGS["token"], normalizer=torch.tensor(5.0), inplace=inplace),
        "logps": logps_step(inplace=inplace),
        "entropy": logps_step(entropy=True, inplace=inplace),
    }


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("name", list(steps(False)))
def test_compiled_equals_eager(name: str, inplace: bool) -> None:
    step = steps(inplace)[name]
    hidden, weight = torch.randn(2, 3, 5), torch.randn(5, 7, requires_grad=True)
    results = []
    for run in (step, torch.compile(step, fullgraph=True)):
        weight.grad = None
        outputs = run(hidden, weight)
        outputs[0].backward()
        assert weight.grad is not None
        results.append((outputs, weight.grad))
    (eager, eager_grad), (compiled, compiled_grad) = results
    assert eager_grad.abs().sum() > 0.01
    torch.testing.assert_close(compiled, eager, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(compiled_grad, eager_grad, rtol=1e-5, atol=1e-6)


OTHER_USES = {
    "before": lambda logits, loss: logits.exp().sum() + loss(logits),
    "after": lambda logits, loss: loss(logits) + torch.logsumexp(logits, -1).square().mean(),
    "square before": lambda logits, loss: (logits * logits).mean() + loss(logits),
    "saved output": lambda logits, loss: loss(torch.tanh(logits)),
    "twice": lambda logits, loss: loss(logits) + loss(logits),
}


@pytest.mark.parametrize("use", list(OTHER_USES))
def test_compiled_in_place_keeps_other_uses_of_the_logits_right(use: str) -> None:
    """Eager raises there; a compiler plans memory itself, so in place is the default there."""

    def step(hidden: Tensor, weight: Tensor, inplace: bool) -> Tensor:
        def loss(logits: Tensor) -> Tensor:
            return gk.grpo_loss(logits, IDS, advantages=ADVANTAGES, completion_mask=MASK, inplace=inplace).loss

        return OTHER_USES[use](hidden @ weight, loss)

    hidden, weight = torch.randn(2, 3, 5), torch.randn(5, 7, requires_grad=True)
    (expected,) = torch.autograd.grad(step(hidden, weight, False), weight)
    (ours,) = torch.autograd.grad(
        torch.compile(step, fullgraph=True, backend="aot_eager")(hidden, weight, True), weight
    )
    torch.testing.assert_close(ours, expected)


def test_compiled_in_place_leaves_a_leaf_alone() -> None:
    leaf = torch.nn.Parameter(torch.randn(2, 3, 7))
    before = leaf.detach().clone()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(logits: Tensor) -> Tensor:
        return gk.grpo_loss(logits, IDS, advantages=ADVANTAGES, inplace=True).loss

    compiled(leaf).backward()
    assert torch.equal(leaf, before)


def test_numbers_that_change_do_not_break_the_graph() -> None:
    @torch.compile(fullgraph=True, backend="aot_eager", dynamic=True)
    def step(logits: Tensor, temperature: float, normalizer: int) -> Tensor:
        return gk.grpo_loss(logits, IDS, advantages=ADVANTAGES, temperature=temperature, normalizer=normalizer).loss

    for temperature, normalizer in ((0.7, 10), (0.8, 11), (0.9, 12)):
        logits = torch.randn(2, 3, 7)
        eager = gk.grpo_loss(logits, IDS, advantages=ADVANTAGES, temperature=temperature, normalizer=normalizer).loss
        torch.testing.assert_close(step(logits, temperature, normalizer), eager)


def test_dynamic_lengths_compile_once_more_at_most() -> None:
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    @torch.compile(backend=counter, fullgraph=True, dynamic=None)
    def step(logits: Tensor, ids: Tensor, old: Tensor) -> Tensor:
        return gk.grpo_loss(logits, ids, advantages=ADVANTAGES, old_per_token_logps=old).loss

    for length in range(3, 23):
        logits = torch.randn(2, length, 7, requires_grad=True)
        step(logits, torch.randint(0, 7, (2, length)), torch.randn(2, length)).backward()
    assert counter.frame_count <= 2
