"""The checks that the losses share, and their arguments as the autograd Functions take them."""

from __future__ import annotations

import functools
import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import aggregation, checks, checks_data, objective
from .advantages import EPS, check_group_arguments, group_advantages
from .config import GRPOLossConfig
from .inputs import LossCall, RowCall, live_rows
from .layout import make_layout, prompt_index
from .outputs import GRPOLossOutput, PerToken
from .screening import live_targets


class LossArguments(NamedTuple):
    """Checked arguments of one call of a loss, detached: gradients flow to the model's output alone."""

    config: GRPOLossConfig
    ids: Tensor
    """Those of `screening.live_targets`, where call.rows says so."""
    given_advantages: Tensor | None
    rewards: Tensor | None
    group_size: int | None
    group_ids: Tensor | None
    old: Tensor | None
    ref: Tensor | None
    mask: Tensor | None
    call: LossCall

    def advantages(self) -> Tensor:
        """As given, or from the rewards of their groups."""
        if self.rewards is None:
            return self.given_advantages  # type: ignore[return-value]
        return group_advantages(self.rewards, group_size=self.group_size, group_ids=self.group_ids)

    def output(self, loss: Tensor, detached: list[Tensor | None], return_per_token: bool) -> GRPOLossOutput:
        """What a loss returns, from what its Function does."""
        if torch.compiler.is_compiling():  # what a Function marks as not differentiable can get lost in a trace
            detached = [None if value is None else value.detach() for value in detached]
        *tokens, values = detached
        weighted = self.call.importance_sampling_ratio is not None or self.config.rollout_correction != "none"
        names = objective.metric_names(self.config, weighted, self.call.rollout_per_token_logps is not None)
        metrics = dict(zip(names, values.unbind(), strict=True))  # type: ignore[union-attr]
        return GRPOLossOutput(loss, metrics, PerToken(*tokens) if return_per_token else None)  # type: ignore[arg-type]


def row_config(function: str, softcap: object, logit_scale: object, entropy: object) -> GRPOLossConfig:
    """The transform of the log-prob functions, as their autograd Functions take it."""
    checks.check_flag(function, "entropy", entropy)
    cap = None if softcap is None else checks.check_scale(function, "softcap", softcap)
    scale = checks.check_scale(function, "logit_scale", logit_scale)
    make = _row_config if torch.compiler.is_compiling() else _known_row_config
    return make(cap, scale, bool(entropy))


def _row_config(softcap: float | None, logit_scale: float, entropy: bool) -> GRPOLossConfig:
    return GRPOLossConfig(softcap=softcap, logit_scale=logit_scale, entropy=entropy)


_known_row_config = functools.lru_cache(maxsize=64)(_row_config)  # its checks cost a small call a fifth of its time


