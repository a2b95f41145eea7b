"""Liger's module and function with the import changed: equal where Liger is right, right where it is not."""

from __future__ import annotations

import copy
import inspect
import os
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from parity_projects import need
from parity_support import Draw, Result, assert_equal, draw, draws, loud
from test_parity_liger import FAULTS, LOSS_TYPES, OPTIONS, chunked, luspo_truth, options_of, weights_of
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels.integrations import liger as ours

need("liger-kernel")

from liger_kernel.chunked_loss.grpo_loss import LigerFusedLinearGRPOLoss  # noqa: E402
from liger_kernel.transformers.grpo_loss import triton_grpo_loss  # noqa: E402


@pytest.mark.parametrize(
    ("our", "theirs"),
    [
        (ours.LigerFusedLinearGRPOLoss.__init__, LigerFusedLinearGRPOLoss.__init__),
        (ours.LigerFusedLinearGRPOLoss.forward, LigerFusedLinearGRPOLoss.forward),
        (ours.triton_grpo_loss, triton_grpo_loss),
    ],
)
def test_the_signatures_are_ligers(our: Any, theirs: Any) -> None:
    our, theirs = (inspect.signature(function).parameters for function in (our, theirs))
    assert list(our) == list(theirs)
    for name, parameter in theirs.items():
        assert (our[name].kind, our[name].default) == (parameter.kind, parameter.default), name


# LigerFusedLinearGRPOLoss


def run_module(batch: Draw, module: dict[str, Any], call: dict[str, Any]) -> Result:
    """Ours in float64: hidden states that are the logits, against a head that changes nothing."""
    logits = batch.logits.clone().requires_grad_()
    loss, metrics = ours.LigerFusedLinearGRPOLoss(**module)(
        logits, torch.eye(logits.shape[-1], dtype=logits.dtype), batch.ids, batch.mask.double(), batch.advantages,
        ref_per_token_logps=batch.ref, old_per_token_logps=None if call["on_policy"] else batch.old,
        vllm_is_ratio=weights_of(batch, call["weights"]), num_items_in_batch=call["items"],
    )  # fmt: skip
    (grad,) = torch.autograd.grad(loss, logits)
    return Result(loss.detach(), grad, dict(enumerate(metrics)))  # type: ignore[arg-type]


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@draws
@given(seed=st.integers(0, 10**6), options=st.fixed_dictionaries(OPTIONS))
def test_the_module_is_ligers(loss_type: str, seed: int, options: dict[str, Any]) -> None:
    """Loss, gradient and both metrics, in float64, summed over Liger's chunks."""
    module, call = options_of(loss_type, options)

    def theirs(batch: Draw, logps: Tensor, entropy: Tensor) -> tuple[Tensor, dict[str, Any]]:
        value, sums = chunked(batch, logps, module, call)
        return value, dict(enumerate(float(x.detach()) for x in sums))  # type: ignore[arg-type]

    batch, their = loud(theirs, seed, **call["shape"])
    our = run_module(batch, module, call)
    assert_equal(our.loss, their.loss, f"{module} {call} loss")
    assert_equal(our.grad, their.grad, f"{module} {call} gradient")
    assert list(our.metrics) == list(their.metrics)
    for name, value in their.metrics.items():
        assert_equal(our.metrics[name], value, f"{module} {call} metric {name}", rtol=1e-6)


def both_modules(arguments: dict[str, Any], **options: Any) -> list[tuple[Any, ...]]:
    """`(loss, metrics, gradients)` of Liger's own and of ours, in float32 from hidden states."""
    results = []
    for cls in (LigerFusedLinearGRPOLoss, ours.LigerFusedLinearGRPOLoss):
        given = copy.deepcopy(arguments)
        leaves = [value.requires_grad_() for name, value in given.items() if name in ("_input", "lin_weight", "bias")]
        loss, metrics = cls(compiled=False, **options)(**given)
        results.append((loss.detach(), metrics, *torch.autograd.grad(loss, leaves)))
    return results


