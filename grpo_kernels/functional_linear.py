"""The operations from hidden states: they check their arguments, then call the one autograd Function."""

from __future__ import annotations

import torch
from torch import Tensor

from . import backends, checks, objective
from .arguments import check_loss_arguments, check_temperature, refuse_unbuilt, row_config
from .autograd_linear import LinearCall, LinearGRPOLossFunction, LinearPerTokenLogpsFunction
from .compiling import outside_compile
from .config import GRPOLossConfig
from .outputs import GRPOLossOutput, LogpsOutput
from .screening import live_targets

_DEFAULT_CONFIG = GRPOLossConfig()


@outside_compile
def linear_per_token_logps(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    entropy: bool = False,
    mode: str = "auto",
    chunk_bytes: int | None = None,
    logits_dtype: str = "float32",
    process_group: object | None = None,
    sampling_mask: tuple[Tensor, Tensor] | None = None,
    impl: str = "auto",
) -> LogpsOutput:
    """log softmax(z)[target] for each row, z = cap(logit_scale * (hidden @ weight.T + bias)) / temperature.

    The logits exist a chunk of rows at a time. Backward multiplies again (8NHV FLOPs in all): any objective may follow,
    at the same memory.

    Args:
        hidden: `[B, T, H]` or `[N, H]`; float16, bfloat16, float32 or float64; any strides, last axis stride 1, so that
            `hidden[:, :-1]` costs no copy.
        weight: `[V, H]`, the head's. Its own dtype may differ; the wider of the two computes. Under autocast both are
            rounded to its dtype, as the head itself would do.
        targets: `[B, T]` or `[N]`; see `per_token_logps`. Dead rows never meet the weight.
        bias: `[V]` or None.
        mask, temperature, softcap, logit_scale, entropy: see `per_token_logps`.
        mode: "auto" or "lean". "fast" is for losses alone: here the upstream gradient is not known in time.
        chunk_bytes: what the logits of a chunk, and their gradient, may take; below one row it means one row. None:
            256 rows on the CPU, 2048 elsewhere, at most 256 MiB or 2 GiB.
        logits_dtype: "float32", or "input": the dtype of the operands, at half the memory and a bfloat16's precision.
        impl: "auto", "torch", "cpp" or "triton".

    Returns:
        LogpsOutput of float32 (float64 for float64 inputs), in nats. Rows are multiplied in panels of a fixed height,
        the last one filled up with zeros: which rows share a call does not change a row's numbers.

    Raises:
        ValueError, TypeError: see the text of each; before any work, inputs unchanged.
        NotImplementedError: `process_group`, `sampling_mask`, K targets per row.
        RuntimeError: an impl that is not there.

    On a device the number of live rows costs one host sync, and one more in backward. Inside torch.compile the call
    breaks the graph.
    """
    name = "linear_per_token_logps"
    refuse_unbuilt(name, process_group=process_group, sampling_mask=sampling_mask)
    if isinstance(targets, Tensor) and isinstance(hidden, Tensor) and targets.ndim == hidden.ndim == 3:
        raise NotImplementedError(
            f"{name}: a trailing axis of K targets is not built yet, got {list(targets.shape)}. Call once per target."
        )
    hidden, weight, targets = checks.check_hidden(name, hidden, weight, bias, "targets", targets)
    mask = checks.check_mask(name, "mask", mask, "targets", targets)
    checks.check_device(name, "hidden", hidden.device, {"mask": mask})
    config = row_config(name, softcap, logit_scale, entropy)
    _check_how(name, mode, chunk_bytes, logits_dtype)
    if mode == "fast":
        advice = "Use mode='lean', or linear_grpo_loss."
        raise ValueError(
            checks.complain(name, "mode", "must be 'auto' or 'lean': the upstream gradient comes late", mode, advice)
        )
    impl = backends.resolve(name, impl, hidden.device)
    targets = live_targets(name, impl, "targets", targets, "mask", mask, weight.shape[0])
    heat = check_temperature(name, "hidden", temperature, _sums(hidden, weight), targets, None, targets >= 0)
    how = "lean" if _differentiable(hidden, weight, bias) else "forward"
    call = LinearCall(how, impl, chunk_bytes, logits_dtype)
    return LogpsOutput(
        *LinearPerTokenLogpsFunction.apply(  # type: ignore[no-untyped-call]
            hidden, weight, bias, targets, heat, config, call
        )
    )