def check_loss_arguments(
    name: str, impl: str, anchor: str, device: torch.device, vocabulary: int, dtype: torch.dtype, ids: Tensor,
    config: GRPOLossConfig, *, advantages: Any, rewards: Any, group_size: Any, group_ids: Any, completion_mask: Any,
    cu_seqlens: Any, old_per_token_logps: Any, ref_per_token_logps: Any, rollout_per_token_logps: Any,
    importance_sampling_ratio: Any, temperature: Any, normalizer: Any, entropy_normalizer: Any, generator: Any,
) -> LossArguments:  # fmt: skip
    """Everything but the model's output, named `anchor`, on `device`, and the ids, which are checked before.

    `impl` is what `backends.resolve` gave.
    """
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
    sampled = checks.check_token_tensor(name, "rollout_per_token_logps", rollout_per_token_logps, ids)
    _check_weight_source(name, config, weight, sampled, ids, num_sequences)
    _check_generator(name, config, generator)
    if config.beta != 0 and ref is None:
        got = f"None with beta={config.beta}"
        raise ValueError(
            checks.complain(
                name, "ref_per_token_logps", "must be given when beta is not 0", got, "Pass it, or set beta=0."
            )
        )
    advantages = checks.check_sequence_or_token(name, "advantages", advantages, ids, num_sequences)
    _check_source(name, config, advantages, rewards, group_size, group_ids)
    if rewards is not None:
        rewards = checks.check_rewards(name, rewards, num_sequences)
    checks.check_device(
        name, anchor, device,
        {"completion_mask": mask, "cu_seqlens": cu_seqlens, "old_per_token_logps": old, "ref_per_token_logps": ref,
         "rollout_per_token_logps": sampled, "importance_sampling_ratio": weight, "advantages": advantages,
         "rewards": rewards},
    )  # fmt: skip
    old, ref, sampled, weight = (_detached(t) for t in (old, ref, sampled, weight))
    # where the offsets cannot be read here, the Function finds out by them what is live
    screened = cu_seqlens is None or checks.reads_data(cu_seqlens)
    if screened:
        ids = live_targets(
            name, impl, "completion_ids", ids, "completion_mask", mask, vocabulary, old=old,
            inside=None if cu_seqlens is None else int(cu_seqlens[-1]), ref=ref if config.beta != 0 else None,
            rollout=sampled,
        )  # fmt: skip
    given = config.temperature if temperature is None else temperature
    live = None
    if isinstance(given, Tensor):
        live = ids >= 0 if screened else live_rows(ids, mask, vocabulary)
    heat = check_temperature(name, anchor, given, dtype, ids, cu_seqlens, live)
    scale = _normalizer(name, "normalizer", normalizer, dtype, device)
    entropy_scale = _normalizer(name, "entropy_normalizer", entropy_normalizer, dtype, device)
    if scale is None:
        _warn_if_distributed(name, config)
    prompts = None
    if rewards is not None:
        rewards = rewards.reshape(-1)
        check_group_arguments(name, rewards, group_size, group_ids, "mean", "group", 1, EPS)
    if config.aggregation_mode == "prompt_mean":
        check_group_arguments(name, heat.new_zeros(num_sequences), group_size, group_ids, "mean", "group", 1, EPS)
        prompts = prompt_index(num_sequences, group_size, group_ids, device)
    call = LossCall(
        RowCall(impl, screened=screened), heat, cu_seqlens, weight, scale, entropy_scale,
        rollout_per_token_logps=sampled, prompts=prompts, generator=generator,
    )  # fmt: skip
    return LossArguments(
        config, ids, _detached(advantages), _detached(rewards), group_size, group_ids, old, ref, mask, call
    )


def _detached(value: Tensor | None) -> Tensor | None:
    """Gradients flow to the logits alone."""
    return None if value is None else value.detach()


def refuse_unbuilt(function: str, **arguments: Any) -> None:
    """NotImplementedError for an argument of the contract that this version does not take."""
    for argument, value in arguments.items():
        if value is not None:
            raise NotImplementedError(f"{function}: {argument} is not built yet. Leave it at None.")


def _check_weight_source(
    function: str, config: GRPOLossConfig, weight: Tensor | None, sampled: Tensor | None, ids: Tensor,
    num_sequences: int,
) -> None:  # fmt: skip
    """One weight of the rollout: given, or made from the sampler's log-probs."""
    correction = config.rollout_correction
    if correction != "none" and sampled is None:
        wanted = f"must be given with rollout_correction={correction!r}"
        advice = "Pass the sampler's log-probs, NaN where missing."
        raise ValueError(checks.complain(function, "rollout_per_token_logps", wanted, None, advice))
    if correction != "none" and weight is not None:
        wanted = f"must be None with rollout_correction={correction!r}"
        advice = "Give a finished weight or have one made, not both."
        raise ValueError(checks.complain(function, "importance_sampling_ratio", wanted, "a weight", advice))
    of_sequences = weight is not None and ids.ndim == 1 and weight.ndim == 1 and num_sequences == ids.shape[0]
    if config.loss_type == "vespo" and weight is not None and (of_sequences or weight.numel() != ids.numel()):
        advice = "VESPO multiplies the weights of a sequence's tokens: [B, 1] could mean their product or each of them."
        wanted = "must be one per token with loss_type='vespo'"
        raise ValueError(
            checks.complain(function, "importance_sampling_ratio", wanted, checks.shape_of(weight), advice)
        )


