"""What a hostile but legal caller found: each stays mended."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from support import default_impl, same_bits
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import grpo_kernels as gk

IDS = torch.zeros(2, 3, dtype=torch.long)
ADVANTAGES = torch.tensor([1.0, -1.0])


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("impl", ["torch", "auto"])
def test_a_checkpointed_loss_has_the_same_gradient(reentrant: bool, inplace: bool, impl: str) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, head = torch.randn(2, 3, 4, generator=generator), torch.randn(7, 4, generator=generator)

    def loss(rows: Tensor) -> Tensor:
        value: Tensor = gk.grpo_loss(rows @ head.T, IDS, advantages=ADVANTAGES, inplace=inplace, impl=impl).loss
        return value

    plain, checked = (hidden.clone().requires_grad_() for _ in range(2))
    loss(plain).backward()
    checkpoint(loss, checked, use_reentrant=reentrant).backward()
    assert plain.grad is not None and checked.grad is not None and plain.grad.abs().max() > 0.01
    assert same_bits(checked.grad, plain.grad)


def test_what_is_detached_stays_so_inside_torch_compile() -> None:
    def call(logits: Tensor) -> gk.GRPOLossOutput:
        return gk.grpo_loss(logits * 1.0, IDS, advantages=ADVANTAGES, return_per_token=True)

    out = torch.compile(call, backend="aot_eager", fullgraph=True)(torch.randn(2, 3, 5, requires_grad=True))
    assert out.loss.requires_grad
    assert not any(value.requires_grad for value in out.metrics.values())
    assert out.per_token is not None
    assert not any(value.requires_grad for value in out.per_token if value is not None)


@pytest.mark.parametrize("field", ["off_policy_mask_threshold", "top_entropy_quantile"])
def test_an_option_that_changes_does_not_break_the_graph(field: str) -> None:
    def call(logits: Tensor, config: gk.GRPOLossConfig) -> Tensor:
        value: Tensor = gk.grpo_loss(logits * 1.0, IDS, advantages=ADVANTAGES, config=config).loss
        return value

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    logits = torch.randn(2, 3, 5, requires_grad=True)
    for number in (0.2, 0.3, 0.4):
        config = gk.GRPOLossConfig(**{field: number})
        torch.testing.assert_close(compiled(logits, config), call(logits, config))


@pytest.mark.skipif(default_impl() == "triton", reason="its cap has the allowance of docs/numerics.md")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("cap", [1e2, 1e4, 1e6, 1e8, 1e12])
def test_a_softcap_far_above_the_logits_changes_nothing(cap: float, dtype: torch.dtype) -> None:
    logits, ids = torch.linspace(-3, 3, 301, dtype=torch.float64).to(dtype)[None], torch.tensor([7])
    z = cap * torch.tanh(logits[0].double() / cap)
    leaf = logits.clone().requires_grad_()
    out = gk.per_token_logps(leaf, ids, softcap=cap, entropy=True)
    out.logps.sum().backward()
    p = z.softmax(0)
    expected = -p
    expected[7] += 1
    expected *= 1 - torch.tanh(logits[0].double() / cap) ** 2
    eps = torch.finfo(dtype).eps
    assert leaf.grad is not None
    assert abs(out.logps.item() - (z[7] - z.logsumexp(0)).item()) < 16 * eps
    assert abs(out.entropy.item() + (p * p.log()).sum().item()) < 16 * eps  # type: ignore[union-attr]
    assert (leaf.grad[0].double() - expected).abs().max() < 4 * eps


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"normalizer": torch.tensor(1e-39)}, "normalizer must be finite and > 0, in float32 too"),
        ({"temperature": torch.tensor(1e-40)}, "temperature must be finite and > 0, from 1e-18 to 1e\\+18"),
        ({"temperature": torch.full((2, 3), 1e-40)}, "temperature must be finite and > 0, from 1e-18 to 1e\\+18"),
        ({"temperature": 1e19}, "temperature must be from 1e-18 to 1e\\+18"),
        ({"temperature": 1e-19}, "temperature must be from 1e-18 to 1e\\+18"),
        ({"temperature": torch.tensor(1e19)}, "from 1e-18 to 1e\\+18"),
        ({"completion_mask": torch.tensor([[1, -100, 1], [0, 1, 1]])}, "completion_mask must be >= 0, got -100"),
    ],
)
def test_numbers_without_room_and_labels_as_masks_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gk.grpo_loss(torch.zeros(2, 3, 5), IDS, advantages=ADVANTAGES, **arguments)


def test_vespo_refuses_a_weight_of_a_sequence_also_where_as_many_tokens_are_packed() -> None:
    with pytest.raises(ValueError, match="must be one per token with loss_type='vespo'"):
        gk.grpo_loss(
            torch.zeros(3, 5), torch.zeros(3, dtype=torch.long), cu_seqlens=torch.tensor([0, 3, 3, 3]),
            config=gk.GRPOLossConfig(loss_type="vespo"), advantages=torch.ones(3),
            importance_sampling_ratio=torch.tensor([0.5, 0.6, 0.7]),
        )  # fmt: skip


def test_configs_that_cannot_be_say_so() -> None:
    with pytest.raises(ValueError, match="max_completion_length must be >= 1 and below"):
        gk.GRPOLossConfig(max_completion_length=10**39)
    with pytest.raises(TypeError, match="loss_type must be a string"):
        gk.GRPOLossConfig.preset("verl", loss_type=["a"])
    assert math.isfinite(gk.GRPOLossConfig(max_completion_length=2**31 - 1).epsilon)
