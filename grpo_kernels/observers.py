"""Who may look at the gradient of each row's log-prob while the logits of a slab are alive."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from typing import NamedTuple, Protocol

from torch import Tensor


class Scored(NamedTuple):
    """Rows of a slab: d logp / d logits is `factor[:, None] * matrix`, valid until the observer returns."""

    positions: Tensor  # [R], of the flattened token tensor
    hidden: Tensor  # [R, H]
    matrix: Tensor  # [R, V]
    factor: Tensor  # [R]
    has_bias: bool


class Observer(Protocol):
    """What sees the rows of the linear functions that run inside `observing`."""

    in_order: bool
    """Whether it needs every live row, in the tokens' order."""

    def parts(self, positions: Tensor, height: int) -> Iterable[slice]:
        """Which of the ordered rows share a slab of at most `height`."""

    def see(self, rows: Scored) -> None:
        """Take what is wanted; the matrix must be left as it was."""


_observer: ContextVar[Observer | None] = ContextVar("grpo_kernels_observer", default=None)


def current() -> Observer | None:
    """The observer of this thread's calls, if there is one."""
    return _observer.get()


@contextlib.contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Show `observer` the rows of every linear call inside. RuntimeError inside another."""
    if _observer.get() is not None:
        raise RuntimeError(
            "observing: there must be one observer at a time, got another inside. Leave the first `with` before."
        )
    token = _observer.set(observer)
    try:
        yield
    finally:
        _observer.reset(token)