def _check_generator(function: str, config: GRPOLossConfig, generator: object) -> None:
    if generator is None:
        return
    if not isinstance(generator, torch.Generator):
        got = type(generator).__name__
        raise TypeError(checks.complain(function, "generator", "must be a torch.Generator", got, "Or pass None."))
    if config.loss_type != "clip_cov":
        wanted = f"must be None with loss_type={config.loss_type!r}"
        raise ValueError(checks.complain(function, "generator", wanted, "one", "Only clip_cov chooses at random."))


def _check_source(
    function: str, config: GRPOLossConfig, advantages: Tensor | None, rewards: object, group_size: object,
    group_ids: object,
) -> None:  # fmt: skip
    if (advantages is None) == (rewards is None):
        got = "neither" if advantages is None else "both"
        advice = "Pass one: rewards are normalised within their groups here."
        raise ValueError(checks.complain(function, "advantages", "or rewards must be given, exactly one", got, advice))
    if config.aggregation_mode == "prompt_mean":
        if group_size is None and group_ids is None:
            advice = "A mean over prompts needs to know which sequences answer the same one."
            wanted = "or group_ids must be given with aggregation='prompt_mean'"
            raise ValueError(checks.complain(function, "group_size", wanted, None, advice))
    elif rewards is None:
        for argument, value in (("group_size", group_size), ("group_ids", group_ids)):
            if value is not None:
                advice = "Groups normalise rewards and serve aggregation='prompt_mean'; advantages stay as they are."
                raise ValueError(checks.complain(function, argument, "must be None with advantages", value, advice))


def check_temperature(
    function: str, anchor: str, temperature: object, dtype: torch.dtype, ids: Tensor, cu_seqlens: Tensor | None,
    live: Tensor | None,
) -> Tensor:  # fmt: skip
    """The temperature as a tensor; what it holds at a dead token, or for a dead sequence, is never used.

    `live` is needed for a tensor.
    """
    layout = None if ids.ndim == 1 and cu_seqlens is None else make_layout(ids.shape, cu_seqlens)
    value = checks.check_temperature(function, temperature, ids, 1 if layout is None else layout.num_sequences)
    if not isinstance(value, Tensor):
        return torch.full((), value, dtype=dtype, device=ids.device)
    if value.ndim > 0:
        checks.check_device(function, anchor, ids.device, {"temperature": value})
    value = value.detach().to(dtype=dtype, device=ids.device)
    if layout is None and value.ndim == 2:
        value = value.reshape(())
    if value.ndim == 0:
        value = value.clone()  # one made in inference mode could not be saved for backward
    elif live is not None and value.shape == ids.shape:
        value = torch.where(live, value, 1.0)
    elif live is not None and value.ndim == 2 and layout is not None:
        value = torch.where(layout.sum(live.to(value.dtype)).unsqueeze(1) > 0, value, 1.0)
    checks_data.check_temperature_values(function, value)
    return value


def _normalizer(function: str, argument: str, value: object, dtype: torch.dtype, device: torch.device) -> Tensor | None:
    number = checks.check_normalizer(function, argument, value)
    if number is None:
        return None
    if not isinstance(number, Tensor):
        return torch.full((), number, dtype=dtype, device=device)
    number = number.detach().to(dtype=dtype, device=device)
    checks_data.check_normalizer_value(function, argument, number)
    return number


_warned_about_ranks = False


def _warn_if_distributed(function: str, config: GRPOLossConfig) -> None:
    global _warned_about_ranks  # noqa: PLW0603
    if _warned_about_ranks or torch.compiler.is_compiling() or not aggregation.counts_tokens(config):
        return
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        _warned_about_ranks = True
        world = distributed.get_world_size()
        warnings.warn(
            f"{function}: normalizer is None with loss_type={config.loss_type!r} on {world} processes: each divides by "
            "its own live tokens. Pass the global token count divided by the number of processes.",
            stacklevel=4,
        )
