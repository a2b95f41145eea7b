"""Which gradient each placement of the KL has in expectation, by enumeration over a vocabulary of five, on-policy."""

from __future__ import annotations

import pytest
import torch

import grpo_kernels as gk

V = 5
GENERATOR = torch.Generator().manual_seed(4)
THETA = torch.randn(V, dtype=torch.float64, generator=GENERATOR)
REF = torch.log_softmax(torch.randn(V, dtype=torch.float64, generator=GENERATOR), 0)
NONE = torch.zeros(V, dtype=torch.float64)


def exact(forward: bool) -> torch.Tensor:
    """Gradient of KL(ref || pi) or KL(pi || ref) in the logits."""
    theta = THETA.clone().requires_grad_()
    logp = torch.log_softmax(theta, 0)
    kl = (REF.exp() * (REF - logp)).sum() if forward else (logp.exp() * (logp - REF)).sum()
    (grad,) = torch.autograd.grad(kl, theta)
    return grad


def expected_gradient(advantages: torch.Tensor | None = None, **options: object) -> torch.Tensor:
    """The loss of every token, each weighted by its probability through the weight of the rollout."""
    theta = THETA.clone().requires_grad_()
    logp = torch.log_softmax(THETA, 0)
    config = gk.GRPOLossConfig(aggregation="token_sum", kl_weighted_by_rollout=True, **options)
    loss = gk.grpo_loss(
        theta.expand(V, 1, V),
        torch.arange(V)[:, None],
        config=config,
        advantages=NONE if advantages is None else advantages,
        ref_per_token_logps=REF[:, None],
        importance_sampling_ratio=logp.exp()[:, None],
    ).loss
    (grad,) = torch.autograd.grad(loss, theta)
    return grad


REVERSE, FORWARD = exact(forward=False), exact(forward=True)
PLACEMENTS = {
    "k1": ({"kl_estimator": "k1"}, NONE),
    "k2": ({"kl_estimator": "k2"}, REVERSE),
    "k3": ({"kl_estimator": "k3"}, FORWARD),
    "k3 times a differentiable ratio": ({"kl_estimator": "k3", "use_bias_correction_kl": True}, REVERSE),
    "k1 times a differentiable ratio": ({"kl_estimator": "k1", "use_bias_correction_kl": True}, REVERSE),
    **{f"{name}+": ({"kl_estimator": f"{name}+"}, REVERSE) for name in ("k1", "abs", "k2", "k3")},
}


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_the_expected_gradient_of_a_kl_in_the_loss(placement: str) -> None:
    options, truth = PLACEMENTS[placement]
    torch.testing.assert_close(expected_gradient(beta=1.0, **options), truth, rtol=1e-12, atol=1e-12)


def test_k1_in_the_reward_is_the_reverse_kl() -> None:
    penalty = torch.log_softmax(THETA, 0) - REF
    for loss_type in ("gpg", "dapo"):
        got = expected_gradient(-penalty, loss_type=loss_type)
        torch.testing.assert_close(got, REVERSE, rtol=1e-12, atol=1e-12)


def test_the_two_directions_differ() -> None:
    assert (REVERSE - FORWARD).norm() > 0.2 * REVERSE.norm()
