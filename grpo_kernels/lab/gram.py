"""Inner products of scores within each group, from scores, from a linear layer's inputs and deltas, or sketched."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from ..checks import check_choice, complain
from .arrays import array, check_shape, check_whole, like, seeded, tensor64

SKETCHES = ("gauss", "rademacher", "count")
_FEW = 1 << 22  # elements of a block in float64


def score_gram(scores: Any) -> Any:
    """K_ab = s_a . s_b within each group: `[P, G, d] -> [P, G, G]`, float64.

    scores: an array, or an iterable of arrays `[P, G, ...]`, one per parameter, whose products add up.
    Nested lists are refused: they could be either.
    """
    total: Tensor | None = None
    sources = []
    for source, flat in _blocks("score_gram", "scores", scores):
        sources.append(source)
        P, G, d = flat.shape
        if total is None:
            total = torch.zeros(P, G, G, dtype=torch.float64, device=flat.device)
        step = max(1, _FEW // max(1, P * G))
        for start in range(0, d, step):
            some = flat[:, :, start : start + step].to(torch.float64)
            total += some @ some.mT
    return like(_something("score_gram", "scores", total), *sources)


def ghost_gram(delta: Any, h: Any, mask: Any = None) -> Any:
    """Inner products of a linear layer's gradients without forming one: K_ij = sum_tt' (d_it . d_jt') (h_it . h_jt').

    Args:
        delta: `[P, G, T, Do]` gradient at the layer's output of each token; for a language-model head onehot - p.
        h: `[P, G, T, Di]` the layer's input.
        mask: `[P, G, T]`, 0 where a token does not count; None: all do.

    Returns `[P, G, G]`, float64. Memory: (G T)^2 numbers of a group at a time.
    """
    name = "ghost_gram"
    d, x = tensor64(name, "delta", delta, 4), tensor64(name, "h", h, 4)
    if x.shape[:3] != d.shape[:3]:
        wanted = f"must have the shape {list(d.shape[:3])} of delta and Di"
        raise ValueError(complain(name, "h", wanted, list(x.shape), "Line the arrays up."))
    if mask is not None:
        live = tensor64(name, "mask", mask, 3)
        check_shape(name, "mask", live, tuple(d.shape[:3]), "delta")
        on = (live != 0).unsqueeze(3)
        d, x = torch.where(on, d, 0.0), torch.where(on, x, 0.0)
    P, G, T, _ = d.shape
    groups = [(a @ a.T) * (b @ b.T) for a, b in zip(d.flatten(1, 2), x.flatten(1, 2), strict=True)]
    summed = [group.view(G, T, G, T).sum((1, 3)) for group in groups]
    return like(torch.stack(summed) if P else d.new_zeros(0, G, G), delta, h)


def sketch(grads: Any, k: int, kind: str = "rademacher", seed: int = 0) -> Any:
    """R s with one random R, E[R^T R] = 1, for every score: `[P, G, ...]` arrays to `[P, G, k]`, float64.

    Inner products, and so a2, a3, a4 and the cross term, stay unbiased over R. A and B2 survive a small k; Vb wants
    one as large as the scores' effective dimension.

    Args:
        grads: an array, or an iterable of arrays, one per parameter, which may be made as they are asked for.
        k: numbers kept.
        kind: "gauss", "rademacher" (signs), or "count" (each coordinate into one of k bins, with a sign).
        seed: of R. All samples and prompts that are to be compared must share it, and the order of the arrays.
    """
    name = "sketch"
    k = check_whole(name, "k", k, 1, "Try 256.")
    check_choice(name, "kind", kind, SKETCHES)
    generator = seeded(name, seed)
    total: Tensor | None = None
    first: Any = None
    for source, block in _blocks(name, "grads", grads):
        flat = block.to(torch.float64)
        if total is None:
            first = source
            total = torch.zeros(*flat.shape[:2], k, dtype=torch.float64, device=flat.device)
        step = max(1, _FEW // k)
        for start in range(0, flat.shape[2], step):
            some = flat[:, :, start : start + step]
            if kind == "count":
                bins = torch.randint(k, (some.shape[2],), generator=generator).to(flat.device)
                total.index_add_(2, bins, some * _signs((some.shape[2],), generator).to(flat.device))
            else:
                shape = (some.shape[2], k)
                drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
                matrix = drawn if kind == "gauss" else _signs(shape, generator)
                total += some @ (matrix.to(flat.device) / k**0.5)
    return like(_something(name, "grads", total), first)


def _blocks(function: str, argument: str, value: Any) -> Iterator[tuple[Any, Tensor]]:
    """Each array as it was given, and as `[P, G, d]`."""
    sources = [value] if hasattr(value, "shape") else value
    kind = f"a {type(value).__name__}"
    if not isinstance(sources, Iterable):
        raise TypeError(complain(function, argument, "must be an array, or several", kind, "Pass [P, G, ...]."))
    shape: torch.Size | None = None
    for source in sources:
        if not hasattr(source, "shape"):
            advice = "Make it an array: a list is one of arrays, one per parameter."
            got = f"{kind} of {type(source).__name__}"
            raise TypeError(complain(function, argument, "must be an array, or several", got, advice))
        block = array(function, argument, source)
        if block.ndim < 2:
            raise ValueError(
                complain(function, argument, "must be [P, G, ...]", list(block.shape), "Put groups first.")
            )
        flat = block.flatten(2) if block.ndim > 2 else block.unsqueeze(-1)
        if shape is not None and flat.shape[:2] != shape:
            wanted = f"must have the shape {list(shape)} of the first array"
            raise ValueError(complain(function, argument, wanted, list(flat.shape[:2]), "Line the arrays up."))
        shape = flat.shape[:2]
        yield source, flat


def _something(function: str, argument: str, total: Tensor | None) -> Tensor:
    if total is None:
        raise ValueError(complain(function, argument, "must hold an array", 0, "Pass one per parameter."))
    return total


def _signs(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randint(2, shape, generator=generator).to(torch.float64).mul_(2).sub_(1)
