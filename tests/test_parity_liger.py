"""Preset "liger" is Liger-Kernel 0.8.5: `LigerFusedLinearGRPOLoss`, chunk by chunk on the CPU, and its known faults.

The module works out log-probabilities in float32, so that it is compared to float32's precision. The function of its
chunks, `ppo_loss_fn`, takes them as they are: it is compared in float64, summed over chunks as the module does.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from parity_projects import need, wide
from parity_support import (
    Draw,
    Result,
    assert_agree,
    assert_equal,
    default_float64,
    draw,
    draws,
    loud,
    run_ours,
    run_theirs,
)
from torch import Tensor

import grpo_kernels as gk

need("liger-kernel")

from liger_kernel.chunked_loss.grpo_loss import (  # noqa: E402
    LigerFusedLinearGRPOFunction,
    LigerFusedLinearGRPOLoss,
)

LOSS_TYPES = ["grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo"]
PER_TOKEN = ["dapo", "cispo", "vespo"]
CLIPPED = ["grpo", "bnpo", "dr_grpo", "dapo", "luspo"]

OPTIONS: dict[str, st.SearchStrategy[Any]] = {
    "importance_sampling_level": st.sampled_from(["token", "sequence"]),
    "epsilon_low": st.sampled_from([0.2, 0.05]),
    "epsilon_high": st.sampled_from([0.2, 0.28, 1.3]),
    "delta": st.sampled_from([None, 1.1, 2.0]),
    "beta": st.sampled_from([0.04, 0.0, 0.7]),
    "use_bias_correction_kl": st.booleans(),
    "sapo_temperature_pos": st.sampled_from([1.0, 0.7]),
    "sapo_temperature_neg": st.sampled_from([1.05, 1.6]),
    "vespo_k_pos": st.sampled_from([2.0, 1.5]),
    "vespo_lambda_pos": st.sampled_from([3.0, 0.6]),
    "vespo_k_neg": st.sampled_from([3.0, 0.8]),
    "vespo_lambda_neg": st.sampled_from([2.0, 0.0]),
    "items": st.sampled_from([None, 31]),
    "weights": st.sampled_from([None, "[B, T]", "[B, 1]"]),
    "on_policy": st.sampled_from([False, False, True]),
    "chunk_size": st.sampled_from([1, 2]),
    "shape": st.fixed_dictionaries(
        {"off_policy": st.sampled_from([0.4, 0.1, 1.0]), "empty_rows": st.sampled_from([False, False, True])}
    ),
}
CALL = ("items", "weights", "on_policy", "chunk_size", "shape")


def options_of(loss_type: str, options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """`(module options, call)`, without what Liger ignores or refuses for this loss type, and without its faults."""
    call = {name: options[name] for name in CALL}
    others = {"sapo", "vespo"} - {loss_type}
    module = {k: v for k, v in options.items() if k not in CALL and k.partition("_")[0] not in others}
    module |= {"loss_type": loss_type, "max_completion_length": 9 if loss_type == "dr_grpo" else None}
    if loss_type not in CLIPPED:
        module |= {"importance_sampling_level": "token", "delta": None}
    if loss_type in ("sapo", "vespo"):
        module |= {"epsilon_low": 0.2, "epsilon_high": 0.2}
    if loss_type == "cispo":
        module["epsilon_high"] += 1.0  # an absolute cap
        module["epsilon_low"] = 0.2
    if loss_type == "luspo":  # FAULTS says why
        module |= {"importance_sampling_level": "sequence", "beta": 0.0}
        call["weights"] = "[B, 1]" if call["weights"] else None
    if loss_type == "vespo" and call["weights"]:
        call["weights"] = "[B, T]"
    return module, call


def our_fields(module: dict[str, Any]) -> dict[str, Any]:
    """Liger's names as ours."""
    renamed = {"epsilon_low": "epsilon"}
    if module["loss_type"] in ("sapo", "vespo"):  # which clip nothing
        module = {name: value for name, value in module.items() if not name.startswith("epsilon")}
    return {renamed.get(name, name): value for name, value in module.items()}


def weights_of(batch: Draw, kind: str | None) -> Tensor | None:
    weights = (batch.old - batch.rollout).exp().clamp(max=2.0)
    weights = torch.where(batch.mask.bool(), weights, 1.0)  # TRL's are 1 there, and VESPO sums over all of them
    return {None: None, "[B, T]": weights, "[B, 1]": weights[:, :1]}[kind]


