"""Hidden states to gradients on this machine: the fused linear loss beside bare matrix products and its rivals.

    python bench/linear.py --save
    python bench/linear.py --shape large --dtype bfloat16 --rounds 3 --save
    python bench/linear.py --page

Every round runs every provider once, in a new order; a ratio is the median over rounds of the provider's time by that
of the bare products of the same round. Peak memory is what torch's allocator had at most beyond the inputs, from a run
of its own. Rivals that are not installed are left out. `--save` writes bench/results, `--page` the table of
docs/linear.md from what lies there.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import grpo_kernels as gk

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "linear.md"
RECORDS = [
    ROOT / "bench" / "results" / f"linear-cpu-{kind}.json"
    for kind in ("base-float32", "large-float32", "large-bfloat16")
]
SHAPES = {"base": (8, 128, 512, 32_000), "large": (4, 128, 896, 151_936)}  # B, T, H, V
Step = Callable[[], Any]


class Case:
    """One shape: tensors, and a step of every provider."""

    def __init__(self, batch: int, length: int, width: int, vocabulary: int, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(0)
        self.hidden = torch.randn(batch, length, width, generator=generator).to(dtype)
        self.weight = (torch.randn(vocabulary, width, generator=generator) / width**0.5).to(dtype)
        self.ids = torch.randint(0, vocabulary, (batch, length), generator=generator)
        self.advantages = torch.randn(batch, generator=generator)
        self.mask = torch.ones(batch, length)
        self.half = self.mask.clone()
        self.half[:, length // 2 :] = 0
        with torch.no_grad():
            logps = gk.linear_per_token_logps(self.hidden, self.weight, self.ids).logps
        noise = torch.randn(batch, length, generator=generator)
        self.old, self.ref = logps + 0.1 * noise, logps - 0.1 * noise
        self.config = gk.GRPOLossConfig(epsilon_high=0.28, beta=0.04)

    def leaves(self, frozen: bool = False) -> tuple[Tensor, Tensor]:
        return self.hidden.detach().requires_grad_(), self.weight.detach().requires_grad_(not frozen)

    def ours(self, mode: str, *, frozen: bool = False, half: bool = False) -> Step:
        def step() -> tuple[Tensor | None, ...]:
            hidden, weight = self.leaves(frozen)
            out = gk.linear_grpo_loss(
                hidden, weight, self.ids, config=self.config, advantages=self.advantages, mode=mode,
                completion_mask=self.half if half else self.mask, old_per_token_logps=self.old,
                ref_per_token_logps=self.ref,
            )  # fmt: skip
            out.loss.backward()
            return hidden.grad, weight.grad

        return step

    def bare(self, dtype: torch.dtype) -> Step:
        """The three products of the shape and nothing else."""
        hidden, weight = self.hidden.flatten(0, 1).to(dtype), self.weight.to(dtype)

        def step() -> tuple[Tensor, Tensor]:
            logits = hidden @ weight.t()
            return logits @ weight, logits.t() @ hidden

        return step

    def objective(self, logps: Tensor) -> Tensor:
        """Clip and k3 on log-probs, as a trainer writes it."""
        ratio, d = torch.exp(logps - self.old), self.ref - logps
        gain = self.advantages.unsqueeze(1)
        clipped = torch.clamp(ratio, 1 - self.config.epsilon, 1 + 0.28)
        token_loss = -torch.minimum(ratio * gain, clipped * gain) + 0.04 * (torch.exp(d) - d - 1)
        return (token_loss * self.mask).sum() / self.mask.sum()

    def naive(self) -> Step:
        """All logits, log_softmax in float32, gather."""

        def step() -> tuple[Tensor | None, ...]:
            hidden, weight = self.leaves()
            logps = torch.log_softmax((hidden @ weight.t()).float(), -1).gather(-1, self.ids.unsqueeze(-1)).squeeze(-1)
            self.objective(logps).backward()
            return hidden.grad, weight.grad

        return step

    def trl(self) -> Step:
        """TRL's own chunked head and its chunk size, then the objective in eager torch."""
        from trl.kernels import ChunkedLogProbFunction
        from trl.trainer import utils

        size = utils._CHUNKED_LOGPROB_CHUNK_SIZE

        def step() -> tuple[Tensor | None, ...]:
            hidden, weight = self.leaves()
            logps = ChunkedLogProbFunction.apply(
                hidden.flatten(0, 1), weight, None, self.ids.flatten(), 1.0, size, None, 1.0, ()
            )[0]
            self.objective(logps.view(self.ids.shape)).backward()
            return hidden.grad, weight.grad

        return step

    def liger(self, chunk_size: int, compiled: bool) -> Step:
        """Liger's fused linear GRPO loss."""
        from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

        loss = LigerFusedLinearGRPOLoss(
            beta=0.04, epsilon_low=0.2, epsilon_high=0.28, chunk_size=chunk_size, compiled=compiled, use_ref_model=True
        )

        def step() -> tuple[Tensor | None, ...]:
            hidden, weight = self.leaves()
            out = loss(
                hidden, weight, self.ids, self.mask, self.advantages,
                ref_per_token_logps=self.ref, old_per_token_logps=self.old,
            )  # fmt: skip
            out[0].backward()
            return hidden.grad, weight.grad

        return step

    def steps(self) -> dict[str, Step]:
        """Every provider that can run here, by name."""
        found = {
            "three bare products": self.bare(torch.float32),
            "ours, fast": self.ours("fast"),
            "ours, lean": self.ours("lean"),
            "ours, fast, half of the rows dead": self.ours("fast", half=True),
            "ours, fast, frozen head": self.ours("fast", frozen=True),
            "naive": self.naive(),
        }
        if self.hidden.dtype != torch.float32:
            found[f"three bare products, {self.hidden.dtype}"] = self.bare(self.hidden.dtype)
        batch = len(self.ids)
        rivals: dict[str, Callable[[], Step]] = {"TRL, chunked head": self.trl}
        for size in (1, batch):
            for compiled in (False, True):
                how = "compiled" if compiled else "eager"
                rivals[f"Liger, {size} sequences a chunk, {how}"] = lambda s=size, c=compiled: self.liger(s, c)
        for name, make in rivals.items():
            try:
                found[name] = make()
            except ImportError:
                print(f"{name}: not installed")
        return found


