"""What the tests share: batches that can fail, one call that runs loss and backward, plain torch to compare with."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import oracle
import torch
from oracle import Batch, Options
from tolerance import as_array
from torch import Tensor

import grpo_kernels as gk

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
LOSS_TYPES = ["grpo", "bnpo", "dr_grpo", "dapo", "cispo"]
OBJECTIVES = [(name, "token") for name in LOSS_TYPES] + [(name, "sequence") for name in LOSS_TYPES if name != "cispo"]
LAYOUTS = ["padded", "packed"]


def default_impl() -> str:
    """What `impl="auto"` is on the CPU here."""
    return gk.backends.resolve("tests", "auto", torch.device("cpu"))


def result_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def real_type(dtype: torch.dtype) -> type:
    return np.longdouble if dtype == torch.float64 else np.float64


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Every `torch.empty` inside is filled with NaN or the largest integer, so that reading unwritten memory shows."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        torch.full((1 << 16,), float("nan"))  # and freed heap memory, for what bypasses torch.empty
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.utils.deterministic.fill_uninitialized_memory = fill


def tensor(value: Any, dtype: torch.dtype | None = None) -> Tensor:
    return torch.as_tensor(np.array(value, copy=True), dtype=dtype)


def uniform(*shape: int, vocab: int = 4, dtype: torch.dtype = torch.float32) -> Tensor:
    """U4: all-zero logits, so that every log-probability is -ln 4."""
    return torch.zeros(*shape, vocab, dtype=dtype)


def from_probabilities(rows: Any, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.as_tensor(np.log(np.asarray(rows, dtype=np.float64))).to(dtype)


def make_batch(
    *, seed: int = 0, lengths: tuple[int, ...] = (5, 2, 7, 4), vocab: int = 37, dtype: torch.dtype = torch.float32,
    spread: float = 2.0, layout: str = "padded", holes: bool = True, off_policy: float = 0.35,
    token_advantages: bool = False, weight: str | None = None,
) -> Batch:  # fmt: skip
    """A batch with uneven lengths, holes, peaked logits rounded to `dtype`, off-policy `old`, a nearby `ref`.

    Values are float64 arrays that are exact in `dtype` (logits) or in the result's dtype (side inputs).
    """
    rng = np.random.default_rng(seed)
    b, t = len(lengths), max(lengths) + 1

    def rounded(x: Any, to: torch.dtype) -> Any:
        return torch.as_tensor(np.asarray(x)).to(to).double().numpy()

    side = result_dtype(dtype)
    logits = rounded(rng.normal(0, spread, (b, t, vocab)), dtype)
    ids = rng.integers(0, vocab, (b, t))
    mask = np.arange(t)[None, :] < np.asarray(lengths)[:, None]
    if holes:
        for row, n in enumerate(lengths):
            if n >= 4:
                mask[row, 1 + row % 2] = False
    p = oracle.row_stats(logits.reshape(-1, vocab), ids.reshape(-1), real=np.float64).logps.reshape(b, t)
    old = rounded(p + rng.normal(0, off_policy, (b, t)), side)
    ref = rounded(p + rng.normal(0, 0.5, (b, t)), side)
    advantages = rounded(rng.normal(0.3, 1.0, (b, t) if token_advantages else (b,)), side)
    ratio = None
    if weight is not None:
        shape = {"[B]": (b,), "[B, 1]": (b, 1), "token": (b, t)}[weight]
        ratio = rounded(rng.uniform(0.3, 1.8, shape), side)
    batch = Batch(logits, ids, advantages, mask, old, ref, ratio)
    return batch if layout == "padded" else pack(batch, lengths)


def pack(batch: Batch, lengths: tuple[int, ...], tail: int = 2) -> Batch:
    """The same tokens without padding, with `tail` dead rows of NaN logits behind the last sequence."""
    keep = np.arange(batch.ids.shape[1])[None, :] < np.asarray(lengths)[:, None]

    def flat(value: Any, fill: Any) -> Any:
        if value is None or np.ndim(value) < 2 or value.shape[:2] != keep.shape:
            return value
        rows = value[keep]
        return np.concatenate([rows, np.full((tail, *rows.shape[1:]), fill, rows.dtype)])

    return batch.but(
        logits=flat(batch.logits, np.nan), ids=flat(batch.ids, 0), mask=flat(batch.mask, True),
        advantages=flat(batch.advantages, np.nan), old=flat(batch.old, np.nan), ref=flat(batch.ref, np.nan),
        weight=flat(batch.weight, np.nan), cu_seqlens=np.concatenate([[0], np.cumsum(lengths)]),
    )  # fmt: skip


@dataclass(frozen=True)
class Ran:
    loss: Tensor
    grad: Tensor
    metrics: dict[str, Tensor]
    per_token: Any


def config_of(opt: Options) -> Any:
    return gk.GRPOLossConfig(**vars(opt))


def loss_inputs(batch: Batch, dtype: torch.dtype) -> dict[str, Any]:
    """Keyword arguments of `gk.grpo_loss`, but for logits, ids and config."""
    side = result_dtype(dtype)
    values = {
        "advantages": batch.advantages, "old_per_token_logps": batch.old, "ref_per_token_logps": batch.ref,
        "importance_sampling_ratio": batch.weight,
    }  # fmt: skip
    arguments: dict[str, Any] = {k: None if x is None else tensor(x, side) for k, x in values.items()}
    arguments["completion_mask"] = None if batch.mask is None else tensor(batch.mask)
    if batch.temperature is not None:
        scalar = isinstance(batch.temperature, (int, float))
        arguments["temperature"] = batch.temperature if scalar else tensor(batch.temperature, side)
    if batch.cu_seqlens is not None:
        arguments["cu_seqlens"] = tensor(batch.cu_seqlens, torch.int32)
    return arguments | {"normalizer": batch.normalizer, "entropy_normalizer": batch.entropy_normalizer}


def run(batch: Batch, opt: Options, dtype: torch.dtype = torch.float32, **changes: Any) -> Ran:
    """`gk.grpo_loss` and its backward on `batch`, in poisoned memory."""
    arguments = loss_inputs(batch, dtype) | {"return_per_token": True} | changes
    logits = tensor(batch.logits, dtype).requires_grad_()
    with poisoned():
        out = gk.grpo_loss(logits, tensor(batch.ids), config=config_of(opt), **arguments)
        out.loss.backward()
    assert logits.grad is not None
    return Ran(out.loss.detach(), logits.grad, out.metrics, out.per_token)


def same_bits(a: Tensor | None, b: Tensor | None) -> bool:
    """Equal dtype, shape and bits: NaN equals the same NaN, and 0.0 is not -0.0."""
    if a is None or b is None:
        return a is b
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    a, b = a.detach().contiguous().reshape(-1), b.detach().contiguous().reshape(-1)
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def assert_same_run(ours: Ran, clean: Ran, where: str) -> None:
    """Bitwise equality of loss, gradient, every metric and every per-token result."""
    assert same_bits(ours.loss, clean.loss), f"{where}: loss {ours.loss.item()} != {clean.loss.item()}"
    assert same_bits(ours.grad, clean.grad), f"{where}: gradient differs"
    assert ours.metrics.keys() == clean.metrics.keys(), where
    for name, value in clean.metrics.items():
        assert same_bits(ours.metrics[name], value), f"{where}: {name} {ours.metrics[name]} != {value}"
    for name, value in clean.per_token._asdict().items():
        assert same_bits(getattr(ours.per_token, name), value), f"{where}: per_token.{name} differs"


# Plain torch in the result's precision: what a careful user would write, differentiable, with no trick.


def plain_row_stats(
    logits: Tensor, ids: Tensor, *, temperature: Any = 1.0, softcap: float | None = None, logit_scale: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """`(logps, entropy, lse)` of rows `[N, V]`; ids must be in range."""
    z = logits.to(result_dtype(logits.dtype)) * logit_scale
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    z = z / (temperature[:, None] if isinstance(temperature, Tensor) and temperature.dim() == 1 else temperature)
    logp = z.log_softmax(-1)
    entropy = -torch.where(logp == -torch.inf, 0.0, logp.exp() * logp).sum(-1)
    return logp.gather(-1, ids[:, None].long())[:, 0], entropy, z.logsumexp(-1)


def plain_loss(batch: Batch, opt: Options, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """`(loss, dlogits, losses of the live tokens)` by autograd; only live rows go in, so that nothing is masked."""
    side = result_dtype(dtype)
    seq_np, count = oracle.sequence_index(batch)
    n = len(seq_np)
    ids = tensor(batch.ids).reshape(n).long()
    keep = torch.as_tensor(seq_np >= 0)
    if batch.mask is not None:
        keep &= tensor(batch.mask).reshape(n) != 0
    keep &= (ids >= 0) & (ids < batch.logits.shape[-1])
    seq = torch.as_tensor(seq_np)[keep]
    logits = tensor(batch.logits, dtype).requires_grad_()

    def token(value: Any) -> Tensor:
        return torch.as_tensor(np.asarray(value).reshape(n)).to(side)[keep]

    def either(value: Any) -> Tensor:
        return token(oracle.spread_out(value, batch, seq_np, count, np.float64))

    tau: Any = opt.temperature if batch.temperature is None else batch.temperature
    if np.ndim(tau) > 0:
        shape = batch.ids.shape if batch.cu_seqlens is None else (n,)
        tau = torch.as_tensor(np.broadcast_to(tau, shape).reshape(n).copy()).to(side)[keep]
    rows = logits.reshape(n, -1)[keep]
    p, entropy, _ = plain_row_stats(
        rows, ids[keep], temperature=tau, softcap=opt.softcap, logit_scale=opt.logit_scale
    )  # fmt: skip
    lengths = torch.bincount(seq, minlength=count).clamp(min=1).to(side)
    log_ratio = p - (p.detach() if batch.old is None else token(batch.old))
    if opt.importance_sampling_level == "sequence":
        log_ratio = (torch.zeros(count, dtype=side).index_add(0, seq, log_ratio) / lengths)[seq]
    r, a = log_ratio.exp(), either(batch.advantages)
    high = opt.epsilon if opt.epsilon_high is None else opt.epsilon_high
    if opt.loss_type == "cispo":
        loss = -r.clamp(max=high).detach() * a * p
    else:
        free = r if opt.delta is None else r.clamp(max=opt.delta)
        loss = -torch.min(free * a, r.clamp(1 - opt.epsilon, 1 + high) * a)
        if opt.dual_clip is not None:
            loss = torch.where(a < 0, torch.min(loss, -opt.dual_clip * a), loss)
    if batch.weight is not None:
        loss = loss * either(batch.weight)
    if opt.beta != 0:
        d = token(batch.ref) - p
        kl = {"k1": -d, "k2": d * d / 2, "k3": d.exp() - d - 1}[opt.kl_estimator]
        loss = loss + opt.beta * (kl * r if opt.use_bias_correction_kl else kl)
    share = torch.ones_like(loss)
    z = float(len(seq))
    if opt.loss_type == "grpo":
        share, z = 1 / lengths[seq], float(count)
    elif opt.loss_type == "dr_grpo":
        z = float(count * (opt.max_completion_length or 0))
    z = max(z, 1.0) if batch.normalizer is None else batch.normalizer
    entropy_z = max(float(len(seq)), 1.0) if batch.entropy_normalizer is None else batch.entropy_normalizer
    total = (loss * share).sum() / z - opt.entropy_coef * entropy.sum() / entropy_z
    total.backward()
    assert logits.grad is not None
    return total.detach(), logits.grad, loss.detach()


# Shared shorthands


def normal_rows(
    rows: int, vocab: int, dtype: torch.dtype = torch.float32, *, std: float = 2.0, mean: float = 0.0, seed: int = 0
) -> Tensor:
    """Random logits `[rows, vocab]`."""
    return (torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * std + mean).to(dtype)


def normal(rows: int, vocab: int, dtype: torch.dtype, *, std: float = 1.0, mean: float = 0.0, seed: int = 0) -> Tensor:
    """Random logits `[1, rows, vocab]`."""
    return normal_rows(rows, vocab, dtype, std=std, mean=mean, seed=seed)[None]


def score(logits: Tensor, ids: Any, **options: Any) -> Any:
    """`gk.per_token_logps` with entropy, in poisoned memory."""
    with poisoned():
        return gk.per_token_logps(logits, torch.as_tensor(ids), entropy=True, **options)


def truth_of(logits: Tensor, ids: Tensor, real: type = np.float64, **options: Any) -> oracle.RowStats:
    """The oracle's statistics of all rows of `logits`, flat."""
    rows = as_array(logits).reshape(-1, logits.shape[-1])
    return oracle.row_stats(rows, as_array(ids).reshape(-1), real=real, **options)


