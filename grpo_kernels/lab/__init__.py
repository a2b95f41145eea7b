"""The lab: how good is this gradient, and how many responses per prompt?

    constants = estimate_constants(rewards, scores)  # a pilot: [P, G] rewards, [P, G, d] scores or sketches of them
    advice = optimal_group_size(constants, c_prompt=4.0)
    print(advice.g_int, advice.why())

Formulas from the U-statistic view of GRPO (arXiv 2603.01162), with the constants and the finite-G terms worked out in
docs/group-size.md. Everything is float64 inside, takes NumPy or torch, and leaves autograd alone. It needs torch alone;
figures, progress bars and files need the `lab` extra.
"""

from __future__ import annotations

from .advice import FLAGS, Advice, optimal_group_size
from .arrays import NotFiniteError
from .bandit import Atoms, make_bandit
from .binary import binary_advantages, binary_second_moment, binary_weight, silent_rate
from .constants import GradConstants, crossing, exact_constants, fixed_budget, mse
from .estimate import TooFewGroupsError, estimate_constants
from .gram import ghost_gram, score_gram, sketch
from .head import HeadScores
from .monitor import GroupSizeMonitor
from .simulate import Simulated, draw_pilot, simulate_mse
from .ustats import UStats, group_ustats

__all__ = [
    "FLAGS",
    "Advice",
    "Atoms",
    "GradConstants",
    "GroupSizeMonitor",
    "HeadScores",
    "NotFiniteError",
    "Simulated",
    "TooFewGroupsError",
    "UStats",
    "binary_advantages",
    "binary_second_moment",
    "binary_weight",
    "crossing",
    "draw_pilot",
    "estimate_constants",
    "exact_constants",
    "fixed_budget",
    "ghost_gram",
    "group_ustats",
    "make_bandit",
    "mse",
    "optimal_group_size",
    "score_gram",
    "silent_rate",
    "simulate_mse",
    "sketch",
]
