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
from .backends import loss_op, one_kernel_op, record, resolve, row_op, whole_loss_op
from .config import GRPOLossConfig
from .inputs import LossCall, RowCall, TokenData, live_rows, temperature_tensor, token_inputs
from .ops.schema import DEAD, stats_dtype
from .quick import QuickCall, Unfit


def _resolved(function: str, rows: RowCall, device: torch.device) -> RowCall:
    """With the implementation that "auto" means on this device."""
    return rows._replace(impl=resolve(function, rows.impl, device)) if rows.impl == "auto" else rows


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
    if torch.is_grad_enabled():  # create_graph: entering a context costs a small call, so only then
        with torch.no_grad():
            return _row_gradient(ctx, grad_logps, grad_entropy, rows)
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


def once_differentiable(grad: Tensor | None, *origins: Tensor | None) -> Tensor | None:
    """A gradient that refuses to be differentiated, whatever of `origins` it is differentiated by."""
    if grad is None or not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return grad
    # on every path by which the gradient depends on something, so that no second derivative passes it by
    refusing: Tensor = _OnceDifferentiable.apply(grad.detach(), *origins)  # type: ignore[no-untyped-call]
    return refusing


def _gradients(ctx: Any, grad: Tensor | None, *origins: Tensor | None) -> tuple[Tensor | None, ...]:
    """What backward returns: the gradient of the logits, and none for the other arguments."""
    return (once_differentiable(grad, *origins), *(None,) * (len(ctx.needs_input_grad) - 1))


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
        temperature: float | Tensor | QuickCall | None,
        config: GRPOLossConfig = GRPOLossConfig(),  # noqa: B008  (immutable)
        call: RowCall = RowCall(),  # noqa: B008
    ) -> tuple[Tensor | None, ...]:
        """Row statistics."""
        if isinstance(temperature, QuickCall):
            return _quick_forward(ctx, logits, targets, mask, temperature)
        call = _resolved("per_token_logps", call, logits.device)
        kept = targets if call.screened else torch.where(live_rows(targets, mask, logits.shape[-1]), targets, DEAD)
        heat = temperature_tensor(config, temperature, stats_dtype(logits), logits.device)
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
        if isinstance(ctx.saved, QuickCall):
            return _quick_backward(ctx, ctx.saved, *grads)
        _refuse_misuse(ctx, "per_token_logps", grads[0])
        grad_logps, grad_entropy = grads[1:3] if ctx.saved.call.inplace else grads[:2]
        if not ctx.needs_input_grad[0] or (grad_logps is None and grad_entropy is None):
            return _gradients(ctx, None)
        rows = ctx.saved_tensors
        if grad_logps is None:
            grad_logps = torch.zeros_like(rows[4])
        return _gradients(ctx, _row_gradient(ctx, grad_logps, grad_entropy, rows), rows[0], *grads)


def _quick_forward(
    ctx: Any, logits: Tensor, targets: Tensor, mask: Tensor | None, call: QuickCall
) -> tuple[Tensor | None, ...]:
    op, _, temperature, logit_scale, softcap, entropy = call
    logps, entropies, lse, kept, state, fine = op(logits, targets, mask, temperature, logit_scale, softcap, entropy)
    if not fine:
        raise Unfit
    record("cpp")
    ctx.saved = call
    ctx.save_for_backward(logits, kept, state)
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(lse)
    return logps, entropies, lse