def hidden_batch(bias: bool = True) -> dict[str, Any]:
    batch = draw(1, off_policy=0.3, rows=3)
    torch.manual_seed(0)
    hidden, weight = torch.randn(*batch.ids.shape, 7), torch.randn(11, 7) * 0.5
    offsets = torch.randn(11) * 0.3 if bias else None
    logits = torch.nn.functional.linear(hidden, weight, offsets)
    p = logits.log_softmax(-1).gather(-1, batch.ids[..., None]).squeeze(-1)
    return {
        "_input": hidden, "lin_weight": weight, "selected_token_ids": batch.ids, "attention_mask": batch.mask.float(),
        "advantages": batch.advantages.float() + 1, "old_per_token_logps": p + (batch.old - batch.rollout).float(),
        "ref_per_token_logps": p + 0.5 * (batch.ref - batch.old).float(),
    } | ({"bias": offsets} if bias else {})  # fmt: skip


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_from_hidden_states_as_ligers(loss_type: str, bias: bool) -> None:
    extra: dict[str, Any] = {"max_completion_length": 9} if loss_type == "dr_grpo" else {}
    extra |= {"importance_sampling_level": "sequence", "beta": 0.0} if loss_type == "luspo" else {}
    extra |= {"epsilon_high": 1.2} if loss_type == "cispo" else {}
    theirs, our = both_modules(hidden_batch(bias), loss_type=loss_type, temperature=0.9, **extra)
    assert abs(theirs[0]) > 0.01
    assert len(theirs[1]) == len(our[1])
    for a, b in zip((our[0], *our[1], *our[2:]), (theirs[0], *theirs[1], *theirs[2:]), strict=True):
        assert_equal(a, b, loss_type, rtol=1e-5)


def test_the_references_head_in_place_of_its_log_probs() -> None:
    given_ = hidden_batch()
    del given_["ref_per_token_logps"]
    torch.manual_seed(5)
    given_ |= {
        "ref_input": given_["_input"] + 0.1 * torch.randn_like(given_["_input"]),
        "ref_weight": given_["lin_weight"] + 0.1 * torch.randn_like(given_["lin_weight"]),
        "ref_bias": given_["bias"] * 0.5,
    }
    theirs, our = both_modules(given_)
    assert float(theirs[1][0]) > 1e-3
    for a, b in zip((our[0], *our[1], *our[2:]), (theirs[0], *theirs[1], *theirs[2:]), strict=True):
        assert_equal(a, b, "from the reference's head", rtol=1e-5)


def test_without_a_reference_the_kl_is_that_of_the_policy_against_itself() -> None:
    given_ = hidden_batch()
    del given_["ref_per_token_logps"]
    theirs, our = both_modules(given_, use_ref_model=False)
    assert [float(x) for x in our[1]] == pytest.approx([float(x) for x in theirs[1]])
    assert our[1][0] == 0
    assert_equal(our[0], theirs[0], "loss", rtol=1e-5)
    with pytest.raises(ValueError, match=r"must be given with beta=0\.04, got neither.*use_ref_model=False"):
        ours.LigerFusedLinearGRPOLoss()(**given_)


def test_two_references_are_one_too_many() -> None:
    given_ = hidden_batch()
    with pytest.warns(UserWarning, match="are both given; the first is used"):
        loss, _ = ours.LigerFusedLinearGRPOLoss()(
            **given_, ref_input=given_["_input"] + 1, ref_weight=given_["lin_weight"]
        )
    assert torch.equal(loss, ours.LigerFusedLinearGRPOLoss()(**given_)[0])


@pytest.mark.parametrize("fault", FAULTS)
def test_the_faults_of_the_module_are_not_copied(fault: str) -> None:
    level, beta, weights = FAULTS[fault]
    for seed in range(10):
        batch = draw(seed, rows=4)
        truth = luspo_truth(batch, beta, level, weights_of(batch, weights))
        module = {"loss_type": "luspo", "importance_sampling_level": level, "beta": beta}
        our = run_module(batch, module, {"on_policy": False, "weights": weights, "items": None})
        assert_equal(our.loss, truth.loss, fault)
        assert_equal(our.grad, truth.grad, fault)


@pytest.mark.parametrize("shape", ["[B]", "[B, 1]"])
@pytest.mark.parametrize("form", ["module", "function"])
def test_vespo_takes_the_weight_of_a_sequence_once(shape: str, form: str) -> None:
    batch = draw(3, rows=4)
    ratio = torch.tensor([0.5, 2.0, 1.5, 0.8], dtype=torch.float64)
    once = torch.ones(batch.ids.shape, dtype=torch.float64)
    once[torch.arange(4), batch.mask.argmax(1)] = ratio
    config = gk.GRPOLossConfig.preset("liger", loss_type="vespo")
    shaped = ratio if shape == "[B]" else ratio[:, None]
    loss = gk.reference.grpo_loss(
        batch.logits, batch.ids, config, batch.advantages, batch.mask, batch.old, batch.ref, once
    )
    if form == "module":
        our, _ = ours.LigerFusedLinearGRPOLoss(loss_type="vespo")(
            batch.logits, torch.eye(batch.logits.shape[-1], dtype=torch.float64), batch.ids, batch.mask,
            batch.advantages, old_per_token_logps=batch.old, ref_per_token_logps=batch.ref, vllm_is_ratio=shaped,
        )  # fmt: skip
    else:
        padded = torch.cat([batch.logits, batch.logits[:, :1]], 1)
        our, _ = ours.triton_grpo_loss(
            padded, batch.old, batch.ref, batch.ids, batch.advantages, batch.mask, temperature=1.0, reduce=True,
            loss_type="vespo", vllm_is_ratio=shaped,
        )  # fmt: skip
    assert_equal(our, loss, "vespo", rtol=1e-9)


