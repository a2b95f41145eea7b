"""One operation in every form: Function, module, checkpointed, compiled, and what it makes a host wait for."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from linear_support import (
    FULL,
    MODES,
    assert_expected,
    bytes_of,
    expect,
    logps_of,
    loss_of,
    make_operands,
    make_problem,
    run_linear,
)
from oracle import Options
from support import OBJECTIVES, config_of, full_options, loss_inputs, same_bits, tensor
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import grpo_kernels as gk


@pytest.mark.parametrize(("loss_type", "level"), OBJECTIVES)
def test_the_function_is_a_drop_in(loss_type: str, level: str) -> None:
    opt = full_options(loss_type, level)
    problem = make_problem(seed=65)
    batch, operands = problem.batch, make_operands(problem)
    rest = (tensor(x, torch.float32) for x in (batch.advantages, batch.old, batch.ref))
    loss, logps = gk.LinearGRPOLossFunction.apply(
        operands["hidden"], operands["weight"], operands["bias"], tensor(batch.ids), *rest, tensor(batch.mask),
        config_of(opt),
    )  # fmt: skip
    ran = run_linear(problem, opt)
    assert same_bits(loss.detach(), ran.loss)
    assert not logps.requires_grad and same_bits(logps, ran.per_token.logps)
    loss.backward()
    assert all(same_bits(x.grad, ran.grads[name]) for name, x in operands.items())


def test_the_function_takes_nothing_for_what_may_be_missing() -> None:
    problem = make_problem(seed=66, bias=False, holes=False, lengths=(4, 4)).but(old=None, ref=None, mask=None)
    operands = make_operands(problem)
    loss, logps = gk.LinearGRPOLossFunction.apply(
        operands["hidden"], operands["weight"], None, tensor(problem.batch.ids),
        tensor(problem.batch.advantages, torch.float32), None, None, None, gk.GRPOLossConfig(),
    )  # fmt: skip
    loss.backward()
    ran = run_linear(problem, Options())
    assert_expected(ran, expect(problem, Options()), "function")
    assert same_bits(loss.detach(), ran.loss) and logps.shape == (2, 5)
    assert same_bits(operands["weight"].grad, ran.grads["weight"])


@pytest.mark.parametrize("how", ["itself", "deepcopy", "pickle"])
def test_the_module_is_the_function(how: str) -> None:
    operands, loss = loss_of()
    problem = make_problem(seed=60, weight="token")
    module = gk.LinearGRPOLoss(config_of(FULL))
    if how == "deepcopy":
        module = copy.deepcopy(module)
    elif how == "pickle":
        module = pickle.loads(pickle.dumps(module))
    arguments = loss_inputs(problem.batch, torch.float32)
    for mode in MODES:
        out = module(operands[0], operands[1], tensor(problem.batch.ids), bias=operands[2], mode=mode, **arguments)
        expected = loss(*operands, mode=mode)
        assert same_bits(out.loss, expected.loss)
        assert out.metrics.keys() == expected.metrics.keys()
    assert list(module.parameters()) == []
    assert "loss_type='grpo'" in repr(module)
    assert gk.LinearGRPOLoss().config == gk.GRPOLossConfig()


@pytest.mark.parametrize("mode", MODES)
def test_activation_checkpointing_changes_nothing(mode: str) -> None:
    operands, loss = loss_of()
    plain = torch.autograd.grad(loss(*operands, mode=mode).loss, operands)
    out = torch.utils.checkpoint.checkpoint(lambda *x: loss(*x, mode=mode).loss, *operands, use_reentrant=False)
    assert all(same_bits(a, b) for a, b in zip(plain, torch.autograd.grad(out, operands), strict=True))


STEPS: dict[str, Callable[..., Any]] = {
    "fast": lambda loss, operands: loss(*operands, mode="fast").loss,
    "lean": lambda loss, operands: loss(*operands, mode="lean").loss,
    "logps": lambda loss, operands: logps_of(operands).logps.mean() + logps_of(operands).entropy.sum(),
}


# torch.compile looks for gradients of what a graph break hands over, leaf or not
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("name", STEPS)
def test_compiled_code_around_it_gives_the_same_numbers(name: str) -> None:
    operands, loss = loss_of()

    def step(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return 3 * STEPS[name](loss, [torch.tanh(hidden), weight * 2, bias])

    results = []
    for run in (step, torch.compile(step, backend="aot_eager")):
        value = run(*operands)
        results.append((value.detach(), *torch.autograd.grad(value, operands)))
    assert all(x.abs().max() > 1e-3 for x in results[0])
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-6)


# What a host waits for: on a device, every read of a value by Python

READS = {"nonzero", "_local_scalar_dense", "masked_select", "unique2", "is_nonzero", "equal", "repeat_interleave"}


class Reads(TorchDispatchMode):
    """Notes each operation that would wait for a device: values read, and shapes that depend on values."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        by_mask = name == "index" and any(i is not None and i.dtype == torch.bool for i in args[1])
        if name in READS or by_mask:
            self.seen.append(name)
        return func(*args, **kwargs or {})


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    """CPU tensors are treated as those of a device, whose values are not free to read."""
    reads = Reads()
    monkeypatch.setattr(gk.backends, "reads_are_free", lambda device: False)
    monkeypatch.setattr("grpo_kernels.checks.reads_data", lambda tensor: False)
    plain = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: reads.seen.append("tolist") or plain(self))
    return reads