@outside_compile
def linear_grpo_loss(
    hidden: Tensor,
    weight: Tensor,
    completion_ids: Tensor,
    *,
    bias: Tensor | None = None,
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
    generator: torch.Generator | None = None,
    mode: str = "auto",
    chunk_bytes: int | None = None,
    logits_dtype: str = "float32",
    num_live_tokens: int | None = None,
    process_group: object | None = None,
    sampling_mask: tuple[Tensor, Tensor] | None = None,
    return_per_token: bool = False,
    impl: str = "auto",
) -> GRPOLossOutput:
    """`grpo_loss` from hidden states: z = hidden @ weight.T + bias exists a chunk of rows at a time.

    Args:
        hidden, weight, bias, chunk_bytes, logits_dtype: see `linear_per_token_logps`. Gradients are computed only where
            they are required: a frozen head costs no product and no buffer.
        completion_ids: `[B, T]`, or `[N]` with `cu_seqlens`.
        mode: "fast" forms the gradients while a chunk's logits are alive (6NHV FLOPs) and keeps that of the weight in
            float32 until backward. "lean" multiplies again in backward (8NHV) and keeps a few numbers a row. "auto":
            fast, but lean where a coefficient needs other tokens: above token level, `vespo`, `gmpo`, `clip_cov`,
            `kl_cov`, masks by entropy or sequence. `backends.last_used()` tells.
        num_live_tokens: how many tokens are live, exactly; spares the host sync that counting costs on a device.
        return_per_token: also return detached token tensors; then every live row meets the weight.
        The others: see `grpo_loss`.

    Rows that cannot matter never meet the weight: dead ones; those of advantage 0 if `old_per_token_logps` is None,
    beta is 0, and neither the entropy nor `return_per_token` is asked for. Rows whose coefficient is 0 (clipped, silent
    groups) have no gradient products (where finding them costs a host sync: in lean mode, without num_live_tokens, and
    those of advantage 0 always).

    Returns:
        GRPOLossOutput, as `grpo_loss`.

    Raises:
        ValueError, TypeError: before any work, inputs unchanged.
        NotImplementedError: `process_group`, `sampling_mask`.
        RuntimeError: an impl that is not there.

    Source: `grpo_loss`. Inside torch.compile the call breaks the graph.
    """
    name = "linear_grpo_loss"
    refuse_unbuilt(name, process_group=process_group, sampling_mask=sampling_mask)
    checks.check_config(name, config)
    hidden, weight, ids = checks.check_hidden(name, hidden, weight, bias, "completion_ids", completion_ids)
    impl = backends.resolve(name, impl, hidden.device)
    given = check_loss_arguments(
        name, impl, "hidden", hidden.device, weight.shape[0], _sums(hidden, weight), ids, config, advantages=advantages,
        rewards=rewards, group_size=group_size, group_ids=group_ids, completion_mask=completion_mask,
        cu_seqlens=cu_seqlens, old_per_token_logps=old_per_token_logps, ref_per_token_logps=ref_per_token_logps,
        rollout_per_token_logps=rollout_per_token_logps, importance_sampling_ratio=importance_sampling_ratio,
        temperature=temperature, normalizer=normalizer, entropy_normalizer=entropy_normalizer, generator=generator,
    )  # fmt: skip
    _check_how(name, mode, chunk_bytes, logits_dtype)
    whole = objective.whole_because(config, given.old is None)
    if mode == "fast" and whole is not None:
        wanted = "must not be 'fast' where a coefficient needs its whole sequence"
        got = f"'fast' with {whole}"
        raise ValueError(checks.complain(name, "mode", wanted, got, "Use mode='lean' or 'auto'."))
    checks.check_flag(name, "return_per_token", return_per_token)
    _check_live_count(name, num_live_tokens, given.ids)
    if not _differentiable(hidden, weight, bias):
        how = "forward"
    elif mode == "auto":
        how = "fast" if whole is None else "lean"
    else:
        how = mode
    call = LinearCall(how, impl, chunk_bytes, logits_dtype, num_live_tokens, return_per_token, given.call)
    loss, *detached = LinearGRPOLossFunction.apply(
        hidden, weight, bias, given.ids, given.advantages(), given.old, given.ref, given.mask, config, call
    )
    return given.output(loss, detached, return_per_token)


def _sums(hidden: Tensor, weight: Tensor) -> torch.dtype:
    return torch.float64 if torch.float64 in (hidden.dtype, weight.dtype) else torch.float32


def _differentiable(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def _check_how(function: str, mode: str, chunk_bytes: object, logits_dtype: str) -> None:
    checks.check_choice(function, "mode", mode, ("auto", "fast", "lean"))
    checks.check_choice(function, "logits_dtype", logits_dtype, ("float32", "input"))
    if chunk_bytes is not None:
        checks.check_count(function, "chunk_bytes", chunk_bytes, 1, "Give bytes; None chooses.")


def _check_live_count(function: str, count: object, targets: Tensor) -> None:
    """num_live_tokens: the number of live tokens, exactly."""
    if count is None:
        return
    advice = "Count the tokens that the mask keeps and whose id is in the vocabulary, or pass None."
    checks.check_count(function, "num_live_tokens", count, 0, advice)
    if not checks.reads_data(targets):
        return
    live = int((targets >= 0).sum())
    if live != count:
        wanted = f"must be the number of live tokens, {live}"
        raise ValueError(checks.complain(function, "num_live_tokens", wanted, count, advice))
