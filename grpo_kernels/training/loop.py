"""GRPO in one page: sample a group of responses per prompt, verify, compare within the group, update, repeat.

Algorithm 1 of GRPO (arXiv 2402.03300), and where `train` deviates from it:

1. The loss is a token mean over the step's responses (DAPO, arXiv 2503.14476); `loss.loss_type = "grpo"` is the paper's
   mean of per-response means.
2. No KL, and so no reference, unless `loss.beta > 0`. The reference is the policy before training and is never renewed;
   with LoRA it is the base with its adapters off.
3. One update per step by default, so that every update is on-policy: the ratio is exactly 1 and nothing is clipped.
   `update.num_iterations` and `update.num_minibatches` make the later ones off-policy; old log-probs are computed then,
   by the same forward that is trained.
4. Rewards come from verifiers, once per response; there is no reward model and no process reward.
5. Advantages divide by the sample standard deviation plus 1e-4 (TRL). An unscored response (NaN) has advantage 0.
6. Dropout stays off, and responses are drawn from the whole distribution at the loss's temperature.

One seed gives one run, bit for bit, on one machine with one number of threads; on a GPU as far as its kernels repeat.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Sequence
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import Tensor
from transformers import PreTrainedTokenizerBase

import grpo_kernels as gk

from .checkpoint import load_checkpoint, save_checkpoint
from .config import TrainConfig, config_to_dict
from .display import LiveTable, print_summary
from .group_size import GroupSizeWatch
from .loss_step import measure_loss_step
from .measure import Stopwatch, peak_memory_mb, versions
from .packing import make_packs
from .plots import save_curves
from .policy import Policy
from .prompts import encode_prompts, end_token_ids
from .rollout import sample
from .start import make_accelerator, open_output, starting_policy
from .tasks import Example, Task, make_task
from .update import (
    Experience,
    all_packs,
    completion_logps,
    make_loss_config,
    make_optimizer,
    split_groups,
    update_policy,
)


def train(config: TrainConfig, *, resume: bool = False) -> dict[str, Any]:
    """Train as `config` says and return the summary.

    Writes to `config.output_dir`: config.json, history.jsonl (a line per step), summary.json, curves.png, `model/` (a
    transformers folder; with LoRA the adapters) and, for the embedded model, `warmed_up/`, the policy it started from.
    resume: go on from the newest checkpoint in there, with the numbers an uninterrupted run would have had.
    """
    loss_config = make_loss_config(config)
    accelerator = make_accelerator(config)
    device, main = accelerator.device, accelerator.is_main_process
    output_dir = open_output(config, accelerator, resume)
    clock = Stopwatch(device)
    set_seed(config.seed)
    generator = torch.Generator(device).manual_seed(config.seed * 1_000_003 + accelerator.process_index)

    task = make_task(config.task, config.seed)
    policy, tokenizer = starting_policy(config, task, accelerator, resume, clock)
    end_ids = end_token_ids(policy.causal_lm, tokenizer)
    if config.lora.rank > 0:
        policy.add_lora(config.lora)
    frozen = policy.frozen_copy() if loss_config.beta != 0 and config.lora.rank == 0 else None
    optimizer = make_optimizer(policy, config.update)
    trained, optimizer = accelerator.prepare(policy, optimizer)  # `policy` samples, `trained` also syncs gradients

    if resume:
        progress = load_checkpoint(output_dir, accelerator, policy, optimizer, generator, config_to_dict(config))
        clock.seconds = progress["seconds"]
    else:
        with clock("evaluation"):
            before = solve_rate(policy, tokenizer, task, config, accelerator)
        progress = {"step": 0, "updates": 0, "history": [], "solve_rate_before": before}
    watch = GroupSizeWatch(config, policy) if config.monitor.every and main else None
    if watch is not None and "monitor" in progress:
        watch.monitor.load_state_dict(progress["monitor"])
    history: list[dict[str, float]] = progress["history"]
    updates: int = progress["updates"]

    P, G = config.sampling.prompts_per_step, config.sampling.num_generations
    off_policy = config.update.num_iterations * config.update.num_minibatches > 1
    table = LiveTable(config.steps) if main else contextlib.nullcontext()
    last = None
    with table, open(output_dir / "history.jsonl" if main else os.devnull, "w", encoding="utf-8") as log:
        log.writelines(json.dumps(row) + "\n" for row in history)
        for step in range(progress["step"], config.steps):
            seconds = dict(clock.seconds)

            with clock("sampling"):
                examples = train_examples(task, config, accelerator, step)  # P
                prompts = encode_prompts(tokenizer, examples, config.model)  # P lists of ids
                with accelerator.autocast():
                    completions = sample(  # P * G lists of ids
                        policy,
                        prompts,
                        num_generations=G,
                        max_completion_length=config.sampling.max_completion_length,
                        temperature=config.sampling.temperature,
                        end_ids=end_ids,
                        generator=generator,
                        max_sequences=config.sampling.max_sequences,
                    )

            with clock("scoring"):
                texts = tokenizer.batch_decode(completions, skip_special_tokens=True)
                scores = task.score([example for example in examples for _ in range(G)], texts)
                own = torch.tensor(scores, dtype=torch.float32, device=device)  # (P * G,)
                rewards = accelerator.gather(own)  # (processes * P * G,)
                advantages = gk.group_advantages(
                    rewards, group_size=G, baseline=config.advantages.baseline, scale=config.advantages.scale
                )[accelerator.process_index * P * G :][: P * G]  # (P * G,): those of this process

            with clock("update"):
                minibatches = [
                    make_packs(
                        prompts,
                        completions,
                        layout=policy.layout,
                        max_tokens=config.update.max_tokens_per_pack,
                        device=device,
                        first=groups.start * G,
                        last=groups.stop * G,
                    )
                    for groups in split_groups(P, config.update.num_minibatches)
                ]
                old = reference = None
                if off_policy:
                    with accelerator.autocast():
                        old = completion_logps(policy, all_packs(minibatches), loss_config.temperature)  # (N,)
                if loss_config.beta != 0:
                    with policy.reference(frozen) as base, accelerator.autocast():
                        reference = completion_logps(base, all_packs(minibatches), loss_config.temperature)  # (N,)
                head_scores = None if watch is None else watch.scores(step, minibatches[0])
                metrics = update_policy(
                    trained,
                    optimizer,
                    accelerator,
                    Experience(minibatches, advantages, old, reference),
                    loss_config,
                    config.update,
                    updates,
                    head_scores,
                )
                updates += config.update.num_iterations * config.update.num_minibatches
                last = (minibatches[0][0], advantages[minibatches[0][0].sequences])

            spent = {name: clock.seconds[name] - seconds.get(name, 0.0) for name in ("sampling", "scoring", "update")}
            tokens = sum(map(len, completions))
            row = {
                "step": step + 1,
                "reward": rewards.nanmean().item(),
                "solve_rate": solved_share(rewards, config.task.solved_at),
                **metrics,
                "completion_length": tokens / len(completions),
                "tokens_per_second": tokens * accelerator.num_processes / sum(spent.values()),
                "memory_mb": peak_memory_mb(device),
                **{f"{name}_seconds": value for name, value in spent.items()},
            }
            history.append(row)
            log.write(json.dumps(row) + "\n")
            log.flush()
            accelerator.log(row, step=step + 1)
            if watch is not None and head_scores is not None and isinstance(table, LiveTable):
                table.note("Responses per prompt", watch.take(head_scores, own))
            if isinstance(table, LiveTable):
                table.update(row)
            if config.save_every and (step + 1) % config.save_every == 0:
                progress |= {"step": step + 1, "updates": updates, "seconds": dict(clock.seconds)}
                progress |= {"config": config_to_dict(config)}
                if watch is not None:
                    progress |= {"monitor": watch.monitor.state_dict()}
                save_checkpoint(output_dir, accelerator, policy, optimizer, generator, progress)

    with clock("evaluation"):
        after = solve_rate(policy, tokenizer, task, config, accelerator)
    summary = {
        "task": task.name,
        "seed": config.seed,
        "steps": config.steps,
        "held_out_prompts": len(task.held_out),
        "solve_rate_before": progress["solve_rate_before"],
        "solve_rate_after": after,
        "seconds": {name: round(value, 2) for name, value in clock.seconds.items()},
        "peak_memory_mb": round(peak_memory_mb(device)),
        "parameters": sum(parameter.numel() for parameter in policy.parameters()),
        "device": str(device),
        "processes": accelerator.num_processes,
        "threads": torch.get_num_threads(),
        "attention": policy.causal_lm.config._attn_implementation,
        "packing": policy.layout,
        "loss_step": None if last is None else measure_loss_step(policy, *last, loss_config),
        "versions": versions(),
        "settings": config_to_dict(config),
    }
    if watch is not None:
        summary["group_size_advice"] = watch.lines()
    if main:
        policy.save(output_dir / "model", tokenizer)
        (output_dir / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
        save_curves(history, summary, output_dir / "curves.png")
        print_summary(summary)
    accelerator.end_training()
    return summary


def train_examples(task: Task, config: TrainConfig, accelerator: Accelerator, step: int) -> list[Example]:
    """This process's prompts of a step: the stream after the warm-up's examples, no prompt used by two processes."""
    size = config.sampling.prompts_per_step
    warm_up = 0 if config.model.path else config.embedded.warmup_steps * config.embedded.warmup_batch_size
    first = warm_up + (step * accelerator.num_processes + accelerator.process_index) * size
    return [task.train_example(index) for index in range(first, first + size)]


def solve_rate(
    policy: Policy, tokenizer: PreTrainedTokenizerBase, task: Task, config: TrainConfig, accelerator: Accelerator
) -> float:
    """Share of the held-out prompts whose most likely answer is right; the processes share the prompts."""
    examples = task.held_out[accelerator.process_index :: accelerator.num_processes]
    rewards: Sequence[float] = []
    if examples:
        with accelerator.autocast():
            completions = sample(
                policy,
                encode_prompts(tokenizer, examples, config.model),
                num_generations=1,
                max_completion_length=config.sampling.max_completion_length,
                temperature=0,
                end_ids=end_token_ids(policy.causal_lm, tokenizer),
                max_sequences=config.sampling.max_sequences,
            )
        rewards = task.score(examples, tokenizer.batch_decode(completions, skip_special_tokens=True))
    solved = torch.tensor(float(sum(reward >= task.solved_at for reward in rewards)), device=accelerator.device)
    return float(accelerator.reduce(solved).item()) / len(task.held_out)


def solved_share(rewards: Tensor, solved_at: float) -> float:
    """Share of the scored rewards `[B]` (not NaN) that reach `solved_at`; NaN when none is scored."""
    scored = rewards[~rewards.isnan()]
    return (scored >= solved_at).float().mean().item() if len(scored) else math.nan
