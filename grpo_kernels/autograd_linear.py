"""The same operations from hidden states: logits exist a chunk at a time, never together.

`fast` forms the gradients while a chunk's logits are alive and keeps them for backward. `lean` keeps a few numbers a
row and multiplies again in backward, by slices of the vocabulary, so that every slice of the weight's gradient is
written once. Only rows that can matter meet a matrix.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import backends, objective, observers
from .autograd import detached_outputs, once_differentiable
from .compiling import outside_compile
from .config import GRPOLossConfig
from .gradient_sums import Sums, lift_of
from .head import Head
from .inputs import LossCall, TokenData, temperature_tensor, token_inputs
from .ops.schema import DEAD
from .recompute import recomputed_gradients
from .slabs import Rows, all_stats, chunk_gradient, chunks, flat_rows, order_of, weigh_op


class LinearCall(NamedTuple):
    """How one call runs, and what a loss has besides the arguments of its Function."""

    mode: str
    """"fast", "lean", or "forward": nothing will be differentiated."""
    impl: str
    chunk_bytes: int | None = None
    logits_dtype: str = "float32"
    num_live_tokens: int | None = None
    per_token: bool = True
    """Whether the log-prob of every live row is wanted."""
    loss: LossCall = LossCall()


def _quiet(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """What follows chooses its own dtypes."""
    return contextlib.nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)


class LinearPerTokenLogpsFunction(torch.autograd.Function):
    """logps, entropy and lse of each row from hidden states; see `linear_per_token_logps`, which checks arguments."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: Tensor,
        config: GRPOLossConfig, call: LinearCall,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        """Row statistics, a chunk at a time; the targets are those of `screening.live_targets`."""
        head = Head(hidden, weight, bias, call.logits_dtype, call.chunk_bytes)
        heat = temperature_tensor(config, temperature, head.sums, hidden.device)
        rows = flat_rows(targets, heat, config, call.impl)
        with _quiet(hidden.device):
            logps, entropy, lse, *stats = all_stats(
                head, order_of(targets >= 0, None, call.num_live_tokens), rows, targets.shape
            )
        backends.record(f"{call.impl} {call.mode}")
        if call.mode != "forward":
            _save_for_lean(ctx, head, call, rows, *(t.view(-1) for t in (entropy, *stats)))
        ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)
        return logps, entropy if config.needs_entropy else None, lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """The products of forward again, and two more."""
        given = [None if grad is None else grad.reshape(-1) for grad in grads[:2]]
        none = (None,) * len(ctx.needs_input_grad)
        of_logps, of_entropy = given
        if of_logps is None:
            if of_entropy is None:
                return none
            of_logps = torch.zeros_like(of_entropy)
        return (*_lean_gradients(ctx, ctx.saved_tensors, of_logps, of_entropy, None, *grads), *none[3:])