def _quick_backward(ctx: Any, call: QuickCall, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    grad_logps, grad_entropy, _ = grads
    if not ctx.needs_input_grad[0] or (grad_logps is None and grad_entropy is None):
        return _gradients(ctx, None)
    logits, targets, state = ctx.saved_tensors
    if grad_logps is None:
        grad_logps = torch.zeros_like(state[0].view(targets.shape))
    rest = (targets, call.temperature, call.logit_scale, call.softcap, state, grad_logps, grad_entropy)
    if not torch.is_grad_enabled():
        return call.gradient(logits, *rest), None, None, None
    with torch.no_grad():  # create_graph
        grad = call.gradient(logits, *rest)
    return _gradients(ctx, grad, logits, *grads)


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
        extras = extras._replace(rows=_resolved("grpo_loss", extras.rows, logits.device))
        dtype, on_policy = stats_dtype(logits), old_per_token_logps is None
        whole, gradient_is_there = whole_loss_op(config, extras.rows.impl, on_policy, logits, extras.rows.inplace)
        given = token_inputs(
            config, extras, logits.shape[-1], dtype, completion_ids, completion_mask, advantages, old_per_token_logps,
            ref_per_token_logps, clean=whole is None,
        )  # fmt: skip
        if whole is not None:
            tokens, stats, result = _whole_loss(whole, config, logits, given, extras)
        else:
            tokens, stats, result, gradient_is_there = _loss_by_parts(config, logits, given, extras)
        rows = (logits, given.targets, given.temperature, *stats)
        kept = (logits,) if gradient_is_there else (*rows, result.coef, result.scale, result.entropy_scale)
        _save(ctx, config, extras.rows, kept)
        ctx.bundled = call is not None
        # side inputs that require grad get none
        fixed = () if ctx.needs_input_grad[0] else (result.loss,)
        if call is None:
            ctx.mark_non_differentiable(tokens.logps, *fixed)
            return result.loss, tokens.logps
        detached = detached_outputs(tokens, result)
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
        saved = ctx.saved_tensors  # once: checkpointing unpacks a tensor once and no more
        if len(saved) == 1:  # the gradient is there already
            (logits,) = saved
            with torch.no_grad():
                row_op("row_scale_", ctx.saved.call.impl)(logits, upstream.to(stats_dtype(logits)))
            return _gradients(ctx, logits, logits, *grads)
        *rows, coef, scale, entropy_scale = saved
        grad_entropy = None
        if entropy_scale is not None:
            live = rows[1] >= 0
            grad_entropy = torch.where(live, entropy_scale * upstream, 0.0)
        grad_logps = torch.where(coef == 0, 0.0, coef * (scale * upstream))
        return _gradients(ctx, _row_gradient(ctx, grad_logps, grad_entropy, tuple(rows)), rows[0], *grads)


_Loss = tuple[objective.TokenInputs, tuple[Tensor, ...], objective.Objective]


def _shares(config: GRPOLossConfig, given: TokenData, call: LossCall, dtype: torch.dtype) -> Any:
    lengths = given.layout.sum(given.live.to(dtype))
    return objective.shares(
        config, config.needs_entropy, given.layout, lengths, call.normalizer, call.entropy_normalizer
    )


def _whole_loss(op: Any, config: GRPOLossConfig, logits: Tensor, given: TokenData, call: LossCall) -> _Loss:
    """Everything by one op. What backward needs of the rows comes second: entropy, row_max, sum_exp, sum_others."""
    weights, scale, entropy_scale = _shares(config, given, call, stats_dtype(logits))
    logps, entropy, row_max, sum_exp, sum_others, ratio, loss, kl, coef, metrics, total = op(
        logits, given.targets, given.temperature, config.logit_scale, config.softcap, config.needs_entropy,
        given.advantages, given.old, given.ref, given.weight, given.rollout, *objective.term_options(config),
        config.row.bounds, weights, scale, entropy_scale,
    )  # fmt: skip
    entropies = entropy if config.needs_entropy else None
    tokens = objective.TokenInputs(logps, entropies, given.live, given.advantages, given.old, given.ref, given.weight)
    kl = kl if config.beta != 0 else None
    result = objective.Objective(total, coef, scale, entropy_scale, loss, kl, ratio, metrics)
    return tokens, (entropy, row_max, sum_exp, sum_others), result


def _loss_by_parts(
    config: GRPOLossConfig, logits: Tensor, given: TokenData, call: LossCall
) -> tuple[objective.TokenInputs, tuple[Tensor, ...], objective.Objective, bool]:
    """Statistics, with the terms of each token if an op makes those in the same pass, then the objective in torch; and
    whether that op has left the gradient over the logits."""
    impl, values = call.rows.impl, given.advantages
    arguments = (
        logits, given.targets, given.temperature, config.logit_scale, config.softcap, config.needs_entropy,
    )  # fmt: skip
    one_pass, one_kernel, terms = loss_op(config, impl, given.old is None), None, None
    if one_pass is not None:
        details = (values, call.group_size, given.old, given.ref, given.weight, *objective.term_options(config))
        one_kernel = one_kernel_op(logits, impl) if call.rows.inplace else None
        if one_kernel is None:
            stats = one_pass(*arguments, *details)
        else:
            stats = one_kernel(*arguments, *details, *_shares(config, given, call, stats_dtype(logits)))
        logps, entropy, row_max, sum_exp, sum_others, *parts, values = stats
        terms = objective.TokenTerms(*parts)
    else:
        logps, entropy, _, row_max, sum_exp, sum_others = row_op("row_stats", impl)(*arguments)
    entropies = entropy if config.needs_entropy else None
    tokens = objective.TokenInputs(
        logps, entropies, given.live, values, given.old, given.ref, given.weight, given.rollout, given.generator
    )
    result = objective.evaluate(config, tokens, given.layout, call.normalizer, call.entropy_normalizer, terms)
    return tokens, (entropy, row_max, sum_exp, sum_others), result, one_kernel is not None


def detached_outputs(tokens: objective.TokenInputs, result: objective.Objective) -> tuple[Tensor | None, ...]:
    """logps, entropy, token loss, KL, ratio, and the metrics as one vector: what a loss returns beside itself."""
    return (tokens.logps, tokens.entropy, result.token_loss, result.kl, result.ratio, result.metrics)
