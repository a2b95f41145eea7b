"""One look at the tokens of a call: which of them count, and whether all that will be read of those can be used."""

from __future__ import annotations

import torch
from torch import Tensor

from . import backends, checks, checks_data
from .inputs import live_rows
from .ops.schema import DEAD


def live_targets(
    function: str, impl: str, ids_argument: str, ids: Tensor, mask_argument: str, mask: Tensor | None, vocabulary: int,
    *, inside: int | None = None, old: Tensor | None = None, ref: Tensor | None = None, rollout: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """A tensor like ids that holds DEAD where a token does not count; nobody else has it.

    Args:
        inside: how many tokens belong to a sequence, the first ones; None: all.
        old, ref, rollout: log-probs that will be read where a token counts; NaN in the last: missing.

    Raises:
        ValueError: a mask that is negative or not finite, an id beyond the vocabulary or a log-prob that is not finite
            where it counts; where values may be read.
    """
    count = ids.numel() if inside is None else inside
    look = backends.screen_op(impl) if checks.reads_data(ids) else None
    if look is not None:
        targets, fine = look(ids, mask, vocabulary, count, old, ref, rollout)
        if fine:
            return targets  # type: ignore[no-any-return]
    checks_data.check_mask_values(function, mask_argument, mask)
    kept = mask
    if inside is not None:
        kept = torch.arange(len(ids), device=ids.device) < inside
        kept = kept if mask is None else kept & (mask != 0)
    checks_data.check_ids_below(function, ids_argument, ids, kept, vocabulary)
    live = live_rows(ids, kept, vocabulary)
    checks_data.check_live_finite(function, "old_per_token_logps", old, live)
    checks_data.check_live_finite(function, "ref_per_token_logps", ref, live)
    if rollout is not None:
        checks_data.check_live_finite(function, "rollout_per_token_logps", rollout, live & (rollout == rollout))
    return torch.where(live, ids, DEAD)
