"""The oracle's first half: statistics of rows of logits and their gradients, by hand in NumPy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[Any]


@dataclass(frozen=True)
class RowStats:
    """Statistics of N rows of V logits; dead rows are 0 in `logps` and `entropy`."""

    logps: Array  # [N]
    entropy: Array  # [N]
    lse: Array  # [N], undefined (0) at dead rows
    live: Array  # [N] bool
    size: Array  # [N] the largest of 1, |log p| of the target and the transformed logits
    dlogps: Array  # [N, V] d logps[n] / d logits[n]
    dentropy: Array  # [N, V] d entropy[n] / d logits[n]


def row_stats(
    logits: ArrayLike,
    ids: ArrayLike,
    *,
    mask: ArrayLike | None = None,
    temperature: ArrayLike = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    real: type = np.longdouble,
) -> RowStats:
    """Log-probability of `ids [N]` under softmax of the transformed `logits [N, V]`, entropy, and both gradients."""
    rows = np.asarray(logits)
    n, v = rows.shape
    ids = np.asarray(ids).astype(np.int64)
    live = (ids >= 0) & (ids < v)
    if mask is not None:
        live &= np.asarray(mask) != 0
    tau = np.broadcast_to(np.asarray(temperature, dtype=real), (n,))
    logps, entropy, lse = np.zeros(n, real), np.zeros(n, real), np.zeros(n, real)
    size = np.ones(n, real)
    dlogps, dentropy = np.zeros((n, v), real), np.zeros((n, v), real)
    for t in np.flatnonzero(live):
        x = rows[t].astype(real)
        if np.isnan(x).any() or np.isposinf(x).any() or np.isneginf(x).all():
            logps[t] = entropy[t] = lse[t] = np.nan
            dlogps[t] = dentropy[t] = np.nan
            continue
        kept = ~np.isneginf(x)
        u = real(logit_scale) * x[kept]
        slope = np.full(u.shape, real(logit_scale))
        if softcap is not None:
            cap = real(softcap)
            slope = slope / np.cosh(u / cap) ** 2
            u = cap * np.tanh(u / cap)
        z = u / tau[t]
        slope = slope / tau[t]
        top = z.max()
        e = np.exp(z - top)
        total = e.sum()
        logp_all = (z - top) - np.log(total)
        p = e / total
        h = -(p * np.where(p > 0, logp_all, real(0))).sum()
        entropy[t], lse[t] = h, top + np.log(total)
        column = np.zeros(v, real)
        column[kept] = -p * slope
        is_kept = bool(kept[ids[t]])
        if is_kept:
            k = int(np.count_nonzero(kept[: ids[t]]))
            logps[t] = logp_all[k]
            column[ids[t]] = slope[k] * (
                (e.sum() - e[k]) / total if e[k] < 0.5 * total else np.delete(e, k).sum() / total
            )
        else:
            logps[t] = -np.inf
        size[t] = max(real(1), np.abs(z).max(), -logps[t] if is_kept else real(1))
        dlogps[t] = column
        dentropy[t][kept] = -p * np.where(p > 0, logp_all + h, real(0)) * slope
    return RowStats(logps, entropy, lse, live, size, dlogps, dentropy)
