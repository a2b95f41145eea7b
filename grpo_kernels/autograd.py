"""One `torch.autograd.Function` per operation: row statistics forward, one row gradient backward.

Arguments after `config` belong to one call and come in one bundle. In place, `mark_dirty` with the logits as an extra
output makes autograd notice every later use: an earlier op that saved the logits fails its version check, and a
differentiable use afterwards sends a gradient to that output. It is the first output: only there does autograd accept
a tensor whose gradient is retained.
"""

from __future__ import annotations

from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from . import objective
from .backends import loss_op, one_kernel_op, resolve, row_op
from .config import GRPOLossConfig
from .layout import Layout, make_layout
from .ops.schema import stats_dtype


class RowCall(NamedTuple):
    """How the row ops of one call run."""

    impl: str = "auto"
    inplace: bool = False

    def resolved(self, function: str, device: torch.device) -> RowCall:
        """With the implementation that "auto" means on this device."""
        return self._replace(impl=resolve(function, self.impl, device)) if self.impl == "auto" else self


class LossCall(NamedTuple):
    """What one call of a loss has besides the arguments of its Function; shapes as in `grpo_loss`."""

    rows: RowCall = RowCall()
    temperature: Tensor | None = None
    cu_seqlens: Tensor | None = None
    importance_sampling_ratio: Tensor | None = None
    normalizer: Tensor | None = None
    entropy_normalizer: Tensor | None = None
    group_size: int = 0
    """> 0: the advantages are rewards, and the kernel normalises them in consecutive groups of this size."""


def _temperature(config: GRPOLossConfig, temperature: float | Tensor | None, logits: Tensor) -> Tensor:
    dtype = stats_dtype(logits)
    if isinstance(temperature, Tensor):
        return temperature.to(dtype=dtype, device=logits.device)
    number = config.temperature if temperature is None else temperature
    return torch.full((), number, dtype=dtype, device=logits.device)


def live_rows(ids: Tensor, mask: Tensor | None, vocabulary: int) -> Tensor:
    """Rows that count: masked in, with an id of the vocabulary. Bool, like ids."""
    live = (ids >= 0) & (ids < vocabulary)
    return live if mask is None else live & (mask != 0)


class _Saved(NamedTuple):
    """The non-tensor part of what backward needs."""

    logit_scale: float
    softcap: float | None
    call: RowCall


def _save(ctx: Any, config: GRPOLossConfig, call: RowCall, tensors: tuple[Tensor | None, ...]) -> None:
    ctx.saved = _Saved(config.logit_scale, config.softcap, call)
    ctx.spent = False
    ctx.save_for_backward(*tensors)
    ctx.set_materialize_grads(False)


def _row_gradient(ctx: Any, grad_logps: Tensor, grad_entropy: Tensor | None, rows: tuple[Tensor, ...]) -> Tensor:
    """d/dlogits of sum(grad_logps * logps + grad_entropy * entropy), over the logits themselves if they were given."""
    logits, targets, temperature, entropy, row_max, sum_exp, sum_others = rows
    saved: _Saved = ctx.saved
    arguments = (
        logits, targets, temperature, saved.logit_scale, saved.softcap, entropy, row_max, sum_exp, sum_others,
        grad_logps, grad_entropy,
    )  # fmt: skip
    with torch.no_grad():
        if not saved.call.inplace:
            grad: Tensor = row_op("row_grad", saved.call.impl)(*arguments)
            return grad
        row_op("row_grad_", saved.call.impl)(*arguments)
        return logits


class _OnceDifferentiable(torch.autograd.Function):
    """Passes a gradient on and refuses to be differentiated.

    torch's `once_differentiable` does so only where the upstream gradient itself requires grad: a gradient penalty
    would silently lose this term.
    """

    @staticmethod
    def forward(_ctx: Any, grad: Tensor, *_origins: Tensor | None) -> Tensor:
        return grad.view_as(grad)

    @staticmethod
    def backward(_ctx: Any, *_grads: Tensor) -> NoReturn:
        raise RuntimeError(
            "grpo_kernels: double backward is not supported: its operations are differentiable once. "
            "Use grpo_kernels.reference where you need second derivatives."
        )


def _gradients(ctx: Any, grad: Tensor | None, *origins: Tensor | None) -> tuple[Tensor | None, ...]:
    """What backward returns: the gradient of the logits, and none for the other arguments."""
    if grad is not None and torch.is_grad_enabled() and not torch.compiler.is_compiling():
        # on every path by which the gradient depends on something, so that no second derivative passes it by
        grad = _OnceDifferentiable.apply(grad.detach(), *origins)  # type: ignore[no-untyped-call]
    return (grad, *(None,) * (len(ctx.needs_input_grad) - 1))


