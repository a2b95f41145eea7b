"""Who is compared: ours and its rivals, each as a function that makes one forward of the loss.

A rival that is not installed, or does not run on the device, is left out with the reason. Each says in which precision
its logits meet the softmax.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from ..config import GRPOLossConfig
from ..functional import grpo_loss, per_token_logps
from ..functional_linear import linear_grpo_loss
from .problems import EPSILON, EPSILON_HIGH, Problem

Loss = Callable[[], Tensor]  # a forward, with a graph behind it


@dataclass(frozen=True)
class Provider:
    """One way to the loss, or, `bare`, work that bounds it and has no loss."""

    name: str
    build: Callable[[Problem], Loss]
    precision: str = "float32"  # of the logits in the softmax
    needs: str = ""  # a package, or torch's own function
    cuda: bool = False  # runs on CUDA devices alone
    bare: bool = False
    early: bool = False  # its forward makes the gradient already: only the whole step compares with others

    def has(self, phase: str) -> bool:
        """Whether it takes part in a phase, `forward`, `backward` or `both`."""
        return phase == "both" or not (self.bare or self.early)

    def missing(self, device: torch.device) -> str | None:
        """Why it cannot run here; None if it can."""
        if self.needs.startswith("F.") and not hasattr(F, self.needs[2:]):
            return f"torch {torch.__version__} has no {self.needs}"
        if self.needs and not self.needs.startswith("F.") and importlib.util.find_spec(self.needs) is None:
            return f"{self.needs} is not installed"
        return "runs on CUDA devices alone" if self.cuda and device.type != "cuda" else None


def _config(problem: Problem, **changes: Any) -> GRPOLossConfig:
    return GRPOLossConfig(epsilon=EPSILON, epsilon_high=EPSILON_HIGH, beta=problem.beta, **changes)


def _sides(problem: Problem) -> dict[str, Any]:
    return {
        "advantages": problem.advantages, "completion_mask": problem.mask, "old_per_token_logps": problem.old,
        "ref_per_token_logps": problem.ref if problem.beta else None,
    }  # fmt: skip


# --- from logits ------------------------------------------------------------------------------------------------------


def _ours(impl: str = "auto", *, inplace: bool = False, entropy: bool = False) -> Callable[[Problem], Loss]:
    def build(problem: Problem) -> Loss:
        options = _sides(problem) | {"config": _config(problem, entropy=entropy), "inplace": inplace, "impl": impl}
        return lambda: grpo_loss(problem.logits(), problem.ids, **options).loss

    return build


def _our_logps(compiled: bool) -> Callable[[Problem], Loss]:
    def build(problem: Problem) -> Loss:
        objective = torch.compile(problem.objective) if compiled else problem.objective
        return lambda: objective(per_token_logps(problem.logits(), problem.ids).logps)

    return build


def _eager_loss(problem: Problem, logits: Tensor) -> Tensor:
    return problem.objective(logits.float().log_softmax(-1).gather(-1, problem.ids.unsqueeze(-1)).squeeze(-1))


def _eager(problem: Problem) -> Loss:
    return lambda: _eager_loss(problem, problem.logits())


def _compiled(problem: Problem) -> Loss:
    loss = torch.compile(_eager_loss)
    return lambda: loss(problem, problem.logits())


def _trl(problem: Problem) -> Loss:
    from trl.trainer.utils import selective_log_softmax

    return lambda: problem.objective(selective_log_softmax(problem.logits(), problem.ids).float())


def _trl_triton(problem: Problem) -> Loss:
    from trl.kernels.logprob_entropy import selective_log_softmax_and_entropy

    return lambda: problem.objective(selective_log_softmax_and_entropy(problem.logits(), problem.ids)[0])


def _liger_triton(problem: Problem) -> Loss:
    """Liger's own contiguous logits, one row longer than the tokens."""
    from liger_kernel.transformers.grpo_loss import triton_grpo_loss

    longer = F.pad(problem.source, (0, 0, 0, 1))
    ref = problem.ref if problem.beta else None

    def loss() -> Tensor:
        found: Tensor = triton_grpo_loss(
            problem.logits(longer), problem.old, ref, problem.ids, problem.advantages, problem.mask, temperature=1.0,
            beta=problem.beta, eps_low=EPSILON, eps_high=EPSILON_HIGH, inplace=False, reduce=True,
        )[0]  # fmt: skip
        return found

    return loss


def _copy(problem: Problem) -> Loss:
    target = torch.empty_like(problem.source)
    return lambda: target.copy_(problem.source)


LOGITS: Final = (
    Provider("ours, in place", _ours(inplace=True), early=True),
    Provider("ours, in place, entropy", _ours(inplace=True, entropy=True), early=True),
    Provider("ours", _ours()),
    Provider("ours, torch implementation, in place", _ours("torch", inplace=True)),
    Provider("ours, log-probs + eager objective", _our_logps(compiled=False)),
    Provider("ours, log-probs + compiled objective", _our_logps(compiled=True)),
    Provider("eager", _eager),
    Provider("compiled", _compiled),
    Provider("TRL", _trl, precision="input", needs="trl"),
    Provider("TRL, Triton", _trl_triton, needs="trl", cuda=True),
    Provider("Liger, Triton", _liger_triton, needs="liger_kernel", cuda=True),
    Provider("copy", _copy, bare=True),
)