@pytest.mark.parametrize("processes", [1, 4])
def test_items_are_counted_over_processes(processes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    given_ = hidden_batch()
    alone, _ = ours.LigerFusedLinearGRPOLoss()(**given_, num_items_in_batch=100)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: processes)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda count: count.mul_(processes))
    shared, _ = ours.LigerFusedLinearGRPOLoss()(**given_, num_items_in_batch=100)
    torch.testing.assert_close(shared, alone * processes)
    local, _ = ours.LigerFusedLinearGRPOLoss()(**given_)
    torch.testing.assert_close(local, alone * 100 / given_["attention_mask"].sum())


# triton_grpo_loss


CALLS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "no reference": {"beta": 0.0},
    "on-policy": {"old_logp": None},
    "two-sided": {"delta": 1.6},
    "corrected KL": {"use_bias_correction_kl": True, "beta": 0.3},
    "weights of tokens": {"vllm_is_ratio": "[B, T]"},
    "weights of sequences": {"vllm_is_ratio": "[B, 1]"},
    "weights, one axis": {"vllm_is_ratio": "[B]"},
    "grpo": {"loss_type": "grpo"},
    "bnpo": {"loss_type": "bnpo"},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "dr_grpo of a length": {"loss_type": "dr_grpo", "max_completion_length": 11},
    "global count": {"num_items_in_batch": 40},
    "cispo": {"loss_type": "cispo", "eps_high": 1.2},
    "sapo": {"loss_type": "sapo", "sapo_temperature_neg": 1.6},
    "vespo": {"loss_type": "vespo", "vespo_k_neg": 1.2},
    "vespo weighted": {"loss_type": "vespo", "vllm_is_ratio": "[B, T]"},
    "by sequence": {"importance_sampling_level": "sequence", "loss_type": "grpo"},
    "by sequence, two-sided, weighted": {
        "importance_sampling_level": "sequence", "loss_type": "grpo", "delta": 1.5, "vllm_is_ratio": "[B, T]",
    },
}  # fmt: skip


def function_batch(call: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
    rng = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 5, 23, generator=rng) * 1.5
    ids = torch.randint(0, 23, (3, 4), generator=rng)
    p = (logits[:, :-1] / 0.9).log_softmax(-1).gather(-1, ids[..., None]).squeeze(-1)
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1], [1, 0, 1, 1]])
    weights = 0.5 + torch.rand(3, 4, generator=rng)
    shapes = {"[B, T]": torch.where(mask == 0, 1.0, weights), "[B, 1]": weights[:, :1], "[B]": weights[:, 0]}
    arguments = {
        "old_logp": p + 0.4 * torch.randn(3, 4, generator=rng), "ref_logp": p + 0.5 * torch.randn(3, 4, generator=rng),
        "completion_ids": ids, "advantages": torch.tensor([1.0, -1.7, 0.4]), "completion_mask": mask,
    }  # fmt: skip
    arguments |= {name: shapes[value] if name == "vllm_is_ratio" else value for name, value in call.items()}
    return logits, {name: v.contiguous() if isinstance(v, Tensor) else v for name, v in arguments.items()}


needs_interpreter = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1" and not torch.cuda.is_available(),
    reason="Liger's kernels need Triton's interpreter or a GPU",
)


@needs_interpreter
@pytest.mark.parametrize("reduce", [False, True])
@pytest.mark.parametrize("case", CALLS)
def test_the_function_is_ligers(case: str, reduce: bool) -> None:
    logits, arguments = function_batch(CALLS[case])
    upstream = torch.rand(3, 4, generator=torch.Generator().manual_seed(1))
    results = []
    for function in (triton_grpo_loss, ours.triton_grpo_loss):
        leaf = logits.clone().requires_grad_()
        loss, *rest = function(leaf * 1.0, reduce=reduce, **arguments)
        numbers = rest[0] if reduce else [x for x in rest if x is not None]
        (grad,) = torch.autograd.grad(loss if reduce else (loss * upstream).sum(), leaf)
        results.append((loss.detach(), grad, *(x.detach() for x in numbers)))
        assert torch.equal(grad[:, -1], torch.zeros(3, 23))
    assert len(results[0]) == len(results[1])
    assert float(results[0][0].abs().max()) > 0.01
    for our, their in zip(results[1], results[0], strict=True):
        assert_equal(our, their, case, rtol=1e-5)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("reduce", [False, True])
