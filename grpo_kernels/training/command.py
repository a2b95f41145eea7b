"""`grpo-kernels train`: the compact loop on the command line."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import sys
from collections.abc import Sequence

import grpo_kernels as gk

from .bounds import ConfigError
from .config import describe_fields, load_config

_EXAMPLE = "example: grpo-kernels train --config examples/sums.toml --steps 100 --update.learning_rate 5e-5"
_SETTINGS_HELP = (
    "Every setting of the config file is an option too, tables and lists written in TOML; so is every field of "
    "grpo_kernels.GRPOLossConfig, as --loss.beta 0.04."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give `parser` the options of `grpo-kernels train` and its example."""
    parser.usage = "%(prog)s [-h] [--config FILE] [--resume] [--SETTING VALUE ...]"
    parser.epilog = _EXAMPLE
    parser.add_argument("--config", metavar="FILE", help="settings in TOML, or the config.json of an earlier run")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in output_dir")
    settings = parser.add_argument_group("settings", _SETTINGS_HELP)
    for key, default in _settings():
        text = argparse.SUPPRESS if key.startswith("loss.") else f"default: {default!r}"
        settings.add_argument(f"--{key}", dest=key, metavar=type(default).__name__.upper(), help=text)


def run(args: argparse.Namespace) -> int:
    """Train; 0 when the run reached its summary, 2 when a setting was refused (the reason goes to stderr)."""
    overrides = []
    for key, default in _settings():
        if (value := getattr(args, key)) is not None:
            overrides.append(f"{key}={json.dumps(value) if isinstance(default, str) else value}")
    try:
        config = load_config(args.config, overrides)
        from transformers.utils.logging import disable_progress_bar

        from .loop import train  # slow to import: after the settings are known to be good

        disable_progress_bar()  # it would break into the live table
        train(config, resume=args.resume)
    except ConfigError as error:
        print(f"grpo-kernels train: {error}", file=sys.stderr)
        return 2
    return 0


def unknown_option(parser: argparse.ArgumentParser, option: str) -> str:
    """What to tell someone who typed an option that `parser` does not have."""
    name = option.partition("=")[0]
    options = [text for action in parser._actions for text in action.option_strings]
    close = difflib.get_close_matches(name.replace("-", "_"), [text.replace("-", "_") for text in options], n=1)
    if close:
        match = next(text for text in options if text.replace("-", "_") == close[0])
        return f"unknown option {name}. Did you mean {match}?"
    return f"unknown option {name}. See --help."


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m grpo_kernels.training.command`, for launchers that start a module (`accelerate launch -m ...`)."""
    parser = argparse.ArgumentParser(prog="grpo-kernels train", allow_abbrev=False)
    add_arguments(parser)
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        parser.error(unknown_option(parser, unknown[0]))
    return run(args)


def _settings() -> list[tuple[str, object]]:
    """Key and default of every setting, those of the loss among them."""
    loss = [(f"loss.{item.name}", item.default) for item in dataclasses.fields(gk.GRPOLossConfig)]
    return [*((key, default) for key, default in describe_fields() if key != "loss"), *loss]


if __name__ == "__main__":
    raise SystemExit(main())