def gradient_error(case: Case, step: Step, truth: list[Tensor]) -> list[float]:
    """Largest error of each gradient by the largest gradient, against float64."""
    return [
        float((ours.double() - right).abs().max() / right.abs().max())
        for ours, right in zip(step(), truth, strict=True)
        if ours is not None
    ]


def truth_of(case: Case) -> list[Tensor]:
    """Gradients in float64."""
    hidden, weight = (t.detach().double().requires_grad_() for t in (case.hidden, case.weight))
    logps = torch.log_softmax(hidden @ weight.t(), -1).gather(-1, case.ids.unsqueeze(-1)).squeeze(-1)
    case.objective(logps).backward()
    return [hidden.grad, weight.grad]  # type: ignore[list-item]


def peak_bytes(step: Step) -> int:
    """Most bytes that torch's CPU allocator held at once beyond those before the step."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        step()
    held = most = 0
    events = recorded.profiler.kineto_results.events()
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


def measured(steps: dict[str, Step], rounds: int) -> dict[str, list[float]]:
    """Seconds of every round, after one to warm up."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    order = list(steps)
    for step in steps.values():
        step()
    for number in range(rounds):
        random.Random(number).shuffle(order)
        for name in order:
            started = time.perf_counter()
            steps[name]()
            times[name].append(time.perf_counter() - started)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="base")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", nargs="+", default=[""], help="providers whose names contain one of these")
    parser.add_argument("--save", action="store_true", help="write the result to bench/results")
    parser.add_argument("--page", action="store_true", help="write the table of the page, and measure nothing")
    options = parser.parse_args()
    if options.page:
        PAGE.write_text(page(PAGE.read_text()))
        return
    torch.manual_seed(0)
    case = Case(*SHAPES[options.shape], getattr(torch, options.dtype))
    steps = {name: step for name, step in case.steps().items() if any(part in name for part in ["bare", *options.only])}
    truth = truth_of(case) if options.shape == "base" else None
    times = measured(steps, options.rounds)
    bare = [min(together) for together in zip(*(times[n] for n in times if "bare" in n), strict=True)]
    results = {}
    for name, seconds in times.items():
        ratios = [ours / base for ours, base in zip(seconds, bare, strict=True)]
        results[name] = {
            "median_s": statistics.median(seconds),
            "min_s": min(seconds),
            "max_s": max(seconds),
            "ratio_to_bare": statistics.median(ratios),
            "peak_mib": peak_bytes(steps[name]) / 2**20,
        }
        if truth is not None and "bare" not in name and "half" not in name:
            results[name]["gradient_error"] = gradient_error(case, steps[name], truth)
        shown = {key: value for key, value in results[name].items() if key != "gradient_error"}
        print(f"{name:40}", " ".join(f"{key}={value:.3f}" for key, value in shown.items()))
    record = {
        "shape": dict(zip("BTHV", SHAPES[options.shape], strict=True)),
        "dtype": options.dtype,
        "threads": torch.get_num_threads(),
        "machine": platform.processor() or platform.machine(),
        "versions": {p: metadata.version(p) for p in ("torch", "trl", "liger-kernel") if _installed(p)},
        "results": results,
    }
    if options.save:
        target = ROOT / "bench" / "results" / f"linear-cpu-{options.shape}-{options.dtype}.json"
        target.write_text(json.dumps(record, indent=1) + "\n")


def page(text: str) -> str:
    """The page with the table between its two marks made anew from the committed records."""
    records = [json.loads(file.read_text()) for file in RECORDS]
    heads = [
        f"{r['dtype']}, N={r['shape']['B'] * r['shape']['T']} H={r['shape']['H']} V={r['shape']['V']}" for r in records
    ]
    names = list(dict.fromkeys(name for record in records for name in record["results"]))
    lines = [f"| | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    for name in names:
        cells = [_cell(record["results"].get(name)) for record in records]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    before, after = text.split("<!-- table -->\n", maxsplit=1)[0], text.split("<!-- end of table -->\n")[1]
    return f"{before}<!-- table -->\n" + "\n".join(lines) + f"\n<!-- end of table -->\n{after}"


def _cell(result: dict[str, float] | None) -> str:
    return "" if result is None else f"{result['ratio_to_bare']:.2f}, {result['peak_mib']:.0f} MiB"


def _installed(package: str) -> bool:
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        return False
    return True


if __name__ == "__main__":
    main()
