"""Tokens of one shape: what every provider is given, and the truth in float64."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..functional import per_token_logps
from ..functional_linear import linear_per_token_logps

EPSILON, EPSILON_HIGH, BETA = 0.2, 0.28, 0.04
CHECKED_ROWS = 48  # of the problem that is compared with float64: its vocabulary and width are those that are timed


@dataclass(frozen=True)
class Shape:
    """What a problem is made of: B sequences of T tokens over V columns; from H hidden features, or from logits."""

    batch: int
    length: int
    vocabulary: int
    dtype: str = "float32"
    hidden: int = 0  # 0: the loss starts from logits
    mixed: bool = False  # 30 % of the tokens masked, 40 % of the groups silent, no KL: as in a run; else all rows live
    frozen: bool = False  # the head takes no gradient

    @property
    def tokens(self) -> int:
        """B * T."""
        return self.batch * self.length

    @property
    def label(self) -> str:
        """The shape in a few words."""
        width = f" H={self.hidden}" if self.hidden else ""
        kind = (", realistic mix" if self.mixed else "") + (", frozen head" if self.frozen else "")
        return f"{self.dtype} N={self.tokens}{width} V={self.vocabulary}{kind}"

    def record(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    def checked(self) -> Shape:
        """A few rows of it, for the comparison with float64."""
        return replace(self, length=max(1, min(self.length, CHECKED_ROWS // self.batch)))


def dtype_of(shape: Shape) -> torch.dtype:
    """The dtype of its logits, or of its hidden states and weight."""
    dtype: torch.dtype = getattr(torch, shape.dtype)
    return dtype


class _Model(torch.autograd.Function):
    """Gives logits away as a model does, no leaf and no view; keeps their gradient, or drops it as soon as it comes."""

    @staticmethod
    def forward(ctx: Any, _parameter: Tensor, logits: Tensor, kept: list[Tensor] | None) -> Tensor:
        ctx.kept = kept
        return logits.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[None, None, None]:
        if ctx.kept is not None:
            ctx.kept[:] = [grads[0].clone()]
        return None, None, None


class Problem:
    """Inputs of the loss, clip and k3: drawn from a fixed seed, so that all providers and runs see the same."""

    def __init__(self, shape: Shape, device: torch.device | str = "cpu", *, keep: bool = False) -> None:
        self.shape, self.device = shape, torch.device(device)
        self._kept: list[Tensor] | None = [] if keep else None
        self._leaves: list[Tensor] = []
        generator = torch.Generator().manual_seed(0)
        # on a device by its own generator: gigabytes take longer to draw on the CPU than to time
        own = generator if self.device.type == "cpu" else torch.Generator(self.device).manual_seed(0)

        def normal(*size: int) -> Tensor:
            return torch.randn(*size, generator=own, device=self.device)

        batch, length, vocabulary = shape.batch, shape.length, shape.vocabulary
        where: dict[str, Any] = {"device": self.device, "dtype": dtype_of(shape)}
        self.ids = torch.randint(0, vocabulary, (batch, length), generator=generator).to(self.device)
        if shape.hidden:
            self.hidden = normal(batch, length, shape.hidden).to(**where)
            self.weight = (normal(vocabulary, shape.hidden) / shape.hidden**0.5).to(**where)
        else:
            self.source = torch.empty(batch, length, vocabulary, **where)
            for row in self.source:  # a sequence at a time: no float32 copy of them all
                row.copy_(normal(*row.shape) * 2)
            self.buffer = self.source.clone()
        self.parameter = torch.zeros(1, device=self.device, requires_grad=True)
        self.beta = 0.0 if shape.mixed else BETA
        self.advantages = torch.where(torch.arange(batch) % 2 == 0, 1.0, -0.5).to(self.device)
        self.mask = torch.ones(batch, length, device=self.device)
        if shape.mixed:
            live = torch.linspace(0.4, 1.0, batch, device=self.device) * length  # 70 % on average
            self.mask = (torch.arange(length, device=self.device) < live.unsqueeze(1)).float()
            self.advantages[torch.arange(batch, device=self.device) // 2 % 5 < 2] = 0.0  # groups of two
        self._with_logps(normal(batch, length))

    def _with_logps(self, noise: Tensor) -> None:
        """Old and reference log-probs near the policy's own."""
        with torch.no_grad():
            if self.shape.hidden:
                logps = linear_per_token_logps(self.hidden, self.weight, self.ids).logps
            else:
                logps = per_token_logps(self.source, self.ids).logps
        # one token in seven far beyond the clip, none near its edge, where an imprecise log-prob decides all or nothing
        gap = torch.where(noise.abs() > 1.5, 0.4, 0.1).copysign(noise)
        self.old, self.ref = logps + gap, logps - 0.1 * noise

    def fresh(self) -> None:
        """Undo what a step did to its inputs, and let go of its gradients."""
        self._leaves = []
        if not self.shape.hidden:
            self.buffer.copy_(self.source)

    def logits(self, buffer: Tensor | None = None) -> Tensor:
        """Logits [B, T, V] as a model gives them, or another buffer of them with rows behind the last token."""
        buffer = self.buffer if buffer is None else buffer
        made: Tensor = _Model.apply(self.parameter, buffer, self._kept)  # type: ignore[no-untyped-call]
        return made

    def leaves(self) -> tuple[Tensor, Tensor]:
        """Hidden states [B, T, H] and the head's weight [V, H]; without a gradient if it is frozen."""
        self._leaves = [
            self.hidden.detach().requires_grad_(), self.weight.detach().requires_grad_(not self.shape.frozen),
        ]  # fmt: skip
        return self._leaves[0], self._leaves[1]

    def gradients(self) -> list[Tensor]:
        """Of the last backward: the logits', or those of hidden states and weight."""
        if not self.shape.hidden:
            return [grad[:, : self.shape.length] for grad in self._kept or []]
        return [leaf.grad for leaf in self._leaves if leaf.grad is not None]

    def objective(self, logps: Tensor) -> Tensor:
        """Clip and k3 on log-probs [B, T], as a trainer writes it in ten lines."""
        sides = (self.old, self.ref, self.mask, self.advantages.unsqueeze(1))
        old, ref, mask, gain = (side.to(logps) for side in sides)
        ratio = torch.exp(logps - old)
        loss = -torch.minimum(ratio * gain, ratio.clamp(1 - EPSILON, 1 + EPSILON_HIGH) * gain)
        if self.beta:
            d = ref - logps
            loss = loss + self.beta * (torch.exp(d) - d - 1)
        return (loss * mask).sum() / mask.sum()

    def truth(self) -> list[Tensor]:
        """The gradients in float64."""
        if self.shape.hidden:
            hidden, weight = (x.double().requires_grad_() for x in (self.hidden, self.weight))
            leaves, logits = [hidden, weight], hidden @ weight.t()
        else:
            logits = self.source.double().requires_grad_()
            leaves = [logits]
        logps = logits.log_softmax(-1).gather(-1, self.ids.unsqueeze(-1)).squeeze(-1)
        wanted = leaves[: 1 if self.shape.frozen else None]
        return list(torch.autograd.grad(self.objective(logps), wanted))
