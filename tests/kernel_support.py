"""What the tests of the compiled kernels share, Triton's and C++'s: a call in poisoned memory, and its error budget."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import oracle
import torch
from oracle import Batch, Options
from oracle_rows import row_stats
from support import Ran, config_of, loss_inputs, plain_loss, plain_row_stats, poisoned, result_dtype, tensor
from tolerance import as_array, assert_within_budget
from torch import Tensor

import grpo_kernels as gk

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "xpu" if torch.xpu.is_available() else "cpu")


def device_of(impl: str) -> torch.device:
    """Where the tests of an implementation run."""
    return DEVICE if impl == "triton" else torch.device("cpu")


class Scored(NamedTuple):
    logps: Tensor
    entropy: Tensor
    lse: Tensor
    grad: Tensor


def upstream_of(ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Gradients of logps and of entropy, [2, ...]."""
    generator = torch.Generator().manual_seed(3)
    return torch.randn(2, *ids.shape, generator=generator, dtype=torch.float64).to(result_dtype(dtype))


def scored(logits: Tensor, ids: Tensor, impl: str = "triton", **options: Any) -> Scored:
    """Statistics of rows and the gradient of sum(u_0 logps + u_1 entropy), in poisoned memory; back on the CPU."""
    device = device_of(impl)
    leaf = logits.detach().clone().to(device).requires_grad_()
    options = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in options.items()}
    upstream = upstream_of(ids, logits.dtype).to(device)
    with poisoned():
        out = gk.per_token_logps(leaf, ids.to(device), entropy=True, impl=impl, **options)
        assert out.entropy is not None and gk.backends.last_used() == impl
        (upstream[0] * out.logps + upstream[1] * out.entropy).sum().backward()
    assert leaf.grad is not None
    return Scored(*(x.detach().cpu() for x in (out.logps, out.entropy, out.lse, leaf.grad)))


def assert_rows_within_budget(
    logits: Tensor, ids: Tensor, real: type = np.longdouble, impl: str = "triton", **transform: Any
) -> None:
    """Statistics and gradient of rows [N, V] against the oracle, no worse than plain torch in the same precision."""
    ours = scored(logits, ids, impl, **transform)
    leaf = logits.clone().requires_grad_()
    plain = plain_row_stats(leaf, ids, **transform)
    upstream = upstream_of(ids, logits.dtype)
    (upstream[0] * plain[0] + upstream[1] * plain[1]).sum().backward()
    assert leaf.grad is not None
    heat = as_array(transform.get("temperature", 1.0))
    truth = row_stats(as_array(logits), as_array(ids), real=real, **transform | {"temperature": heat})
    side = result_dtype(logits.dtype)
    # transformed logits are rounded too, eps times their size, and a cap of c to 2 eps c
    size = truth.size if transform else np.ones(len(ids))
    size = size + 2 * transform.get("softcap", 0.0) / heat
    for name, mine, theirs in zip(("logps", "entropy", "lse"), ours[:3], plain, strict=True):
        floor = 2 * size if name == "entropy" else size  # log S and E / S
        assert_within_budget(mine, theirs, getattr(truth, name), side, floor=floor, name=name)
    assert (ours.logps <= 0).all() and (ours.entropy >= 0).all()
    u = as_array(upstream).astype(real)[..., None]
    expected = u[0] * truth.dlogps + u[1] * truth.dentropy
    steepest = transform.get("logit_scale", 1.0) / heat
    scale = steepest * size * (np.abs(u[0, :, 0]) + np.abs(u[1, :, 0]) * (1 + truth.entropy))
    floor = np.broadcast_to(scale[:, None], expected.shape)
    assert ours.grad.dtype == logits.dtype
    assert_within_budget(ours.grad, leaf.grad, expected, logits.dtype, compute=side, floor=floor, name="dlogits")