def chunked(batch: Draw, logps: Tensor, module: dict[str, Any], call: dict[str, Any]) -> tuple[Tensor, list[Tensor]]:
    """Liger's loss and metrics from log-probabilities in float64, summed over its chunks."""
    weights = weights_of(batch, call["weights"])
    total, sums = logps.new_zeros(()), [0.0] * (1 + (module["beta"] != 0))
    for rows in torch.arange(len(batch.ids)).split(call["chunk_size"]):
        with default_float64():
            value, metrics = LigerFusedLinearGRPOFunction._compute_loss_from_logps(
                logps[rows], batch.mask[rows].double(), batch.advantages[rows], wide(batch.ref[rows]),
                None if call["on_policy"] else wide(batch.old[rows]), None if weights is None else weights[rows],
                full_attention_mask=batch.mask.double(), ppo_loss_fn=LigerFusedLinearGRPOFunction.ppo_loss_fn,
                num_items_in_batch=call["items"], **module,
            )  # fmt: skip
        total = total + value
        sums = [a + b for a, b in zip(sums, metrics, strict=True)]
    return total, sums


def ours(batch: Draw, module: dict[str, Any], call: dict[str, Any]) -> tuple[Result, Any]:
    config = gk.GRPOLossConfig.preset("liger", **our_fields(module))
    weights = weights_of(batch, call["weights"])
    per_token = module["loss_type"] in PER_TOKEN
    return run_ours(
        batch, config, old_per_token_logps=None if call["on_policy"] else batch.old, ref_per_token_logps=batch.ref,
        importance_sampling_ratio=weights, normalizer=call["items"] if per_token else None,
    )  # fmt: skip


def clip_share(batch: Draw, per_token: Any, module: dict[str, Any]) -> Tensor:
    """Liger's one clip metric: a mean over tokens at any level, of the ratio before delta."""
    ratio, advantages = per_token.ratio, batch.token_advantages()
    if module["loss_type"] in ("sapo", "vespo"):
        return torch.zeros((), dtype=torch.float64)
    if module["loss_type"] == "cispo":
        flags = (ratio > module["epsilon_high"]) & (advantages > 0)
    else:
        flags = (ratio > 1 + module["epsilon_high"]) & (advantages > 0)
        flags |= (ratio < 1 - module["epsilon_low"]) & (advantages < 0)
    return flags[batch.mask.bool()].double().mean()


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@draws
@given(seed=st.integers(0, 10**6), options=st.fixed_dictionaries(OPTIONS))
def test_the_loss_is_ligers(loss_type: str, seed: int, options: dict[str, Any]) -> None:
    module, call = options_of(loss_type, options)

    def theirs(batch: Draw, logps: Tensor, entropy: Tensor) -> tuple[Tensor, dict[str, Any]]:
        value, sums = chunked(batch, logps, module, call)
        return value, dict(zip(["kl", "clip"][-len(sums) :], (float(x.detach()) for x in sums), strict=True))

    batch, their = loud(theirs, seed, **call["shape"])
    our, per_token = ours(batch, module, call)
    metrics = dict(our.metrics) | {"clip": clip_share(batch, per_token, module)}
    assert_agree(Result(our.loss, our.grad, metrics), their, {"kl": "kl", "clip": "clip"}, where=f"{module} {call}")
    if module["importance_sampling_level"] == "token" and module["delta"] is None and loss_type in (*CLIPPED, "cispo"):
        name = "cispo_clip_ratio" if loss_type == "cispo" else "clip_ratio/region_mean"
        assert_equal(our.metrics[name], their.metrics["clip"], name)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("seed", range(3))
