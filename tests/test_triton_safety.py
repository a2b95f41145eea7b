"""What the Triton kernels touch, and what a row's bits depend on: nothing but that row."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from support import (
    DTYPES,
    LAYOUTS,
    LOSS_TYPES,
    Ran,
    assert_same_run,
    config_of,
    full_options,
    loss_inputs,
    make_batch,
    normal_rows,
    pack,
    poisoned,
    same_bits,
    tensor,
)
from torch import Tensor
from triton_support import DEVICE, Scored, blocks_of, run_on, scored, upstream_of

import grpo_kernels as gk
from grpo_kernels.backends.triton import launch

NAN = math.nan
CAPPED = {"softcap": 9.0, "logit_scale": 1.3, "temperature": 0.7}


# Fences: what a launch reads and writes


class Fenced:
    """A tensor in a buffer of its own, as aligned and strided as before, with the same bits around and between."""

    MARGIN = 64  # elements; the buffers of torch begin on as many bytes
    BITS = 0xFF  # NaN in every float, -1 as an id

    def __init__(self, original: Tensor) -> None:
        self.original = original
        extent = 1 + sum((n - 1) * stride for n, stride in zip(original.shape, original.stride(), strict=True))
        extent = extent if original.numel() else 0
        offset = self.MARGIN + original.data_ptr() % 64 // original.itemsize
        self.buffer = torch.empty(extent + offset + self.MARGIN, dtype=original.dtype, device=original.device)
        self.buffer.view(torch.uint8).fill_(self.BITS)
        self.outside = torch.ones(self.buffer.shape, dtype=torch.bool, device=original.device)
        where = original.shape, original.stride(), offset
        self.outside.as_strided(*where).fill_(False)
        self.inside = self.buffer.as_strided(*where)
        self.inside.copy_(original)

    def is_whole(self) -> bool:
        return bool((self.buffer[self.outside].view(torch.uint8) == self.BITS).all())

    def give_back(self) -> bool:
        """Copy what the kernel wrote into the original; whether it wrote anything."""
        changed = not same_bits(self.inside, self.original)
        self.original.copy_(self.inside)
        return changed


class FencedKernel:
    """Launches a kernel on fenced copies, checks the fences, and notes which arguments it wrote to."""

    def __init__(self, kernel: Any, written: dict[str, set[str]]) -> None:
        self.kernel, self.written = kernel, written

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def run(*arguments: Any, **options: Any) -> None:
            fenced: dict[Any, Fenced] = {}
            names: dict[Any, str] = {}
            moved = []
            for name, value in zip(self.kernel.arg_names, arguments, strict=False):
                if not isinstance(value, Tensor):
                    moved.append(value)
                    continue
                key = value.data_ptr(), value.shape, value.stride()
                names[key] = f"{names[key]}, {name}" if key in names else name  # in place the logits come twice
                fenced[key] = fenced[key] if key in fenced else Fenced(value)
                moved.append(fenced[key].inside)
            self.kernel[grid](*moved, **options)
            for key, region in fenced.items():
                assert region.is_whole(), f"{self.kernel.__name__} wrote outside of {names[key]}"
                if region.give_back():
                    self.written.setdefault(self.kernel.__name__, set()).add(names[key])

        return run


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, set[str]]]:
    """Fences around every launch of the test; afterwards, which arguments each kernel wrote to."""
    written: dict[str, set[str]] = {}
    kernels = [name for name in vars(launch) if name.endswith("_kernel")]
    assert len(kernels) >= 3
    for name in kernels:
        monkeypatch.setattr(launch, name, FencedKernel(getattr(launch, name), written))
    yield written
    assert written, "no kernel ran"


STATISTICS = {"row_max", "sum_exp", "sum_others", "logps"}
TERMS = {"ratios", "losses", "slopes", "own_slopes", "kls", "advantages_out"}
VIEWS: dict[str, Any] = {
    "contiguous": (lambda v: (2, 2, v), lambda x: x),
    "next token": (lambda v: (2, 3, v), lambda x: x[:, :-1]),
    "vocabulary": (lambda v: (2, 2, v + 3), lambda x: x[..., :-3]),
    "off by one": (lambda v: (2, 2, v + 16 - v % 16), lambda x: x[..., 1 : 1 + (x.shape[-1] - 2)]),
    "transposed": (lambda v: (2, 2, v), lambda x: x.transpose(0, 1)),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("width", ["odd", "several blocks"])
def test_rows_stay_inside_their_tensors(
    dtype: torch.dtype, view: str, width: str, written: dict[str, set[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    shape, cut = VIEWS[view]
    vocab = 7 if width == "odd" else 2 * blocks_of(dtype).block + 14
    base = torch.full(shape(vocab), NAN, dtype=dtype, device=DEVICE)
    b, t, v = cut(base).shape
    cut(base).copy_(normal_rows(b * t, v, dtype, std=3.0).reshape(b, t, v))
    ids = torch.tensor([[0, v - 1], [-100, v // 2]], device=DEVICE)
    upstream = upstream_of(ids, dtype).to(DEVICE)

    def run() -> list[Tensor]:
        leaf = base.clone().requires_grad_()
        with poisoned():
            out = gk.per_token_logps(cut(leaf), ids, entropy=True, impl="triton", softcap=7.0 if v % 2 else None)
            (out.logps * upstream[0] + out.entropy * upstream[1]).sum().backward()
        assert leaf.grad is not None
        return [out.logps, out.entropy, out.lse, leaf.grad]

    fenced = run()
    assert written["row_stats_fwd_kernel"] == STATISTICS | {"entropy", "lse"}
    assert written["row_grad_bwd_kernel"] == {"out"}
    monkeypatch.undo()
    assert all(same_bits(a, b) for a, b in zip(fenced, run(), strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("vocab", [11, 150])
def test_losses_stay_inside_their_tensors(
    layout: str, dtype: torch.dtype, inplace: bool, vocab: int, written: dict[str, set[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    batch = make_batch(seed=3, lengths=(2, 1, 3), vocab=vocab, dtype=dtype, layout=layout, weight="token")
    sources: dict[str, Any] = {"advantages": None, "rewards": torch.tensor([1.0, NAN, 0.0]), "group_size": 3}
    opt = full_options("grpo")
    fenced = run_on("triton", batch, opt, dtype, inplace=inplace, **sources)
    one_kernel = inplace and dtype != torch.float16
    assert written["grpo_loss_fwd_kernel"] == STATISTICS | TERMS | {"entropy"} | ({"logits"} if one_kernel else set())
    if not one_kernel:
        assert written["row_grad_bwd_kernel"] == {"logits, out" if inplace else "out"}
    monkeypatch.undo()
    assert_same_run(run_on("triton", batch, opt, dtype, inplace=inplace, **sources), fenced, "without fences")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_upstream_scale_of_one_kernel_stays_inside(dtype: torch.dtype, written: dict[str, set[str]]) -> None:
    batch = make_batch(seed=3, lengths=(2, 3), vocab=75, dtype=dtype)
    got = run_on("triton", batch, full_options(), dtype, inplace=True, upstream=3.0)
    assert written["scale_kernel"] == {"logits"}
    assert torch.isfinite(got.grad).all()


def test_a_fence_falls(written: dict[str, set[str]]) -> None:
    """The fences notice a kernel that writes one element too many."""
    rows, targets = torch.zeros(1, 5, device=DEVICE), torch.zeros(1, dtype=torch.long, device=DEVICE)
    heat, six = torch.ones(1, device=DEVICE), [torch.zeros(1, device=DEVICE) for _ in range(6)]
    target = launch.target_of(rows)
    options = launch.common_options(rows, target, launch.TILES[target.name], 1.0, None, True)
    with pytest.raises(AssertionError, match="row_stats_fwd_kernel wrote outside of logps"):
        launch.row_stats_fwd_kernel[(2,)](  # two programs for one row
            rows, targets.expand(2), heat, *six, 1, 5, 0, 0, 0, ALIGNED=False, PAIRED=False, **options
        )  # fmt: skip


# A row's bits are its own


def companies(rows: Tensor, ids: Tensor) -> Iterator[tuple[str, Tensor, Tensor, Callable[[Tensor], Tensor]]]:
    """The same rows in other companies and places: name, logits, ids, and how to get the rows' results back."""
    n, vocab = rows.shape
    for i in range(n):
        yield f"row {i} alone", rows[i : i + 1], ids[i : i + 1], lambda x, i=i: x[i : i + 1]
    yield "reversed", rows.flip(0), ids.flip(0), lambda x: x.flip(0)
    wide = torch.full((2 * n, vocab + 16), NAN, dtype=rows.dtype)
    wide[::2, :vocab] = rows
    yield "every other row", wide[::2, :vocab], ids, lambda x: x
    shifted = torch.full((n, vocab + 9), NAN, dtype=rows.dtype)
    shifted[:, 1 : 1 + vocab] = rows
    yield "out of line", shifted[:, 1 : 1 + vocab], ids, lambda x: x
    padded = torch.full((n, 3, vocab), 3.0, dtype=rows.dtype)
    padded[:, 1] = rows
    padded_ids = torch.full((n, 3), -100)
    padded_ids[:, 1] = ids
    yield "padded", padded, padded_ids, lambda x: x
    company = torch.cat([torch.full((2, vocab), NAN, dtype=rows.dtype), 7 * rows[:1], rows])
    yield "in company", company, torch.cat([torch.tensor([-1, 0, 0]), ids]), lambda x: x


