"""The functions of the library: they check their arguments, then call the one autograd Function of the operation."""

from __future__ import annotations

import torch
from torch import Tensor

from . import backends, checks
from .arguments import check_loss_arguments, check_temperature, refuse_unbuilt, row_config
from .autograd import GRPOLossFunction, PerTokenLogpsFunction
from .config import GRPOLossConfig
from .inputs import RowCall
from .ops.schema import stats_dtype
from .outputs import GRPOLossOutput, LogpsOutput
from .quick import Unfit, quick_call
from .screening import live_targets

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
        temperature: a number, a 0-d tensor, `[B, 1]` or one per token, from 1e-18 to 1e18.
        softcap: c in `c * tanh(z / c)`.
        logit_scale: multiplies the logits first; in the same range, like softcap.
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
    if sampling_mask is not None:
        refuse_unbuilt(name, sampling_mask=sampling_mask)
    quick = quick_call(logits, targets, mask, impl, inplace, temperature, logit_scale, softcap, entropy)
    if quick is not None:
        try:
            return LogpsOutput(
                *PerTokenLogpsFunction.apply(logits, targets, mask, quick)  # type: ignore[no-untyped-call]
            )
        except (Unfit, NotImplementedError):
            pass  # the checks that follow say what is wrong
    if isinstance(targets, Tensor) and isinstance(logits, Tensor) and targets.ndim == logits.ndim == 3:
        raise NotImplementedError(
            f"{name}: a trailing axis of K targets is not built yet, got {list(targets.shape)}. Call once per target."
        )
    logits, targets = checks.check_logits(name, logits, "targets", targets)
    mask = checks.check_mask(name, "mask", mask, "targets", targets)
    own_heat = temperature if isinstance(temperature, Tensor) and temperature.ndim > 0 else None
    checks.check_device(name, "logits", logits.device, {"mask": mask, "temperature": own_heat})
    config = row_config(name, softcap, logit_scale, entropy)
    impl = backends.resolve(name, impl, logits.device)
    targets = live_targets(name, impl, "targets", targets, "mask", mask, logits.shape[-1])
    live = targets >= 0 if isinstance(temperature, Tensor) else None
    heat = check_temperature(name, "logits", temperature, stats_dtype(logits), targets, None, live)
    call = RowCall(impl, checks.check_inplace(name, logits, inplace), screened=True)
    return LogpsOutput(
        *PerTokenLogpsFunction.apply(logits, targets, None, heat, config, call)[-3:]  # type: ignore[no-untyped-call]
    )


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
    generator: torch.Generator | None = None,
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
        group_size, group_ids: the groups of `rewards`, neither: one group; the prompts of aggregation="prompt_mean".
        completion_mask: like the ids; which tokens count. Holes are allowed. None: all.
        cu_seqlens: `[S + 1]`, offsets of packed sequences; empty ones are legal, tokens beyond the last are dead.
        old_per_token_logps: like the ids. None: on-policy, the ratio is exactly 1 and the gradient is that of
            `old = logps.detach()`.
        ref_per_token_logps: like the ids; needed when beta is not 0, never read when it is.
        rollout_per_token_logps: like the ids, the sampler's own log-probs, NaN where it has none: for
            config.rollout_correction and config.off_policy_mask_threshold. Without them it is compared and reported.
        importance_sampling_ratio: `[B]`, `[B, 1]` or `[B, T]`; multiplies the policy term, and the KL if the config
            says so.
        temperature: overrides config.temperature: a number, 0-d, `[B, 1]` (packed `[S, 1]`) or one per token.
        normalizer: Z as given, > 0, of the aggregation: live tokens for token means, sequences for means over them,
            sequences * max_completion_length for dr_grpo, prompts for prompt_mean, 1 for token_sum. Give the global
            count divided by the number of processes when a batch is split. None: what this call can see, at least 1.
        entropy_normalizer: the same for the entropy bonus; None: this call's live tokens.
        generator: of the random choice of loss_type="clip_cov"; None: torch's own of the CPU.
        inplace: give the logits' storage away for the gradient; see `per_token_logps`.
        return_per_token: also return detached token tensors.
        impl: "auto", "torch", "cpp" or "triton".

    Returns:
        GRPOLossOutput. Metrics are means over live tokens (clip flags at sequence level: over all sequences).

    Raises:
        ValueError, TypeError: before any work, inputs unchanged.
        NotImplementedError: `sampling_mask`.
        RuntimeError: as `per_token_logps`.

    Source: OBJECTIVES of GRPO (arXiv 2402.03300), DAPO (2503.14476), Dr. GRPO (2503.20783), GSPO (2507.18071), CISPO
    (2506.13585); conventions of TRL 1.16.
    """
    name = "grpo_loss"
    refuse_unbuilt(name, sampling_mask=sampling_mask)
    checks.check_config(name, config)
    checks.check_flag(name, "return_per_token", return_per_token)
    logits, ids = checks.check_logits(name, logits, "completion_ids", completion_ids)
    impl = backends.resolve(name, impl, logits.device)
    given = check_loss_arguments(
        name, impl, "logits", logits.device, logits.shape[-1], stats_dtype(logits), ids, config, advantages=advantages,
        rewards=rewards, group_size=group_size, group_ids=group_ids, completion_mask=completion_mask,
        cu_seqlens=cu_seqlens, old_per_token_logps=old_per_token_logps, ref_per_token_logps=ref_per_token_logps,
        rollout_per_token_logps=rollout_per_token_logps, importance_sampling_ratio=importance_sampling_ratio,
        temperature=temperature, normalizer=normalizer, entropy_normalizer=entropy_normalizer, generator=generator,
    )  # fmt: skip
    rows = given.call.rows._replace(inplace=checks.check_inplace(name, logits, inplace))
    call = given.call._replace(rows=rows)
    one_pass = backends.loss_op(config, impl, given.old is None) is not None
    in_kernel = one_pass and cu_seqlens is None and group_ids is None
    if given.rewards is not None and in_kernel and given.rewards.dtype in (torch.float32, stats_dtype(logits)):
        values = given.rewards
        call = call._replace(group_size=group_size or max(1, len(values)))
    else:
        values = given.advantages()
    _, loss, *detached = GRPOLossFunction.apply(  # type: ignore[no-untyped-call]
        logits, given.ids, values, given.old, given.ref, given.mask, config, call
    )
    return given.output(loss, detached, return_per_token)
