"""Logits to gradients on this CPU: the loss on the C++ kernels beside eager torch, its compiled form, TRL's and a copy.

    python bench/cpp.py --output bench/results/cpp.json
    python bench/cpp.py --rows 64 --rounds 5

Every step is forward and backward of clip + k3. A round runs every provider once, in a new order; a ratio is the median
over rounds of a provider's time by that of ours of the same round. Logits are the output of an operation, as a model's
are, and are written anew before each step, outside its time. Rivals that are not installed are left out.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import grpo_kernels as gk

ROWS = {32_000: 512, 151_936: 128}  # vocabulary: tokens
SMALL = (16, 1_000)
WARM_UP = 12  # rounds; on a virtual machine the first use of a page that no process had yet takes ten times a later one
Step = Callable[[], Any]


class Model(torch.autograd.Function):
    """Gives logits away and drops their gradient: what is left is the loss."""

    @staticmethod
    def forward(_ctx: Any, _parameter: Tensor, logits: Tensor) -> Tensor:
        return logits.detach()

    @staticmethod
    def backward(_ctx: Any, _grad: Tensor) -> tuple[None, None]:
        return None, None


class Case:
    """Tokens of one shape, and a step of every provider."""

    def __init__(self, rows: int, vocabulary: int, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(0)
        self.source = (torch.randn(rows, vocabulary, generator=generator) * 2).to(dtype)
        self.buffer, self.target = self.source.clone(), torch.empty_like(self.source)
        self.ids = torch.randint(0, vocabulary, (rows,), generator=generator)
        self.ends = torch.tensor([0, rows // 2, rows])
        self.advantages = torch.tensor([1.0, -0.5])
        with torch.no_grad():
            logps = gk.per_token_logps(self.source, self.ids).logps
        noise = torch.randn(rows, generator=generator)
        self.old, self.ref = logps + 0.1 * noise, logps - 0.1 * noise
        self.per_token = self.advantages.repeat_interleave(rows // 2)
        self.parameter = torch.zeros(1, requires_grad=True)

    def fresh(self) -> None:
        self.buffer.copy_(self.source)

    def logits(self) -> Tensor:
        made: Tensor = Model.apply(self.parameter, self.buffer)
        return made

    def ours(self, impl: str = "cpp", *, inplace: bool = False, entropy: bool = False) -> Step:
        config = gk.GRPOLossConfig(epsilon_high=0.28, beta=0.04, entropy=entropy)

        def step() -> None:
            gk.grpo_loss(
                self.logits(), self.ids, config=config, advantages=self.advantages, old_per_token_logps=self.old,
                ref_per_token_logps=self.ref, cu_seqlens=self.ends, inplace=inplace, impl=impl,
            ).loss.backward()  # fmt: skip

        return step

    def objective(self, logps: Tensor) -> Tensor:
        """Clip and k3 on log-probs, as a trainer writes it."""
        ratio, d = torch.exp(logps - self.old), self.ref - logps
        surrogate = torch.min(ratio * self.per_token, ratio.clamp(0.8, 1.28) * self.per_token)
        return (-surrogate + 0.04 * (d.exp() - d - 1)).mean()

    def from_logits(self, logits: Tensor) -> Tensor:
        logps = logits.float().log_softmax(-1).gather(-1, self.ids[:, None])[:, 0]
        return self.objective(logps)

    def eager(self) -> None:
        self.from_logits(self.logits()).backward()

    def compiled(self) -> Step:
        loss = torch.compile(self.from_logits)
        return lambda: loss(self.logits()).backward()

    def copy(self) -> None:
        self.target.copy_(self.source)

    def providers(self, names: list[str] | None) -> dict[str, Step]:
        found: dict[str, Step] = {
            "in place": self.ours(inplace=True),
            "in place, entropy": self.ours(inplace=True, entropy=True),
            "default": self.ours(),
            "torch implementation, in place": self.ours("torch", inplace=True),
            "eager": self.eager,
            "compiled": self.compiled(),
            "copy": self.copy,
        }
        try:
            from trl.trainer.utils import selective_log_softmax
        except ImportError:
            pass
        else:
            found["TRL"] = lambda: self.objective(selective_log_softmax(self.logits(), self.ids)).backward()
        return {name: step for name, step in found.items() if names is None or name in names}


def timed(case: Case, step: Step, repeat: int) -> float:
    case.fresh()
    start = time.perf_counter()
    for _ in range(repeat):
        step()
    return (time.perf_counter() - start) / repeat


def measured(case: Case, names: list[str] | None, rounds: int, repeat: int = 1) -> dict[str, Any]:
    """Milliseconds (median, quartiles) of every provider, and its time by ours in place and by ours by default."""
    steps = case.providers(names)
    for _ in range(WARM_UP):  # compiles, and until the memory that a process gets back has been in use before
        for step in steps.values():
            timed(case, step, repeat)
    times: dict[str, list[float]] = {name: [] for name in steps}
    order = list(steps)
    shuffle = random.Random(0)
    for _ in range(rounds):
        shuffle.shuffle(order)
        for name in order:
            times[name].append(timed(case, steps[name], repeat))
    result: dict[str, Any] = {}
    for name, own in times.items():
        low, middle, high = statistics.quantiles(own, n=4)
        result[name] = {"ms": round(1e3 * middle, 4), "quartiles": [round(1e3 * low, 4), round(1e3 * high, 4)]}
        for ours in ("in place", "default"):
            if ours in times:
                by = statistics.median(mine / base for mine, base in zip(own, times[ours], strict=True))
                result[name][f"by ours, {ours}"] = round(by, 3)
    return result


def cases(rows: int | None) -> Iterator[tuple[str, Case]]:
    for vocabulary, usual in ROWS.items():
        for dtype in (torch.float32, torch.bfloat16):
            name = f"{rows or usual} x {vocabulary} {str(dtype).removeprefix('torch.')}"
            yield name, Case(rows or usual, vocabulary, dtype)


def small_case(rounds: int) -> dict[str, Any]:
    """Where the cost of a call shows: log-probs alone, and the loss with all its metrics."""
    case = Case(*SMALL, torch.float32)

    def logps_eager() -> None:
        case.logits().float().log_softmax(-1).gather(-1, case.ids[:, None]).sum().backward()

    def logps_ours() -> None:
        gk.per_token_logps(case.logits(), case.ids, impl="cpp").logps.sum().backward()

    found: dict[str, Any] = measured(case, ["default", "eager"], rounds, repeat=20)
    pairs = [(timed(case, logps_ours, 20), timed(case, logps_eager, 20)) for _ in range(rounds)]
    found["per_token_logps by eager"] = round(statistics.median(a / b for a, b in pairs), 3)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--rows", type=int, default=None, help="tokens (default: what suits the vocabulary)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--providers", nargs="*", default=None, help="only these")
    parser.add_argument("--output", type=Path, default=None)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    report: dict[str, Any] = {
        "machine": platform.processor() or platform.machine(), "threads": arguments.threads,
        "torch": torch.__version__, "rounds": arguments.rounds, "cpp": gk.backends.report()["cpp"], "cases": {},
    }  # fmt: skip
    for name, case in cases(arguments.rows):
        report["cases"][name] = measured(case, arguments.providers, arguments.rounds)
        print(name, json.dumps(report["cases"][name], indent=1), flush=True)
    report["cases"]["{} x {} float32".format(*SMALL)] = small_case(arguments.rounds * 5)
    print(json.dumps(report["cases"]["{} x {} float32".format(*SMALL)], indent=1))
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
