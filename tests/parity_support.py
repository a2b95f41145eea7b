"""Batches for the parity tests, and the comparison itself: loss, gradient and metrics in float64 to 1e-9.

The other project's code gets log-probabilities (and entropies) that plain torch takes from the logits; `gk.grpo_loss`
gets the logits. Equal gradients of the logits then mean equal gradients of the log-probabilities, and of the entropies.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import hypothesis
import torch
from parity_projects import wide
from torch import Tensor

import grpo_kernels as gk

RTOL = 1e-9
FLOOR = 0.01
"""Every drawn loss is further from 0 than this: 0 == 0 proves nothing."""

draws = hypothesis.settings(derandomize=True, deadline=None, database=None, max_examples=150)
"""The same draws on every machine; a project's test asks for more where it has more options."""


@dataclass(frozen=True)
class Draw:
    """One batch `[B, T]` in float64: holes in the mask, an old policy and a sampler that are not the new policy."""

    logits: Tensor
    ids: Tensor
    mask: Tensor  # int64: a count with + 1e-8 stays the count in float32, to which the projects' code takes it
    advantages: Tensor  # [B], or [B, T]
    old: Tensor
    ref: Tensor
    rollout: Tensor

    @property
    def lengths(self) -> Tensor:
        """Live tokens of each sequence."""
        return self.mask.sum(1)

    @property
    def live(self) -> int:
        """Live tokens."""
        return int(self.mask.sum())

    @property
    def sequences(self) -> int:
        """Sequences with a live token."""
        return int((self.lengths > 0).sum())

    def token_advantages(self) -> Tensor:
        """The advantages as `[B, T]`."""
        return self.advantages.reshape(len(self.ids), -1).expand(self.ids.shape)

    def logps(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """`(logps, entropy)` of logits, differentiable."""
        log_p = logits.log_softmax(-1)
        return log_p.gather(-1, self.ids[..., None]).squeeze(-1), -(log_p.exp() * log_p).sum(-1)


def draw(
    seed: int,
    *,
    off_policy: float = 0.4,
    reference: float = 0.6,
    token_advantages: bool = False,
    empty_rows: bool = False,
    rows: int = 0,
) -> Draw:
    """A batch from its seed.

    `off_policy` and `reference` are how far the logits of the old policy and of the reference are off, `empty_rows`
    allows sequences without a live token.
    """
    rng = torch.Generator().manual_seed(seed)

    def integer(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=rng))

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng, dtype=torch.float64)

    b, t, v = rows or integer(2, 5), integer(2, 6), integer(2, 5)
    logits = (normal(b, t, v) * 1.5).log_softmax(-1)  # log-probabilities of a small vocabulary, as any logits are
    ids = torch.randint(0, v, (b, t), generator=rng)
    lengths = torch.randint(1, t + 1, (b, 1), generator=rng)
    mask = (torch.arange(t) < lengths) & (torch.rand(b, t, generator=rng) > 0.2)
    first = torch.zeros(b, dtype=torch.bool) if empty_rows else mask.sum(1) == 0
    mask[:, 0] |= first
    mask[integer(0, b - 1), integer(0, t - 1)] = True

    def near(other: Tensor, spread: float) -> Tensor:
        return (other + spread * normal(b, t, v)).log_softmax(-1)

    def scored(other: Tensor) -> Tensor:
        return other.gather(-1, ids[..., None]).squeeze(-1)

    advantages = normal(b, t if token_advantages else 1) + 0.3
    advantages = torch.where(torch.rand(advantages.shape, generator=rng) < 0.1, 0.0, advantages)
    old = near(logits, off_policy)
    return Draw(
        logits, ids, mask.to(torch.int64), advantages if token_advantages else advantages[:, 0],
        old=scored(old), ref=scored(near(logits, reference)), rollout=scored(near(old, 0.4)),
    )  # fmt: skip


@contextlib.contextmanager
def default_float64() -> Iterator[None]:
    """Numbers and lists become float64: some projects make tensors of their options."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@dataclass(frozen=True)
class Result:
    """What one implementation makes of a draw."""

    loss: Tensor
    grad: Tensor  # of the logits
    metrics: Mapping[str, Any]


Theirs = Callable[[Draw, Tensor, Tensor], tuple[Tensor, Mapping[str, Any]]]
"""`(draw, logps, entropy)` -> `(loss, metrics)` by the other project's code."""


def run_theirs(batch: Draw, theirs: Theirs) -> Result:
    """The other project's code on log-probabilities that never leave float64."""
    leaf = batch.logits.clone().requires_grad_()
    logps, entropy = batch.logps(leaf)
    loss, metrics = theirs(batch, wide(logps), wide(entropy))
    (grad,) = torch.autograd.grad(loss, leaf, allow_unused=True, materialize_grads=True)
    return Result(loss.detach().as_subclass(Tensor), grad.as_subclass(Tensor), metrics)


def run_ours(batch: Draw, config: gk.GRPOLossConfig, **arguments: Any) -> tuple[Result, Any]:
    """`gk.grpo_loss` of the draw, and its per-token results."""
    leaf = batch.logits.clone().requires_grad_()
    arguments = {"advantages": batch.advantages} | arguments
    out = gk.grpo_loss(
        leaf, batch.ids, config=config, completion_mask=batch.mask, return_per_token=True, **arguments
    )  # fmt: skip
    (grad,) = torch.autograd.grad(out.loss, leaf)
    return Result(out.loss.detach(), grad, out.metrics), out.per_token


def loud(theirs: Theirs, seed: int, *, tokens: int = 1, **shape: Any) -> tuple[Draw, Result]:
    """The first batch after a seed with at least so many tokens, whose loss is far from 0."""
    for attempt in range(50):
        batch = draw(seed * 50 + attempt, **shape)
        if batch.live < tokens:
            continue
        result = run_theirs(batch, theirs)
        if abs(result.loss) > 2 * FLOOR:
            return batch, result
    raise AssertionError(f"no loss above {FLOOR} in 50 batches of seed {seed}: these options leave nothing to compare")


def assert_equal(ours: Any, theirs: Any, what: str, rtol: float = RTOL) -> None:
    """Equal to `rtol` of the largest value."""
    ours, theirs = (torch.as_tensor(x, dtype=torch.float64).as_subclass(Tensor) for x in (ours, theirs))
    assert ours.shape == theirs.shape, f"{what}: {list(ours.shape)} and {list(theirs.shape)}"
    assert torch.isfinite(theirs).all(), f"{what}: {theirs}"
    worst = (ours - theirs).abs().max()
    assert worst <= rtol * theirs.abs().max() + 1e-15, f"{what}: {ours} is not {theirs}"


def assert_agree(ours: Result, theirs: Result, names: Mapping[str, str], where: str = "", rtol: float = RTOL) -> None:
    """Loss, gradient and the metrics of `names` (theirs -> ours) agree; every metric of theirs is named there."""
    assert abs(theirs.loss) > FLOOR, where
    assert_equal(ours.loss, theirs.loss, f"{where} loss", rtol)
    assert_equal(ours.grad, theirs.grad, f"{where} gradient", rtol)
    assert set(theirs.metrics) <= set(names), set(theirs.metrics) - set(names)
    for name, value in theirs.metrics.items():
        assert_equal(ours.metrics[names[name]], value, f"{where} {name}", rtol)
