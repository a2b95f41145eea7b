"""Liger 0.8.5's GRPO losses by its own signatures and defaults, on this library: change the import, and nothing else.

    from grpo_kernels.integrations.liger import LigerFusedLinearGRPOLoss, triton_grpo_loss

Where Liger's value is right ours is the same; its faults are not copied (docs/conventions.md). Liger itself is not
needed. Of the options that a loss does not have delta and importance_sampling_level are refused; epsilon_*, sapo_*,
vespo_* and max_completion_length are without effect, as in Liger, and so may stay in a call that changes its loss_type.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from .. import checks
from ..checks_data import check_live_finite, check_mask_values
from ..config import GRPOLossConfig
from ..config_checks import NAME
from ..functional import grpo_loss, per_token_logps
from ..functional_linear import linear_grpo_loss, linear_per_token_logps
from ..ops.schema import DEAD
from ..outputs import GRPOLossOutput
from .given_logps import UNCLIPPED_BELOW, check_alike, clipped, lower_clip, mean_over, token_losses_of_logps

__all__ = ["LigerFusedLinearGRPOLoss", "triton_grpo_loss"]

_TOKEN_LOSSES = ("dapo", "cispo", "vespo")
_UNCLIPPED = ("sapo", "vespo")


class LigerFusedLinearGRPOLoss(nn.Module):
    """`linear_grpo_loss` as Liger's module of this name.

    `compiled` and `chunk_size` say how Liger computes; here chunks are bounded in bytes, and they change nothing.

    Raises:
        ValueError: an option out of its range, or a delta or level that the loss does not have.
    """

    def __init__(
        self,
        beta: float = 0.04,
        compiled: bool = True,
        use_ref_model: bool = True,
        chunk_size: int = 1,
        epsilon_low: float = 0.2,
        epsilon_high: float = 0.2,
        loss_type: str = "dapo",
        max_completion_length: int | None = None,
        importance_sampling_level: str = "token",
        sapo_temperature_pos: float = 1.0,
        sapo_temperature_neg: float = 1.05,
        temperature: float = 1.0,
        delta: float | None = None,
        use_bias_correction_kl: bool = False,
        vespo_k_pos: float = 2.0,
        vespo_lambda_pos: float = 3.0,
        vespo_k_neg: float = 3.0,
        vespo_lambda_neg: float = 2.0,
    ) -> None:
        super().__init__()
        self.beta, self.compiled, self.use_ref_model, self.chunk_size = beta, compiled, use_ref_model, chunk_size
        self.config = _config(
            loss_type, epsilon_low, epsilon_high, beta=beta if use_ref_model else 0.0, delta=delta,
            max_completion_length=max_completion_length, importance_sampling_level=importance_sampling_level,
            temperature=temperature, use_bias_correction_kl=use_bias_correction_kl,
            sapo_temperature_pos=sapo_temperature_pos,
            sapo_temperature_neg=sapo_temperature_neg, vespo_k_pos=vespo_k_pos, vespo_lambda_pos=vespo_lambda_pos,
            vespo_k_neg=vespo_k_neg, vespo_lambda_neg=vespo_lambda_neg,
        )  # fmt: skip

    def forward(
        self,
        _input: Tensor,
        lin_weight: Tensor,
        selected_token_ids: Tensor,
        attention_mask: Tensor,
        advantages: Tensor,
        bias: Tensor | None = None,
        ref_per_token_logps: Tensor | None = None,
        old_per_token_logps: Tensor | None = None,
        ref_input: Tensor | None = None,
        ref_weight: Tensor | None = None,
        ref_bias: Tensor | None = None,
        vllm_is_ratio: Tensor | None = None,
        num_items_in_batch: int | Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """`(loss, metrics)`, metrics = (kl if beta is not 0, clip ratio).

        Args:
            _input: `[B, T, H]`; lin_weight `[V, H]`; selected_token_ids, attention_mask and both log-probs `[B, T]`;
                advantages `[B]`.
            ref_input, ref_weight, ref_bias: the reference's head, in place of its log-probs.
            vllm_is_ratio: `[B]`, `[B, 1]` or `[B, T]`; for vespo the first two are the weight of a whole sequence.
            num_items_in_batch: live tokens of the global batch, over all processes.
        """
        if self.config.beta != 0 and ref_per_token_logps is None:
            if ref_input is None or ref_weight is None:
                raise ValueError(
                    "LigerFusedLinearGRPOLoss: ref_per_token_logps or ref_input and ref_weight must be given with "
                    f"beta={self.beta}, got neither. Pass one, or set use_ref_model=False."
                )
            with torch.no_grad():
                ref_per_token_logps = linear_per_token_logps(
                    ref_input, ref_weight, selected_token_ids, bias=ref_bias, mask=attention_mask,
                    temperature=self.config.temperature,
                ).logps  # fmt: skip
        elif self.config.beta != 0 and ref_input is not None:
            warnings.warn(
                "LigerFusedLinearGRPOLoss: ref_per_token_logps and ref_input are both given; the first is used.",
                stacklevel=2,
            )
        own_clip = _needs_own_clip(self.config)
        out = linear_grpo_loss(
            _input, lin_weight, selected_token_ids, bias=bias, config=self.config, advantages=advantages,
            completion_mask=attention_mask, old_per_token_logps=old_per_token_logps,
            ref_per_token_logps=ref_per_token_logps if self.config.beta != 0 else None,
            importance_sampling_ratio=_weight(self.config, vllm_is_ratio, attention_mask),
            normalizer=_normalizer(self.config, attention_mask, num_items_in_batch), return_per_token=own_clip,
        )  # fmt: skip
        return out.loss, tuple(_metrics(self.config, self.beta, out, advantages, attention_mask))


def triton_grpo_loss(
    logits: Tensor,
    old_logp: Tensor | None,
    ref_logp: Tensor | None,
    completion_ids: Tensor,
    advantages: Tensor,
    completion_mask: Tensor | None = None,
    temperature: float = 0.9,
    beta: float = 0.04,
    eps_low: float = 0.2,
    eps_high: float = 0.4,
    inplace: bool = True,
    loss_type: str = "dapo",
    max_completion_length: int | None = None,
    importance_sampling_level: str = "token",
    reduce: bool = False,
    sapo_temperature_pos: float = 1.0,
    sapo_temperature_neg: float = 1.05,
    vllm_is_ratio: Tensor | None = None,
    delta: float | None = None,
    use_bias_correction_kl: bool = False,
    num_items_in_batch: int | Tensor | None = None,
    vespo_k_pos: float = 2.0,
    vespo_lambda_pos: float = 3.0,
    vespo_k_neg: float = 3.0,
    vespo_lambda_neg: float = 2.0,
) -> tuple[Any, ...]:
    """`grpo_loss` as Liger's function of this name.

    Args:
        logits: `[B, T + 1, V]`: the last row is never read, and its gradient is 0.
        old_logp, ref_logp, completion_ids, completion_mask: `[B, T]`; advantages `[B]`.
        inplace: the gradient takes the logits' storage where autograd allows it: a leaf or a view keeps its own.
        reduce: `(loss, [kl if beta is not 0, clip ratio])`; else `(losses, kl | None, clipped)` of each token,
            `[B, T]`, losses differentiable.
        The others: see `LigerFusedLinearGRPOLoss`.

    Raises:
        ValueError, TypeError: as `grpo_loss`, and for a delta or level that the loss does not have.
    """
    _check_call(logits, completion_ids, completion_mask, advantages, old_logp, ref_logp, vllm_is_ratio, beta)
    rows, width = completion_ids.shape
    length = max_completion_length or (width if loss_type == "dr_grpo" else None)
    config = _config(
        loss_type, eps_low, eps_high, beta=beta, delta=delta, max_completion_length=length,
        importance_sampling_level=importance_sampling_level, temperature=temperature,
        use_bias_correction_kl=use_bias_correction_kl, sapo_temperature_pos=sapo_temperature_pos,
        sapo_temperature_neg=sapo_temperature_neg, vespo_k_pos=vespo_k_pos, vespo_lambda_pos=vespo_lambda_pos,
        vespo_k_neg=vespo_k_neg, vespo_lambda_neg=vespo_lambda_neg,
    )  # fmt: skip
    mask = torch.ones_like(completion_ids) if completion_mask is None else completion_mask
    weight = _weight(config, vllm_is_ratio, mask)
    ref_logp = ref_logp if beta != 0 else None
    give_away = inplace and not logits.is_leaf and not logits._is_view()
    # a dead token for the last row: the whole tensor goes in, so that its storage can be given away
    dead = completion_ids.new_full((rows, 1), DEAD)
    ids = torch.cat([completion_ids, dead], 1)
    if not reduce:
        logps = per_token_logps(logits, ids, mask=_padded(mask), temperature=temperature, inplace=give_away).logps
        losses, kl, ratio = token_losses_of_logps(
            "triton_grpo_loss", config, logps[:, :-1], mask, advantages=advantages, old=old_logp, ref=ref_logp,
            weight=weight,
        )  # fmt: skip
        return losses, kl, _clipped(config, ratio, advantages, mask).to(losses.dtype)
    values: Tensor = _padded_tokens(advantages, width)
    out = grpo_loss(
        logits, ids, config=config, advantages=values, completion_mask=_padded(mask),
        old_per_token_logps=_padded(old_logp), ref_per_token_logps=_padded(ref_logp),
        importance_sampling_ratio=_padded_tokens(weight, width),
        normalizer=_normalizer(config, mask, num_items_in_batch), inplace=give_away,
        return_per_token=_needs_own_clip(config),
    )  # fmt: skip
    return out.loss, list(_metrics(config, beta, out, values, _padded(mask)))


def _check_call(
    logits: Any, ids: Any, mask: Any, advantages: Any, old: Any, ref: Any, weight: Any, beta: float
) -> None:
    """The arguments of the function by its own names, before logits and ids get a column more."""
    name = "triton_grpo_loss"
    checks.check_tensor(name, "logits", logits, checks.FLOATS, "float16, bfloat16, float32 or float64")
    checks.check_tensor(name, "completion_ids", ids, (torch.int32, torch.int64), "int32 or int64 ids")
    check_alike(name, "completion_ids", ids, {})
    checks.check_device(name, "logits", logits.device, {"completion_ids": ids})
    rows, width = ids.shape
    if logits.ndim != 3 or checks.shape_of(logits)[:2] != [rows, width + 1]:
        got = f"{checks.shape_of(logits)} with completion_ids {[rows, width]}"
        advice = "Row t scores id t, and the last row is not read: logits_to_keep = T + 1 of a model gives it."
        raise ValueError(checks.complain(name, "logits", f"must be [{rows}, {width + 1}, V]", got, advice))
    logps = {"old_logp": old, "ref_logp": ref if beta != 0 else None}
    logps = {argument: value for argument, value in logps.items() if value is not None}
    check_alike(name, "completion_ids", ids, logps, dtypes=checks.FLOATS)
    check_alike(name, "completion_ids", ids, {"advantages": advantages}, [rows], [rows, 1])
    if beta != 0 and ref is None:
        advice = "Pass it, or set beta=0."
        raise ValueError(checks.complain(name, "ref_logp", f"must be given with beta={beta}", None, advice))
    if weight is not None:
        check_alike(name, "completion_ids", ids, {"vllm_is_ratio": weight}, [rows], [rows, 1])
    live = ids >= 0
    if mask is not None:
        check_alike(name, "completion_ids", ids, {"completion_mask": mask})
        check_mask_values(name, "completion_mask", mask)
        live = live & (mask != 0)
    for argument, value in logps.items():
        check_live_finite(name, argument, value, live)


def _config(loss_type: str, epsilon_low: float, epsilon_high: float, **options: Any) -> GRPOLossConfig:
    """Liger's options as ours; those of sapo and vespo where they belong, and no clip where there is none."""
    for option in ("sapo_temperature_pos", "sapo_temperature_neg"):  # which its module looks at for every loss
        checks.check_positive(NAME, option, options[option])
    own = {name: value for name, value in options.items() if name.partition("_")[0] not in _UNCLIPPED}
    own |= {name: value for name, value in options.items() if name.startswith(f"{loss_type}_")}
    if loss_type not in _UNCLIPPED:
        own["epsilon_high"] = epsilon_high
        if loss_type != "cispo":
            own["epsilon"] = lower_clip(epsilon_low)
    return GRPOLossConfig.preset("liger", loss_type=loss_type, **own)