def test_the_storage_of_the_logits_is_given_away_where_it_can_be(inplace: bool, reduce: bool) -> None:
    logits, arguments = function_batch({})
    leaf = logits.clone().requires_grad_()
    made = leaf * 1.0
    made.retain_grad()
    before = made.detach().clone()
    loss = ours.triton_grpo_loss(made, inplace=inplace, reduce=reduce, **arguments)[0]
    loss.sum().backward()
    assert torch.equal(made.detach(), before) != inplace
    for other in (logits.clone().requires_grad_(), (logits.clone().requires_grad_() * 1.0)[:]):  # a leaf, a view
        value = ours.triton_grpo_loss(other, inplace=inplace, reduce=reduce, **arguments)[0]
        (grad,) = torch.autograd.grad(value.sum(), other)
        assert leaf.grad is not None
        assert torch.equal(grad, leaf.grad)


def truth(logits: Tensor, arguments: dict[str, Any], **fields: Any) -> tuple[Tensor, Tensor]:
    """Loss and gradient in float64."""
    config = gk.GRPOLossConfig(temperature=0.9, epsilon=0.2, epsilon_high=0.4, **fields)
    leaf = logits.double().requires_grad_()
    loss = gk.reference.grpo_loss(
        leaf[:, :-1], arguments["completion_ids"], config, arguments["advantages"].double(),
        arguments["completion_mask"], arguments["old_logp"].double(), arguments["ref_logp"].double(),
    )  # fmt: skip
    return loss.detach(), torch.autograd.grad(loss, leaf)[0]


WRONG: dict[str, dict[str, Any]] = {
    "luspo: the gradient is 1 / T of the right one": {"loss_type": "luspo", "beta": 0.0},
    "delta below the clip: a gradient where min(r, delta) has none": {"loss_type": "dapo", "beta": 0.0, "delta": 1.1},
    "the same by sequence": {
        "loss_type": "grpo", "importance_sampling_level": "sequence", "beta": 0.0, "delta": 1.01,
    },
}  # fmt: skip


@needs_interpreter
@pytest.mark.parametrize("fault", WRONG)
def test_the_faults_of_the_function_are_not_copied(fault: str) -> None:
    logits, arguments = function_batch(WRONG[fault])
    _, right = truth(logits, arguments, **WRONG[fault])
    gradients = []
    for function in (ours.triton_grpo_loss, triton_grpo_loss):
        leaf = logits.clone().requires_grad_()
        loss, _ = function(leaf * 1.0, reduce=True, **arguments)
        gradients.append(torch.autograd.grad(loss, leaf)[0])
    assert_equal(gradients[0], right, fault, rtol=1e-5)
    assert not torch.allclose(gradients[1].double(), right, rtol=1e-2, atol=1e-4), f"mended in this release: {fault}"


@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_losses_of_tokens_are_differentiable_for_any_upstream(level: str, corrected: bool) -> None:
    """Also where a token's loss depends on every token of its sequence: against plain float64."""
    logits, arguments = function_batch({})
    upstream = torch.rand(3, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    leaf = logits.double().requires_grad_()
    losses, kl, clipped = ours.triton_grpo_loss(
        leaf * 1.0, importance_sampling_level=level, use_bias_correction_kl=corrected, beta=0.3, **arguments
    )
    mask = arguments["completion_mask"]
    p = (leaf[:, :-1] / 0.9).log_softmax(-1).gather(-1, arguments["completion_ids"][..., None]).squeeze(-1)
    gap = p - arguments["old_logp"]
    if level == "sequence":
        gap = ((gap * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True)).expand_as(gap)
    ratio, values = gap.exp(), arguments["advantages"].double()[:, None]
    apart = arguments["ref_logp"] - p
    k3 = (apart.exp() - apart - 1) * (ratio if corrected else 1)
    wanted = (-torch.min(ratio * values, ratio.clamp(0.8, 1.4) * values) + 0.3 * k3) * mask
    torch.testing.assert_close(losses, wanted, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(kl, (k3 * mask).detach(), rtol=1e-6, atol=1e-9)
    held = ((ratio > 1.4) & (values > 0)) | ((ratio < 0.8) & (values < 0))
    assert torch.equal(clipped.bool(), held & (mask != 0))
    ours_, theirs = (torch.autograd.grad((x * upstream).sum(), leaf, retain_graph=True)[0] for x in (losses, wanted))
    torch.testing.assert_close(ours_, theirs, rtol=1e-6, atol=1e-9)