def full_options(loss_type: str = "dapo", level: str = "token", **changes: Any) -> Options:
    """Options with every term switched on, so that a fault in any of them shows."""
    values: dict[str, Any] = {
        "beta": 0.1, "epsilon_high": 1.1, "max_completion_length": 9, "entropy": True, "entropy_coef": 0.2,
        "use_bias_correction_kl": True, "temperature": 0.8,
    }  # fmt: skip
    return Options(loss_type=loss_type, importance_sampling_level=level, **values | changes)


def objective_options(loss_type: str, level: str, extra: dict[str, Any]) -> Options:
    """`extra` for one objective, without what cispo refuses and with a cap that some ratios reach."""
    values: dict[str, Any] = {"max_completion_length": 7} | extra
    if loss_type == "cispo":
        values = {k: v for k, v in values.items() if k not in ("delta", "dual_clip")} | {"epsilon_high": 1.15}
    return Options(loss_type=loss_type, importance_sampling_level=level, **values)


def setting(
    dtype: torch.dtype = torch.float32,
    opt: Options | None = None,
    *,
    seed: int = 31,
    layout: str = "padded",
    **kwargs: Any,
) -> tuple[Tensor, Callable[..., Any]]:
    """Logits (a plain tensor) and the loss as a function of them."""
    batch = make_batch(seed=seed, dtype=dtype, layout=layout, weight="token", **kwargs)
    arguments, ids, config = loss_inputs(batch, dtype), tensor(batch.ids), config_of(opt or full_options())
    return tensor(batch.logits, dtype), lambda x, **more: gk.grpo_loss(x, ids, config=config, **arguments, **more)
