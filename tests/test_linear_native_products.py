"""Where 16-bit products come out in float32, as on CUDA, told on the CPU: the gradient lies beside the logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels import backends, head

B, T, H, V = 3, 5, 16, 131
EVERYTHING = {"entropy_coef": 0.1, "softcap": 8.0, "temperature": 0.7}


@pytest.fixture(autouse=True)
def native(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.mm(out_dtype=...) does not exist on the CPU: what it gives, from widened operands."""

    def multiply(a: Tensor, b: Tensor, out: Tensor, *, add: bool) -> None:
        assert a.dtype == b.dtype and (out.dtype in (a.dtype, torch.float32))
        product = (a.float() @ b.float()).to(out.dtype)
        out.copy_(out + product if add else product)

    monkeypatch.setattr(backends, "multiplies_into_wider", lambda device: True)
    monkeypatch.setattr(head, "_multiply", multiply)


def problem(dtype: torch.dtype) -> tuple[list[Tensor], Tensor, dict[str, Any]]:
    leaves = [torch.randn(B, T, H), torch.randn(V, H) / 4, torch.randn(V)]
    ids = torch.randint(0, V, (B, T))
    mask = torch.ones(B, T)
    mask[0, 1], mask[2, 3:] = 0, 0
    logps = torch.log_softmax(leaves[0] @ leaves[1].t() + leaves[2], -1).gather(-1, ids[..., None])[..., 0]
    sides = {
        "old_per_token_logps": logps + 0.1 * torch.randn(B, T),
        "ref_per_token_logps": logps - 0.2,
        "completion_mask": mask,
    }
    return [leaf.to(dtype) for leaf in leaves], ids, sides | {"advantages": torch.tensor([1.0, -0.5, 0.0])}


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("logits_dtype", ["float32", "input"])
@pytest.mark.parametrize("mode", ["fast", "lean"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "options", [{}, {"entropy_coef": 0.1, "softcap": 8.0, "temperature": 0.7}], ids=["plain", "all"]
)
@pytest.mark.parametrize("normalizer", [None, 65536.0])
def test_gradients(
    dtype: torch.dtype, mode: str, impl: str, logits_dtype: str, options: dict[str, float], normalizer: float | None
) -> None:
    if impl == "triton":
        pytest.importorskip("triton")
        if normalizer is not None or logits_dtype == "input":
            pytest.skip("the interpreter takes too long for all of them")
    leaves, ids, sides = problem(dtype)
    config = gk.GRPOLossConfig(beta=0.1, **options)
    wide = [leaf.double().requires_grad_() for leaf in leaves]
    truth = gk.grpo_loss(wide[0] @ wide[1].t() + wide[2], ids, config=config, normalizer=normalizer, **sides).loss
    scale = 1.0 if normalizer is None else normalizer
    expected = torch.autograd.grad(truth * scale, wide)
    narrow = [leaf.clone().requires_grad_() for leaf in leaves]
    out = gk.linear_grpo_loss(
        narrow[0], narrow[1], ids, bias=narrow[2], config=config, mode=mode, impl=impl, logits_dtype=logits_dtype,
        normalizer=normalizer, chunk_bytes=4 * 6 * V, **sides,
    )  # fmt: skip
    assert gk.backends.last_used() == f"{impl} {mode}"
    # logits of 16 bits are a distribution of their own, off by half an ulp of the largest
    allowed = (3 if logits_dtype == "float32" else 12) * torch.finfo(dtype).eps
    grads = torch.autograd.grad(out.loss * scale, narrow)
    for name, ours, right in zip(("hidden", "weight", "bias"), grads, expected, strict=True):
        assert ours.dtype == dtype
        error = (ours.double() - right).abs().max() / right.abs().max()
        assert error < allowed, (name, error)
