"""`grpo-kernels info` and `check`: what runs on this machine, and whether its numbers are right."""

from __future__ import annotations

import importlib.metadata
import math
import os
import platform
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from . import backends, reference
from .checks import ENVIRONMENT as CHECK_ENVIRONMENT
from .config import GRPOLossConfig
from .functional import grpo_loss, per_token_logps
from .functional_linear import linear_grpo_loss
from .ops.schema import stats_dtype

PACKAGES = ("grpo-kernels", "torch", "triton", "transformers", "accelerate", "peft", "flash-attn", "trl")
Finding = tuple[str, bool, str]  # what was checked, whether it holds, the numbers


def default_device() -> str:
    """The accelerator that torch sees, else the CPU."""
    for name in ("cuda", "xpu"):
        if getattr(torch, name).is_available():
            return name
    return "cpu"


def versions() -> dict[str, str]:
    """Installed versions of what matters here; "not installed" otherwise."""
    found = {"python": platform.python_version(), "platform": platform.platform()}
    installed = {d.name.lower().replace("_", "-"): d.version for d in importlib.metadata.distributions()}
    return found | {package: installed.get(package, "not installed") for package in PACKAGES}


def info_lines() -> Iterator[str]:
    """Versions, devices, implementations and environment variables, a line each."""
    for name, version in versions().items():
        yield f"{name:<24} {version}"
    yield f"{'device':<24} {_device_name(default_device())}"
    yield f"{'threads':<24} {torch.get_num_threads()}"
    for name, state in backends.report().items():
        yield f"{'implementation ' + name:<24} {state}"
    for variable in (backends.ENVIRONMENT, CHECK_ENVIRONMENT):
        yield f"{variable:<24} {os.environ.get(variable, 'not set')}"


def _device_name(device: str) -> str:
    if device == "cpu":
        return f"cpu ({platform.processor() or platform.machine()})"
    module = getattr(torch, device)
    return f"{device} ({module.get_device_name()}, {module.device_count()} visible)"


def check(device: str, impl: str) -> Iterator[Finding]:
    """Compare with float64 on this device, one finding at a time: seconds, most of them at V = 151 936."""
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    yield _not_zero(device, impl)
    yield _narrow_tail(device, impl)
    for dtype in dtypes:
        yield _accuracy(device, impl, dtype)
    yield _sixteen_bit_inputs(device, impl)
    for dtype in dtypes:
        yield _gradient(device, impl, dtype)
        yield _linear(device, impl, dtype)
    yield _poisoned_padding(device, impl)
    yield _row_alone(device, impl)
    yield _far_rows(device, impl)


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=_generator())


def _not_zero(device: str, impl: str) -> Finding:
    logits = torch.arange(12.0, device=device).reshape(4, 3)
    logps = per_token_logps(logits, torch.zeros(4, dtype=torch.int64, device=device), impl=impl).logps
    error = (logps.cpu() + 2.4076059).abs().max().item()
    return "a 4 x 3 problem has its known log-probs", error < 1e-6, f"error {error:.1e}"


def _narrow_tail(device: str, impl: str) -> Finding:
    worst = 0.0
    for width in (1, 2, 3, 255, 257, 1025, 32001, 151936):
        logits = torch.full((1, width), -30.0, device=device)
        out = per_token_logps(logits, torch.zeros(1, dtype=torch.int64, device=device), entropy=True, impl=impl)
        entropy = math.nan if out.entropy is None else out.entropy.item()
        worst = max(worst, abs(out.logps.item() + math.log(width)), abs(entropy - math.log(width)))
    return "columns beyond the vocabulary carry no mass", worst < 1e-5, f"error {worst:.1e}"


def _accuracy(device: str, impl: str, dtype: torch.dtype) -> Finding:
    logits, ids = (_draw(4, 151936) * 3 - 500).to(dtype), torch.tensor([7, 0, 151935, 1234])
    truth = reference.per_token_logps(logits.double(), ids, temperature=0.7)[0]
    ours = per_token_logps(logits.to(device), ids.to(device), temperature=0.7, impl=impl).logps.cpu().double()
    error = (ours - truth).abs().max().item()
    return f"log-probs at V = 151936, {dtype}", error < 1e-5, f"error {error:.1e}, allowed 1e-05"


def _sixteen_bit_inputs(device: str, impl: str) -> Finding:
    logits, ids = _draw(64, 4001).to(torch.bfloat16).to(device), torch.arange(64, device=device)
    narrow = per_token_logps(logits, ids, impl=impl).logps
    wide = per_token_logps(logits.float(), ids, impl=impl).logps
    error = (narrow - wide).abs().max().item()
    same = narrow.dtype == torch.float32 and error < 1e-5
    return "bfloat16 logits lose nothing after they are read", same, f"difference {error:.1e}"


