"""Schemas of the row ops, their fake kernels, and the record of which implementation ran last.

`logits` is `[B, T, V]` or `[N, V]` with any strides, last axis stride 1; every other tensor has its leading shape.
`targets` holds DEAD at dead rows, and for gradients ELSEWHERE where the logits are a part of the vocabulary that the
target is not in. The exponent of a column is `y = (c(x) - row_max) * k` in nats with `k = factor / temperature`:
without a softcap `c(x) = x` and `factor = logit_scale`; with one `c(x) = softcap * tanh(logit_scale * x / softcap)` and
`factor = 1`.

row_stats_* returns, per row (0 at dead rows; float64 for float64 logits, else float32):
    logps        log softmax(z)[target], exact also where the target holds nearly all the mass
    entropy      of softmax(z); empty unless asked for
    lse          log-sum-exp of z
    row_max      max c(x). Not scaled: `(x - row_max)` is exact near the max without a fused multiply-add, where
                 `x * k - row_max * k` is wrong by 1e-4 for logits near -1000. A kernel with an FMA multiplies first.
    sum_exp      S = sum exp(y)
    sum_others   R = the same without the target's column: 1 - p of the target is R / S, never 1 - exp(logp)

loss_stats_* are those of a token-level loss in the same pass: (logps, entropy, row_max, sum_exp, sum_others), then per
row (ratio, loss, slope, own_slope, kl) of `formulas.token_terms` and the advantage. Side inputs are broadcastable to
the targets, any strides, dtype of the statistics; with group_size > 0 `advantages` are rewards of consecutive groups.
`limits` and what follows are `objective.term_options`.

loss_grad_*_ does the same and, in the same launch, writes d loss / d logits over the logits: `share` is c_i per
row, `scale` 1 / Z, `entropy_scale` d loss / d entropy. row_scale_*_ multiplies them by an upstream gradient later.

loss_* and loss_*_ give (logps, entropy, row_max, sum_exp, sum_others, ratio, loss, kl, coef, metrics, total): slopes as
the one coefficient `Objective.coef` of every row, and the loss of the batch with its metrics, those of
`metrics.metric_names` in one vector. `rollout` is the sampler's log-prob, NaN where missing, `bounds` what a clip
bounds (`loss_types.LossType`). loss_*_ also writes the gradient over the logits.

live_targets_* is what `screening.live_targets` returns, and whether its checks hold. logps_* is that and row_stats_* in
one, for a temperature that is a number: (logps, entropy, lse, targets, state, whether all fits and may run), where
state is what logps_grad_* needs, one tensor `[3 or 4, N]`.

row_grad_* gives d/dlogits of `sum(grad_logps * logps + grad_entropy * entropy)` in the logits' dtype; rows whose two
coefficients are 0 are written as 0 without being read. row_grad_*_ (`_` at the end) writes it over the logits,
row_grad_into_* over `out`, in the dtype of that.

row_weights_*_ is row_stats without softcap for `[R, V]` logits of the statistics' dtype that nobody else needs, and
overwrites them by exp(y), the target's by 0: the gradient of a log-prob is that times -k / S, at the target k R / S.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

NAMESPACE: Final = "grpo_kernels"
DEAD: Final = -1
ELSEWHERE: Final = -2
_STATS = (
    "(Tensor logits, Tensor targets, Tensor temperature, float logit_scale, float? softcap, bool entropy)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_GRAD = (
    "Tensor targets, Tensor temperature, float logit_scale, float? softcap, Tensor entropy, Tensor row_max,"
    " Tensor sum_exp, Tensor sum_others, Tensor grad_logps, Tensor? grad_entropy)"
)
_WEIGHTS = (
    "(Tensor(a!) logits, Tensor targets, Tensor temperature, float logit_scale, bool entropy)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_ROWS = "Tensor targets, Tensor temperature, float logit_scale, float? softcap, bool entropy, Tensor advantages,"
_TERMS = " float[] limits, str surrogate, str kl, bool corrected, bool kl_weighted"
_SHARES = ", Tensor share, Tensor scale, Tensor? entropy_scale"
_ELEVEN = ") -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
_LOSS = f"{_ROWS} int group_size, Tensor? old, Tensor? ref, Tensor? weight,{_TERMS}"
_WHOLE_LOSS = (
    f"{_ROWS} Tensor? old, Tensor? ref, Tensor? weight, Tensor? rollout,{_TERMS}, str bounds{_SHARES}{_ELEVEN}"
)
_TOKENS = (
    "(Tensor ids, Tensor? mask, int vocabulary, int inside, Tensor? old, Tensor? ref, Tensor? rollout)"
    " -> (Tensor, bool)"
)
_LOGPS = (
    "(Tensor logits, Tensor ids, Tensor? mask, float temperature, float logit_scale, float? softcap, bool entropy)"
    " -> (Tensor, Tensor?, Tensor, Tensor, Tensor, bool)"
)
_SCALE = "(Tensor(a!) logits, Tensor factor) -> ()"
_library = torch.library.Library(NAMESPACE, "DEF")
_last_used: str | None = None


def last_used() -> str | None:
    """What the last call ran: an implementation, and how where it has more than one way; None before any."""
    return _last_used


def record(name: str) -> None:
    """Note what a call of several ops ran."""
    global _last_used  # noqa: PLW0603
    _last_used = name


def declare(name: str) -> None:
    """Define the ops of an implementation whose kernels a shared library registers, with their fake kernels."""
    row_ops: tuple[tuple[str, str, Callable[..., Any]], ...] = (
        (f"row_stats_{name}", _STATS, _fake_stats),
        (f"row_weights_{name}_", _WEIGHTS, _fake_weights),
        (f"row_grad_{name}", f"(Tensor logits, {_GRAD} -> Tensor", _fake_grad),
        (f"row_grad_{name}_", f"(Tensor(a!) logits, {_GRAD} -> ()", _fake_nothing),
        (f"row_grad_into_{name}", f"(Tensor logits, Tensor(a!) out, {_GRAD} -> ()", _fake_nothing),
        (f"loss_{name}", f"(Tensor logits, {_WHOLE_LOSS}", _fake_whole_loss),
        (f"loss_{name}_", f"(Tensor(a!) logits, {_WHOLE_LOSS}", _fake_whole_loss),
        (f"row_scale_{name}_", _SCALE, _fake_nothing),
    )
    for op, arguments, fake in row_ops:
        _define(op, arguments, None, fake)
    # these look at values, so they are never traced
    state = "float logit_scale, float? softcap, Tensor state, Tensor grad_logps, Tensor? grad_entropy)"
    _library.define(f"live_targets_{name}{_TOKENS}")
    _library.define(f"logps_{name}{_LOGPS}")
    _library.define(f"logps_grad_{name}(Tensor logits, Tensor targets, float temperature, {state} -> Tensor")


def implement(name: str, row_stats: Callable[..., Any], row_grad_into: Callable[..., None]) -> None:
    """Register one implementation as `row_stats_NAME`, `row_grad_NAME`, `row_grad_NAME_` and `row_grad_into_NAME`."""

    def row_grad(logits: Tensor, *rest: Any) -> Tensor:
        grad = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
        row_grad_into(logits, grad, *rest)
        return grad

    def row_grad_(logits: Tensor, *rest: Any) -> None:
        row_grad_into(logits, logits, *rest)

    # a backward is part of its forward's call, which alone is recorded
    _define(f"row_stats_{name}", _STATS, _recorded(name, row_stats), _fake_stats)
    _define(f"row_grad_{name}", f"(Tensor logits, {_GRAD} -> Tensor", row_grad, _fake_grad)
    _define(f"row_grad_{name}_", f"(Tensor(a!) logits, {_GRAD} -> ()", row_grad_, _fake_nothing)
    _define(f"row_grad_into_{name}", f"(Tensor logits, Tensor(a!) out, {_GRAD} -> ()", row_grad_into, _fake_nothing)


def implement_weights(name: str, row_weights_: Callable[..., Any]) -> None:
    """Register `row_weights_NAME_`."""
    _define(f"row_weights_{name}_", _WEIGHTS, _recorded(name, row_weights_), _fake_weights)


def _define(op: str, arguments: str, kernel: Callable[..., Any] | None, fake: Callable[..., Any]) -> None:
    _library.define(op + arguments)
    if kernel is not None:
        _library.impl(op, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{op}", fake, lib=_library)


def implement_loss(
    name: str, loss_stats: Callable[..., Any], loss_grad_: Callable[..., Any], row_scale_: Callable[..., None]
) -> None:
    """Register a one-pass loss as `loss_stats_NAME`, `loss_grad_NAME_` and `row_scale_NAME_`."""
    one_pass, one_kernel = _recorded(f"{name} one-pass", loss_stats), _recorded(f"{name} one-kernel", loss_grad_)
    _define(f"loss_stats_{name}", f"(Tensor logits, {_LOSS}{_ELEVEN}", one_pass, _fake_loss)
    _define(f"loss_grad_{name}_", f"(Tensor(a!) logits, {_LOSS}{_SHARES}{_ELEVEN}", one_kernel, _fake_loss)
    _define(f"row_scale_{name}_", _SCALE, row_scale_, _fake_nothing)


def _recorded(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    def run(*arguments: Any) -> Any:
        record(name)
        return kernel(*arguments)

    return run


def stats_dtype(logits: Tensor) -> torch.dtype:
    """float64 for float64 logits, else float32."""
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def _fake_stats(
    logits: Tensor, targets: Tensor, temperature: Tensor, logit_scale: float, softcap: float | None, entropy: bool
) -> tuple[Tensor, ...]:
    dtype = stats_dtype(logits)
    names = ("logps", "entropy", "lse", "row_max", "sum_exp", "sum_others")
    shapes = [[0] if name == "entropy" and not entropy else targets.shape for name in names]
    return tuple(torch.empty(shape, dtype=dtype, device=logits.device) for shape in shapes)


def _fake_weights(
    logits: Tensor, targets: Tensor, temperature: Tensor, logit_scale: float, entropy: bool
) -> tuple[Tensor, ...]:
    return _fake_stats(logits, targets, temperature, logit_scale, None, entropy)


def _fake_loss(
    logits: Tensor,
    targets: Tensor,
    temperature: Tensor,
    logit_scale: float,
    softcap: float | None,
    entropy: bool,
    *rest: Any,
) -> tuple[Tensor, ...]:
    stats = _fake_stats(logits, targets, temperature, logit_scale, softcap, entropy)
    return (*stats[:2], *stats[3:], *(torch.empty_like(stats[0]) for _ in range(6)))


def _fake_whole_loss(
    logits: Tensor, targets: Tensor, temperature: Tensor, logit_scale: float, softcap: float | None, entropy: bool,
    advantages: Tensor, old: Tensor | None, ref: Tensor | None, weight: Tensor | None, rollout: Tensor | None,
    limits: list[float], surrogate: str, kl: str, corrected: bool, kl_weighted: bool, bounds: str, *shares: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    stats = _fake_stats(logits, targets, temperature, logit_scale, softcap, entropy)
    flags = {"": 0, "cap": 1}.get(bounds, 3)
    count = 5 + flags + entropy + (kl != "none") + 3 * (weight is not None) + 2 * (rollout is not None)
    rows = (torch.empty_like(stats[0]) for _ in range(4))
    return (*stats[:2], *stats[3:], *rows, stats[0].new_empty(count), stats[0].new_empty(()))


def _fake_grad(logits: Tensor, *rest: Any) -> Tensor:
    return torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)


def _fake_nothing(*_arguments: Any) -> None:
    return None
