"""torch.compile traces the objectives without a break, all but clip_cov, which chooses at random."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_objective_coefficients import OWN, problem

import grpo_kernels as gk

CASES: dict[str, dict[str, Any]] = {
    **{name: {"loss_type": name, **OWN[name]} for name in ("sapo", "vespo", "gmpo", "kl_cov")},
    "masks": {"off_policy_mask_threshold": 0.0, "top_entropy_quantile": 0.5, "entropy_coef": 0.1},
    "correction": {"rollout_correction": "sequence_mask", "rollout_veto": 0.5, "rollout_clip_min": 0.5},
    "bounds": {"beta": 0.1, "kl_estimator": "k3+", "kl_clamp": (0.3, 0.2), "log_ratio_clamp": 0.4},
    "prompts": {"aggregation": "prompt_mean"},
}


@pytest.mark.parametrize("case", CASES)
def test_compiled_equals_eager(case: str) -> None:
    config = gk.GRPOLossConfig(**CASES[case])
    logits, ids, rest = problem(3)
    if case == "prompts":
        rest |= {"group_ids": torch.tensor([2, 0, 2, 1, 0, 1])}

    def loss(logits: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = gk.grpo_loss(logits, ids, config=config, impl="torch", **rest).loss
        return total

    torch._dynamo.reset()
    results = []
    for run in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        value = run(logits)
        results.append((value.detach(), torch.autograd.grad(value, logits)[0]))
    torch.testing.assert_close(results[1], results[0], rtol=1e-10, atol=1e-12)