# --- from hidden states -----------------------------------------------------------------------------------------------


def _linear(mode: str) -> Callable[[Problem], Loss]:
    def build(problem: Problem) -> Loss:
        options = _sides(problem) | {"config": _config(problem), "mode": mode}
        return lambda: linear_grpo_loss(*problem.leaves(), problem.ids, **options).loss

    return build


def _naive_loss(problem: Problem, hidden: Tensor, weight: Tensor) -> Tensor:
    return _eager_loss(problem, hidden @ weight.t())


def _naive(problem: Problem) -> Loss:
    return lambda: _naive_loss(problem, *problem.leaves())


def _naive_compiled(problem: Problem) -> Loss:
    loss = torch.compile(_naive_loss)
    return lambda: loss(problem, *problem.leaves())


def _trl_chunked(problem: Problem) -> Loss:
    """TRL's own chunked head and its chunk size, then the objective in eager torch."""
    from trl.kernels import ChunkedLogProbFunction
    from trl.trainer import utils

    size = utils._CHUNKED_LOGPROB_CHUNK_SIZE

    def loss() -> Tensor:
        hidden, weight = problem.leaves()
        logps = ChunkedLogProbFunction.apply(
            hidden.flatten(0, 1), weight, None, problem.ids.flatten(), 1.0, size, None, 1.0, ()
        )[0]
        return problem.objective(logps.view(problem.ids.shape))

    return loss


def _liger(whole: bool, compiled: bool) -> Callable[[Problem], Loss]:
    """Liger's fused linear GRPO loss; its chunks are sequences, one by default."""

    def build(problem: Problem) -> Loss:
        from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

        own = LigerFusedLinearGRPOLoss(
            beta=problem.beta, epsilon_low=EPSILON, epsilon_high=EPSILON_HIGH, compiled=compiled,
            chunk_size=problem.shape.batch if whole else 1, use_ref_model=problem.beta != 0, loss_type="dapo",
        )  # fmt: skip

        def loss() -> Tensor:
            hidden, weight = problem.leaves()
            found: Tensor = own(
                hidden, weight, problem.ids, problem.mask, problem.advantages,
                ref_per_token_logps=problem.ref if problem.beta else None, old_per_token_logps=problem.old,
            )[0]  # fmt: skip
            return found

        return loss

    return build


def _torch_linear(problem: Problem) -> Loss:
    """torch's chunked linear cross entropy per token, as log-probs of the objective."""
    options = torch.nn.LinearCrossEntropyOptions()

    def loss() -> Tensor:
        hidden, weight = problem.leaves()
        nats = F.linear_cross_entropy(
            hidden.flatten(0, 1), weight, problem.ids.flatten(), reduction="none", options=options
        )  # fmt: skip
        return problem.objective(-nats.float().view(problem.ids.shape))

    return loss


def _cce(problem: Problem) -> Loss:
    """Cut cross-entropy per token, as log-probs of the objective."""
    from cut_cross_entropy import linear_cross_entropy

    def loss() -> Tensor:
        hidden, weight = problem.leaves()
        nats = linear_cross_entropy(hidden.flatten(0, 1), weight, problem.ids.flatten(), reduction="none")
        return problem.objective(-nats.float().view(problem.ids.shape))

    return loss


def _bare(wide: bool) -> Callable[[Problem], Loss]:
    """The products of the shape and nothing else: three, or two where the head is frozen."""

    def build(problem: Problem) -> Loss:
        dtype = torch.float32 if wide else problem.hidden.dtype
        hidden, weight = problem.hidden.flatten(0, 1).to(dtype), problem.weight.to(dtype)

        def products() -> Tensor:
            logits = hidden @ weight.t()
            found: Tensor = logits @ weight
            return found if problem.shape.frozen else logits.t() @ hidden

        return products

    return build


LINEAR: Final = (
    Provider("bare products", _bare(wide=True), bare=True),
    Provider("bare products, input dtype", _bare(wide=False), precision="input", bare=True),
    Provider("ours, fast", _linear("fast")),
    Provider("ours, lean", _linear("lean")),
    Provider("eager", _naive, precision="input"),
    Provider("compiled", _naive_compiled, precision="input"),
    Provider("torch linear_cross_entropy + GRPO", _torch_linear, precision="input", needs="F.linear_cross_entropy"),
    Provider("TRL, chunked head", _trl_chunked, needs="trl"),
    Provider("Liger, 1 sequence a chunk", _liger(whole=False, compiled=False), precision="input", needs="liger_kernel"),
    Provider("Liger, one chunk", _liger(whole=True, compiled=False), precision="input", needs="liger_kernel"),
    Provider("Liger, one chunk, compiled", _liger(whole=True, compiled=True), precision="input", needs="liger_kernel"),
    Provider("cut-cross-entropy + GRPO", _cce, needs="cut_cross_entropy", cuda=True),
)
