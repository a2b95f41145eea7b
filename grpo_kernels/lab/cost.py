"""What a unit of cost buys at each group size: (c_p + c_r G) [Vb + A/G + B2/(G(G-1))], and where it is least."""

from __future__ import annotations

import math

from .constants import GradConstants

LARGE = 1 << 20
"""Stands for infinity where the cost has no minimum."""
_UNBOUNDED = 1 << 53  # a float beyond it is no certain integer


class Cost:
    """The cost of a gradient times its error, convex in G > 1 for constants >= 0; in units of its largest parts."""

    def __init__(self, constants: GradConstants, c_prompt: float, c_response: float) -> None:
        # an estimate below 0 is noise around something that is not
        parts = [max(value, 0.0) for value in (constants.Vb, constants.A, constants.B2)]
        unit, price = max(parts), max(c_prompt, c_response)
        self.silent = unit == 0
        """There is no error, whatever G is."""
        self.vb, self.a, self.b2 = parts if self.silent else [part / unit for part in parts]
        self.prompt, self.response = c_prompt / price, c_response / price

    def error(self, G: float) -> float:
        """Of one prompt."""
        second = self.b2 / (G * (G - 1)) if self.b2 else 0.0
        return self.vb + self.a / G + second

    def __call__(self, G: float) -> float:
        """Cost times error of one prompt."""
        return (self.prompt + self.response * G) * self.error(G)

    def within_budget(self, G: int, N: int) -> float:
        """The same when N responses are paid for, and the N // G prompts leave some of them over."""
        return (self.prompt + self.response * (N / (N // G))) * self.error(G)

    def _slope(self, G: float) -> float:
        second = self.b2 * (2 * G - 1) / (G * (G - 1)) / (G * (G - 1)) if self.b2 else 0.0
        return self.response * self.error(G) - (self.prompt + self.response * G) * (self.a / (G * G) + second)

    def minimiser(self) -> float:
        """The best real G >= 1; inf where the error of more responses keeps falling."""
        if self.vb == 0 or self.response == 0:
            return math.inf
        if self.prompt == 0:
            best = 1 + math.sqrt(self.b2 / self.vb)
            return best if best < _UNBOUNDED else math.inf
        low, high = 1 + 1e-9, 2.0
        if self._slope(low) >= 0:
            return 1.0
        while self._slope(high) < 0:
            high *= 2
            if high > _UNBOUNDED:
                return math.inf
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

    def best_of_budget(self, N: int, first: int, last: int, step: int) -> int:
        """The best multiple of `step` in [first, last] for n = N // G prompts.

        Only the largest G of each n is in question: of two with the same n it has the smaller error, at one price.
        """
        candidates = []
        size = last
        while size >= first:
            candidates.append(size)
            prompts = N // size + 1
            size = N // prompts // step * step
        return min(candidates, key=lambda G: self.within_budget(G, N))

    def within(self, best: float, factor: float) -> tuple[float, float]:
        """The interval of G >= 2 that costs at most `factor` of the best of them."""
        inside = max(2.0, best if math.isfinite(best) else float(LARGE))
        limit = factor * self(inside)
        low = 2.0 if self(2.0) <= limit else self._edge(limit, inside, 2.0)
        outside = 2 * inside
        while self(outside) <= limit:
            outside *= 2
            if outside > _UNBOUNDED:
                return low, math.inf
        return low, self._edge(limit, inside, outside)

    def _edge(self, limit: float, inside: float, outside: float) -> float:
        """Where the cost passes the limit between a G within it and one without."""
        for _ in range(100):
            middle = (inside + outside) / 2
            inside, outside = (middle, outside) if self(middle) <= limit else (inside, middle)
        return inside