def test_the_module_is_ligers(loss_type: str, seed: int, bias: bool) -> None:
    """`LigerFusedLinearGRPOLoss` itself from hidden states, with `gk.linear_grpo_loss` at its defaults beside it."""
    torch.manual_seed(seed)
    batch = draw(seed, off_policy=0.3, rows=3)
    width, vocabulary = 7, 11
    hidden = torch.randn(*batch.ids.shape, width)
    weight = torch.randn(vocabulary, width) * 0.5
    offsets = torch.randn(vocabulary) * 0.3 if bias else None
    extra: dict[str, Any] = {"max_completion_length": 9} if loss_type == "dr_grpo" else {}
    extra |= {"importance_sampling_level": "sequence", "beta": 0.0} if loss_type == "luspo" else {}
    cap = {"epsilon_high": 1.2} if loss_type == "cispo" else {}
    log_p = torch.nn.functional.linear(hidden.double(), weight.double(), None if offsets is None else offsets.double())
    p = log_p.log_softmax(-1).gather(-1, batch.ids[..., None]).squeeze(-1)
    old, ref = (p + batch.old - batch.rollout).float(), (p + 0.5 * batch.ref - 0.5 * batch.old).float()
    results = []
    for module in (
        LigerFusedLinearGRPOLoss(loss_type=loss_type, compiled=False, **extra, **cap),
        gk.LinearGRPOLoss(gk.GRPOLossConfig.preset("liger", loss_type=loss_type, **extra, **cap)),
    ):
        leaves = [x.clone().requires_grad_() for x in (hidden, weight, *([] if offsets is None else [offsets]))]
        bias_leaf = leaves[2] if bias else None
        arguments: dict[str, Any] = {"ref_per_token_logps": ref, "old_per_token_logps": old, "bias": bias_leaf}
        advantages = batch.advantages.float() + 1
        if isinstance(module, LigerFusedLinearGRPOLoss):
            value, _ = module(leaves[0], leaves[1], batch.ids, batch.mask.float(), advantages, **arguments)
        else:
            value = module(
                leaves[0], leaves[1], batch.ids, advantages=advantages, completion_mask=batch.mask, **arguments
            ).loss
        results.append((value.detach(), *torch.autograd.grad(value, leaves)))
    assert abs(results[0][0]) > 0.01
    for theirs, mine, name in zip(*results, ("loss", "hidden", "weight", "bias"), strict=False):
        assert_equal(mine, theirs, name, rtol=1e-5)


def test_the_defaults_are_ligers() -> None:
    theirs = {
        name: parameter.default for name, parameter in inspect.signature(LigerFusedLinearGRPOLoss).parameters.items()
    }
    for name in ("compiled", "use_ref_model", "chunk_size"):  # how it computes, not what
        theirs.pop(name)
    ours = gk.GRPOLossConfig.preset("liger")
    low, high = theirs.pop("epsilon_low"), theirs.pop("epsilon_high")
    assert (ours.epsilon, 1 + high) == (low, ours.upper_bound)
    assert {name: getattr(ours, name) for name in theirs} == theirs


# Known faults of 0.8.5, not copied: what it gives, why it is wrong, and that ours is the value that TRL's formula has.


def luspo_truth(batch: Draw, beta: float, level: str, weights: Tensor | None) -> Result:
    """mean over sequences of sum_t m_t (w_t l_t + beta k3_t), in plain float64."""

    def truth(batch: Draw, logps: Tensor, entropy: Tensor) -> tuple[Tensor, dict[str, Any]]:
        mask, advantages = batch.mask.double(), batch.token_advantages()
        gap = logps - batch.old
        if level == "sequence":
            gap = ((gap * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)).expand_as(gap)
        ratio = gap.exp()
        terms = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        terms = terms if weights is None else terms * weights
        d = batch.ref - logps
        terms = terms + beta * (d.exp() - d - 1)
        return (terms * mask).sum(1).mean(), {}

    return run_theirs(batch, truth)


FAULTS = {
    "luspo takes padding for tokens and divides by T: ratios of tokens": ("token", 0.0, None),
    "luspo takes padding for tokens and divides by T: a KL": ("sequence", 0.3, None),
    "luspo takes padding for tokens and divides by T: weights of tokens": ("sequence", 0.0, "[B, T]"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_ligers_faults_are_not_copied(fault: str) -> None:
    level, beta, weights = FAULTS[fault]
    module = {
        "loss_type": "luspo", "importance_sampling_level": level, "beta": beta, "epsilon_low": 0.2, "epsilon_high": 0.2,
    }  # fmt: skip
    call = {"items": None, "weights": weights, "on_policy": False, "chunk_size": 1}
    errors = []
    for seed in range(20):
        batch = draw(seed, rows=4)
        theirs, _ = chunked(batch, wide(batch.logps(batch.logits)[0]), module, call)
        truth = luspo_truth(batch, beta, level, weights_of(batch, weights))
        our, _ = ours(batch, module, call)
        assert_equal(our.loss, truth.loss, fault)
        assert_equal(our.grad, truth.grad, fault)
        errors.append(float(abs(theirs - truth.loss) / max(abs(truth.loss), 0.1)))
    assert max(errors) > 0.1, f"mended in this release of Liger: {fault}"
