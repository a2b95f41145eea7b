"""The group size that makes the most of a budget: N MSE = Vb G + A + B2/(G - 1), smallest at G = 1 + sqrt(B2 / Vb)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..checks import complain
from .arrays import check_number, check_whole
from .constants import GradConstants, crossing
from .cost import LARGE, Cost

FLAGS = {
    "NO_SIGNAL": "Vb, A and B2 are all 0, or below it by noise: no reward or no score differs within a prompt",
    "VB_NONPOSITIVE": "prompts did not differ in this pilot: larger groups look better without end",
    "PILOT_TOO_SMALL": "fewer than eight prompts, or other draws of them would have advised otherwise, at a price: "
    "take more prompts",
    "SCORES_NOT_CENTRED": "E[s|x] is not 0 (length normalisation, clipping, truncated sampling): the advice for the "
    "leave-one-out mean holds, oracle, vanilla and g_cross do not",
    "SILENT_RATE_HIGH": "more than half of the groups had equal rewards: the constants rest on the others",
    "N_LT_G": "the budget is smaller than one group of the best size",
}
_FEW_PROMPTS = 8  # of fewer, a variance between prompts is off by more than half: sqrt(2 / (n - 1)) of it


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """What to do, and how sure."""

    g_cont: float
    """The minimiser over real G; inf where nothing bounds it, NaN where there is nothing to choose by."""
    g_int: int | None
    """The best integer (multiple) within the limits; None where nothing bounds it, or without a signal."""
    penalty: float | None
    """What the limits cost: the share by which g_int is dearer than the best integer without them, and without
    responses left over. 0 where they cost nothing; None where there is no best integer."""
    interval_5pct: tuple[float, float]
    """Every G in here costs at most 5 % more, where no limit is in the way."""
    ci: tuple[float, float] | None
    """5 % and 95 % of g_cont over bootstrap pilots. Approximate: it covered 82 % where 90 % was asked. None when they
    all agree to the last bit, or the pilot had fewer than eight prompts."""
    g_cross: float
    """Up to this G subtracting nothing has the smaller error than the group mean; inf: at every G; NaN without A0."""
    curve: tuple[tuple[int, float], ...]
    """(G, cost x MSE) at powers of two and at g_int; in units of the best."""
    flags: tuple[str, ...]
    """Keys of `FLAGS`."""

    def why(self) -> list[str]:
        """The advice in sentences."""
        lines = self._size()
        if self.ci is not None:
            lines.append(f"From other pilots of this size: {_shown(self.ci[0])} to {_shown(self.ci[1])}.")
        nothing = "subtracting nothing has the smaller error than the group mean"
        if self.g_cross == math.inf and "NO_SIGNAL" not in self.flags:
            lines.append(f"At every G {nothing}: the worse responses have the larger gradients.")
        elif 2 <= self.g_cross < math.inf:
            lines.append(f"Up to G = {self.g_cross:.1f} {nothing}.")
        return lines + [f"{flag}: {FLAGS[flag]}." for flag in self.flags]

    def _size(self) -> list[str]:
        if "NO_SIGNAL" in self.flags:
            return ["No group size to advise: this pilot has no error that one could lower."]
        if self.g_int is None:
            return ["No best group size: the larger the better, as far as this pilot can tell."]
        if self.penalty is None:
            return [f"Use G = {self.g_int}, the best within the limits: without them, the larger the better."]
        if self.penalty > 0:
            percent = 100 * self.penalty
            share = f"{percent:.2g}" if percent < 10 else f"{percent:.0f}"
            more = f"it costs {share} % more than the best G without them"
            return [
                f"Use G = {self.g_int}, the best within the limits: {more}, where the optimum is {self.g_cont:.1f}."
            ]
        low, high = self.interval_5pct
        first, last = math.ceil(low), math.floor(high) if math.isfinite(high) else math.inf
        text = f"Any G from {first} to {last if last < math.inf else 'infinity'} costs at most 5 % more."
        return [f"Use G = {self.g_int}: the optimum is {self.g_cont:.1f}.", *([text] if first < last else [])]


def _shown(value: float) -> str:
    return f"{value:.1f}" if math.isfinite(value) else "infinity"


class Limits(NamedTuple):
    """What G may be, and what it costs: the arguments of `optimal_group_size`, checked."""

    N: int | None
    c_prompt: float
    c_response: float
    first: int
    last: int | None
    """The largest multiple within g_max."""
    step: int


def check_limits(
    function: str, N: Any, c_prompt: Any, c_response: Any, g_min: Any, g_max: Any, multiple_of: Any
) -> Limits:
    """The arguments of `optimal_group_size`, in the name of `function`."""
    prompt, response = (
        check_number(function, argument, price, "Give seconds, tokens or money.", least=0)
        for argument, price in (("c_prompt", c_prompt), ("c_response", c_response))
    )
    if prompt == response == 0:
        raise ValueError(complain(function, "c_response", "must be > 0 if c_prompt is 0", 0, "Something has to cost."))
    least = check_whole(function, "g_min", g_min, 2, "A leave-one-out mean needs two responses.")
    step = check_whole(function, "multiple_of", multiple_of, 1, "1 allows every G.")
    budget, most = (
        None if limit is None else check_whole(function, argument, limit, least, "It must leave room for g_min.")
        for argument, limit in (("N", N), ("g_max", g_max))
    )
    first = -(-least // step) * step
    if any(limit is not None and limit < first for limit in (budget, most)):
        raise ValueError(complain(function, "multiple_of", "must have a multiple within the limits", step, "Lower it."))
    return Limits(budget, prompt, response, first, None if most is None else most // step * step, step)


def optimal_group_size(
    constants: GradConstants,
    N: int | None = None,
    c_prompt: float = 0.0,
    c_response: float = 1.0,
    g_min: int = 2,
    g_max: int | None = None,
    multiple_of: int = 1,
) -> Advice:
    """argmin over G of (c_prompt + c_response G) [Vb + A/G + B2/(G(G-1))]: the error that a unit of cost buys.

    Args:
        constants: exact or estimated. Estimated with bootstrap, they give an interval.
        N: responses per update, if fixed: G is at most N, and the integer is chosen for n = N // G prompts, all N
            responses paid for. The real optimum does not depend on it.
        c_prompt, c_response: cost of another prompt (prefill, sandbox set-up) and of another response, same unit.
        g_min, g_max, multiple_of: what G may be.

    Raises ValueError for constants that are not finite, costs below 0 or both 0, and limits that leave no G.
    """
    name = "optimal_group_size"
    if not isinstance(constants, GradConstants):
        advice = "Make them with estimate_constants or exact_constants."
        raise TypeError(complain(name, "constants", "must be GradConstants", type(constants).__name__, advice))
    _check_constants(name, constants)
    limits = check_limits(name, N, c_prompt, c_response, g_min, g_max, multiple_of)
    cost = Cost(constants, limits.c_prompt, limits.c_response)
    cross = math.nan if constants.A0 is None else crossing(constants)
    if cost.silent:
        return Advice(
            g_cont=math.nan, g_int=None, penalty=None, interval_5pct=(math.nan, math.nan), ci=None, g_cross=cross,
            curve=(), flags=("NO_SIGNAL", *_flags(constants)[1:]),  # but for VB_NONPOSITIVE
        )  # fmt: skip
    best = cost.minimiser()
    free = cost.best_integer(best, 2, None, 1)
    chosen, penalty = _chosen(cost, best, free, limits)
    ci, loss = None, 0.0
    if constants.boot is not None and len(constants.boot):
        ci, loss = _spread(constants.boot, free, limits)
        if ci[0] == ci[1] or _few(constants):
            ci = None
    flags = _flags(constants, loss)
    wanted = cost.best_integer(best, limits.first, limits.last, limits.step)
    if limits.N is not None and (wanted is None or wanted > limits.N):
        flags.append("N_LT_G")
    sizes = sorted({*(1 << k for k in range(1, 9)), *(() if chosen is None else (chosen,))})
    least = cost(max(2.0, best if math.isfinite(best) else float(LARGE)))
    return Advice(
        g_cont=best, g_int=chosen, penalty=penalty, interval_5pct=cost.within(best, 1.05), ci=ci, g_cross=cross,
        curve=tuple((size, cost(size) / least) for size in sizes), flags=tuple(flags),
    )  # fmt: skip


def _check_constants(function: str, constants: GradConstants) -> None:
    for part in ("Vb", "A", "B2", "J2", "A0", "Aopt"):
        value = getattr(constants, part)
        if value is not None and not math.isfinite(value):
            raise ValueError(complain(function, "constants", f"must have a finite {part}", value, "Mend the pilot."))
    if constants.boot is not None and not constants.boot.isfinite().all():
        raise ValueError(complain(function, "constants", "must have finite boot", "other values", "Mend the pilot."))


def _few(constants: GradConstants) -> bool:
    return constants.n is not None and constants.n < _FEW_PROMPTS


def _flags(constants: GradConstants, loss: float = 0.0) -> list[str]:
    """What is to be said of advice from these constants; loss: what `_spread` says."""
    found = {
        "VB_NONPOSITIVE": constants.Vb <= 0,
        "PILOT_TOO_SMALL": loss > 0.05 or _few(constants),
        "SCORES_NOT_CENTRED": constants.off_centre is not None and constants.off_centre > 4,
        "SILENT_RATE_HIGH": constants.silent is not None and constants.silent > 0.5,
    }
    return [flag for flag, holds in found.items() if holds]


def _chosen(cost: Cost, best: float, free: int | None, limits: Limits) -> tuple[int | None, float | None]:
    """The integer within the limits, and what they cost."""
    ends = [limit for limit in (limits.last, limits.N) if limit is not None]
    if limits.N is None:
        chosen = cost.best_integer(best, limits.first, limits.last, limits.step)
    else:
        last = min(ends) // limits.step * limits.step
        chosen = cost.best_of_budget(limits.N, limits.first, last, limits.step)
    if chosen is None or free is None:
        return chosen, None
    paid = cost(chosen) if limits.N is None else cost.within_budget(chosen, limits.N)
    return chosen, max(0.0, paid / cost(free) - 1)


def _spread(boot: torch.Tensor, chosen: int | None, limits: Limits) -> tuple[tuple[float, float], float]:
    """5 % and 95 % of the best G over the pilots, and what 90 % of them would lose at most by the chosen one."""
    sizes, losses = [], []
    for vb, first, second, square, _ in boot.tolist():
        drawn = GradConstants(Vb=vb, A=first, B2=second, J2=square)
        cost = Cost(drawn, limits.c_prompt, limits.c_response)
        best = cost.minimiser()
        sizes.append(best)
        if not cost.silent:
            least = cost(max(2.0, best if math.isfinite(best) else float(LARGE)))
            losses.append(cost(float(chosen or LARGE)) / least - 1)
    sizes.sort()
    losses.sort()
    last = len(sizes) - 1
    ends = (sizes[round(0.05 * last)], sizes[round(0.95 * last)])
    return ends, losses[round(0.9 * (len(losses) - 1))] if losses else 0.0
