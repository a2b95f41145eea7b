"""What must hold on a device, without a test runner: rows beyond 2^31 elements, memory, devices, bits, launches.

    python bench/device_checks.py --device cuda --output checks.json
    python bench/device_checks.py --device cpu --small

Prints a line for each, `ok`, `FAIL` or `skip` with the numbers or the reason; exit code 1 when one fails. `--small`
runs the same at sizes for a CPU.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels.benchmark.measure import clock_of, make_of
from grpo_kernels.benchmark.memory import peak_bytes
from grpo_kernels.benchmark.problems import Problem, Shape
from grpo_kernels.benchmark.providers import LOGITS

Finding = tuple[bool | None, str]  # None: not applicable here; and the numbers, or why
Check = Callable[[torch.device, bool], Finding]
BIG = 151_936


def logits_of(device: torch.device, *shape: int) -> Tensor:
    generator = torch.Generator(device).manual_seed(0)
    return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16).mul_(2)


def scored(logits: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probs and the gradient of a sum of them with weights that differ."""
    leaf = logits.detach().requires_grad_()
    logps = gk.per_token_logps(leaf, ids).logps
    (logps * (1.0 + ids.float() / BIG)).sum().backward()
    assert leaf.grad is not None
    return logps.detach(), leaf.grad


def gradients_agree_with_float64(device: torch.device, small: bool) -> Finding:
    """Each kernel in each dtype: plain, with entropy and softcap; beside the logits and in place; scaled from above."""
    vocabulary, worst = (1000 if small else 32_000), 0.0
    generator = torch.Generator().manual_seed(0)
    raw = torch.randn(3, 5, vocabulary, generator=generator) * 2
    ids = torch.randint(0, vocabulary, (3, 5), generator=generator)
    gap = torch.where(torch.arange(15).reshape(3, 5) % 4 == 0, 0.4, -0.1)  # clipped and not, none near the edge
    for config in (
        gk.GRPOLossConfig(epsilon_high=0.28, beta=0.04),
        gk.GRPOLossConfig(epsilon_high=0.28, beta=0.04, entropy_coef=0.01, softcap=30.0, temperature=0.8),
    ):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            logits = raw.to(dtype)
            z = logits.double() / config.temperature
            if config.softcap is not None:
                z = config.softcap * torch.tanh(logits.double() / config.softcap) / config.temperature
            logps = z.log_softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)
            sides = {
                "advantages": torch.tensor([1.0, -0.5, 0.25]), "old_per_token_logps": logps + gap,
                "ref_per_token_logps": logps - 0.3, "completion_mask": torch.tensor([[1, 1, 0, 1, 1]] * 3),
            }  # fmt: skip
            leaf = logits.double().requires_grad_()
            right = torch.autograd.grad(3.0 * gk.reference.grpo_loss(leaf, ids, config=config, **sides), leaf)[0]
            there = {name: side.to(device, torch.float32) for name, side in sides.items()}
            for inplace in (False, True):
                leaf = logits.to(device).requires_grad_()
                taken = leaf * 1.0 if inplace else leaf
                loss = gk.grpo_loss(taken, ids.to(device), config=config, inplace=inplace, **there).loss
                grad = torch.autograd.grad(3.0 * loss, leaf)[0].cpu().double()
                error = float((grad - right).abs().max() / right.abs().max())
                worst = max(worst, error / (4 * torch.finfo(dtype).eps + 1e-5))
    return worst <= 1.0, f"12 runs, the worst at {worst:.0%} of what rounding allows, {gk.backends.last_used()}"


