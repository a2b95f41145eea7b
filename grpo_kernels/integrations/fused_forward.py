"""Work done inside a model's own forward, where DDP, FSDP, PEFT and checkpointing see it, in place of its head."""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from torch import nn
from transformers import PreTrainedModel

from .. import checks
from ..compiling import outside_compile
from .lm_head import causal_lm

Compute = Callable[[Any, Mapping[str, Any]], Any]
"""`(output of the backbone, arguments of the forward)` -> what the forward returns."""


class _Replaced(NamedTuple):
    """A forward that is replaced at the moment."""

    before: Any
    """The model's own one on the instance; None: that of its class."""
    forwards: dict[int, list[Callable[..., Any]]]
    """Of each thread that asked for another, the latest last."""


_LOCK = threading.Lock()
_REPLACED: weakref.WeakKeyDictionary[PreTrainedModel, _Replaced] = weakref.WeakKeyDictionary()


def call_in_place_of_head(
    function: str, model: nn.Module, compute: Compute, inputs: Mapping[str, Any], own: tuple[str, ...] = ()
) -> Any:
    """`model(**inputs)`, whose innermost forward runs the backbone and then `compute`, and never makes logits.

    The forward is replaced on the instance, so that every wrapper around it still runs, and for this thread alone:
    others may generate with the model meanwhile. All arguments but those named in `own` go to the backbone as they
    come.

    Raises:
        ValueError: nn.DataParallel over several devices, whose copies of the model run in threads of their own; a
            model whose config has it return tuples.
        RuntimeError: a wrapper that never came to this forward.
    """
    check_call(function, model)
    base = causal_lm(model)
    came = False

    def forward(*args: Any, **kwargs: Any) -> Any:
        nonlocal came
        came = True
        passed = {name: value for name, value in kwargs.items() if name not in own} | {"use_cache": False}
        return compute(base.base_model(*args, **passed), kwargs)

    with _forward_of_this_thread(base, forward):
        outputs = model(**inputs)
    if not came:
        raise RuntimeError(
            f"{function}: {type(model).__name__} did not call the forward of {type(base).__name__} in this thread. "
            "Pass the model without that wrapper."
        )
    return outputs


def check_call(function: str, model: nn.Module) -> None:
    """The ValueErrors of `call_in_place_of_head`."""
    if isinstance(model, nn.DataParallel) and len(model.device_ids) > 1:
        got = f"nn.DataParallel over {len(model.device_ids)} devices"
        advice = "Use DistributedDataParallel (torchrun), or show one device (CUDA_VISIBLE_DEVICES)."
        raise ValueError(checks.complain(function, "model", "must run in the thread that calls it", got, advice))
    if not getattr(causal_lm(model).config, "return_dict", True):
        wanted, advice = "must have config.return_dict=True", "The backbone's output is read by name. Set it."
        raise ValueError(checks.complain(function, "model", wanted, False, advice))


@contextlib.contextmanager
def _forward_of_this_thread(base: PreTrainedModel, forward: Callable[..., Any]) -> Iterator[None]:
    thread = threading.get_ident()
    with _LOCK:
        replaced = _REPLACED.get(base)
        if replaced is None:
            replaced = _REPLACED[base] = _Replaced(vars(base).get("forward"), {})
            base.forward = _dispatching(base.forward, replaced.forwards)
        replaced.forwards.setdefault(thread, []).append(forward)
    try:
        yield
    finally:
        with _LOCK:
            replaced.forwards[thread].pop()
            if not replaced.forwards[thread]:
                del replaced.forwards[thread]
            if not replaced.forwards:
                del _REPLACED[base]
                if replaced.before is None:
                    del base.forward
                else:
                    base.forward = replaced.before


def _dispatching(original: Callable[..., Any], forwards: dict[int, list[Callable[..., Any]]]) -> Callable[..., Any]:
    @functools.wraps(original)  # generate() reads its signature
    def forward(*args: Any, **kwargs: Any) -> Any:
        mine = _of_this_thread(forwards)
        return mine[-1](*args, **kwargs) if mine else original(*args, **kwargs)

    return forward


@outside_compile
def _of_this_thread(forwards: dict[int, list[Callable[..., Any]]]) -> list[Callable[..., Any]] | None:
    return forwards.get(threading.get_ident())
