"""One absolute number by hand for each loss that does not clip the ratio, or not alone; the batch is test_golden.py's.

Its ratios are 5/4, 2 with A = +1 and 1/2, 3/2, 1 with A = -1; its probabilities 1/2, 1/4 and 1/4, 3/4, 1/4. The KL sums
of the two rows are 0.1 (ln 2 - 1/2) and 0.05, together kl = 0.0693147181.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import loss_inputs, tensor
from test_golden import BATCH

import grpo_kernels as gk

GOLDEN: dict[str, tuple[dict[str, Any], float]] = {
    # (-2.53 + 3.3 + kl) / 2
    "luspo": ({"epsilon_high": 0.28}, 0.4196573590),
    # s = logistic: rows -(4 s(1/4) + 4 s(1)) / 2 and 4 / 1.05 (s(-0.525) + s(0.525) + 1/2) / 3
    "sapo": ({}, -0.3276921143),
    # W = ln 5/2 and ln 3/4: phi = e^(3 - 7.5) (5/2)^2 = 0.0694312284 and e^(2 - 1.5) (3/4)^3 = 0.6955542861;
    # (0.0694312284 ln 8 + 0.6955542861 ln(3/64) + kl) / 5
    "vespo": ({}, -0.3829783138),
    # bounds 0.2 in log space: e^0.2 = 1.2214027582 and ((3/2) e^-0.2)^(1/3) = 1.0708881698
    "gmpo": ({}, -0.0620952813),
    # (ln 8 + ln(3/64) + kl) / 5
    "gpg": ({}, -0.1823029070),
    # p - old = 0.1, 0.125 (> 0.11: out) and -0.25 (< -0.2: out), 0.25, 0; cap 1.2:
    # (1.2 ln 2 + 1.2 ln(3/4) + ln(1/4) + kl) / 5
    "dppo_tv": ({"epsilon_high": 0.11, "dppo_cap": 1.2}, -0.1660843027),
    # KL = 0.0201, 0.0482 (> 0.04: out) and 0.1438 (> 0.1: out), 0.1438 the other way, 0: the same tokens
    "dppo_kl": ({"epsilon": 0.1, "epsilon_high": 0.04, "dppo_cap": 1.2}, -0.1660843027),
    # gpg + 1/4 (ln^2 5/4 + ln^2 2 + ln^2 1/2 + ln^2 3/2) / 5
    "dro": ({"dro_beta": 0.5}, -0.1235478557),
    # covariances 0.402, -0.430, 0.287, -0.592, 0.287: the first token alone lies above 0.3; (-1.28 + 3.3 + kl) / 5
    "clip_cov": ({"epsilon_high": 0.28, "cov_ratio": 0.5, "cov_bounds": (0.3, 5.0)}, 0.4178629436),
    # the first token alone: (-3.25 + 3 + ln(5/4) / 2 + kl) / 5
    "kl_cov": ({"cov_ratio": 0.3, "cov_coef": 0.5}, -0.0138227012),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("loss_type", GOLDEN)
def test_the_loss_is_the_hand_number(loss_type: str, dtype: torch.dtype) -> None:
    options, loss = GOLDEN[loss_type]
    config = gk.GRPOLossConfig(loss_type=loss_type, beta=0.1, **options)
    out = gk.grpo_loss(tensor(BATCH.logits, dtype), tensor(BATCH.ids), config=config, **loss_inputs(BATCH, dtype))
    assert abs(loss) > 0.01
    assert out.loss.item() == pytest.approx(loss, abs=1e-9 if dtype == torch.float64 else 1e-6)


def test_every_loss_has_a_number() -> None:
    from test_golden import GOLDEN as CLIPPED

    assert set(GOLDEN) | set(CLIPPED) == set(gk.config.LOSS_TYPES)