def _loss_problem(dtype: torch.dtype) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    logits, ids = (_draw(3, 5, 1031) * 2).to(dtype), torch.arange(15).reshape(3, 5) * 61
    logps = reference.per_token_logps(logits.double(), ids)[0]
    return logits, ids, {
        "advantages": torch.tensor([1.0, -0.5, 0.25]),
        "completion_mask": torch.tensor([[1, 1, 0, 1, 1], [1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]),
        "old_per_token_logps": logps + 0.2 * _draw(3, 5),
        "ref_per_token_logps": logps + 0.3 * _draw(5, 3).reshape(3, 5),
    }  # fmt: skip


def _gradient(device: str, impl: str, dtype: torch.dtype) -> Finding:
    config = GRPOLossConfig(beta=0.1, entropy_coef=0.01, epsilon_high=0.28)

    def run(kind: torch.dtype, where: str, loss_of: Callable[..., Tensor]) -> Tensor:
        logits, ids, rest = _loss_problem(dtype)
        leaf = logits.to(where).to(kind).requires_grad_()
        rest = {name: value.to(where, stats_dtype(leaf)) for name, value in rest.items()}
        (grad,) = torch.autograd.grad(loss_of(leaf, ids.to(where), config=config, **rest), leaf)
        return grad.cpu().double()

    truth = run(torch.float64, "cpu", reference.grpo_loss)
    plain = run(torch.float32, "cpu", reference.grpo_loss)
    ours = run(dtype, device, lambda *tensors, **options: grpo_loss(*tensors, impl=impl, **options).loss)
    # a float32 log-prob near -8 is itself rounded by 4 eps, which its ratio, and so its gradient, inherits
    scale, inherited = truth.abs().max(), 8 * torch.finfo(torch.float32).eps
    error = (ours - truth).abs()
    allowed = (plain - truth).abs() + torch.finfo(dtype).eps * truth.abs() + inherited * scale
    text = f"worst error / largest gradient {(error.max() / scale).item():.1e}"
    return f"gradient of clip + k3 + entropy, {dtype}", bool((error <= allowed).all()), text


def _linear(device: str, impl: str, dtype: torch.dtype) -> Finding:
    _, ids, rest = _loss_problem(torch.float32)
    config = GRPOLossConfig(epsilon_high=0.28, beta=0.1)
    head = [(_draw(3, 5, 64)).to(dtype), (_draw(1031, 64) / 8).to(dtype)]

    def run(kind: torch.dtype, where: str, loss_of: Callable[..., Tensor]) -> list[Tensor]:
        leaves = [tensor.to(where).to(kind).requires_grad_() for tensor in head]
        sides = {name: value.to(where, torch.float32) for name, value in rest.items()}
        loss = loss_of(*leaves, ids.to(where), config=config, **sides)
        return [grad.cpu().double() for grad in torch.autograd.grad(loss, leaves)]

    truth = run(torch.float64, "cpu", lambda h, w, *more, **rest: reference.grpo_loss(h @ w.t(), *more, **rest))
    worst = 0.0
    for mode in ("fast", "lean"):
        ours = run(dtype, device, lambda *t, mode=mode, **rest: linear_grpo_loss(*t, mode=mode, impl=impl, **rest).loss)
        errors = [((a - b).abs().max() / b.abs().max()).item() for a, b in zip(ours, truth, strict=True)]
        worst = max(worst, *errors)
    allowed = 4 * torch.finfo(dtype).eps + 1e-5
    return f"gradients of hidden states and head, {dtype}", worst < allowed, f"error {worst:.1e}, allowed {allowed:.1e}"


def _poisoned_padding(device: str, impl: str) -> Finding:
    logits, ids, rest = _loss_problem(torch.float32)
    config = GRPOLossConfig(beta=0.1)

    def run(poison: float) -> Tensor:
        dead = rest["completion_mask"] == 0
        filled: dict[str, Any] = {name: value.to(device) for name, value in rest.items()}
        for name in ("old_per_token_logps", "ref_per_token_logps"):
            filled[name] = rest[name].masked_fill(dead, poison).to(device)
        leaf = logits.masked_fill(dead.unsqueeze(-1), poison).to(device).requires_grad_()
        loss = grpo_loss(leaf, ids.to(device), config=config, impl=impl, **filled).loss
        (grad,) = torch.autograd.grad(loss, leaf)
        return torch.cat([loss.detach().reshape(1), grad.reshape(-1)])

    same = all(torch.equal(run(0.0), run(poison)) for poison in (math.nan, math.inf))
    return "NaN and inf behind the mask change no bit", same, "loss and gradient equal" if same else "they differ"


def _row_alone(device: str, impl: str) -> Finding:
    logits, ids = _draw(8, 32001).to(device), torch.arange(8, device=device)
    together = per_token_logps(logits, ids, impl=impl).logps
    alone = torch.cat([per_token_logps(logits[i : i + 1], ids[i : i + 1], impl=impl).logps for i in range(8)])
    same = torch.equal(together, alone)
    return "a row's bits do not depend on its neighbours", same, "equal" if same else "they differ"


def _far_rows(device: str, impl: str) -> Finding:
    """Two rows with a stride beyond int32 on a GPU (4.3 GB of storage); on a CPU, sparing memory, one past 2^27."""
    far = 2**27 + 64 if torch.device(device).type == "cpu" else 2**31 + 64
    storage = torch.zeros(far + 1024, dtype=torch.bfloat16, device=device)
    rows = storage.as_strided((2, 1024), (far, 1))
    rows.copy_(_draw(2, 1024))
    ids = torch.tensor([5, 6], device=device)
    together, alone = (per_token_logps(x, ids, impl=impl).logps for x in (rows, rows.clone()))
    same = torch.equal(together, alone)
    return f"rows {far} elements apart", same, "equal to the same rows side by side" if same else "they differ"
