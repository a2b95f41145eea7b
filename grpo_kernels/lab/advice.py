"""The group size that makes the most of a budget: N MSE = Vb G + A + B2/(G - 1), smallest at G = 1 + sqrt(B2 / Vb)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ..checks import check_count, complain
from .constants import GradConstants, crossing

FLAGS = {
    "VB_NONPOSITIVE": "prompts did not differ in this pilot: larger groups look better without end",
    "PILOT_TOO_SMALL": "other draws of this pilot would have advised otherwise, at a price: take more prompts",
    "SCORES_NOT_CENTRED": "E[s|x] is not 0 (length normalisation, clipping, truncated sampling): the advice for the "
    "leave-one-out mean holds, oracle, vanilla and g_cross do not",
    "SILENT_RATE_HIGH": "more than half of the groups had equal rewards: the constants rest on the others",
    "N_LT_G": "the budget is smaller than one group of the best size",
}
_LARGEST = 1 << 20  # where every curve in G has turned, short of Vb <= 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """What to do, and how sure."""

    g_cont: float
    """The minimiser over real G; inf where nothing bounds it."""
    g_int: int | None
    """The best integer (multiple) within the limits; None where nothing bounds it."""
    interval_5pct: tuple[float, float]
    """Every G in here costs at most 5 % more."""
    ci: tuple[float, float] | None
    """5 % and 95 % of g_cont over bootstrap pilots. Approximate: it covered 82 % where 90 % was asked."""
    g_cross: float
    """Up to this G no baseline at all is better than the group mean; inf: at every G; NaN without A0."""
    curve: tuple[tuple[int, float], ...]
    """(G, cost x MSE) at powers of two and at g_int; in units of the best."""
    flags: tuple[str, ...]
    """Keys of `FLAGS`."""

    def why(self) -> list[str]:
        """The advice in sentences."""
        if self.g_int is None:
            lines = ["No best group size: the larger the better, as far as this pilot can tell."]
        else:
            low, high = self.interval_5pct
            lines = [f"Use G = {self.g_int}: the optimum is {self.g_cont:.1f}."]
            lines.append(f"Any G from {math.ceil(low)} to {_shown(high)} costs at most 5 % more.")
        if self.ci is not None:
            lines.append(f"From other pilots of this size: {self.ci[0]:.1f} to {_shown(self.ci[1])}.")
        if self.g_cross == math.inf:
            lines.append("No baseline beats the group mean at every G: the worse responses have the larger gradients.")
        elif self.g_cross >= 2:
            lines.append(f"Up to G = {self.g_cross:.1f} no baseline beats the group mean.")
        return lines + [f"{flag}: {FLAGS[flag]}." for flag in self.flags]


def _shown(value: float) -> str:
    return f"{math.floor(value)}" if math.isfinite(value) else "infinity"


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
        N: responses per update, if fixed: G is at most N. The optimum itself does not depend on it.
        c_prompt, c_response: cost of another prompt (prefill, sandbox set-up) and of another response, same unit.
        g_min, g_max, multiple_of: what G may be.

    Raises ValueError for costs below 0 or both 0, and limits that leave no G.
    """
    name = "optimal_group_size"
    check_count(name, "g_min", g_min, 2, "A leave-one-out mean needs two responses.")
    check_count(name, "multiple_of", multiple_of, 1, "1 allows every G.")
    for argument, price in (("c_prompt", c_prompt), ("c_response", c_response)):
        if not (price >= 0 and math.isfinite(price)):
            raise ValueError(complain(name, argument, "must be at least 0", price, "Give seconds, tokens or money."))
    if c_prompt == c_response == 0:
        raise ValueError(complain(name, "c_response", "must be > 0 if c_prompt is 0", 0, "Something has to cost."))
    for argument, limit in (("N", N), ("g_max", g_max)):
        if limit is not None:
            check_count(name, argument, limit, g_min, "It must leave room for g_min.")
    first = -(-g_min // multiple_of) * multiple_of
    limits = [limit // multiple_of * multiple_of for limit in (g_max, N) if limit is not None]
    last = min(limits, default=None)
    if last is not None and last < first:
        raise ValueError(
            complain(name, "multiple_of", "must have a multiple within the limits", multiple_of, "Lower it.")
        )

    cost = _Cost(constants, c_prompt, c_response)
    best = cost.minimiser()
    free = cost.best_integer(best, first, None, multiple_of)
    chosen = cost.best_integer(best, first, last, multiple_of)
    flags = []
    if constants.Vb <= 0:
        flags.append("VB_NONPOSITIVE")
    ci = None
    if constants.boot is not None and len(constants.boot):
        ci, loss = _spread(constants.boot, cost.best_integer(best, 2, None, 1), c_prompt, c_response)
        if loss > 0.05:
            flags.append("PILOT_TOO_SMALL")
    if constants.off_centre is not None and constants.off_centre > 4:
        flags.append("SCORES_NOT_CENTRED")
    if constants.silent is not None and constants.silent > 0.5:
        flags.append("SILENT_RATE_HIGH")
    if N is not None and (free is None or free > N):
        flags.append("N_LT_G")
    sizes = sorted({*(1 << k for k in range(1, 9)), *(() if chosen is None else (chosen,))})
    least = cost(best) if math.isfinite(best) else cost(float(_LARGEST))
    return Advice(
        g_cont=best, g_int=chosen, interval_5pct=cost.within(best, 1.05), ci=ci,
        g_cross=math.nan if constants.A0 is None else crossing(constants),
        curve=tuple((size, cost(size) / least) for size in sizes), flags=tuple(flags),
    )  # fmt: skip


class _Cost:
    """(c_p + c_r G) [Vb + A/G + B2/(G(G-1))], convex in G > 1 for constants >= 0."""

    def __init__(self, constants: GradConstants, c_prompt: float, c_response: float) -> None:
        # an estimate below 0 is noise around something that is not
        self.vb, self.a, self.b2 = (max(value, 0.0) for value in (constants.Vb, constants.A, constants.B2))
        self.prompt, self.response = c_prompt, c_response

    def __call__(self, G: float) -> float:
        error = self.vb + self.a / G
        if self.b2:
            error += self.b2 / (G * (G - 1))
        return (self.prompt + self.response * G) * error

    def _slope(self, G: float) -> float:
        second = self.b2 * (2 * G - 1) / (G * (G - 1)) ** 2 if self.b2 else 0.0
        error = self.vb + self.a / G + (self.b2 / (G * (G - 1)) if self.b2 else 0.0)
        return self.response * error - (self.prompt + self.response * G) * (self.a / G**2 + second)

    def minimiser(self) -> float:
        """The best real G > 1; inf where the error of more responses keeps falling."""
        if self.vb == 0 or self.response == 0:
            return math.inf
        if self.prompt == 0:
            return 1 + math.sqrt(self.b2 / self.vb)
        low, high = 1 + 1e-9, 2.0
        if self._slope(low) >= 0:
            return 1.0
        while self._slope(high) < 0:
            high *= 2
        for _ in range(200):
            middle = (low + high) / 2
            low, high = (middle, high) if self._slope(middle) < 0 else (low, middle)
        return (low + high) / 2

    def best_integer(self, best: float, first: int, last: int | None, step: int) -> int | None:
        """The best multiple of `step` in [first, last]: next to the real one, since the cost is convex."""
        if not math.isfinite(best):
            return last
        floor = max(first, math.floor(best) // step * step)
        candidates = [floor, floor + step]
        if last is not None:
            candidates = [min(candidate, last) for candidate in candidates]
        return min(candidates, key=self)

    def within(self, best: float, factor: float) -> tuple[float, float]:
        """The interval of G >= 2 that costs at most `factor` of the best of them."""
        best = max(best, 2.0)
        limit = factor * (self(best) if math.isfinite(best) else self(float(_LARGEST)))
        low, inside = 2.0, min(best, float(_LARGEST))
        if self(low) > limit:
            low = _edge(self, limit, inside, low)
        if self(float(_LARGEST)) <= limit:
            return low, math.inf
        return low, _edge(self, limit, inside, float(_LARGEST))


def _edge(cost: _Cost, limit: float, inside: float, outside: float) -> float:
    """Where the cost passes the limit between a G within it and one without."""
    for _ in range(100):
        middle = (inside + outside) / 2
        inside, outside = (middle, outside) if cost(middle) <= limit else (inside, middle)
    return inside


def _spread(
    boot: torch.Tensor, chosen: int | None, c_prompt: float, c_response: float
) -> tuple[tuple[float, float], float]:
    """5 % and 95 % of the best G over the pilots, and what 90 % of them would lose at most by the chosen one."""
    sizes, losses = [], []
    for vb, first, second, square, _ in boot.tolist():
        cost = _Cost(GradConstants(Vb=vb, A=first, B2=second, J2=square), c_prompt, c_response)
        best = cost.minimiser()
        sizes.append(best)
        least = cost(max(2.0, min(best, float(_LARGEST))))
        if least > 0:
            losses.append(cost(float(chosen or _LARGEST)) / least - 1)
    sizes.sort()
    losses.sort()
    last = len(sizes) - 1
    ends = (sizes[round(0.05 * last)], sizes[round(0.95 * last)])
    return ends, losses[round(0.9 * (len(losses) - 1))] if losses else 0.0
