"""TRL's GRPOTrainer with the fused loss: the logits never exist, and log-probs of both policies share one arithmetic.

TRL keeps its own code for everything but the loss's arithmetic. Its `_compute_loss` runs as ever, on log-probs that
come without a graph: metrics and the entropy controller are its own, by its own names. The loss that is returned is
`linear_grpo_loss`'s, computed inside the model's forward, and compared with TRL's number at every step.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers
import trl
from packaging.version import Version
from torch import Tensor
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from trl import GRPOTrainer
from trl.trainer.utils import FusedCausalLMOutput, maybe_gather_lm_head_ctx

from ..functional_linear import linear_grpo_loss, linear_per_token_logps
from ..objective import whole_because
from .fused_forward import call_in_place_of_head
from .head_check import check_head, check_head_once
from .lm_head import CausalLMHead, causal_lm, causal_lm_head, linear_head, softcap_and_scale
from .trl_loss import accumulation, completion_mask, loss_arguments, loss_config, size_of_terms
from .trl_options import complaints

__all__ = ["NEWEST", "OLDEST", "FusedGRPOTrainer", "Patch", "patch_trainer"]

OLDEST, NEWEST = "1.15", "1.16"
"""The releases of TRL that the tests run."""
_SEAMS = ("_compute_loss", "_get_per_token_logps_and_entropies")
_LOSS = (*_SEAMS, "compute_loss", "get_gamma_weights", "get_high_entropy_mask", "get_off_policy_mask")
_HEADS_ARGUMENTS = ("fused_lm_head", "labels", "shift_labels", "num_items_in_batch")
_OFF_POLICY_ALREADY = 1e-3


class FusedGRPOTrainer(GRPOTrainer):  # type: ignore[misc]  # TRL is untyped
    """A GRPOTrainer with the same arguments and GRPOConfig, whose loss is `linear_grpo_loss` of the hidden states.

    Every option of GRPOConfig is honoured or refused (`trl_options`); the logged names and values are TRL's.

    Raises:
        ImportError: an unsupported version of TRL or transformers.
        ValueError: an option, model or subclass whose loss this would not compute; the text says what to do instead.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _refuse("FusedGRPOTrainer", self, FusedGRPOTrainer)
        self._fused = FusedLoss(self, super()._compute_loss, super()._get_per_token_logps_and_entropies)

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        return self._fused.compute_loss(model, inputs)

    def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        return self._fused.logps(model, *args, **kwargs)


class Patch:
    """What `patch_trainer` did, and the way back."""

    def __init__(self, trainer: GRPOTrainer) -> None:
        self._trainer = trainer
        self._fused = FusedLoss(trainer, *(getattr(trainer, name) for name in _SEAMS))
        trainer._compute_loss = self._fused.compute_loss
        trainer._get_per_token_logps_and_entropies = self._fused.logps

    def undo(self) -> None:
        """Give the trainer its own methods back; a second call changes nothing, also after another patch."""
        for name in _SEAMS:
            if getattr(vars(self._trainer).get(name), "__self__", None) is self._fused:
                delattr(self._trainer, name)


def patch_trainer(trainer: GRPOTrainer) -> Patch:
    """Give a GRPOTrainer the loss of `FusedGRPOTrainer`, and print what was replaced.

    Args:
        trainer: a GRPOTrainer, or a subclass that leaves the loss alone.

    Returns:
        A handle whose `undo()` takes it all back.

    Raises:
        ImportError, ValueError: as `FusedGRPOTrainer`; a trainer that is patched already.
    """
    name = "patch_trainer"
    if not isinstance(trainer, GRPOTrainer):
        advice = "Build it with trl.GRPOTrainer."
        raise TypeError(f"{name}: trainer must be a GRPOTrainer, got {type(trainer).__name__}. {advice}")
    seams = [getattr(vars(trainer).get(seam), "__self__", None) for seam in _SEAMS]
    if isinstance(trainer, FusedGRPOTrainer) or any(isinstance(owner, FusedLoss) for owner in seams):
        advice = "It needs no second patch; undo() of the handle takes the first one back."
        raise ValueError(f"{name}: trainer must not be patched, got a patched {type(trainer).__name__}. {advice}")
    _refuse(name, trainer, GRPOTrainer)
    patch = Patch(trainer)
    if trainer.accelerator.is_main_process:
        print(
            f"grpo_kernels: replaced {' and '.join(_SEAMS)} of this {type(trainer).__name__} (TRL {trl.__version__}): "
            "loss and log-probs now come from linear_grpo_loss and linear_per_token_logps."
        )
    return patch


