"""The command line: `grpo-kernels info | check | inspect | bench | train | lab`."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from types import ModuleType

from . import backends, diagnostics


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    options, unknown = _parser().parse_known_args(arguments)
    if unknown:
        options.parser.error(_unknown(options, unknown[0]))
    try:
        code: int = options.run(options)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, `head` perhaps, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code


def _parser() -> argparse.ArgumentParser:
    from .benchmark import command as benchmark
    from .inspection import command as inspection
    from .training import command as training

    parser = argparse.ArgumentParser(prog="grpo-kernels", description="Fused GRPO losses: what runs here, and a demo.")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def add(name: str, text: str, example: str) -> argparse.ArgumentParser:
        command = commands.add_parser(
            name, help=text, description=text, epilog=f"example: {example}", allow_abbrev=False
        )
        command.set_defaults(parser=command)
        return command

    info = add("info", "Say what runs on this machine, and why.", "grpo-kernels info")
    info.set_defaults(run=_info)

    check = add(
        "check",
        "Compare results with float64 on this machine; exit code 1 when one is outside its error budget.",
        "grpo-kernels check --device cpu --impl torch",
    )
    check.add_argument("--device", default=None, help="torch device (default: the accelerator, else cpu)")
    check.add_argument("--impl", default="auto", help="auto, torch, cpp or triton (default: auto)")
    check.set_defaults(run=_check)

    inspect = add(
        "inspect",
        "Compile every Triton kernel for every GPU target and read the machine code: registers, spills, shared memory, "
        "instructions per logit, and what bounds it. No GPU needed.",
        "grpo-kernels inspect --targets sm_90 --kernels row_stats --rivals",
    )
    _add_command(inspect, inspection)

    bench = add(
        "bench",
        "Time the losses and their rivals on this machine, each checked against float64 first: time, memory, errors.",
        "grpo-kernels bench logits --output results",
    )
    _add_command(bench, benchmark)

    train = add(
        "train",
        "Train a language model with GRPO; without options a small embedded one that needs no download.",
        "grpo-kernels train --config run.toml",
    )
    _add_command(train, training)

    lab = add(
        "lab",
        "How good is this gradient, and how many responses per prompt? Advice from a pilot, and the studies behind it.",
        "grpo-kernels lab mse-curve --task bandit --groups 2,4,8,16",
    )
    _add_lab(lab)
    return parser


def _add_command(parser: argparse.ArgumentParser, command: ModuleType) -> None:
    command.add_arguments(parser)
    parser.set_defaults(run=command.run)


def _add_lab(parser: argparse.ArgumentParser) -> None:
    from .lab import command

    command.add_arguments(parser)


def _unknown(options: argparse.Namespace, option: str) -> str:
    from .training import command

    return command.unknown_option(options.parser, option)


def _info(_options: argparse.Namespace) -> int:
    print("\n".join(diagnostics.info_lines()))
    return 0


def _check(options: argparse.Namespace) -> int:
    device = options.device or diagnostics.default_device()
    started, failures = time.perf_counter(), 0
    for name, version in diagnostics.versions().items():
        print(f"{name:<24} {version}")
    try:
        for text, holds, numbers in diagnostics.check(device, options.impl):
            failures += not holds
            print(f"{'ok  ' if holds else 'FAIL'}  {text}: {numbers}", flush=True)
    except (AssertionError, RuntimeError, ValueError) as error:  # an implementation or a device that is not there
        print(error, file=sys.stderr)
        return 2
    seconds = time.perf_counter() - started
    verdict = "all within budget" if failures == 0 else f"{failures} outside the budget: please report this output"
    print(f"{device}, implementation {backends.last_used()}: {verdict} ({seconds:.1f} s)")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
