"""What a run stands on before its first step: the process group, the output folder, the policy it starts from."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers
from accelerate.utils import DistributedType
from transformers import PreTrainedTokenizerBase

from . import embedded
from .bounds import ConfigError
from .checkpoint import checkpoints, newest_checkpoint
from .config import TrainConfig, config_to_dict
from .measure import Stopwatch
from .policy import Policy, choose_attention, load_pretrained
from .prompts import encode_answers, encode_prompts
from .tasks import Task

WARMED_UP = "warmed_up"
_SUPPORTED = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


def make_accelerator(config: TrainConfig) -> Accelerator:
    """Device, processes (DDP) and tracker. ConfigError for a tracker that is not there and for sharded models."""
    if config.tracker != "none":
        installed = sorted(str(getattr(tracker, "value", tracker)) for tracker in get_available_trackers())
        if config.tracker not in installed:
            known = "is not installed" if config.tracker in LOGGER_TYPE_TO_CLASS else "is not one of accelerate's"
            raise ConfigError(
                f"make_accelerator: tracker must be installed, got {config.tracker!r}, which {known}. "
                f"Installed: {', '.join(installed) or 'none'}."
            )
    accelerator = Accelerator(
        cpu=config.device == "cpu",
        mixed_precision=config.model.mixed_precision,
        log_with=None if config.tracker == "none" else config.tracker,
        project_dir=config.output_dir,
    )
    if accelerator.distributed_type not in _SUPPORTED:
        raise ConfigError(
            f"make_accelerator: processes must each hold the whole model, got {accelerator.distributed_type.value}. "
            "Launch with DDP: sampling reads the weights outside the wrapped forward."
        )
    return accelerator


def open_output(config: TrainConfig, accelerator: Accelerator, resume: bool) -> Path:
    """The output folder, config.json in it. ConfigError when a new run would mix with an older one's checkpoints."""
    folder = Path(config.output_dir)
    if resume:
        newest_checkpoint(folder)
    elif checkpoints(folder):
        raise ConfigError(
            f"open_output: output_dir must hold no checkpoint of an earlier run, got {folder}. "
            "Resume that run, or choose another folder."
        )
    if accelerator.is_main_process:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config_to_dict(config), indent=2) + "\n", encoding="utf-8")
    accelerator.wait_for_everyone()
    if config.tracker != "none":
        accelerator.init_trackers("grpo_kernels", config={"settings": json.dumps(config_to_dict(config))})
    return folder


def starting_policy(
    config: TrainConfig, task: Task, accelerator: Accelerator, resume: bool, clock: Stopwatch
) -> tuple[Policy, PreTrainedTokenizerBase]:
    """The policy before training, on its device: the folder `model.path`, or the embedded model, warmed up.

    The warmed-up model is written to `output_dir/warmed_up` and read from there, by a resumed run too.
    """
    attn = choose_attention(config.model, accelerator.device)
    folder = config.model.path or str(Path(config.output_dir) / WARMED_UP)
    if not config.model.path and not resume:
        if accelerator.is_main_process:
            with clock("warm_up"):
                write_embedded(config, task, accelerator.device, folder)
        accelerator.wait_for_everyone()
    model, tokenizer = load_pretrained(folder, config.model.dtype, attn)
    with accelerator.autocast():
        return Policy(model.to(accelerator.device), packing=config.update.packing == "auto"), tokenizer


def write_embedded(config: TrainConfig, task: Task, device: torch.device, folder: str) -> None:
    """Make the embedded model, warm it up on the task's answers, and save it with its tokenizer."""
    tokenizer = embedded.make_tokenizer()
    policy = Policy(embedded.make_model(config.embedded, tokenizer)).to(device)

    def pairs(first: int, count: int) -> tuple[list[list[int]], list[list[int]]]:
        examples = [task.train_example(index) for index in range(first, first + count)]
        return encode_prompts(tokenizer, examples, config.model), encode_answers(tokenizer, examples)

    def report(step: int, loss: float) -> None:
        if step % max(1, config.embedded.warmup_steps // 4) == 0:
            print(f"warm-up: step {step} of {config.embedded.warmup_steps}, loss {loss:.3f}", flush=True)

    embedded.warm_up(policy, pairs, config.embedded, max_tokens=config.update.max_tokens_per_pack, report=report)
    policy.save(folder, tokenizer)
