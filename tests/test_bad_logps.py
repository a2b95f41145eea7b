"""Bad input of the log-probability function is refused in words, before any work on the logits."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from refusals import LONG, B, T, V, good, refused

import grpo_kernels as gk

NAN = math.nan


# per_token_logps


LOGPS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "unshifted": ({"logits": torch.zeros(B, T + 1, V)}, ValueError, "(logits|targets)"),
    "targets short": ({"targets": torch.zeros(B, T - 1, dtype=LONG)}, ValueError, "(logits|targets)"),
    "logits flat": ({"logits": torch.zeros(V)}, ValueError, "logits"),
    "targets flat": ({"targets": torch.zeros(B * T, dtype=LONG)}, ValueError, "(logits|targets)"),
    "empty vocabulary": ({"logits": torch.zeros(B, T, 0)}, ValueError, "logits"),
    "mask": ({"mask": torch.ones(B, T + 1)}, ValueError, "mask"),
    "mask kind": ({"mask": torch.ones(B, T, dtype=torch.complex64)}, TypeError, "mask"),
    "targets kind": ({"targets": torch.zeros(B, T)}, TypeError, "targets"),
    "targets int8": ({"targets": torch.zeros(B, T, dtype=torch.int8)}, TypeError, "targets"),
    "logits kind": ({"logits": torch.zeros(B, T, V, dtype=torch.int32)}, TypeError, "logits"),
    "logits bool": ({"logits": torch.zeros(B, T, V, dtype=torch.bool)}, TypeError, "logits"),
    "temperature [B]": ({"temperature": torch.ones(B)}, ValueError, "temperature"),
    "temperature [T]": ({"temperature": torch.ones(T)}, ValueError, "temperature"),
    "temperature 0": ({"temperature": 0.0}, ValueError, "temperature"),
    "temperature kind": ({"temperature": None}, TypeError, "temperature"),
    "temperature complex": ({"temperature": torch.ones(B, 1, dtype=torch.complex64)}, TypeError, "temperature"),
    "softcap 0": ({"softcap": 0.0}, ValueError, "softcap"),
    "softcap negative": ({"softcap": -5.0}, ValueError, "softcap"),
    "softcap NaN": ({"softcap": NAN}, ValueError, "softcap"),
    "scale NaN": ({"logit_scale": NAN}, ValueError, "logit_scale"),
    "scale inf": ({"logit_scale": math.inf}, ValueError, "logit_scale"),
    "live id": ({"targets": torch.full((B, T), V)}, ValueError, "targets"),
    "unknown impl": ({"impl": "gpu"}, ValueError, "impl"),
}


@pytest.mark.parametrize("case", LOGPS)
def test_log_probs_refuse(case: str) -> None:
    change, error, argument = LOGPS[case]
    call = {"logits": torch.zeros(B, T, V), "targets": torch.zeros(B, T, dtype=LONG)} | change
    refused(gk.per_token_logps, call, error, "per_token_logps", argument)


def test_a_flat_temperature_with_flat_targets_is_per_token() -> None:
    """`[N]` is token-shaped there, so it is not ambiguous."""
    logits, targets = torch.zeros(3, V), torch.zeros(3, dtype=LONG)
    assert gk.per_token_logps(logits, targets, temperature=torch.ones(3)).logps.shape == (3,)


def test_a_live_id_beyond_the_vocabulary_may_be_masked() -> None:
    targets = torch.tensor([[0, V, -100]])
    out = gk.per_token_logps(torch.zeros(1, 3, V), targets, mask=torch.tensor([[1, 0, 1]]))
    assert out.logps[0, 1:].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("impl", ["triton", "cpp"])
@pytest.mark.parametrize("function", ["grpo_loss", "per_token_logps"])
def test_an_absent_implementation_says_why(impl: str, function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(gk.backends, "_cpp_missing", lambda: "not built")
    call = (
        good()
        if function == "grpo_loss"
        else {"logits": torch.zeros(B, T, V), "targets": torch.zeros(B, T, dtype=LONG)}
    )
    with pytest.raises(RuntimeError, match=impl):
        getattr(gk, function)(**call, impl=impl)
    assert torch.isfinite(gk.grpo_loss(**good(), impl="auto").loss)


def test_inplace_refusals_have_the_text() -> None:
    call = good()
    leaf = call["logits"].requires_grad_()
    refused(gk.grpo_loss, call | {"inplace": True}, ValueError, "grpo_loss", "(logits|inplace)", "inplace", "leaf")
    view = (leaf * 1.0)[:, :]
    refused(
        gk.grpo_loss,
        call | {"logits": view, "inplace": True},
        ValueError,
        "grpo_loss",
        "(logits|inplace)",
        "inplace",
        "view",
    )