def taken(name: str, value: Tensor) -> Tensor:
    return value[:, 1] if name == "padded" else value[3:] if name == "in company" else value


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", ["odd", "aligned", "out of line"])
@pytest.mark.parametrize("transform", [{}, CAPPED], ids=["plain", "capped"])
def test_a_row_is_bitwise_the_same_in_any_company(dtype: torch.dtype, width: str, transform: dict[str, float]) -> None:
    block = blocks_of(dtype).block
    vocab = {"odd": 5, "aligned": 2 * block, "out of line": 2 * block + 3}[width]
    rows, ids = normal_rows(3, vocab, dtype, std=3.0), torch.tensor([0, vocab - 1, vocab // 2])
    upstream = torch.tensor([0.7, -1.3, 0.2], dtype=upstream_of(ids, dtype).dtype)

    def run(logits: Tensor, targets: Tensor, weights: Tensor) -> Scored:
        leaf = logits.to(DEVICE).detach().requires_grad_()
        out = gk.per_token_logps(leaf, targets.to(DEVICE), entropy=True, impl="triton", **transform)
        ((out.logps + 0.5 * out.entropy) * weights.to(DEVICE)).sum().backward()
        assert leaf.grad is not None
        return Scored(*(x.detach().cpu() for x in (out.logps, out.entropy, out.lse, leaf.grad)))

    together = run(rows, ids, upstream)
    for name, logits, targets, back in companies(rows, ids):
        weights = torch.zeros(targets.shape, dtype=upstream.dtype)
        taken(name, weights).copy_(back(upstream))
        other = run(logits, targets, weights)
        for field in Scored._fields:
            expected = back(getattr(together, field))
            assert same_bits(taken(name, getattr(other, field)), expected), f"{name}: {field}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("loss_type", ["dapo", "cispo"])
def test_packed_tokens_are_bitwise_the_padded_ones(dtype: torch.dtype, loss_type: str) -> None:
    lengths = (1, 3)
    batch = make_batch(seed=13, lengths=lengths, vocab=131, dtype=dtype, weight="token").but(
        normalizer=4.0, entropy_normalizer=4.0
    )
    opt = full_options(loss_type)
    padded, packed = run_on("triton", batch, opt, dtype), run_on("triton", pack(batch, lengths), opt, dtype)
    keep = torch.arange(batch.ids.shape[1])[None] < torch.tensor(lengths)[:, None]
    assert same_bits(packed.grad[:4], padded.grad[keep]) and (packed.grad[4:] == 0).all()
    for name, value in padded.per_token._asdict().items():
        assert same_bits(getattr(packed.per_token, name)[:4], value[keep]), name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_route_gives_the_same_log_probs(dtype: torch.dtype) -> None:
    """With and without entropy, in a loss of either level, in place: `old` from any of them makes the ratio 1."""
    batch = make_batch(seed=14, lengths=(2, 2), vocab=131, dtype=dtype, holes=False).but(old=None)
    logits, ids = tensor(batch.logits, dtype).to(DEVICE), tensor(batch.ids).to(DEVICE)
    mask = tensor(batch.mask).to(DEVICE)
    plain = gk.per_token_logps(logits, ids, mask=mask, impl="triton")
    asked = gk.per_token_logps(logits, ids, mask=mask, entropy=True, impl="triton")
    assert same_bits(plain.logps, asked.logps) and same_bits(plain.lse, asked.lse)
    for entropy in (False, True):
        for level in ("token", "sequence"):
            for inplace in (False, True):
                opt = full_options("grpo", level, entropy=entropy, entropy_coef=0.0, temperature=1.0)
                got = run_on("triton", batch, opt, dtype, inplace=inplace).per_token
                assert same_bits(got.logps, plain.logps.cpu()), (entropy, level, inplace)
                assert not entropy or same_bits(got.entropy, asked.entropy.cpu()), (level, inplace)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_second_run_is_the_first(dtype: torch.dtype) -> None:
    batch = make_batch(seed=15, lengths=(2, 3), vocab=131, dtype=dtype, weight="[B]")
    first, second = (run_on("triton", batch, full_options("grpo", softcap=5.0), dtype) for _ in range(2))
    assert_same_run(second, first, "second run")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_in_place_is_bitwise_the_default(dtype: torch.dtype, loss_type: str, layout: str) -> None:
    batch = make_batch(seed=16, lengths=(3, 1, 5), vocab=75, dtype=dtype, layout=layout, weight="token")
    opt = full_options(loss_type, softcap=8.0)
    default, inplace = (run_on("triton", batch, opt, dtype, inplace=inplace) for inplace in (False, True))
    assert_same_run(inplace, default, "in place")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("transform", [{}, CAPPED], ids=["plain", "capped"])
def test_in_place_log_probs_are_bitwise_the_default(dtype: torch.dtype, transform: dict[str, float]) -> None:
    vocab = blocks_of(dtype).program + 3
    rows, ids = normal_rows(3, vocab, dtype), torch.tensor([0, vocab - 1, -1], device=DEVICE)
    upstream = upstream_of(ids, dtype).to(DEVICE)
    grads = []
    for inplace in (False, True):
        leaf = rows.clone().to(DEVICE).requires_grad_()
        with poisoned():
            out = gk.per_token_logps(leaf * 1.0, ids, entropy=True, inplace=inplace, impl="triton", **transform)
            (out.logps * upstream[0] + out.entropy * upstream[1]).sum().backward()
        grads.append(leaf.grad)
    assert same_bits(grads[0], grads[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_default_changes_no_input(dtype: torch.dtype, level: str, layout: str) -> None:
    batch = make_batch(seed=17, lengths=(2, 3), dtype=dtype, layout=layout, weight="token")
    arguments = loss_inputs(batch, dtype) | {"completion_ids": tensor(batch.ids)}
    arguments = {name: x.to(DEVICE) if isinstance(x, Tensor) else x for name, x in arguments.items()}
    arguments["logits"] = tensor(batch.logits, dtype).to(DEVICE).requires_grad_()
    inputs = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
    before = {name: (value.detach().clone(), value._version) for name, value in inputs.items()}
    gk.grpo_loss(config=config_of(full_options("grpo", level)), impl="triton", **arguments).loss.backward()
    for name, value in inputs.items():
        assert same_bits(value.detach(), before[name][0]) and value._version == before[name][1], name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_spoilt_dead_tokens_change_no_bit(dtype: torch.dtype) -> None:
    batch = make_batch(seed=18, lengths=(2, 3), vocab=75, dtype=dtype, weight="token", token_advantages=True)
    opt = full_options("grpo")
    dead = ~np.asarray(batch.mask)

    def spoilt(value: float) -> Ran:
        changed = {}
        for name in ("logits", "old", "ref", "weight", "advantages"):
            array = np.array(getattr(batch, name))
            array[dead] = value
            changed[name] = array
        return run_on("triton", batch.but(**changed, ids=np.where(dead, 10**9, batch.ids)), opt, dtype)

    clean = run_on("triton", batch, opt, dtype)
    for value in (NAN, math.inf, -math.inf):
        assert_same_run(spoilt(value), clean, f"dead tokens {value}")


def test_poison_shows() -> None:
    """Outputs come from torch.empty, which `poisoned` fills: a launch that writes nothing leaves NaN."""
    rows, ids = torch.zeros(2, 5, device=DEVICE), torch.zeros(2, dtype=torch.long, device=DEVICE)

    class Nothing:
        def __getitem__(self, grid: Any) -> Callable[..., None]:
            return lambda *arguments, **options: None

    with pytest.MonkeyPatch.context() as patch, poisoned():
        patch.setattr(launch, "row_stats_fwd_kernel", Nothing())
        assert gk.per_token_logps(rows, ids, impl="triton").logps.isnan().all()
    assert scored(rows.cpu(), ids.cpu()).logps.isfinite().all()
