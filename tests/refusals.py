"""One refusal, checked whole: its type and text, that nothing was computed from the logits, that no input changed.

Text: `<function>: <argument> <requirement>, got <value>. <what to do>`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import same_bits
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import grpo_kernels as gk

NAN = math.nan
B, T, V, G = 4, 3, 5, 2
LONG = torch.long
TEXT = r"^{function}: {argument}\b.*, got .+\. .+"


class Watch(TorchDispatchMode):
    """Notes each operation that reads or writes the logits' storage.

    Making views is free, and so is an op that looks at the other tensors first and says that they do not fit.
    """

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.storage = logits.untyped_storage().data_ptr()
        self.touched: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if str(func) == "grpo_kernels.logps_cpp.default" and not result[-1]:
            return result
        if not func.is_view and func is not torch.ops.aten.detach.default:
            for x in (*args, *kwargs.values()):
                if isinstance(x, Tensor) and x.device.type == "cpu" and x.untyped_storage().data_ptr() == self.storage:
                    self.touched.append(str(func))
        return result


def good() -> dict[str, Any]:
    """A call of `grpo_loss` with nothing wrong in it."""
    generator = torch.Generator().manual_seed(0)
    return {
        "logits": torch.randn(B, T, V, generator=generator), "completion_ids": torch.arange(B * T).reshape(B, T) % V,
        "config": gk.GRPOLossConfig(beta=0.1), "advantages": torch.tensor([1.0, -1.0, 0.5, -0.5]),
        "completion_mask": torch.ones(B, T), "old_per_token_logps": torch.full((B, T), -1.5),
        "ref_per_token_logps": torch.full((B, T), -1.4),
    }  # fmt: skip


def packed() -> dict[str, Any]:
    call = {k: v.flatten(0, 1) if isinstance(v, Tensor) and v.dim() > 1 else v for k, v in good().items()}
    return call | {"cu_seqlens": torch.tensor([0, 3, 3, 7, 12], dtype=torch.int32)}


def refused(
    call: Callable[..., Any],
    arguments: dict[str, Any],
    error: type[Exception],
    function: str,
    argument: str,
    *words: str,
) -> str:
    """Calls, checks type, format and words of the refusal, that the logits were not worked on and no input changed."""
    tensors = {k: v for k, v in arguments.items() if isinstance(v, Tensor)}
    before = {k: (v.detach().clone(), v._version) for k, v in tensors.items()}
    watch = Watch(arguments["logits"]) if isinstance(arguments.get("logits"), Tensor) else None
    last = gk.backends.last_used()
    with (
        pytest.raises(error, match=TEXT.format(function=function, argument=argument)) as caught,
        watch or contextlib.nullcontext(),
    ):
        call(**arguments)
    text = str(caught.value)
    for word in words:
        assert word in text, f"{word!r} is not in {text!r}"
    assert type(caught.value) is error
    assert watch is None or not watch.touched, watch.touched
    assert gk.backends.last_used() == last
    for name, value in tensors.items():
        if value.device.type == "cpu":
            assert same_bits(value.detach(), before[name][0]), name
        assert value._version == before[name][1], name
    return text