def _weight(config: GRPOLossConfig, ratio: Tensor | None, mask: Tensor) -> Tensor | None:
    """`[B, 1]` or `[B, T]`. VESPO multiplies the weights of tokens: that of a sequence goes to its first live one."""
    if ratio is None:
        return None
    ratio = ratio.unsqueeze(1) if ratio.ndim == 1 else ratio
    if config.loss_type != "vespo" or ratio.shape == mask.shape:
        return ratio
    live = (mask != 0).to(torch.int64)
    first = (live == 1) & (live.cumsum(1) == 1)
    return torch.where(first, ratio, torch.ones_like(ratio))


def _normalizer(config: GRPOLossConfig, mask: Tensor, num_items: int | Tensor | None) -> Tensor | None:
    """Live tokens of the global batch over the number of processes, for losses that are means over tokens."""
    if config.loss_type not in _TOKEN_LOSSES:
        return None
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    world = torch.distributed.get_world_size() if distributed else 1
    if num_items is not None:
        count = torch.as_tensor(num_items, device=mask.device, dtype=torch.float32)
        return (count / world).clamp(min=1.0)
    if world == 1:
        return None
    count = (mask != 0).sum().to(torch.float32)
    torch.distributed.all_reduce(count)
    return (count / world).clamp(min=1.0)