def run_on(
    impl: str,
    batch: Batch,
    opt: Options,
    dtype: torch.dtype = torch.float32,
    *,
    inplace: bool = False,
    upstream: float = 1.0,
    **changes: Any,
) -> Ran:
    """`gk.grpo_loss` and its backward with one implementation, in poisoned memory; results back on the CPU."""
    arguments = loss_inputs(batch, dtype) | {"return_per_token": True} | changes
    device = device_of(impl)
    arguments = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in arguments.items()}
    leaf = tensor(batch.logits, dtype).to(device).requires_grad_()
    with poisoned():
        logits = leaf * 1.0 if inplace else leaf
        out = gk.grpo_loss(
            logits, tensor(batch.ids).to(device), config=config_of(opt), inplace=inplace, impl=impl, **arguments
        )
        (out.loss if upstream == 1.0 else out.loss * upstream).backward()
    assert leaf.grad is not None
    per_token = (
        None if out.per_token is None else type(out.per_token)(*(x if x is None else x.cpu() for x in out.per_token))
    )
    return Ran(out.loss.detach().cpu(), leaf.grad.cpu(), {k: v.cpu() for k, v in out.metrics.items()}, per_token)


def assert_run_within_budget(
    got: Ran, batch: Batch, opt: Options, dtype: torch.dtype, *, ref: Ran | None = None, slack: float = 1.0
) -> None:
    """Everything that one call of the loss gives, against the oracle; `ref` in place of plain torch."""
    truth = oracle.grpo(batch, opt)
    if opt.softcap is not None:  # a cap of c is exact to 2 eps c
        slack *= 1 + 2 * opt.softcap / float(
            np.min(opt.temperature if batch.temperature is None else batch.temperature)
        )
    side, live = result_dtype(dtype), torch.as_tensor(truth.live)
    if ref is None:
        loss, grad, tokens = plain_loss(batch, opt, dtype)
    else:
        loss, grad, tokens = ref.loss, ref.grad, ref.per_token.loss.reshape(-1)[live]
    assert_within_budget(got.loss, loss, truth.loss, side, floor=slack * max(1, truth.loss_scale), name="loss")
    floor = np.broadcast_to(slack * truth.dlogits_scale.reshape(*batch.ids.shape, 1), batch.logits.shape)
    assert_within_budget(got.grad, grad, truth.dlogits, dtype, compute=side, floor=floor, name="dlogits")
    assert_within_budget(
        got.per_token.loss.reshape(-1)[live], tokens, truth.token_loss[truth.live], side,
        floor=slack * np.maximum(1, truth.token_scale[truth.live]), name="per_token.loss",
    )  # fmt: skip
    # a log-prob of -40 is rounded to 40 eps, and so is what comes of it
    size = np.maximum(1, np.abs(np.where(np.isfinite(truth.logps), truth.logps, 1)).astype(float))
    for name in ("logps", "entropy", "kl", "ratio"):
        value = getattr(got.per_token, name)
        if value is not None:
            flat, expected = as_array(value).reshape(-1), getattr(truth, name).astype(float)
            assert_close(flat[truth.live], expected[truth.live], size[truth.live], name)
            assert (flat[~truth.live] == 0).all(), name
    assert set(truth.metrics) <= set(got.metrics)
    assert set(got.metrics) == set(truth.metrics) or not truth.live.any()
    for name, value in truth.metrics.items():
        # of a sequence whose tokens have advantages of both signs, the oracle counts any, the loss the mean
        expected = as_array(ref.metrics[name]) if ref is not None and "clip" in name else value
        assert_close(as_array(got.metrics[name]), expected, size[truth.live].max(initial=1), name)


def assert_close(ours: Any, truth: Any, size: Any, name: str) -> None:
    """Within 1e-5 relative or 1e-6 absolute, times `size`."""
    apart = np.abs(ours - truth) - (1e-5 * np.abs(truth) + 1e-6) * size
    same = (ours == truth) | (np.isnan(ours) & np.isnan(truth))
    assert (same | (apart <= 0)).all(), f"{name}: {ours} is not {truth}"