class LinearGRPOLossFunction(torch.autograd.Function):
    """A GRPO-family loss from hidden states; see `linear_grpo_loss`.

    `apply(hidden, weight, bias, completion_ids, advantages, old_per_token_logps, ref_per_token_logps, completion_mask,
    config) -> (loss, per_token_logps)`, the last detached: hidden `[B, T, H]`, weight `[V, H]`, bias `[V]` or None, the
    rest as in `GRPOLossFunction`. With a `LinearCall` as tenth argument it returns what `linear_grpo_loss` needs:
    (loss, logps, entropy | None, token loss, kl | None, ratio, metrics). Arguments are not checked here.
    """

    @classmethod
    @outside_compile
    def apply(cls, *arguments: Any) -> Any:
        """Run it; whether anything will be differentiated is known out here alone."""
        bundled = len(arguments) > 9
        if not bundled:
            config = arguments[8]
            mode = "fast" if objective.whole_field(config, arguments[5] is None) is None else "lean"
            wanted = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in arguments[:3])
            impl = backends.resolve("linear_grpo_loss", "auto", arguments[0].device)
            arguments = (*arguments, LinearCall(mode if wanted else "forward", impl))
        outputs = super().apply(*arguments)  # type: ignore[no-untyped-call]
        return outputs if bundled else outputs[:2]

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, completion_ids: Tensor, advantages: Tensor,
        old_per_token_logps: Tensor | None, ref_per_token_logps: Tensor | None, completion_mask: Tensor | None,
        config: GRPOLossConfig, call: LinearCall,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        """Statistics and terms of a chunk, in fast mode its gradients; then the objective over all rows."""
        head = Head(hidden, weight, bias, call.logits_dtype, call.chunk_bytes)
        given = token_inputs(
            config, call.loss, head.vocabulary, head.sums, completion_ids, completion_mask, advantages,
            old_per_token_logps, ref_per_token_logps,
        )  # fmt: skip
        rows = flat_rows(given.targets, given.temperature, config, call.impl)
        shape = completion_ids.shape
        kept: tuple[Tensor | None, ...]
        with _quiet(hidden.device):
            if call.mode == "fast":
                logps, entropy, terms, kept = _fast(head, rows, given, call, ctx.needs_input_grad[:3])
            else:
                order = order_of(*_wanted(given, rows, call), call.num_live_tokens)
                logps, entropy, _, *kept_stats = all_stats(head, order, rows, shape)
                terms = None
        backends.record(f"{call.impl} {call.mode}")
        entropies = entropy.view(shape) if config.needs_entropy else None
        tokens = objective.TokenInputs(logps.view(shape), entropies, given.live, *given[4:])
        extras = call.loss
        result = objective.evaluate(config, tokens, given.layout, extras.normalizer, extras.entropy_normalizer, terms)
        ctx.set_materialize_grads(False)
        ctx.mode, ctx.operand = call.mode, head.operand
        if call.mode == "fast":
            ctx.save_for_backward(hidden, weight, bias, *kept)
        elif call.mode == "lean":
            relative = None if result.entropy_scale is None else result.entropy_scale / result.scale
            relative = relative if relative is None or relative.ndim == 0 else relative.reshape(-1)
            saved = (t.view(-1) for t in (entropy, *kept_stats))
            _save_for_lean(ctx, head, call, rows, *saved, result.coef, result.scale, relative)
        detached = detached_outputs(tokens, result)
        differentiable = any(ctx.needs_input_grad[:3])
        fixed = () if differentiable else (result.loss,)
        ctx.mark_non_differentiable(*(t for t in detached if t is not None), *fixed)
        return (result.loss, *detached)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Fast: the stored gradients times 1 / Z and the upstream gradient. Lean: the products of forward again."""
        none = (None,) * len(ctx.needs_input_grad)
        upstream = grads[0]
        if upstream is None or not any(ctx.needs_input_grad[:3]):
            return none
        if ctx.mode == "fast":
            return (*_stored_gradients(ctx, upstream), *none[3:])
        *saved, coef, scale, entropy_coef = ctx.saved_tensors
        of_entropy = None if entropy_coef is None else torch.where(saved[3] != DEAD, entropy_coef, 0.0)
        return (*_lean_gradients(ctx, saved, coef.reshape(-1), of_entropy, scale * upstream, upstream), *none[3:])


def _wanted(given: TokenData, rows: Rows, call: LinearCall) -> tuple[Tensor, Tensor | None]:
    """Rows that may have a gradient, and those whose log-prob alone is wanted; the rest never meets the weight."""
    config = rows.config
    whole = objective.whole_field(config, given.old is None) is not None
    if whole or config.beta != 0 or config.entropy_coef != 0 or not config.row.silent_at_zero:
        return given.live, None
    observer = observers.current()
    if observer is not None and observer.in_order:
        return given.live, None
    moving = given.live & (given.advantages != 0)
    hidden = given.old is None and not config.needs_entropy and not call.per_token
    unseen = hidden and given.rollout is None and observer is None
    return moving, None if unseen else given.live


def _fast(
    head: Head, rows: Rows, given: TokenData, call: LinearCall, needs: tuple[bool, ...]
) -> tuple[Tensor, Tensor, objective.TokenTerms, tuple[Tensor | None, ...]]:
    """log-probs, entropies and terms of all rows, and what backward needs of the gradients: see `Sums.stored`.

    1 / Z is in the coefficients where the gradient of the logits is float32. Where it is 16-bit it would cost digits
    there: it joins the float32 sums, and the coefficients are taken times a power of 2 that leaves float16 room at both
    ends. The gradient of the hidden states is rounded here already, so it has 1 / Z in it, and in float16 each row is
    kept times a power of 2 of its own.
    """
    config, shape = rows.config, given.targets.shape
    lengths = given.layout.sum(given.live.to(head.sums))
    weights, scale, entropy_scale = objective.shares(
        config, config.needs_entropy, given.layout, lengths, call.loss.normalizer, call.loss.entropy_normalizer
    )
    weights = weights.expand(shape).reshape(-1)
    sides_of_rows = (given.advantages, given.old, given.ref, given.weight)
    flat = [None if t is None else t.expand(shape).reshape(-1) for t in sides_of_rows]
    order = order_of(*_wanted(given, rows, call), call.num_live_tokens)
    weigh = weigh_op(head, rows, entropy_scale is not None)
    zeros = [torch.zeros(len(rows.targets), dtype=head.sums, device=scale.device) for _ in range(6)]
    ones = torch.ones_like(zeros[0])
    logps, entropy, outputs = zeros[0], zeros[1], [ones, *zeros[2:]]
    late_scale = None
    if head.grad_dtype == head.sums:
        weights = weights * scale
    else:
        by = weights * (flat[0].abs() + abs(config.beta) + (config.dro_beta or 0.0))  # type: ignore[union-attr]
        by = by * (config.logit_scale / rows.temperature)
        entropy_scale = None if entropy_scale is None else entropy_scale / scale
        lift = lift_of(by if entropy_scale is None else by + entropy_scale.abs(), 8)
        weights, late_scale = weights * lift, scale / lift
        entropy_scale = None if entropy_scale is None else entropy_scale * lift
    sums = Sums(head, needs, late_scale)
    done = 0
    for chunk in chunks(head, order, rows, weigh):
        index = chunk.positions
        advantages, *sides = (None if t is None else t[index] for t in flat)
        live = rows.targets[index] != DEAD
        own = chunk.stats[1] if config.needs_entropy else None
        tokens = objective.TokenInputs(chunk.stats[0], own, live, advantages, *sides)  # type: ignore[arg-type]
        terms = objective.token_level_terms(config, tokens)
        logps[index] = chunk.stats[0]
        if own is not None:
            entropy[index] = own
        for output, values in zip(outputs, terms, strict=True):
            output[index] = values.to(output.dtype)
        # where looking is free it is not the advantage but the coefficient that decides: that of a NaN is NaN
        free = backends.reads_are_free(index.device)
        wanted = len(index) if free else max(0, min(len(index), order.wanted - done))
        done += len(index)
        if wanted and any(needs):
            coef = torch.where(live, weights[index] * (terms.slope + terms.own_slope), 0.0)[:wanted]
            of_entropy = None if entropy_scale is None else entropy_scale.expand(wanted)
            sums.add(chunk_gradient(head, chunk, rows, weigh, coef, of_entropy))
    terms = objective.TokenTerms(*(t.view(shape) for t in outputs))
    return logps, entropy, terms, sums.stored()


def _stored_gradients(ctx: Any, upstream: Tensor) -> list[Tensor | None]:
    hidden, weight, bias, late_scale, unit, *stored = ctx.saved_tensors
    keep = _graph_is_kept()
    grads: list[Tensor | None] = []
    with torch.no_grad():
        for grad, origin in zip(stored, (hidden, weight, bias), strict=True):
            if grad is None:
                grads.append(None)
                continue
            factor = upstream
            if grad is stored[0]:
                factor = upstream if unit is None else (unit * upstream).view(*grad.shape[:-1], 1)
            elif late_scale is not None:
                factor = late_scale * upstream
            grads.append(_times(grad, factor, keep).to(origin.dtype))
    return [once_differentiable(grad, hidden, weight, bias, upstream) for grad in grads]


def _times(stored: Tensor, factor: Tensor, keep: bool) -> Tensor:
    """stored * factor, over it unless the next backward under retain_graph needs it."""
    if backends.reads_are_free(factor.device) and factor.ndim == 0 and factor.item() == 1.0:
        return stored.clone() if keep else stored
    nothing = stored == 0 if not backends.reads_are_free(factor.device) or not factor.isfinite().all() else None
    scaled = stored * factor if keep else stored.mul_(factor)
    return scaled if nothing is None else scaled.masked_fill_(nothing, 0.0)  # 0 * inf


def _graph_is_kept() -> bool:
    """Whether this backward runs under retain_graph; where torch does not tell, suppose so."""
    tell = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return True if tell is None else bool(tell())


def _save_for_lean(ctx: Any, head: Head, call: LinearCall, rows: Rows, *tensors: Tensor | None) -> None:
    ctx.call, ctx.config, ctx.operand = call, rows.config, head.operand
    ctx.save_for_backward(head.hidden, head.weight, head.bias, rows.targets, rows.temperature, *tensors)


def _lean_gradients(
    ctx: Any, saved: Sequence[Any], of_logps: Tensor, of_entropy: Tensor | None, factor: Tensor | None,
    *upstream: Tensor | None,
) -> list[Tensor | None]:  # fmt: skip
    """Gradients of hidden, weight and bias from those of log-probs and entropies, `[N]`, times `factor`."""
    hidden, weight, bias, targets, heat, entropy, *stats = saved
    call: LinearCall = ctx.call
    with torch.no_grad(), _quiet(hidden.device):
        head = Head(hidden, weight, bias, call.logits_dtype, call.chunk_bytes, ctx.operand)
        live = targets != DEAD
        needed = of_logps != 0 if of_entropy is None else (of_logps != 0) | (of_entropy != 0)
        order = order_of(live & needed, live if call.num_live_tokens is not None else None, call.num_live_tokens)
        order = order._replace(positions=order.positions[: order.wanted])
        index = order.positions
        per_row = [entropy[index] if entropy.numel() else entropy, *(t[index] for t in stats), of_logps[index]]
        per_row.append(None if of_entropy is None else of_entropy[index])
        rows = Rows(targets, heat, ctx.config, call.impl)
        if head.grad_dtype != head.sums:
            largest = per_row[4] if of_entropy is None else per_row[4].abs() + per_row[5].abs()
            lift = lift_of(largest * (ctx.config.logit_scale / rows.of(index)[1]), 9)
            per_row[4:] = [None if g is None else g * lift for g in per_row[4:]]
            factor = 1.0 / lift if factor is None else factor / lift
        grads = recomputed_gradients(head, order, rows, per_row, ctx.needs_input_grad[:3], factor)
    return [once_differentiable(grad, hidden, weight, bias, *upstream) for grad in grads]
