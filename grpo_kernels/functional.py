"""The functions of the library: they check their arguments, then call the one autograd Function of the operation."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from . import aggregation, backends, checks, objective
from .advantages import EPS, group_advantages
from .autograd import GRPOLossFunction, LossCall, PerTokenLogpsFunction, RowCall, live_rows
from .config import GRPOLossConfig
from .layout import make_layout
from .ops.schema import stats_dtype
from .outputs import GRPOLossOutput, LogpsOutput, PerToken

_DEFAULT_CONFIG = GRPOLossConfig()


def per_token_logps(
    logits: Tensor,
    targets: Tensor,
    *,
    mask: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    entropy: bool = False,
    inplace: bool = False,
    sampling_mask: tuple[Tensor, Tensor] | None = None,
    impl: str = "auto",
) -> LogpsOutput:
    """log softmax(z)[target] for each row, z = cap(logit_scale * logits) / temperature, without an `[N, V]` temporary.

    Args:
        logits: `[B, T, V]` or `[N, V]`; float16, bfloat16, float32 or float64; any strides, last axis stride 1. Row t
            scores target t: pass `logits[:, :-1]` (no copy) where the model predicts the next token.
        targets: `[B, T]` or `[N]`, int32 or int64. A row with an id outside `[0, V)` is dead; on the CPU a live id
            >= V is an error.
        mask: like targets; rows with 0 are dead: never read, result 0, gradient exactly 0. None: every row counts.
        temperature: a number, a 0-d tensor, `[B, 1]` or one per token, > 0.
        softcap: c in `c * tanh(z / c)`.
        logit_scale: multiplies the logits first, > 0.
        entropy: also return the entropy of softmax(z), differentiable.
        inplace: give the logits' storage away for the gradient. Needs a non-leaf tensor that is no view.
        impl: "auto", "torch", "cpp" or "triton".

    Returns:
        LogpsOutput of float32 (float64 for float64 logits), in nats. A row's numbers depend on that row alone, bit for
        bit.

    Raises:
        ValueError, TypeError: see the text of each; before any work, inputs unchanged.
        NotImplementedError: `sampling_mask` and K targets per row.
        RuntimeError: an impl that is not there; a second backward or a later use of logits given away in place.
    """
    name = "per_token_logps"
    _refuse_unbuilt(name, sampling_mask=sampling_mask)
    if isinstance(targets, Tensor) and isinstance(logits, Tensor) and targets.ndim == logits.ndim == 3:
        raise NotImplementedError(
            f"{name}: a trailing axis of K targets is not built yet, got {list(targets.shape)}. Call once per target."
        )
    logits, targets = checks.check_logits(name, logits, "targets", targets)
    mask = checks.check_mask(name, "mask", mask, "targets", targets)
    checks.check_device(name, "logits", logits.device, {"mask": mask})
    checks.check_flag(name, "entropy", entropy)
    config = GRPOLossConfig(
        softcap=None if softcap is None else checks.check_positive(name, "softcap", softcap),
        logit_scale=checks.check_positive(name, "logit_scale", logit_scale),
        entropy=entropy,
    )
    checks.check_ids_below(name, "targets", targets, mask, logits.shape[-1])
    live = live_rows(targets, mask, logits.shape[-1])
    heat = _temperature(name, temperature, logits, targets, None, live)
    call = RowCall(backends.resolve(name, impl, logits.device), checks.check_inplace(name, logits, inplace))
    logps, entropies, lse = PerTokenLogpsFunction.apply(  # type: ignore[no-untyped-call]
        logits, targets, _detached(mask), heat, config, call
    )[-3:]
    return LogpsOutput(logps, entropies, lse)


def grpo_loss(
    logits: Tensor,
    completion_ids: Tensor,
    *,
    config: GRPOLossConfig = _DEFAULT_CONFIG,
    advantages: Tensor | None = None,
    rewards: Tensor | None = None,
    group_size: int | None = None,
    group_ids: Tensor | None = None,
    completion_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    old_per_token_logps: Tensor | None = None,
    ref_per_token_logps: Tensor | None = None,
    rollout_per_token_logps: Tensor | None = None,
    importance_sampling_ratio: Tensor | None = None,
    temperature: float | Tensor | None = None,
    normalizer: float | Tensor | None = None,
    entropy_normalizer: float | Tensor | None = None,
    sampling_mask: tuple[Tensor, Tensor] | None = None,
    inplace: bool = False,
    return_per_token: bool = False,
    impl: str = "auto",
) -> GRPOLossOutput:
    """sum_t c_i m_t (w_t surrogate_t + beta KL_t) / Z - entropy_coef * mean entropy, from logits.

    Args:
        logits: `[B, T, V]`, or `[N, V]` with `cu_seqlens`; see `per_token_logps`.
        completion_ids: `[B, T]` or `[N]`.
        config: which loss; see `GRPOLossConfig`.
        advantages: `[B]`, `[B, 1]` or `[B, T]` (packed: `[S]`, `[S, 1]`, `[N]`). Exactly one of these and `rewards`.
        rewards: `[B]` (packed `[S]`); normalised by `group_advantages` with its defaults.
        group_size, group_ids: the groups of `rewards`; neither: one group.
        completion_mask: like the ids; which tokens count. Holes are allowed. None: all.
        cu_seqlens: `[S + 1]`, offsets of packed sequences; empty ones are legal, tokens beyond the last are dead.
        old_per_token_logps: like the ids. None: on-policy, the ratio is exactly 1 and the gradient is that of
            `old = logps.detach()`.
        ref_per_token_logps: like the ids; needed when beta is not 0, never read when it is.
        importance_sampling_ratio: `[B]`, `[B, 1]` or `[B, T]`; multiplies the policy term, not the KL.
        temperature: overrides config.temperature: a number, 0-d, `[B, 1]` (packed `[S, 1]`) or one per token.
        normalizer: Z as given, > 0: live tokens for token means, sequences for grpo, sequences * max_completion_length
            for dr_grpo. Give the global count divided by the number of processes when a batch is split. None: what this
            call can see, at least 1.
        entropy_normalizer: the same for the entropy bonus; None: this call's live tokens.
        inplace: give the logits' storage away for the gradient; see `per_token_logps`.
        return_per_token: also return detached token tensors.
        impl: "auto", "torch", "cpp" or "triton".

    Returns:
        GRPOLossOutput. Metrics are means over live tokens (clip flags at sequence level: over all sequences).

    Raises:
        ValueError, TypeError: before any work, inputs unchanged.
        NotImplementedError: `rollout_per_token_logps`, `sampling_mask`.
        RuntimeError: as `per_token_logps`.

    Source: OBJECTIVES of GRPO (arXiv 2402.03300), DAPO (2503.14476), Dr. GRPO (2503.20783), GSPO (2507.18071), CISPO
    (2506.13585); conventions of TRL 1.16.
    """
    name = "grpo_loss"
    _refuse_unbuilt(name, rollout_per_token_logps=rollout_per_token_logps, sampling_mask=sampling_mask)
    checks.check_config(name, config)
    logits, ids = checks.check_logits(name, logits, "completion_ids", completion_ids)
    if cu_seqlens is None and ids.ndim == 1:
        advice = "Pass [B, T] ids, or cu_seqlens [S + 1] with packed ones."
        raise ValueError(
            checks.complain(name, "completion_ids", "must be [B, T] without cu_seqlens", list(ids.shape), advice)
        )
    if cu_seqlens is not None:
        cu_seqlens = checks.check_cu_seqlens(name, cu_seqlens, ids)
    num_sequences = ids.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    mask = checks.check_mask(name, "completion_mask", completion_mask, "completion_ids", ids)
    old = checks.check_token_tensor(name, "old_per_token_logps", old_per_token_logps, ids)
    ref = checks.check_token_tensor(name, "ref_per_token_logps", ref_per_token_logps, ids)
    weight = checks.check_sequence_or_token(
        name, "importance_sampling_ratio", importance_sampling_ratio, ids, num_sequences
    )
    if config.beta != 0 and ref is None:
        got = f"None with beta={config.beta}"
        raise ValueError(
            checks.complain(
                name, "ref_per_token_logps", "must be given when beta is not 0", got, "Pass it, or set beta=0."
            )
        )
    advantages = checks.check_sequence_or_token(name, "advantages", advantages, ids, num_sequences)
    _check_source(name, advantages, rewards, group_size, group_ids)
    if rewards is not None:
        rewards = checks.check_rewards(name, rewards, num_sequences)
    checks.check_device(
        name, "logits", logits.device,
        {"completion_mask": mask, "cu_seqlens": cu_seqlens, "old_per_token_logps": old, "ref_per_token_logps": ref,
         "importance_sampling_ratio": weight, "advantages": advantages, "rewards": rewards},
    )  # fmt: skip
    inside = mask
    if cu_seqlens is not None and checks.reads_data(cu_seqlens):
        inside = torch.arange(ids.shape[0], device=ids.device) < cu_seqlens[-1]
        inside = inside if mask is None else inside & (mask != 0)
    checks.check_ids_below(name, "completion_ids", ids, inside, logits.shape[-1])
    live = live_rows(ids, inside, logits.shape[-1])
    checks.check_live_finite(name, "old_per_token_logps", old, live)
    checks.check_live_finite(name, "ref_per_token_logps", ref if config.beta != 0 else None, live)
    heat = _temperature(name, config.temperature if temperature is None else temperature, logits, ids, cu_seqlens, live)
    scale = _normalizer(name, "normalizer", normalizer, logits)
    entropy_scale = _normalizer(name, "entropy_normalizer", entropy_normalizer, logits)
    if scale is None:
        _warn_if_distributed(config)
    rows = RowCall(backends.resolve(name, impl, logits.device), checks.check_inplace(name, logits, inplace))
    group = 0
    if rewards is not None:
        checks.check_group_arguments(name, rewards.reshape(-1), group_size, group_ids, "mean", "group", 1, EPS)
        advantages = rewards.reshape(-1)
        fused = cu_seqlens is None and backends.loss_op(config, rows.impl) is not None
        if fused and group_ids is None and rewards.dtype in (torch.float32, stats_dtype(logits)):
            group = group_size or max(1, num_sequences)
        else:
            advantages = group_advantages(advantages, group_size=group_size, group_ids=group_ids)

    call = LossCall(rows, heat, cu_seqlens, _detached(weight), scale, entropy_scale, group)
    _, loss, logps, entropy, token_loss, kl, ratio, values = GRPOLossFunction.apply(  # type: ignore[no-untyped-call]
        logits, ids, *map(_detached, (advantages, old, ref, mask)), config, call
    )
    names = objective.metric_names(config, weight is not None)
    metrics = dict(zip(names, values.unbind(), strict=True))
    per_token = PerToken(logps, entropy, token_loss, kl, ratio) if return_per_token else None
    return GRPOLossOutput(loss, metrics, per_token)


def _detached(value: Tensor | None) -> Tensor | None:
    """Gradients flow to the logits alone."""
    return None if value is None else value.detach()


def _refuse_unbuilt(function: str, **arguments: Any) -> None:
    for argument, value in arguments.items():
        if value is not None:
            raise NotImplementedError(f"{function}: {argument} is not built yet. Leave it at None.")


def _check_source(
    function: str, advantages: Tensor | None, rewards: object, group_size: object, group_ids: object
) -> None:
    if (advantages is None) == (rewards is None):
        got = "neither" if advantages is None else "both"
        advice = "Pass one: rewards are normalised within their groups here."
        raise ValueError(checks.complain(function, "advantages", "or rewards must be given, exactly one", got, advice))
    if rewards is None:
        for argument, value in (("group_size", group_size), ("group_ids", group_ids)):
            if value is not None:
                advice = "Groups normalise rewards; advantages are taken as they are."
                raise ValueError(checks.complain(function, argument, "must be None with advantages", value, advice))


def _temperature(
    function: str, temperature: object, logits: Tensor, ids: Tensor, cu_seqlens: Tensor | None, live: Tensor
) -> Tensor:
    """The temperature as a tensor; what it holds at a dead token, or for a dead sequence, is never used."""
    layout = None if ids.ndim == 1 and cu_seqlens is None else make_layout(ids.shape, cu_seqlens)
    value = checks.check_temperature(function, temperature, ids, 1 if layout is None else layout.num_sequences)
    if not isinstance(value, Tensor):
        return torch.full((), value, dtype=stats_dtype(logits), device=logits.device)
    if value.ndim > 0:
        checks.check_device(function, "logits", logits.device, {"temperature": value})
    value = value.detach().to(dtype=stats_dtype(logits), device=logits.device)
    if layout is None and value.ndim == 2:
        value = value.reshape(())
    if value.ndim == 0:
        value = value.clone()  # one made in inference mode could not be saved for backward
    elif value.shape == ids.shape:
        value = torch.where(live, value, 1.0)
    elif value.ndim == 2 and layout is not None:
        value = torch.where(layout.sum(live.to(value.dtype)).unsqueeze(1) > 0, value, 1.0)
    checks.check_temperature_values(function, value)
    return value


def _normalizer(function: str, argument: str, value: object, logits: Tensor) -> Tensor | None:
    number = checks.check_normalizer(function, argument, value)
    if number is None:
        return None
    dtype = stats_dtype(logits)
    if not isinstance(number, Tensor):
        return torch.full((), number, dtype=dtype, device=logits.device)
    number = number.detach().to(dtype=dtype, device=logits.device)
    checks.check_normalizer_value(function, argument, number)
    return number


_warned_about_ranks = False


def _warn_if_distributed(config: GRPOLossConfig) -> None:
    global _warned_about_ranks  # noqa: PLW0603
    if _warned_about_ranks or torch.compiler.is_compiling() or not aggregation.counts_tokens(config):
        return
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        _warned_about_ranks = True
        world = distributed.get_world_size()
        warnings.warn(
            f"grpo_loss: normalizer is None with loss_type={config.loss_type!r} on {world} processes: each divides by "
            "its own live tokens. Pass the global token count divided by the number of processes.",
            stacklevel=3,
        )
