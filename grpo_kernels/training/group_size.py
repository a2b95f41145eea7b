"""The group-size monitor of a run: which steps it measures, and what it has to say."""

from __future__ import annotations

import contextlib
from typing import Any

from torch import Tensor

from grpo_kernels.lab import GroupSizeMonitor, HeadScores

from .bounds import ConfigError
from .config import TrainConfig
from .packing import Pack
from .policy import Policy


class GroupSizeWatch:
    """Measures the first update of every `monitor.every`-th step, while the policy is still the one that sampled.

    The scores are the head's part of them, sketched from the loss as it runs: no pass of its own. Only the main
    process's prompts are seen. Neither the update nor its bits change.
    """

    def __init__(self, config: TrainConfig, policy: Policy) -> None:
        if policy.head() is None:
            raise ConfigError(
                f"GroupSizeWatch: monitor.every must be 0 for this model, got {config.monitor.every}: its head is no "
                "plain linear layer, so the loss never sees hidden states. Remove it."
            )
        self._config = config.monitor
        self._group_size = config.sampling.num_generations
        self.monitor = GroupSizeMonitor(config.monitor.every, config.monitor.ema, c_prompt=config.monitor.prompt_cost)

    def scores(self, step: int, packs: list[Pack]) -> HeadScores | None:
        """What collects the scores of the step's first minibatch; None if the step is not measured."""
        if not self.monitor.due(step):
            return None
        return HeadScores(packs[-1].sequences.stop, self._group_size, method="sketch", k=self._config.sketch)

    def take(self, scores: HeadScores, rewards: Tensor) -> list[str]:
        """Add the step's rewards `[B]` and the collected scores; the advice so far, and why.

        Scores or rewards that are not finite are left out with a RuntimeWarning: the run is what matters.
        """
        shape = scores.scores.shape[:2]
        self.monitor.update(rewards[: shape.numel()].view(shape), scores.scores)
        return self.lines()

    def lines(self) -> list[str]:
        """The advice so far, and why."""
        advice, constants = self.monitor.advice(), self.monitor.constants()
        if advice is None or constants is None:
            return ["No step yet had two groups with four scored responses and finite gradients."]
        between = f"prompts differ by Vb = {constants.Vb:.3g}, responses by A = {constants.A:.3g}"
        return [*advice.why(), f"Here {between}; the estimated baseline costs B2 = {constants.B2:.3g}."]


def watching(scores: HeadScores | None, pack: Pack) -> contextlib.AbstractContextManager[Any]:
    """The loss of `pack` runs inside."""
    if scores is None:
        return contextlib.nullcontext()
    return scores.watch(pack.completion_ids, cu_seqlens=pack.cu_seqlens, first=pack.sequences.start)
