"""Run by torchrun: the same training runs by both trainers, their logs printed by the main process."""

from __future__ import annotations

import json

from integration_support import build, causal_lm, train
from trl import GRPOTrainer

from grpo_kernels.integrations.trl import FusedGRPOTrainer

RUNS = [
    {"beta": 0.04, "num_iterations": 2},
    {"loss_type": "bnpo", "gradient_accumulation_steps": 2, "entropy_coef": 0.02, "ddp_find_unused_parameters": True},
]

if __name__ == "__main__":
    model = causal_lm()  # before the processes meet: later only one of them writes the reference's folder
    for options in RUNS:
        logs = []
        for cls in (GRPOTrainer, FusedGRPOTrainer):
            trainer = build(cls, model, max_steps=3, max_completion_length=10, **options)
            logs.append(train(trainer))
        if trainer.accelerator.is_main_process:
            print("LOGS", json.dumps({"processes": trainer.accelerator.num_processes, "logs": logs}), flush=True)
