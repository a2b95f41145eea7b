"""The advice along a run: the statistics are averaged over steps, not the advice."""

from __future__ import annotations

import math
import warnings
from typing import Any

from ..checks import complain
from .advice import Advice, check_limits, optimal_group_size
from .arrays import NotFiniteError, check_number, check_whole
from .constants import GradConstants
from .estimate import TooFewGroupsError, estimate_constants

_KEYS = ("Vb", "A", "B2", "J2", "A0")


class GroupSizeMonitor:
    """Exponential moving averages of Vb, A, B2, |grad J|^2 and A0, and the group size that they advise.

    Each of them is linear in the unbiased a2, a3, a4 and cross term of a step, so the average stays unbiased, which an
    average of G* would not be. The constants move as the policy does: G* falls as it sharpens.

    Args:
        every: steps from one measurement to the next.
        ema: weight of the past, in [0, 1); the first measurements count fully (bias-corrected).
        N, c_prompt, c_response, g_min, g_max, multiple_of: see `optimal_group_size`.

    Raises ValueError for values that `optimal_group_size` would refuse.
    """

    def __init__(
        self, every: int = 1, ema: float = 0.9, *, N: int | None = None, c_prompt: float = 0.0,
        c_response: float = 1.0, g_min: int = 2, g_max: int | None = None, multiple_of: int = 1,
    ) -> None:  # fmt: skip
        name = "GroupSizeMonitor"
        self.every = check_whole(name, "every", every, 1, "1 measures each step.")
        self.ema = check_number(name, "ema", ema, "Try 0.9.")
        if not 0 <= self.ema < 1:
            raise ValueError(complain(name, "ema", "must be in [0, 1)", ema, "Try 0.9."))
        check_limits(name, N, c_prompt, c_response, g_min, g_max, multiple_of)
        self._costs: dict[str, Any] = {
            "N": N, "c_prompt": c_prompt, "c_response": c_response, "g_min": g_min, "g_max": g_max,
            "multiple_of": multiple_of,
        }  # fmt: skip
        self._sums = dict.fromkeys(_KEYS, 0.0)
        self._weight = 0.0
        self._groups = 0
        self._silent = 0.0

    def due(self, step: int) -> bool:
        """Whether `step`, counted from 0, is to be measured."""
        return step % self.every == 0

    def update(self, rewards: Any, scores: Any = None, **given: Any) -> bool:
        """Take one step's `[P, G]` rewards and scores, or what else `estimate_constants` takes.

        False, and nothing is taken, if fewer than two groups have four scored responses, or, with a RuntimeWarning, if
        what was measured is not finite: one such step would stay in the averages for good.
        """
        try:
            step = estimate_constants(rewards, scores, n_boot=0, **given)
        except TooFewGroupsError:
            return False
        except NotFiniteError as error:
            warnings.warn(f"GroupSizeMonitor.update: this step is left out. {error}", RuntimeWarning, stacklevel=2)
            return False
        for key in _KEYS:
            self._sums[key] = self.ema * self._sums[key] + (1 - self.ema) * getattr(step, key)
        self._silent = self.ema * self._silent + (1 - self.ema) * (step.silent or 0.0)
        self._weight = self.ema * self._weight + 1 - self.ema
        self._groups += step.n or 0
        return True

    def constants(self) -> GradConstants | None:
        """The averages; None before the first measurement."""
        if self._weight == 0:
            return None
        means = {key: value / self._weight for key, value in self._sums.items()}
        silent = self._silent / self._weight
        return GradConstants(
            Vb=means["Vb"], A=means["A"], B2=means["B2"], J2=means["J2"], A0=means["A0"], n=self._groups, silent=silent
        )

    def advice(self) -> Advice | None:
        """What they advise; None before the first measurement."""
        found = self.constants()
        return None if found is None else optimal_group_size(found, **self._costs)

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, for a checkpoint."""
        return {"sums": dict(self._sums), "weight": self._weight, "groups": self._groups, "silent": self._silent}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there. Raises ValueError for averages that are not finite."""
        numbers = [*state["sums"].values(), state["weight"], state["silent"]]
        if not all(math.isfinite(number) for number in numbers):
            advice = "Start a new monitor."
            raise ValueError(complain("GroupSizeMonitor.load_state_dict", "state", "must be finite", numbers, advice))
        self._sums = {key: float(state["sums"][key]) for key in _KEYS}
        self._weight, self._groups = float(state["weight"]), int(state["groups"])
        self._silent = float(state["silent"])
