"""TRL's own `GRPOTrainer`, without a model, a data set or an engine: what `_compute_loss` reads is given directly."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
from parity_projects import need, wide
from parity_support import Draw, default_float64
from torch import Tensor

need("trl")

from trl import GRPOConfig  # noqa: E402
from trl.trainer.grpo_trainer import GRPOTrainer  # noqa: E402


def defaults() -> dict[str, Any]:
    """Every option of GRPOConfig at its default."""
    return {f.name: f.default for f in dataclasses.fields(GRPOConfig) if f.default is not dataclasses.MISSING}


class OneProcess:
    """The accelerator of a single process; `num_processes` is only divided by."""

    process_index = 0
    is_main_process = True
    sync_gradients = True
    device = torch.device("cpu")

    def __init__(self, num_processes: int = 1) -> None:
        self.num_processes = num_processes

    @staticmethod
    def gather(value: Tensor) -> Tensor:
        return value

    gather_for_metrics = gather

    @staticmethod
    def reduce(value: Tensor, reduction: str) -> Tensor:
        assert reduction == "sum"
        return value

    @staticmethod
    def pad_across_processes(value: Tensor, dim: int, pad_index: float) -> Tensor:
        return value


class Trainer(GRPOTrainer):  # type: ignore[misc]
    """GRPOTrainer with the attributes that its loss and its scoring read, and nothing else set up."""

    def __init__(self, *, training: bool = True, accumulation: int = 1, processes: int = 1, **options: Any) -> None:
        values = defaults() | options
        self.args = SimpleNamespace(**values)
        for name in (
            "beta", "entropy_coef", "importance_sampling_level", "loss_type", "mask_truncated_completions",
            "max_completion_length", "multi_objective_aggregation", "num_generations", "num_iterations",
            "off_policy_mask_threshold", "scale_rewards", "top_entropy_quantile", "use_adaptive_entropy", "use_vllm",
            "vllm_importance_sampling_clip_max", "vllm_importance_sampling_clip_min",
            "vllm_importance_sampling_correction", "vllm_importance_sampling_mode",
        ):  # fmt: skip
            setattr(self, name, values[name])
        # as GRPOTrainer.__init__ does
        self.epsilon_low = self.args.epsilon
        self.epsilon_high = self.args.epsilon_high if self.args.epsilon_high is not None else self.args.epsilon
        self._entropy_bonus_enabled = self.entropy_coef != 0.0 or self.use_adaptive_entropy
        self.aux_loss_enabled = False
        self.accelerator = OneProcess(processes)
        self.model = SimpleNamespace(training=training, is_gradient_checkpointing=False)
        self.current_gradient_accumulation_steps = accumulation
        self._metrics = {"train": defaultdict(list), "eval": defaultdict(list)}
        self.scores: tuple[Tensor, Tensor] | None = None

    def _get_per_token_logps_and_entropies(self, *_: Any, **__: Any) -> tuple[Tensor, Tensor, None]:
        assert self.scores is not None
        return (*self.scores, None)

    def metrics(self) -> dict[str, float]:
        """What was logged, once each."""
        (logged,) = [values for values in self._metrics.values() if values] or [{}]
        return {name: value for name, (value,) in logged.items()}

    def loss(self, batch: Draw, logps: Tensor, entropy: Tensor, **inputs: Any) -> Tensor:
        """`_compute_loss` of a batch; the holes of the mask are TRL's tool mask."""
        self.scores = (logps, entropy)
        ids = batch.ids
        inputs |= {
            "prompt_ids": ids[:, :0], "prompt_mask": ids[:, :0], "completion_ids": ids,
            "completion_mask": torch.ones_like(batch.mask), "tool_mask": batch.mask, "advantages": batch.advantages,
        }  # fmt: skip
        with default_float64():
            return self._compute_loss(self.model, inputs)


class Scorer(Trainer):
    """GRPOTrainer up to the scores: generation is replaced by a batch that is there, rewards by given ones."""

    def __init__(self, batch: Draw, rewards: Tensor, reward_weights: Tensor | None = None, **options: Any) -> None:
        super().__init__(
            **{"steps_per_generation": 1, "gradient_accumulation_steps": 1, "num_generations": len(rewards)} | options
        )
        self.batch, self.rewards = batch, rewards
        self.reward_weights = torch.ones(rewards.shape[1]) if reward_weights is None else reward_weights
        self.reward_func_names = [str(column) for column in range(rewards.shape[1])]
        self.reward_funcs = self.reward_func_names
        self.num_generations_eval = self.num_generations
        self.environment_factories = self.environments = self.tools = self.pad_to_multiple_of = self._is_vlm = None
        self._tokenizer = SimpleNamespace(pad_token_id=0)
        self.log_multimodal = False
        self._pending_extra_logs: dict[str, Any] = {}
        self._pending_metrics: dict[str, Any] = {}
        self._logs: dict[str, Any] = defaultdict(list)
        self._logs["rewards"] = defaultdict(list)
        self.scores = (wide(batch.old), wide(torch.zeros_like(batch.old)))  # before the update, the policy is the old
        self.beta = 0.0  # the reference model is of no interest here

    def _generate(self, prompts: Any) -> Any:
        ids, mask = self.batch.ids.tolist(), self.batch.mask.tolist()
        logps = [[None if x != x else x for x in row] for row in self.batch.rollout.tolist()]  # as vLLM's come
        return [[1]] * len(ids), ids, mask, [""] * len(ids), logps, {}, None, None

    def _calculate_rewards(self, *_: Any) -> Tensor:
        return self.rewards

    def score(self) -> dict[str, Tensor]:
        """The inputs of the loss: advantages, the old policy, the sampler and its weights."""
        with default_float64():
            return self._generate_and_score_completions([{"prompt": ""}] * len(self.rewards))