def rows_beyond_32_bits(device: torch.device, small: bool) -> Finding:
    """V = 151 936, 16 384 tokens: from row 14 135 on an element's number does not fit an int32."""
    vocabulary, tokens = (1000, 64) if small else (BIG, 16_384)
    picked = [0, tokens // 2, tokens - 1] if small else [0, 14_134, 14_135, tokens - 1]
    for batch in (1, 8):
        logits = logits_of(device, batch, tokens // batch, vocabulary)
        ids = (torch.arange(tokens, device=device) * 7919 % vocabulary).reshape(batch, -1)
        logps, grad = scored(logits, ids)
        for row in picked:
            at = row // (tokens // batch), row % (tokens // batch)
            alone, own = scored(logits[at][None, None].clone(), ids[at][None, None])
            if not (torch.equal(logps[at], alone[0, 0]) and torch.equal(grad[at], own[0, 0])):
                return False, f"row {row} of B = {batch} differs from the same row alone"
            if not (-100 < float(logps[at]) < 0 and bool(grad[at].any())):
                return False, f"row {row} of B = {batch} has no sensible numbers: {float(logps[at])}"
        del logits, grad
    return True, f"{len(picked)} rows of {tokens} x {vocabulary}, B = 1 and 8: equal to the same rows alone"


def strides_beyond_32_bits(device: torch.device, small: bool) -> Finding:
    """A view of two rows that lie further apart than 2^31 elements."""
    far = 2**31 + 64
    # never touched but for two rows: on a CPU its pages do not come to exist
    rows = torch.empty(far + 1024, dtype=torch.bfloat16, device=device).as_strided((2, 1024), (far, 1))
    rows.copy_(logits_of(device, 2, 1024))
    ids = torch.tensor([5, 6], device=device)
    same = all(torch.equal(a, b) for a, b in zip(scored(rows, ids), scored(rows.clone(), ids), strict=True))
    return same, f"rows {far} elements apart {'equal' if same else 'differ from'} the same rows side by side"


def memory_of_the_logits(device: torch.device, small: bool) -> Finding:
    """B = 4, T = 2048, V = 151 936: forward 1 % of the logits at most, backward one gradient, in place 1 %."""
    shape = Shape(2, 16, 32_000, "bfloat16") if small else Shape(4, 2048, BIG, "bfloat16")
    problem = Problem(shape, device)
    size = problem.source.numel() * problem.source.element_size()
    slack = 0.02 if small else 0.0005  # the rows' own numbers, which weigh more beside few logits
    holds, texts = True, []
    for provider, most in (("ours", 1.0), ("ours, in place", 0.01)):
        loss = next(p for p in LOGITS if p.name == provider).build(problem)
        loss().backward()
        if device.type == "cpu" and gk.backends.last_used() == "torch":
            return None, f"plain torch holds more than one gradient; C++ here: {gk.backends.report()['cpp']}"
        problem.fresh()
        forward, backward = (
            peak_bytes(make_of(phase, problem, loss), device) / size for phase in ("forward", "backward")
        )  # fmt: skip
        holds = holds and forward <= 0.01 + slack and backward <= most + slack
        texts.append(f"{provider}: forward {forward:.2%}, backward {backward:.2%}")
    return holds, f"{'; '.join(texts)} of the logits"


def launches_go_to_the_tensors_device(device: torch.device, small: bool) -> Finding:
    """Tensors on the second GPU while the first is current; and mixed devices are refused by name."""
    logits, ids = logits_of(device, 2, 3, 1000), torch.zeros(2, 3, dtype=torch.int64, device=device)
    elsewhere = torch.device("meta") if device.type == "cpu" else torch.device("cpu")
    try:
        gk.per_token_logps(logits, ids.to(elsewhere))
    except ValueError as error:
        if "targets" not in str(error):
            return False, f"mixed devices are refused without the argument's name: {error}"
    else:
        return False, "mixed devices are not refused"
    if device.type == "cpu" or torch.cuda.device_count() < 2:
        return True, "mixed devices are refused by name; there is no second GPU to launch on"
    second = torch.device("cuda", 1)
    with torch.cuda.device(0):
        there = gk.per_token_logps(logits.to(second), ids.to(second)).logps
        same = torch.cuda.current_device() == 0 and torch.equal(
            there.cpu(), gk.per_token_logps(logits, ids).logps.cpu()
        )
    return same, "tensors on the second GPU: " + ("the same bits, current device unchanged" if same else "differ")


def digest(device: torch.device, small: bool) -> str:
    """A hash of losses and gradients, from logits and from hidden states."""
    vocabulary, rows, width = (1000, 6, 16) if small else (BIG, 128, 256)
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(4, rows // 2, vocabulary, generator=generator) * 2).to(device, torch.bfloat16)
    ids = torch.randint(0, vocabulary, logits.shape[:2], generator=generator).to(device)
    advantages = torch.tensor([1.0, -0.5, 0.25, -0.75], device=device)
    side = -torch.rand(logits.shape[:2], generator=generator).to(device) - 10.0
    sides = {"advantages": advantages, "old_per_token_logps": side, "ref_per_token_logps": side + 0.1}
    config = gk.GRPOLossConfig(beta=0.04, entropy_coef=0.01)
    hidden = torch.randn(4, rows // 2, width, generator=generator).to(device, torch.bfloat16)
    weight = (torch.randn(vocabulary, width, generator=generator) / width**0.5).to(device, torch.bfloat16)
    hash_ = hashlib.sha256()

    def add(loss: Tensor, *leaves: Tensor) -> None:
        for tensor in (loss, *torch.autograd.grad(loss, leaves)):
            hash_.update(tensor.detach().float().cpu().numpy().tobytes())

    leaf = logits.requires_grad_()
    add(gk.grpo_loss(leaf, ids, config=config, **sides).loss, leaf)
    made = leaf * 1.0
    add(gk.grpo_loss(made, ids, config=config, inplace=True, **sides).loss, leaf)
    for mode in ("fast", "lean"):
        leaves = [tensor.detach().requires_grad_() for tensor in (hidden, weight)]
        add(gk.linear_grpo_loss(*leaves, ids, config=config, mode=mode, **sides).loss, *leaves)
    return hash_.hexdigest()


def fresh_processes_agree(device: torch.device, small: bool) -> Finding:
    """Two new processes, the same inputs: the same bits of every loss and gradient."""
    command = [sys.executable, __file__, "--device", str(device), "--digest", *(["--small"] if small else [])]
    places = [str(Path(gk.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, places))}
    digests = []
    for _ in range(2):
        run = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        if run.returncode != 0:
            return False, f"a process ended with exit code {run.returncode}: {run.stderr.strip()[-500:]}"
        digests.append(run.stdout.strip())
    first, second = digests
    return first == second != "", f"digests {first[:16]} and {second[:16]}"


def launches_do_not_grow(device: torch.device, small: bool) -> Finding:
    """3 kernels over the vocabulary a forward at most, as many for 4096 x 1 as for 1 x 4096, alike in time."""
    count, vocabulary = (64, 1000) if small else (4096, 32_000)
    shapes = ((count, 1), (1, count))
    inputs = [
        (logits_of(device, *shape, vocabulary), torch.zeros(shape, dtype=torch.int64, device=device))
        for shape in shapes
    ]
    clock = clock_of(device)
    makes = [lambda pair=pair: lambda: gk.per_token_logps(*pair) for pair in inputs]
    for make in makes:
        make()()
    medians = [statistics.median(clock.seconds(make) for _ in range(7)) for make in makes]
    times = max(medians) / min(medians)
    if device.type == "cpu":
        return None, f"no launches on a CPU; times of {shapes[0]} and {shapes[1]} are {times:.2f} apart"
    return judged([_kernels(make()) for make in makes], times)


def judged(kernels: list[list[str]], times: float) -> Finding:
    """The names of the kernels of two forwards that should be alike, and how far their times are apart."""
    ours = [sum("row_stats" in name for name in names) for names in kernels]
    text = f"kernels of a forward: {len(kernels[0])} and {len(kernels[1])}, over the vocabulary {ours[0]} and {ours[1]}"
    text = f"{text}; times {times:.2f} apart"
    if max(ours) == 0 and times <= 1.3:  # a profiler without the right to count sees nothing, which proves nothing
        return None, f"the profiler shows none of our kernels; {text}"
    return 1 <= min(ours) <= max(ours) <= 3 and len(kernels[0]) == len(kernels[1]) and times <= 1.3, text


def _kernels(step: Callable[[], Any]) -> list[str]:
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as recorded:
        step()
        torch.cuda.synchronize()
    events = [event for event in recorded.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return [event.name for event in events if not event.name.startswith(("Mem", "mem"))]


CHECKS: dict[str, Check] = {
    "gradients": gradients_agree_with_float64,
    "rows beyond 2^31 elements": rows_beyond_32_bits,
    "strides beyond 2^31 elements": strides_beyond_32_bits,
    "memory": memory_of_the_logits,
    "devices": launches_go_to_the_tensors_device,
    "fresh processes": fresh_processes_agree,
    "launches": launches_do_not_grow,
}


def found(device: torch.device, small: bool) -> Iterator[dict[str, Any]]:
    """Every check with its verdict."""
    for name, check in CHECKS.items():
        started = time.perf_counter()
        try:
            if device.type == "cuda":
                torch.cuda.empty_cache()  # of what the check before held; after some errors this raises too
            holds, text = check(device, small)
        except Exception as error:  # noqa: BLE001  (whatever breaks on a device is a finding, and the others still run)
            holds, text = False, f"{type(error).__name__}: {error}"
        verdict = "skip" if holds is None else "ok" if holds else "FAIL"
        yield {"check": name, "verdict": verdict, "text": text, "seconds": round(time.perf_counter() - started, 1)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="sizes for a CPU")
    parser.add_argument("--output", type=Path, default=None, help="write the findings as JSON")
    parser.add_argument("--digest", action="store_true", help="print a hash of losses and gradients, and nothing else")
    options = parser.parse_args()
    device = torch.device(options.device)
    if options.digest:
        print(digest(device, options.small))
        return 0
    findings = []
    for finding in found(device, options.small):
        findings.append(finding)
        print(f"{finding['verdict']:<5} {finding['check']}: {finding['text']} ({finding['seconds']} s)", flush=True)
        if options.output is not None:  # now: the next check may be the one in which the process is stopped
            record = {"device": str(device), "last_used": gk.backends.last_used(), "findings": findings}
            options.output.write_text(json.dumps(record, indent=1) + "\n")
    return int(any(finding["verdict"] == "FAIL" for finding in findings))


if __name__ == "__main__":
    sys.exit(main())
