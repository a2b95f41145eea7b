"""What the head's scores cost beside the loss they ride on: forward and backward, with and without.

    python bench/head_gram.py --save

Every round runs the loss alone, with the exact Gram matrix and with the sketch, in a new order; a ratio is the median
over rounds of the processor time with by the time without (one thread; other work on the machine does not count). The
exact one multiplies (G T)^2 V, the loss 6 N H V.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

import grpo_kernels as gk
from grpo_kernels.lab.head import HeadScores

RECORD = Path(__file__).parents[1] / "bench" / "results" / "lab" / "head-gram.json"
SHAPES = [  # P, G, T, H, V
    (8, 8, 32, 512, 32_000),
    (2, 8, 64, 512, 32_000),
    (1, 8, 128, 512, 32_000),
    (2, 8, 32, 896, 151_936),
    (1, 8, 64, 896, 151_936),
    (1, 16, 64, 896, 32_000),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--k", type=int, default=64, help="size of the sketch")
    parser.add_argument("--save", action="store_true", help="write bench/results/lab/head-gram.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = []
    for shape in SHAPES:
        results.append(measured(*shape, options.rounds, options.k))
        print(json.dumps(results[-1]), flush=True)
    record = {
        "command": "python bench/head_gram.py --save",
        "threads": torch.get_num_threads(),
        "machine": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "implementation": gk.backends.last_used(),
        "rounds": options.rounds,
        "k": options.k,
        "results": results,
    }
    if options.save:
        RECORD.parent.mkdir(parents=True, exist_ok=True)
        RECORD.write_text(json.dumps(record, indent=1) + "\n")


def measured(P: int, G: int, T: int, H: int, V: int, rounds: int, k: int) -> dict[str, object]:
    """Ratios of one shape; the slab holds one group, for all three alike."""
    generator = torch.Generator().manual_seed(0)
    B = P * G
    hidden = torch.randn(B, T, H, generator=generator).requires_grad_()
    weight = (torch.randn(V, H, generator=generator) / H**0.5).requires_grad_()
    ids = torch.randint(0, V, (B, T), generator=generator)
    advantages = torch.randn(B, generator=generator)
    chunk = max(256, G * T) * V * 4

    def loss(**options: int) -> None:
        hidden.grad = weight.grad = None
        gk.linear_grpo_loss(hidden, weight, ids, advantages=advantages, **options).loss.backward()

    def with_scores(method: str, **options: int) -> Callable[[], None]:
        def run() -> None:
            scores = HeadScores(B, G, method=method, k=k)
            with scores.watch(ids):
                loss(**options)
            _ = scores.gram

        return run

    steps: dict[str, Callable[[], None]] = {
        "loss": lambda: loss(chunk_bytes=chunk),
        "exact": with_scores("exact", chunk_bytes=chunk),
        "default": loss,
        "sketch": with_scores("sketch"),
    }
    times: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        step()
    for number in range(rounds):
        order = list(steps)
        random.Random(number).shuffle(order)
        for name in order:
            started = time.process_time()
            steps[name]()
            times[name].append(time.process_time() - started)

    def ratio(name: str, base: str) -> float:
        return round(statistics.median(a / b for a, b in zip(times[name], times[base], strict=True)), 3)

    return {
        "shape": {"P": P, "G": G, "T": T, "H": H, "V": V},
        "loss_s": round(statistics.median(times["loss"]), 3),
        "exact_ratio": ratio("exact", "loss"),
        "sketch_ratio": ratio("sketch", "default"),
        "slab_ratio": ratio("loss", "default"),
        "tokens_of_a_group_by_width": round(G * T / H, 2),
    }


if __name__ == "__main__":
    main()