def _refuse_misuse(ctx: Any, name: str, grad_of_logits: Tensor | None) -> None:
    """In place, the logits' values are gone after the first backward and their storage has one use."""
    if not ctx.saved.call.inplace:
        return
    if grad_of_logits is not None:
        raise RuntimeError(
            f"{name}: logits were given away by inplace=True, but a later differentiable use needs their values. "
            "Use inplace=False, or detach that use and compute it before."
        )
    if ctx.spent:
        raise RuntimeError(f"{name}: a second backward needs logits that inplace=True overwrote. Use inplace=False.")
    ctx.spent = True


class PerTokenLogpsFunction(torch.autograd.Function):
    """logps = log softmax(z)[target], entropy and lse of each row; see `per_token_logps`.

    `apply(logits, targets, mask, temperature, config) -> (logps, entropy | None, lse)`: logits `[B, T, V]` or `[N, V]`,
    targets and mask of its leading shape (mask may be None), temperature a number, a tensor broadcastable to that
    shape, or None (config.temperature), config a `GRPOLossConfig` of which softcap, logit_scale and entropy count.
    Arguments are not checked here: `per_token_logps` checks them, then calls this.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        mask: Tensor | None,
        temperature: float | Tensor | None,
        config: GRPOLossConfig,
        call: RowCall = RowCall(),  # noqa: B008  (immutable)
    ) -> tuple[Tensor | None, ...]:
        """Row statistics."""
        call = call.resolved("per_token_logps", logits.device)
        kept = torch.where(live_rows(targets, mask, logits.shape[-1]), targets, -1)
        heat = _temperature(config, temperature, logits)
        logps, entropy, lse, row_max, sum_exp, sum_others = row_op("row_stats", call.impl)(
            logits, kept, heat, config.logit_scale, config.softcap, config.needs_entropy
        )
        _save(ctx, config, call, (logits, kept, heat, entropy, row_max, sum_exp, sum_others))
        ctx.mark_non_differentiable(lse)
        outputs = (logps, entropy if config.needs_entropy else None, lse)
        if call.inplace:
            ctx.mark_dirty(logits)
            return (logits, *outputs)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """One row gradient."""
        _refuse_misuse(ctx, "per_token_logps", grads[0])
        grad_logps, grad_entropy = grads[1:3] if ctx.saved.call.inplace else grads[:2]
        if not ctx.needs_input_grad[0] or (grad_logps is None and grad_entropy is None):
            return _gradients(ctx, None)
        rows = ctx.saved_tensors
        if grad_logps is None:
            grad_logps = torch.zeros_like(rows[4])
        return _gradients(ctx, _row_gradient(ctx, grad_logps, grad_entropy, rows), rows[0], *grads)


class GRPOLossFunction(torch.autograd.Function):
    """A GRPO-family loss from logits; see `grpo_loss`.

    `apply(logits, completion_ids, advantages, old_per_token_logps, ref_per_token_logps, completion_mask, config) ->
    (loss, per_token_logps)`, the last detached: logits `[B, T, V]`, ids `[B, T]`, advantages `[B]`, `[B, 1]` or
    `[B, T]`, the rest `[B, T]` or None. With a `LossCall` as eighth argument it returns what `grpo_loss` needs: (logits
    | None, loss, logps, entropy | None, token loss, kl | None, ratio, metrics). Arguments are not checked here:
    `grpo_loss` checks them, then calls this.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        completion_ids: Tensor,
        advantages: Tensor,
        old_per_token_logps: Tensor | None,
        ref_per_token_logps: Tensor | None,
        completion_mask: Tensor | None,
        config: GRPOLossConfig,
        call: LossCall | None = None,
    ) -> tuple[Tensor | None, ...]:
        """Row statistics, then the objective, which also gives the coefficient of every row for backward."""
        extras = LossCall() if call is None else call
        extras = extras._replace(rows=extras.rows.resolved("grpo_loss", logits.device))
        layout = make_layout(completion_ids.shape, extras.cu_seqlens)
        live = live_rows(completion_ids, completion_mask, logits.shape[-1])
        inside = layout.inside()
        live = live if inside is None else live & inside
        targets = torch.where(live, completion_ids, -1)
        temperature = _temperature(config, extras.temperature, logits)
        if extras.cu_seqlens is not None and temperature.ndim == 2:
            # tokens outside every sequence are dead: any positive number serves
            temperature = torch.where(live, layout.spread(temperature.squeeze(1)), 1.0)
        dtype = stats_dtype(logits)
        ref = ref_per_token_logps if config.beta != 0 else None
        weight, old = extras.importance_sampling_ratio, old_per_token_logps
        grouped = extras.group_size > 0  # then they are rewards, and the kernel makes the advantages
        values = advantages.to(dtype) if grouped else _token_values(advantages, live, dtype, layout)
        sides = [
            None if old is None else _finite_where_dead(old, live, dtype),
            None if ref is None else _finite_where_dead(ref, live, dtype),
            None if weight is None else _token_values(weight, live, dtype, layout),
        ]
        arguments = (logits, targets, temperature, config.logit_scale, config.softcap, config.needs_entropy)
        one_pass = loss_op(config, extras.rows.impl)
        terms = None
        one_kernel = None
        if one_pass is not None:
            details = (values, extras.group_size, *sides, *objective.term_options(config))
            one_kernel = one_kernel_op(logits, extras.rows.impl) if extras.rows.inplace else None
            if one_kernel is None:
                stats = one_pass(*arguments, *details)
            else:
                weights, scale, entropy_scale = objective.shares(
                    config, config.needs_entropy, layout, layout.sum(live.to(dtype)), extras.normalizer,
                    extras.entropy_normalizer,
                )  # fmt: skip
                stats = one_kernel(*arguments, *details, weights, scale, entropy_scale)
            logps, entropy, row_max, sum_exp, sum_others, *parts, values = stats
            terms = objective.TokenTerms(*parts)
        else:
            logps, entropy, _, row_max, sum_exp, sum_others = row_op("row_stats", extras.rows.impl)(*arguments)
        tokens = objective.TokenInputs(logps, entropy if config.needs_entropy else None, live, values, *sides)
        result = objective.evaluate(config, tokens, layout, extras.normalizer, extras.entropy_normalizer, terms)
        rows = (logits, targets, temperature, entropy, row_max, sum_exp, sum_others)
        kept = (*rows, result.coef, result.scale, result.entropy_scale) if one_kernel is None else (logits,)
        _save(ctx, config, extras.rows, kept)
        ctx.bundled = call is not None
        # side inputs that require grad get none
        fixed = () if ctx.needs_input_grad[0] else (result.loss,)
        if call is None:
            ctx.mark_non_differentiable(logps, *fixed)
            return result.loss, logps
        metrics = torch.stack(
            [result.metrics[name] for name in objective.metric_names(config, tokens.weight is not None)]
        )
        detached = (logps, tokens.entropy, result.token_loss, result.kl, result.ratio, metrics)
        ctx.mark_non_differentiable(*(t for t in detached if t is not None), *fixed)
        if extras.rows.inplace:
            ctx.mark_dirty(logits)
            return (logits, result.loss, *detached)
        return (None, result.loss, *detached)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """One row gradient; 1/Z joins the upstream scale here, so that small coefficients keep their digits."""
        _refuse_misuse(ctx, "grpo_loss", grads[0])
        upstream = grads[1] if ctx.bundled else grads[0]
        if upstream is None or not ctx.needs_input_grad[0]:
            return _gradients(ctx, None)
        if len(ctx.saved_tensors) == 1:  # the gradient is there already
            (logits,) = ctx.saved_tensors
            with torch.no_grad():
                row_op("row_scale_", ctx.saved.call.impl)(logits, upstream.to(stats_dtype(logits)))
            return _gradients(ctx, logits, logits, *grads)
        *rows, coef, scale, entropy_scale = ctx.saved_tensors
        grad_entropy = None
        if entropy_scale is not None:
            live = rows[1] >= 0
            grad_entropy = torch.where(live, entropy_scale * upstream, 0.0)
        grad_logps = torch.where(coef == 0, 0.0, coef * (scale * upstream))
        return _gradients(ctx, _row_gradient(ctx, grad_logps, grad_entropy, tuple(rows)), rows[0], *grads)


def _token_values(values: Tensor, live: Tensor, dtype: torch.dtype, layout: Layout) -> Tensor:
    """A sequence or token tensor as token values."""
    if live.ndim == 1:  # packed: [N] or [N, 1] are tokens, [S] or [S, 1] sequences
        is_sequence = values.shape[0] == layout.num_sequences and not (
            values.ndim == 2 and layout.num_sequences == len(live)
        )
        values = values.reshape(-1)
        values = layout.spread(values) if is_sequence else values
    elif values.ndim == 1:
        values = values.unsqueeze(1)
    return _finite_where_dead(values, live, dtype)


def _finite_where_dead(values: Tensor, live: Tensor, dtype: torch.dtype) -> Tensor:
    """Dead tokens become 0, whatever they held."""
    return torch.where(live, values.to(dtype), 0.0)
