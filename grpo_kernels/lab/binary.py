"""What a group's normalisation does to a prompt with success rate p: sums over k ~ Binomial(G, p), exact.

For rewards 0 and 1 every advantage that treats responses alike is (A+(k), A-(k)), and E[estimate | x] = w_G(p) grad p.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..checks import check_choice, complain
from .arrays import check_number, check_whole, like, tensor64

SCHEMES = ("none", "loo", "mean", "std0", "std1", "maxrl", "maxrl_raw")


def binary_advantages(scheme: str, G: int, eps: float = 0.0) -> tuple[Tensor, Tensor]:
    """(A+, A-) of the successes and failures of a group with k = 0 ... G successes, float64 `[G + 1]` each.

    Args:
        scheme: "none": r. "mean": r - mean. "loo": r - mean of the others. "std0", "std1": (r - mean) / (std + eps),
            ddof 0 (NumPy's) or 1 (torch's, TRL's). "maxrl": (r - mean) / mean. "maxrl_raw": r / mean (arXiv
            2602.02710).
        G: responses, at least 2.

    A group of equal rewards has advantage 0 but for "none" and "maxrl_raw". Raises ValueError.
    """
    return _advantages("binary_advantages", scheme, G, eps)


def _advantages(function: str, scheme: str, G: Any, eps: Any) -> tuple[Tensor, Tensor]:
    check_choice(function, "scheme", scheme, SCHEMES)
    G = check_whole(function, "G", G, 2, "One response has nothing to be compared with.")
    eps = check_number(function, "eps", eps, "Leave it out.", least=0)
    k = torch.arange(G + 1, dtype=torch.float64)
    mean = k / G
    if scheme == "none":
        return torch.ones_like(k), torch.zeros_like(k)
    if scheme == "maxrl_raw":
        return torch.where(k > 0, 1 / mean.clamp(min=1 / G), 0.0), torch.zeros_like(k)
    mixed = (k > 0) & (k < G)
    scale = torch.ones_like(k)
    if scheme == "loo":
        scale = scale * ((G - 1) / G)
    elif scheme == "maxrl":
        scale = mean.clamp(min=1 / G)
    elif scheme.startswith("std"):
        std = (mean * (1 - mean)).sqrt()
        std = std * (G / (G - 1)) ** 0.5 if scheme == "std1" else std
        scale = torch.where(mixed, std + eps, 1.0)
    return torch.where(mixed, (1 - mean) / scale, 0.0), torch.where(mixed, -mean / scale, 0.0)


def binary_weight(scheme: str, G: int, p: Any, eps: float = 0.0) -> Any:
    """w_G(p) = E[k A+ / (G p) - (G - k) A- / (G (1 - p))], the weight of grad p in the expected estimate.

    p: success rates in (0, 1), a number or an array. The others: see `binary_advantages`.
    """
    plus, minus = _advantages("binary_weight", scheme, G, eps)
    rate, k, chance = _outcomes("binary_weight", G, p)
    value = k * plus / (G * rate) - (G - k) * minus / (G * (1 - rate))
    return like((chance * value).sum(-1), p)


def binary_second_moment(scheme: str, G: int, p: Any, grad_sq: Any, m1: Any, m0: Any, eps: float = 0.0) -> Any:
    """E|estimate|^2 given the prompt, of (1/G) sum A_i s_i.

    Args:
        grad_sq: |grad p|^2.
        m1, m0: E[|s|^2 | r = 1] and E[|s|^2 | r = 0].
        The others: see `binary_weight`. Numbers or arrays, which broadcast with p.
    """
    name = "binary_second_moment"
    plus, minus = _advantages(name, scheme, G, eps)
    rate, k, chance = _outcomes(name, G, p)
    norm, ones, zeros = (
        _squares(name, argument, value) for argument, value in (("grad_sq", grad_sq), ("m1", m1), ("m0", m0))
    )
    left = G - k
    value = plus**2 * (k * ones + k * (k - 1) * norm / rate**2)
    value = value + minus**2 * (left * zeros + left * (left - 1) * norm / (1 - rate) ** 2)
    value = value - 2 * plus * minus * k * left * norm / (rate * (1 - rate))
    return like((chance * value).sum(-1) / G**2, p, grad_sq, m1, m0)


def _squares(function: str, argument: str, value: Any) -> Tensor:
    """Mean squares, with an axis for k."""
    found = tensor64(function, argument, value)
    if not ((found >= 0) & found.isfinite()).all():
        raise ValueError(complain(function, argument, "must be finite and at least 0", value, "It is a square."))
    return found.unsqueeze(-1)


def silent_rate(p: Any, G: Any) -> Any:
    """p^G + (1 - p)^G: how often all G responses get the same reward, and the group teaches nothing.

    Args:
        p: success rates in [0, 1].
        G: responses, whole numbers of at least 1.
        Numbers or arrays, which broadcast. Raises ValueError for others.
    """
    name = "silent_rate"
    rate, size = tensor64(name, "p", p), tensor64(name, "G", G)
    if not ((rate >= 0) & (rate <= 1)).all():
        raise ValueError(complain(name, "p", "must be in [0, 1]", p, "It is a probability."))
    if not ((size >= 1) & (size == size.floor()) & size.isfinite()).all():
        raise ValueError(complain(name, "G", "must be whole numbers >= 1", G, "It counts responses."))
    return like(rate**size + (1 - rate) ** size, p, G)


def _outcomes(function: str, G: int, p: Any) -> tuple[Tensor, Tensor, Tensor]:
    """p with an axis for k, k itself, and the chance of each."""
    rate = tensor64(function, "p", p).unsqueeze(-1)
    if not ((rate > 0) & (rate < 1)).all():
        raise ValueError(complain(function, "p", "must be in (0, 1)", p, "grad p has no weight where nothing varies."))
    k = torch.arange(G + 1, dtype=torch.float64, device=rate.device)
    ways = torch.lgamma(torch.tensor(G + 1.0, dtype=torch.float64)) - torch.lgamma(k + 1) - torch.lgamma(G - k + 1)
    return rate, k, torch.exp(ways + k * rate.log() + (G - k) * torch.log1p(-rate))
