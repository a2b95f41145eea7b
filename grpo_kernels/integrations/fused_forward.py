"""Work done inside a model's own forward, where DDP, FSDP, PEFT and checkpointing see it, in place of its head."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from transformers import PreTrainedModel

Compute = Callable[[Any, Mapping[str, Any]], Any]
"""`(output of the backbone, arguments of the forward)` -> what the forward returns."""


@contextlib.contextmanager
def in_place_of_head(base: PreTrainedModel, compute: Compute, own: tuple[str, ...] = ()) -> Iterator[None]:
    """While open, `base(...)` runs its backbone and then `compute`, and never makes logits.

    The forward is replaced on the instance, so that every wrapper around it still runs; all arguments but those named
    in `own` go to the backbone as they come.
    """

    def forward(*args: Any, **kwargs: Any) -> Any:
        inputs = {name: value for name, value in kwargs.items() if name not in own} | {"use_cache": False}
        return compute(base.base_model(*args, **inputs), kwargs)

    before = vars(base).get("forward")
    base.forward = forward
    try:
        yield
    finally:
        if before is None:
            del base.forward
        else:
            base.forward = before
