"""What the functions return."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class LogpsOutput(NamedTuple):
    """Per-token log-probabilities, in nats, shaped like the targets; 0 at dead rows."""

    logps: Tensor
    """log softmax(z)[target], differentiable."""
    entropy: Tensor | None
    """-sum p log p of softmax(z), differentiable; None unless asked for."""
    lse: Tensor
    """log-sum-exp of the transformed logits z, not differentiable."""


class PerToken(NamedTuple):
    """Detached token tensors behind one loss, 0 at dead tokens."""

    logps: Tensor
    """log-probabilities under the policy, in nats."""
    entropy: Tensor | None
    """Entropy in nats; None unless the config asks for it."""
    loss: Tensor
    """Policy term times its weight, plus beta * KL, before aggregation."""
    kl: Tensor | None
    """The KL term, after bias correction; None when beta is 0."""
    ratio: Tensor
    """exp(logp - old), of the token or of its sequence, before any clip."""


class GRPOLossOutput(NamedTuple):
    """A loss and what to log with it."""

    loss: Tensor
    """0-d, differentiable."""
    metrics: dict[str, Tensor]
    """0-d tensors on the loss's device, detached."""
    per_token: PerToken | None
    """Token tensors, if `return_per_token`."""
