"""Bandits: M prompts with K answers under a linear-softmax policy and Bernoulli rewards, everything enumerable."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .arrays import check_number, check_whole, seeded


@dataclass(frozen=True, slots=True, eq=False)
class Atoms:
    """M prompts, K outcomes (a response and its reward) each; float64 but for the scores, which may be float32."""

    P: Tensor  # [M, K] probabilities
    R: Tensor  # [M, K] rewards
    S: Tensor  # [M, K, d] scores


def make_bandit(seed: int = 7, M: int = 8, K: int = 6, d: int = 8, eps: float = 0.35, qscale: float = 1.5) -> Atoms:
    """Atoms of a policy softmax(features @ theta): features shared by the prompts but for `eps`, Bernoulli rewards.

    Args:
        M, K, d: prompts, answers, parameters.
        eps: how far the prompts' features differ; 0 makes the prompts alike but for their rewards.
        qscale: spread of the success rates' logits.
    """
    name = "make_bandit"
    M, K, d = (check_whole(name, argument, n, 1, "Count from 1.") for argument, n in (("M", M), ("K", K), ("d", d)))
    eps, qscale = (check_number(name, argument, x, "Try 1.") for argument, x in (("eps", eps), ("qscale", qscale)))
    generator = seeded(name, seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    features = (draw(K, d) + eps * draw(M, K, d)) / d**0.5 * 2
    theta = draw(d)
    success = torch.sigmoid(qscale * (draw(K) + eps * draw(M, K)))  # [M, K]
    probabilities = torch.softmax(features @ theta, 1)
    scores = features - torch.einsum("mk,mkd->md", probabilities, features).unsqueeze(1)
    return with_bernoulli(probabilities, success, scores)


def with_bernoulli(P: Tensor, success: Tensor, S: Tensor) -> Atoms:
    """Each response as two atoms, rewarded by 1 or by 0."""
    return Atoms(
        torch.cat([P * success, P * (1 - success)], 1),
        torch.cat([torch.ones_like(P), torch.zeros_like(P)], 1),
        torch.cat([S, S], 1),
    )
