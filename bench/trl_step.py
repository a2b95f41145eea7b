"""The loss part of a step of TRL's GRPOTrainer on this machine, as it comes and patched, side by side.

    python bench/trl_step.py --save
    python bench/trl_step.py --vocabulary 2000 --hidden 32 --length 16 --rounds 1

One step: the log-probs of the old policy without gradient (for `--iterations 2`), then `_compute_loss` and its backward
on the same micro-batch. Both trainers share one model: a Qwen2 of `--layers` random layers. Every round runs both, in
turn; peak memory is what torch's allocator had at most beyond what lay there before, from a run of its own. Loss and
gradient of both are compared first. `--save` writes bench/results.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl import GRPOConfig, GRPOTrainer

from grpo_kernels.benchmark.memory import peak_bytes
from grpo_kernels.benchmark.timing import WallClock, interleaved
from grpo_kernels.integrations.trl import patch_trainer

TARGET = Path(__file__).parents[1] / "bench" / "results" / "trl-step-cpu.json"
PROMPT = 16


def trainer_of(model: Qwen2ForCausalLM, options: argparse.Namespace) -> GRPOTrainer:
    """A trainer of the model; its data and rewards are never used."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"<pad>": 0, "a": 1}, unk_token="a")), pad_token="<pad>",
        eos_token="a",
    )  # fmt: skip
    args = GRPOConfig(
        output_dir=tempfile.mkdtemp(), per_device_train_batch_size=options.batch, num_generations=options.batch,
        max_completion_length=options.length, loss_type=options.loss_type, use_cpu=True, bf16=False, report_to=[],
        activation_checkpointing=False, importance_sampling_level=options.level,
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=model, reward_funcs=lambda completions, **_: [0.0] * len(completions), args=args,
        processing_class=tokenizer, train_dataset=Dataset.from_dict({"prompt": ["a"]}),
    )  # fmt: skip
    trainer.current_gradient_accumulation_steps = 1
    return trainer


def batch_of(options: argparse.Namespace) -> dict[str, Any]:
    """What TRL hands to the loss: completions of full length."""
    rng = torch.Generator().manual_seed(0)
    ids = torch.randint(2, options.vocabulary, (options.batch, PROMPT + options.length), generator=rng)
    return {
        "prompt_ids": ids[:, :PROMPT], "prompt_mask": torch.ones_like(ids[:, :PROMPT]),
        "completion_ids": ids[:, PROMPT:], "completion_mask": torch.ones_like(ids[:, PROMPT:]),
        "advantages": torch.randn(options.batch, generator=rng) + 0.1,
        "num_items_in_batch": torch.tensor(options.batch * options.length),
    }  # fmt: skip


def step_of(trainer: GRPOTrainer, inputs: dict[str, Any], options: argparse.Namespace) -> Callable[[], Any]:
    """One step of a trainer, which leaves its loss and the gradient of the head."""
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)

    def step() -> tuple[float, torch.Tensor]:
        trainer.model.train()
        trainer.model.zero_grad(set_to_none=True)
        given = dict(inputs)
        if options.iterations > 1:
            with torch.no_grad():
                old, _, _ = trainer._get_per_token_logps_and_entropies(
                    trainer.model, ids, torch.ones_like(ids), options.length
                )
            given["old_per_token_logps"] = old
        loss = trainer._compute_loss(trainer.model, given)
        loss.backward()
        trainer._metrics["train"].clear()
        return loss.item(), trainer.model.lm_head.weight.grad

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--hidden", type=int, default=896)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--loss-type", default="dapo")
    parser.add_argument("--level", default="token")
    parser.add_argument("--iterations", type=int, default=1)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--save", action="store_true", help="write the result to bench/results")
    options = parser.parse_args()
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=options.vocabulary, hidden_size=options.hidden, intermediate_size=2 * options.hidden,
        num_hidden_layers=options.layers, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config).to(getattr(torch, options.dtype))
    inputs = batch_of(options)
    trainers = {"TRL": trainer_of(model, options), "grpo_kernels": trainer_of(model, options)}
    patch_trainer(trainers["grpo_kernels"])
    steps = {name: step_of(trainer, inputs, options) for name, trainer in trainers.items()}
    (loss, grad), (our_loss, our_grad) = (step() for step in steps.values())
    apart = {
        "loss": abs(our_loss - loss) / abs(loss),
        "gradient": float((our_grad.double() - grad.double()).norm() / grad.double().norm()),
    }
    del grad, our_grad
    work = {name: (lambda step=step: step) for name, step in steps.items()}
    times = interleaved(work, WallClock(), rounds=options.rounds, warm_up=1)
    results = {}
    for name, seconds in times.items():
        model.zero_grad(set_to_none=True)  # or the step would free them, and its peak seem lower
        results[name] = {
            "median_s": statistics.median(seconds),
            "min_s": min(seconds),
            "max_s": max(seconds),
            "peak_mib": peak_bytes(work[name], torch.device("cpu")) / 2**20,
        }
    record = {
        "options": {name: value for name, value in vars(options).items() if name != "save"},
        "threads": torch.get_num_threads(),
        "machine": platform.processor() or platform.machine(),
        "versions": {name: metadata.version(name) for name in ("torch", "transformers", "trl")},
        "relative_difference": apart,
        "ratio_of_times": statistics.median(
            ours / theirs for theirs, ours in zip(times["TRL"], times["grpo_kernels"], strict=True)
        ),
        "results": results,
    }
    print(json.dumps(record, indent=1))
    if options.save:
        TARGET.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