class FusedLoss:
    """The two methods of one trainer, around its own."""

    def __init__(self, trainer: Any, compute_loss: Callable[..., Tensor], logps: Callable[..., Any]) -> None:
        self._trainer, self._compute_loss, self._logps = trainer, compute_loss, logps
        self._first = trainer._step == 0  # nothing was learned yet

    def compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        """The fused loss; metrics, and the number that it is compared with, are TRL's."""
        trainer = self._trainer
        call = _FusedCall(trainer, model, inputs)
        theirs = self._compute_loss(call, inputs).detach()
        loss: Tensor = call.outputs.loss
        if trainer.aux_loss_enabled:
            loss = loss + trainer.router_aux_loss_coef * call.outputs.aux_loss / accumulation(trainer)
        _compare(loss.detach(), theirs, call.size)
        if self._first and trainer.model.training:
            self._first = False
            _warn_of_stale_logps(call.outputs.log_probs, inputs)
        return loss

    def logps(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """TRL's method, all arguments as they come, around a model that uses our kernels for its head."""
        if not isinstance(model, _FusedCall):
            given = inspect.signature(self._logps).bind(model, *args, **kwargs).arguments
            model = _FusedCall(self._trainer, model, None, entropy=given.get("compute_entropy", False))
        return self._logps(model, *args, **kwargs)


class _FusedCall:
    """Stands for the model in TRL's code: the same call, with our kernels in place of the head."""

    def __init__(self, trainer: Any, model: Any, inputs: dict[str, Any] | None, entropy: bool = True) -> None:
        self._trainer, self._model, self._inputs, self._entropy = trainer, model, inputs, entropy
        self._base = causal_lm(model)
        self.outputs: Any = None
        """Of the last call, after every wrapper of the model."""
        self.size = torch.zeros(())
        """Of the terms that the loss of the last call is made of."""

    def __call__(self, **kwargs: Any) -> Any:
        if not is_deepspeed_zero3_enabled():
            check_head_once(self._model, {name: kwargs[name] for name in kwargs if name not in _HEADS_ARGUMENTS})
        self.outputs = call_in_place_of_head(
            "FusedGRPOTrainer", self._model, self._compute, kwargs, _HEADS_ARGUMENTS
        )  # fmt: skip
        return self.outputs

    def _compute(self, outputs: Any, kwargs: Mapping[str, Any]) -> FusedCausalLMOutput:
        module = self._base.get_output_embeddings()
        partitioned = module.weight.numel() == 0  # ZeRO-3
        with maybe_gather_lm_head_ctx(module.weight, module.bias):
            head = causal_lm_head(self._base)
            hidden = outputs.last_hidden_state[:, :-1].to(head.weight.device)
            as_it_is: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
            if self._trainer.args.cast_lm_head_to_fp32:
                hidden, as_it_is = hidden.float(), torch.autocast(hidden.device.type, enabled=False)
            with as_it_is:
                if self._inputs is None:
                    result = self._logps(hidden, head, kwargs["labels"][:, 1:])
                else:
                    result = self._loss(hidden, head, self._inputs, partitioned)
        if kwargs.get("output_router_logits"):
            result.aux_loss = _aux_loss(self._base, outputs, kwargs)
        return result

    def _logps(self, hidden: Tensor, head: CausalLMHead, labels: Tensor) -> FusedCausalLMOutput:
        """Log-probs of the labels; those of -100 are 0 and never meet the head."""
        out = linear_per_token_logps(
            hidden, head.weight, labels.to(hidden.device), bias=head.bias, temperature=self._trainer.temperature,
            softcap=head.softcap, logit_scale=head.logit_scale, entropy=self._entropy,
        )  # fmt: skip
        return FusedCausalLMOutput(log_probs=out.logps, entropy=out.entropy)

    def _loss(
        self, hidden: Tensor, head: CausalLMHead, inputs: dict[str, Any], partitioned: bool
    ) -> FusedCausalLMOutput:
        """The loss, and the log-probs and entropies that TRL's metrics are made of."""
        ids = inputs["completion_ids"]
        config = loss_config(self._trainer, head.softcap, head.logit_scale, accumulation(self._trainer))
        arguments = loss_arguments(self._trainer, inputs)
        whole = whole_because(config, arguments["old_per_token_logps"] is None)
        if partitioned and whole is not None:
            raise ValueError(
                f"FusedGRPOTrainer: under ZeRO-3 the head is there in the forward alone, but {whole} multiplies again "
                "in backward. Tie the word embeddings, use ZeRO-2 or FSDP2, or use TRL's own trainer."
            )
        out = linear_grpo_loss(
            hidden[:, -ids.shape[1] :], head.weight, ids, bias=head.bias, config=config, return_per_token=True,
            **arguments,
        )  # fmt: skip
        if out.per_token is None:
            raise RuntimeError("FusedGRPOTrainer: linear_grpo_loss returned no token values.")
        logps = out.per_token.logps
        old, ref = arguments["old_per_token_logps"], arguments["ref_per_token_logps"]
        inert = next((values for values in (old, ref) if values is not None), torch.zeros_like(logps))
        live = arguments["completion_mask"] != 0
        self.size = size_of_terms(config, out.per_token.loss, live, arguments["normalizer"])
        logps = torch.where(live, logps, inert)  # TRL multiplies by the mask: what it masks must be finite
        return FusedCausalLMOutput(loss=out.loss, log_probs=logps, entropy=out.per_token.entropy)


def _aux_loss(base: Any, outputs: Any, kwargs: Mapping[str, Any]) -> Tensor:
    """The load-balancing loss as TRL 1.16's add_fused_lm_head computes it."""
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    config = base.config.get_text_config()
    experts = getattr(config, "num_experts", None) or base.num_experts  # GPT-OSS before transformers 5.6
    return torch.as_tensor(
        load_balancing_loss_func(
            outputs.router_logits, experts, config.num_experts_per_tok, kwargs.get("attention_mask")
        )
    )


def _compare(ours: Tensor, theirs: Tensor, size: Tensor) -> None:
    """To the rounding of the terms, which cancel: of policy and KL `size`, of what is added to them the sum's too.

    TRL reads every metric of the step on the host, so one more number costs nothing.
    """
    gap, most = torch.stack([(ours - theirs).abs(), size + theirs.abs()]).tolist()
    if math.isfinite(most) and not gap <= 1e-3 * most:
        warnings.warn(
            f"FusedGRPOTrainer: the loss is {float(ours)}, TRL's own of the same log-probs is {float(theirs)}. The "
            f"gradient is that of the first. Train with TRL's GRPOTrainer, and report both with TRL {trl.__version__}.",
            RuntimeWarning,
            stacklevel=2,
        )


def _warn_of_stale_logps(logps: Tensor, inputs: dict[str, Any]) -> None:
    """Before the first update the policy is the one that `old` was computed with."""
    old = inputs.get("old_per_token_logps")
    if old is None:
        return
    most = float(((logps - old).abs() * (completion_mask(inputs) != 0)).max())
    if most > _OFF_POLICY_ALREADY:
        warnings.warn(
            f"FusedGRPOTrainer: before the first update |log-ratio| is up to {most:.2g}, although nothing was learned "
            "yet: old_per_token_logps come from another precision, or from a model with dropout. Sequence-level clips "
            "of about that width would act on noise. Compute both in one precision, and set every dropout of the "
            "model's config to 0: disable_dropout reaches nn.Dropout modules only.",
            RuntimeWarning,
            stacklevel=2,
        )


def _refuse(name: str, trainer: Any, ours: type) -> None:
    """Everything for which the fused loss would not be this trainer's loss."""
    _check_versions()
    classes = [cls for cls in type(trainer).__mro__ if cls not in (ours, *GRPOTrainer.__mro__)]
    for owner, where in [(trainer, "an instance's own "), *((cls, f"{cls.__name__}.") for cls in classes)]:
        own = [method for method in _LOSS if method in vars(owner)]
        if own:
            advice = "Write that loss with gk.linear_grpo_loss or gk.linear_per_token_logps, or use it without ours."
            raise ValueError(f"{name}: trainer must leave {own[0]} to TRL, got {where}{own[0]}. {advice}")
    found = complaints(trainer)
    if found:
        raise ValueError(f"{name}: args must be options that this loss has, got {' '.join(found)}")
    for adapter in getattr(trainer.model, "peft_config", {}).values():
        if adapter.is_prompt_learning:
            advice = "Use LoRA, or TRL's own trainer."
            got = type(adapter).__name__
            raise ValueError(f"{name}: model must not learn prompts: its rows are not its tokens', got {got}. {advice}")
    base = causal_lm(trainer.model)
    linear_head(base)
    loss_config(trainer, *softcap_and_scale(base))  # refuses what TRL trains with and this loss does not
    if base.config.get_text_config() is base.config and not is_deepspeed_zero3_enabled():
        check_head(trainer.model)  # a multimodal model waits for its first batch


def _check_versions() -> None:
    """Raises or warns outside what is tested."""
    release = Version(trl.__version__)
    if release < Version(OLDEST):
        raise ImportError(f"integrations.trl needs TRL {OLDEST} or newer, got {release}. pip install -U trl")
    if Version(transformers.__version__) < Version("5.0"):
        raise ImportError(
            f"integrations.trl needs transformers 5.0 or newer, got {transformers.__version__}. "
            "pip install -U transformers"
        )
    if (release.major, release.minor) > tuple(int(part) for part in NEWEST.split(".")):
        warnings.warn(
            f"integrations.trl is tested with TRL {OLDEST} to {NEWEST}, not with {release}. Options that it does not "
            "know are refused, and every loss is compared with TRL's own.",
            RuntimeWarning,
            stacklevel=2,
        )