def test_the_meter_sees_reads(reads: Reads) -> None:
    values = torch.arange(3)
    with reads:
        values.tolist(), values.sum().item(), bool(values[0] > 0), values.nonzero(), values[values > 1]
    assert len(reads.seen) >= 5
    reads.seen.clear()
    with reads:
        values.index_select(0, values), values[values], torch.where(values > 1, values, 0), values * 2
    assert not reads.seen


@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("silent", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_the_host_reads_the_number_of_rows_alone(mode: str, silent: bool, counted: bool, reads: Reads) -> None:
    """Once in forward, once more in a backward that multiplies again; never when the caller has counted."""
    problem = make_problem(seed=67)
    operands, rest = make_operands(problem), loss_inputs(problem.batch, torch.float32)
    live = int(torch.as_tensor(problem.batch.mask).sum())
    advantages = torch.tensor([1.0, 0.0, -1.0, 0.0]) if silent else torch.ones(4)
    with reads:
        out = gk.linear_grpo_loss(
            operands["hidden"], operands["weight"], tensor(problem.batch.ids), bias=operands["bias"], mode=mode,
            chunk_bytes=bytes_of(8, 37), num_live_tokens=live if counted else None,
            **rest | {"advantages": advantages},
        )  # fmt: skip
        forward = list(reads.seen)
        out.loss.backward()
    assert len(forward) == (0 if counted else 1), forward
    assert len(reads.seen) - len(forward) == (1 if mode == "lean" and not counted else 0), reads.seen
    expected = run_linear(problem, Options(), mode=mode, advantages=advantages)
    torch.testing.assert_close(out.loss.detach(), expected.loss, rtol=1e-6, atol=1e-7)
    for name, leaf in operands.items():
        torch.testing.assert_close(leaf.grad, expected.grads[name], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("entropy", [False, True])
def test_the_host_reads_the_number_of_rows_alone_for_log_probs(entropy: bool, reads: Reads) -> None:
    operands, _ = loss_of()
    with reads:
        out = logps_of(operands)
        forward = len(reads.seen)
        (out.logps.sum() + (out.entropy.sum() if entropy else 0)).backward()
    assert (forward, len(reads.seen)) == (1, 2)


@pytest.mark.gpu
@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_host_syncs_are_those_reads(mode: str, counted: bool) -> None:
    operands, _ = loss_of()
    hidden, weight = (x.detach().cuda().requires_grad_() for x in operands[:2])
    ids = torch.zeros(4, 8, dtype=torch.long, device="cuda")
    mask = (torch.arange(32, device="cuda").reshape(4, 8) % 3 > 0).long()
    advantages = torch.ones(4, device="cuda")
    count = 21 if counted else None

    def step() -> None:
        gk.linear_grpo_loss(
            hidden, weight, ids, advantages=advantages, completion_mask=mask, mode=mode, num_live_tokens=count,
            chunk_bytes=bytes_of(8, 37), impl="triton",
        ).loss.backward()  # fmt: skip

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    syncs = [w for w in caught if "synchroniz" in str(w.message)]
    assert len(syncs) == (0 if counted else {"fast": 1, "lean": 2}[mode])
