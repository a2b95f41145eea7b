"""The C++ kernels from above: every objective, memory, torch.compile, and what the operators promise torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cpp_support import needs_cpp
from kernel_support import assert_run_within_budget, run_on
from support import DTYPES, LAYOUTS, OBJECTIVES, make_batch, objective_options, same_bits
from test_memory import peak_of, step

import grpo_kernels as gk
from grpo_kernels import backends

pytestmark = needs_cpp
ROW, SMALL = 64, 2 * 2**20  # bytes a row of logits may take, and bytes that any call may


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("loss_type", "level"), OBJECTIVES)
def test_every_objective(loss_type: str, level: str, dtype: torch.dtype, layout: str, inplace: bool) -> None:
    extra = {"beta": 0.1, "entropy_coef": 0.2, "entropy": True, "temperature": 0.8, "softcap": 6.0}
    opt = objective_options(loss_type, level, extra)
    batch = make_batch(seed=7, dtype=dtype, layout=layout, vocab=2100, lengths=(3, 2, 4))
    assert_run_within_budget(run_on("cpp", batch, opt, dtype, inplace=inplace), batch, opt, dtype)
    route = "cpp one-kernel" if inplace and dtype != torch.float16 else "cpp one-pass"
    assert backends.last_used() == (route if level == "token" else "cpp")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [64, 256])
def test_memory_beside_the_logits(dtype: torch.dtype, rows: int) -> None:
    run, _ = step(rows, dtype, inplace=True, impl="cpp")
    assert peak_of(run) <= ROW * rows + SMALL
    run, logits_bytes = step(rows, dtype, impl="cpp")
    assert logits_bytes <= peak_of(run) <= logits_bytes + ROW * rows + SMALL


@pytest.mark.parametrize("inplace", [False, True])
def test_compiled_without_a_graph_break(inplace: bool) -> None:
    logits, ids = torch.randn(2, 3, 17), torch.tensor([[1, 4, 16], [0, 2, 3]])
    ones = torch.ones(2, 3)

    def call(leaf: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = gk.grpo_loss(
            leaf * 1.0, ids, advantages=ones, old_per_token_logps=-ones, inplace=inplace, impl="cpp"
        ).loss
        return loss

    def run(function: Any) -> tuple[torch.Tensor, torch.Tensor]:
        leaf = logits.clone().requires_grad_()
        loss = function(leaf)
        loss.backward()
        assert leaf.grad is not None
        return loss.detach(), leaf.grad

    eager, compiled = run(call), run(torch.compile(call, backend="aot_eager", fullgraph=not inplace))
    for ours, theirs in zip(compiled, eager, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_schemas_and_fake_kernels_tell_the_truth(dtype: torch.dtype) -> None:
    ops, checks = torch.ops.grpo_kernels, ("test_schema", "test_faketensor")
    rows, ids, heat = torch.randn(3, 9).to(dtype), torch.tensor([0, -1, 8]), torch.ones(())
    for entropy in (False, True):
        stats = (rows, ids, heat, 1.0, 5.0, entropy)
        torch.library.opcheck(ops.row_stats_cpp.default, stats, test_utils=checks)
        _, spread, _, *found = ops.row_stats_cpp(*stats)
        coefs = torch.ones(3)
        arguments = (ids, heat, 1.0, 5.0, spread, *found, coefs, coefs if entropy else None)
        torch.library.opcheck(ops.row_grad_cpp.default, (rows, *arguments), test_utils=checks)
        torch.library.opcheck(ops.row_grad_cpp_.default, (rows.clone(), *arguments), test_utils=checks)
        out = torch.empty(3, 9, dtype=torch.float16)
        torch.library.opcheck(ops.row_grad_into_cpp.default, (rows, out, *arguments), test_utils=checks)
        if dtype == torch.float32:
            weights = (rows.clone(), ids, heat, 1.0, entropy)
            torch.library.opcheck(ops.row_weights_cpp_.default, weights, test_utils=checks)


def test_arguments_that_do_not_fit_are_refused() -> None:
    op = torch.ops.grpo_kernels.row_stats_cpp
    rows, ids, heat = torch.zeros(2, 5), torch.tensor([0, 1]), torch.ones(())
    for bad in (
        (rows.to(torch.int32), ids, heat), (torch.zeros(5, 2).T, ids, heat), (rows, ids.float(), heat),
        (rows, ids[:, None], heat), (rows, ids, heat.half()), (rows, ids, torch.ones(3)), (rows[0], ids[0], heat),
    ):  # fmt: skip
        with pytest.raises(RuntimeError, match="grpo_kernels: "):
            op(*bad, 1.0, None, False)


def test_another_implementation_runs_in_the_same_process() -> None:
    rows, ids = torch.randn(3, 40), torch.tensor([0, 1, 39])
    used = []
    for impl in ("cpp", "torch", "cpp"):
        gk.per_token_logps(rows, ids, impl=impl)
        used.append(backends.last_used())
    assert used == ["cpp", "torch", "cpp"]
    a, b = (gk.per_token_logps(rows, ids, impl=impl).logps for impl in ("cpp", "torch"))
    torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
    assert same_bits(a, gk.per_token_logps(rows, ids, impl="cpp").logps)
