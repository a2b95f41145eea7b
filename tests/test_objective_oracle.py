"""Every loss against the tests' own truth in NumPy, with derivatives by hand and no autograd, padded and packed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from oracle import Batch, Options, grpo
from support import LAYOUTS, make_batch, run, tensor
from tolerance import as_array

OWN: dict[str, dict[str, Any]] = {
    "luspo": {"epsilon_high": 0.28, "delta": 1.4}, "cispo": {"epsilon_high": 1.1},
    "sapo": {"sapo_temperature_pos": 0.7, "sapo_temperature_neg": 1.4},
    "vespo": {"vespo_k_pos": 1.5, "vespo_lambda_pos": 0.8, "vespo_k_neg": 1.2, "vespo_lambda_neg": 0.5},
    "gmpo": {"epsilon": 0.3, "epsilon_high": 0.4}, "gpg": {},
    "dppo_tv": {"epsilon": 0.02, "epsilon_high": 0.03, "dppo_cap": 1.2},
    "dppo_kl": {"epsilon": 0.002, "epsilon_high": 0.003, "dppo_cap": 1.2}, "dro": {"dro_beta": 0.7},
    "dapo": {"dual_clip": 1.4}, "grpo": {},
}  # fmt: skip
CASES = [
    (name, level) for name in OWN for level in ("token", "sequence", "sequence_token")
    if level == "token" or name in ("luspo", "sapo", "dapo", "grpo")
]  # fmt: skip
EXTRAS: list[dict[str, Any]] = [
    {}, {"log_ratio_clamp": 0.2}, {"beta": 0.3, "kl_estimator": "abs", "kl_clamp": (0.4, None)},
    {"beta": 0.3, "kl_clamp": (None, 0.1), "use_bias_correction_kl": True, "log_ratio_clamp": 0.3},
    {"beta": 0.3, "kl_estimator": "k3+", "kl_weighted_by_rollout": True, "use_bias_correction_kl": True},
    {"beta": 0.2, "kl_estimator": "k1+", "aggregation": "prompt_mean"}, {"aggregation": "token_sum"},
    {"aggregation": "seq_mean_token_sum_norm", "max_completion_length": 5, "entropy_coef": 0.2},
    {"aggregation": "seq_mean_token_sum", "temperature": 0.8},
]  # fmt: skip


def batch_of(seed: int, layout: str) -> Batch:
    batch = make_batch(seed=seed, dtype=torch.float64, layout=layout, weight="token", token_advantages=seed % 2 == 1)
    return batch.but(old=np.minimum(batch.old, -1e-3), groups=np.array([3, 1, 3, 1]))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("loss_type", "level"), CASES)
def test_loss_gradient_tokens_and_metrics(loss_type: str, level: str, layout: str) -> None:
    for seed, extra in enumerate(EXTRAS):
        opt = Options(loss_type=loss_type, importance_sampling_level=level, **OWN[loss_type] | extra)
        batch = batch_of(seed, layout)
        groups = {"group_ids": tensor(batch.groups)} if opt.mode == "prompt_mean" else {}
        got, truth = run(batch, opt, torch.float64, **groups), grpo(batch, opt)
        where = f"{extra} {seed}"
        assert abs(truth.loss) > 1e-4, where
        assert got.loss.item() == pytest.approx(float(truth.loss), rel=1e-12, abs=1e-13), where
        grad = as_array(got.grad)
        live = truth.live.reshape(batch.ids.shape)
        np.testing.assert_allclose(grad[live], truth.dlogits.astype(float)[live], rtol=1e-10, atol=1e-13, err_msg=where)
        assert (grad[~live] == 0).all()
        for name in ("loss", "kl", "ratio"):
            value = getattr(got.per_token, name)
            expected = getattr(truth, {"loss": "token_loss"}.get(name, name)).astype(float)
            if value is not None:
                np.testing.assert_allclose(as_array(value).reshape(-1), expected, rtol=1e-11, atol=1e-13, err_msg=where)
        for name, value in truth.metrics.items():
            assert got.metrics[name].item() == pytest.approx(value, rel=1e-11, abs=1e-13), (name, where)