def _needs_own_clip(config: GRPOLossConfig) -> bool:
    """Whether Liger's clip ratio, a mean over tokens before delta, is none of our metrics."""
    unclipped = config.epsilon == UNCLIPPED_BELOW
    return unclipped or config.delta is not None or config.importance_sampling_level != "token"


def _metrics(
    config: GRPOLossConfig, beta: float, out: GRPOLossOutput, advantages: Tensor, mask: Tensor
) -> list[Tensor]:
    """kl, if beta is not 0, and the clip ratio."""
    zero = torch.zeros_like(out.metrics["num_tokens"])
    kl = [out.metrics.get("kl", zero)] if beta != 0 else []  # without a reference: of the policy against itself
    if out.per_token is not None:
        held = _clipped(config, out.per_token.ratio, advantages, mask)
        return [*kl, mean_over(mask, held.to(zero.dtype))]
    name = "cispo_clip_ratio" if config.loss_type == "cispo" else "clip_ratio/region_mean"
    return [*kl, out.metrics.get(name, zero)]


def _clipped(config: GRPOLossConfig, ratio: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """Live tokens that a clip holds back, before delta."""
    if config.loss_type in _UNCLIPPED:
        return torch.zeros_like(ratio, dtype=torch.bool)
    return clipped(config, ratio, advantages.unsqueeze(1) if advantages.ndim == 1 else advantages) & (mask != 0)


def _padded(values: Any) -> Any:
    """With one more column, which no one reads."""
    return None if values is None else nn.functional.pad(values, (0, 1))


def _padded_tokens(values: Any, width: int) -> Any:
    """The same for one value per token; those of sequences as they are."""
    return _padded(values) if values is not None and values.ndim == 2 and values.shape[1] == width else values
