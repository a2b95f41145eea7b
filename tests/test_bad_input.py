"""Bad input of the functions is refused in words, before any work on the logits, and leaves every input as it was."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from refusals import LONG, B, G, T, V, Watch, good, packed, refused

import grpo_kernels as gk

NAN = math.nan


def test_the_good_calls_are_good() -> None:
    for call in (good(), packed()):
        assert torch.isfinite(gk.grpo_loss(**call).loss)


def test_the_watch_sees_work() -> None:
    call = good()
    watch = Watch(call["logits"])
    with watch:
        gk.grpo_loss(**call)
    assert watch.touched


LOSS_SHAPES: dict[str, tuple[dict[str, Any], str, tuple[str, ...]]] = {
    "mask longer": ({"completion_mask": torch.ones(B, T + 1)}, "completion_mask", ("[4, 4]", "[4, 3]")),
    "mask flat": ({"completion_mask": torch.ones(B * T)}, "completion_mask", ("[12]", "[4, 3]")),
    "mask per sequence": ({"completion_mask": torch.ones(B, 1)}, "completion_mask", ("[4, 1]",)),
    "unshifted logits": ({"logits": torch.zeros(B, T + 1, V)}, "(logits|completion_ids)", ("[:, :-1]",)),
    "short logits": ({"logits": torch.zeros(B, T - 1, V)}, "(logits|completion_ids)", ()),
    "other batch": ({"logits": torch.zeros(B + 1, T, V)}, "(logits|completion_ids)", ()),
    "logits without V": ({"logits": torch.zeros(B, T)}, "(logits|completion_ids)", ()),
    "logits of four axes": ({"logits": torch.zeros(1, B, T, V)}, "logits", ()),
    "empty vocabulary": ({"logits": torch.zeros(B, T, 0)}, "logits", ()),
    "old": ({"old_per_token_logps": torch.zeros(B, T + 1)}, "old_per_token_logps", ("[4, 4]", "[4, 3]")),
    "old per sequence": ({"old_per_token_logps": torch.zeros(B)}, "old_per_token_logps", ()),
    "old broadcast": ({"old_per_token_logps": torch.zeros(1, T)}, "old_per_token_logps", ()),
    "ref": ({"ref_per_token_logps": torch.zeros(B, T + 1)}, "ref_per_token_logps", ("[4, 4]", "[4, 3]")),
    "ref flat": ({"ref_per_token_logps": torch.zeros(B * T)}, "ref_per_token_logps", ()),
    "advantages short": ({"advantages": torch.zeros(B - 1)}, "advantages", ("[3]",)),
    "advantages along T": ({"advantages": torch.zeros(T)}, "advantages", ()),
    "advantages 0-d": ({"advantages": torch.zeros(())}, "advantages", ()),
    "advantages broadcast": ({"advantages": torch.zeros(1, T)}, "advantages", ()),
    "advantages wide": ({"advantages": torch.zeros(B, T + 1)}, "advantages", ()),
    "weight short": ({"importance_sampling_ratio": torch.ones(B + 1)}, "importance_sampling_ratio", ("[5]",)),
    "weight wide": ({"importance_sampling_ratio": torch.ones(B, T + 1)}, "importance_sampling_ratio", ()),
    "weight broadcast": ({"importance_sampling_ratio": torch.ones(1, T)}, "importance_sampling_ratio", ()),
    "temperature [B]": ({"temperature": torch.ones(B)}, "temperature", ("[B, 1]",)),
    "temperature wide": ({"temperature": torch.ones(B, T + 1)}, "temperature", ()),
    "normalizer [1]": ({"normalizer": torch.ones(1)}, "normalizer", ("0-d",)),
    "entropy_normalizer [B]": ({"entropy_normalizer": torch.ones(B)}, "entropy_normalizer", ("0-d",)),
}


@pytest.mark.parametrize("case", LOSS_SHAPES)
def test_loss_refuses_shapes(case: str) -> None:
    change, argument, words = LOSS_SHAPES[case]
    refused(gk.grpo_loss, good() | change, ValueError, "grpo_loss", argument, *words)


PACKED_SHAPES: dict[str, tuple[dict[str, Any], str]] = {
    "mask": ({"completion_mask": torch.ones(B, T)}, "completion_mask"),
    "old": ({"old_per_token_logps": torch.zeros(11)}, "old_per_token_logps"),
    "logits": ({"logits": torch.zeros(13, V)}, "(logits|completion_ids)"),
    "advantages per neither": ({"advantages": torch.zeros(5)}, "advantages"),
    "weight per neither": ({"importance_sampling_ratio": torch.ones(3)}, "importance_sampling_ratio"),
    "temperature [S]": ({"temperature": torch.ones(B)}, "temperature"),
    "cu_seqlens two axes": ({"cu_seqlens": torch.tensor([[0, 3], [3, 12]])}, "cu_seqlens"),
    "cu_seqlens none at all": ({"cu_seqlens": torch.zeros(0, dtype=torch.int32)}, "cu_seqlens"),
    "cu_seqlens falls": ({"cu_seqlens": torch.tensor([0, 7, 3, 9, 12])}, "cu_seqlens"),
    "cu_seqlens beyond N": ({"cu_seqlens": torch.tensor([0, 3, 3, 7, 13])}, "cu_seqlens"),
    "cu_seqlens negative": ({"cu_seqlens": torch.tensor([-1, 3, 3, 7, 12])}, "cu_seqlens"),
    "cu_seqlens starts late": ({"cu_seqlens": torch.tensor([1, 3, 3, 7, 12])}, "cu_seqlens"),
}


@pytest.mark.parametrize("case", PACKED_SHAPES)
def test_loss_refuses_packed_shapes(case: str) -> None:
    change, argument = PACKED_SHAPES[case]
    refused(gk.grpo_loss, packed() | change, ValueError, "grpo_loss", argument)


def test_cu_seqlens_goes_with_flat_ids_and_flat_ids_with_cu_seqlens() -> None:
    refused(gk.grpo_loss, good() | {"cu_seqlens": torch.tensor([0, 12])}, ValueError, "grpo_loss", "cu_seqlens")
    flat = packed() | {"cu_seqlens": None}
    refused(gk.grpo_loss, flat, ValueError, "grpo_loss", "completion_ids", "cu_seqlens")


KINDS: dict[str, tuple[dict[str, Any], str]] = {
    "float ids": ({"completion_ids": torch.zeros(B, T)}, "completion_ids"),
    "int16 ids": ({"completion_ids": torch.zeros(B, T, dtype=torch.int16)}, "completion_ids"),
    "bool ids": ({"completion_ids": torch.zeros(B, T, dtype=torch.bool)}, "completion_ids"),
    "list ids": ({"completion_ids": [[0] * T] * B}, "completion_ids"),
    "int logits": ({"logits": torch.zeros(B, T, V, dtype=LONG)}, "logits"),
    "complex logits": ({"logits": torch.zeros(B, T, V, dtype=torch.complex64)}, "logits"),
    "list logits": ({"logits": [[[0.0] * V] * T] * B}, "logits"),
    "complex mask": ({"completion_mask": torch.ones(B, T, dtype=torch.complex64)}, "completion_mask"),
    "list mask": ({"completion_mask": [[1] * T] * B}, "completion_mask"),
    "list advantages": ({"advantages": [1.0, -1.0, 0.5, -0.5]}, "advantages"),
    "complex advantages": ({"advantages": torch.zeros(B, dtype=torch.complex64)}, "advantages"),
    "float old": ({"old_per_token_logps": -1.5}, "old_per_token_logps"),
    "list ref": ({"ref_per_token_logps": [[0.0] * T] * B}, "ref_per_token_logps"),
    "number weight": ({"importance_sampling_ratio": 0.5}, "importance_sampling_ratio"),
    "text temperature": ({"temperature": "1.0"}, "temperature"),
    "text normalizer": ({"normalizer": "3"}, "normalizer"),
    "dict config": ({"config": {"loss_type": "grpo"}}, "config"),
    "text config": ({"config": "grpo"}, "config"),
}


@pytest.mark.parametrize("case", KINDS)
def test_loss_refuses_kinds(case: str) -> None:
    change, argument = KINDS[case]
    refused(gk.grpo_loss, good() | change, TypeError, "grpo_loss", argument)


@pytest.mark.parametrize("kind", [torch.float32, torch.bool, torch.int16], ids=str)
def test_loss_refuses_the_kind_of_cu_seqlens(kind: torch.dtype) -> None:
    refused(gk.grpo_loss, packed() | {"cu_seqlens": torch.zeros(B + 1).to(kind)}, TypeError, "grpo_loss", "cu_seqlens")
    refused(gk.grpo_loss, packed() | {"cu_seqlens": [0, 3, 3, 7, 12]}, TypeError, "grpo_loss", "cu_seqlens")


VALUES: dict[str, tuple[dict[str, Any], str, tuple[str, ...]]] = {
    "temperature 0": ({"temperature": 0.0}, "temperature", ("> 0",)),
    "temperature -1": ({"temperature": -1}, "temperature", ("> 0",)),
    "temperature NaN": ({"temperature": NAN}, "temperature", ("nan",)),
    "temperature 0-d": ({"temperature": torch.tensor(0.0)}, "temperature", ()),
    "temperature of one row": ({"temperature": torch.tensor([[1.0], [1.0], [-2.0], [1.0]])}, "temperature", ()),
    "temperature of one token": (
        {"temperature": torch.ones(B, T).index_fill(1, torch.tensor([2]), 0.0)},
        "temperature",
        (),
    ),
    "normalizer 0": ({"normalizer": 0}, "normalizer", ("> 0",)),
    "normalizer -1": ({"normalizer": -1.0}, "normalizer", ()),
    "normalizer NaN": ({"normalizer": NAN}, "normalizer", ()),
    "normalizer tensor 0": ({"normalizer": torch.tensor(0)}, "normalizer", ()),
    "entropy_normalizer 0": ({"entropy_normalizer": 0.0}, "entropy_normalizer", ()),
    "entropy_normalizer tensor": ({"entropy_normalizer": torch.tensor(-3.0)}, "entropy_normalizer", ()),
    "no reference": ({"ref_per_token_logps": None}, "ref_per_token_logps", ("beta",)),
    "both": ({"rewards": torch.ones(B)}, "advantages", ("rewards",)),
    "neither": ({"advantages": None}, "advantages", ("rewards",)),
    "live id V": ({"completion_ids": torch.full((B, T), V)}, "completion_ids", ("5",)),
    "live id huge": ({"completion_ids": torch.full((B, T), 2**40)}, "completion_ids", ()),
    "unknown impl": ({"impl": "cuda"}, "impl", ("cuda", "torch")),
}


@pytest.mark.parametrize("case", VALUES)
def test_loss_refuses_values(case: str) -> None:
    change, argument, words = VALUES[case]
    refused(gk.grpo_loss, good() | change, ValueError, "grpo_loss", argument, *words)


@pytest.mark.parametrize("name", ["old_per_token_logps", "ref_per_token_logps"])
@pytest.mark.parametrize("value", [NAN, math.inf, -math.inf])
def test_loss_refuses_live_log_probs_that_are_not_finite(name: str, value: float) -> None:
    call = good()
    call[name][1, 2] = value
    refused(gk.grpo_loss, call, ValueError, "grpo_loss", name, "finite")
    call["completion_mask"][1, 2] = 0
    assert torch.isfinite(gk.grpo_loss(**call).loss)


REWARDS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "size does not divide": ({"group_size": 3}, ValueError, "group_size"),
    "size 0": ({"group_size": 0}, ValueError, "group_size"),
    "size negative": ({"group_size": -2}, ValueError, "group_size"),
    "size a float": ({"group_size": 2.0}, TypeError, "group_size"),
    "ids short": ({"group_ids": torch.zeros(B - 1, dtype=LONG)}, ValueError, "group_ids"),
    "ids two axes": ({"group_ids": torch.zeros(B, 1, dtype=LONG)}, ValueError, "group_ids"),
    "ids floats": ({"group_ids": torch.zeros(B)}, TypeError, "group_ids"),
    "ids a list": ({"group_ids": [0, 0, 1, 1]}, TypeError, "group_ids"),
    "size and ids": ({"group_size": 2, "group_ids": torch.zeros(B, dtype=LONG)}, ValueError, "group_size"),
    "rewards a list": ({"rewards": [1.0] * B}, TypeError, "rewards"),
    "rewards two axes": ({"rewards": torch.ones(B // G, G)}, ValueError, "rewards"),
    "rewards 0-d": ({"rewards": torch.ones(())}, ValueError, "rewards"),
    "rewards complex": ({"rewards": torch.ones(B, dtype=torch.complex64)}, TypeError, "rewards"),
}


@pytest.mark.parametrize("case", REWARDS)
@pytest.mark.parametrize("function", ["grpo_loss", "group_advantages"])
def test_rewards_and_groups_are_checked_in_both_functions(case: str, function: str) -> None:
    change, error, argument = REWARDS[case]
    rewards = {"rewards": torch.tensor([1.0, 0.0, 0.5, 2.0])} | change
    if function == "grpo_loss":
        speaker = "(grpo_loss|group_advantages)"  # the loss runs the normalisation as a step of its own
        refused(gk.grpo_loss, good() | {"advantages": None} | rewards, error, speaker, argument)
    else:
        refused(gk.group_advantages, rewards, error, function, argument)


def test_the_size_that_does_not_divide_says_so() -> None:
    text = refused(
        gk.group_advantages, {"rewards": torch.ones(4), "group_size": 3}, ValueError, "group_advantages", "group_size"
    )
    assert "4" in text and "3" in text


def test_rewards_of_another_batch() -> None:
    call = good() | {"advantages": None, "rewards": torch.ones(B + 1)}
    refused(gk.grpo_loss, call, ValueError, "grpo_loss", "rewards", "5")


@pytest.mark.parametrize(
    ("change", "error", "argument", "word"),
    [
        ({"baseline": "median"}, ValueError, "baseline", "leave_one_out"),
        ({"scale": "groups"}, ValueError, "scale", "group"),
        ({"eps": -1e-4}, ValueError, "eps", ""),
        ({"eps": NAN}, ValueError, "eps", ""),
        ({"ddof": -1}, ValueError, "ddof", ""),
        ({"baseline": None}, ValueError, "baseline", "none"),
    ],
)
def test_group_advantages_refuses_options(
    change: dict[str, Any], error: type[Exception], argument: str, word: str
) -> None:
    refused(gk.group_advantages, {"rewards": torch.ones(4)} | change, error, "group_advantages", argument, word)


def test_a_vocabulary_that_is_not_innermost_is_refused() -> None:
    """Never read as if it were."""
    logits = torch.zeros(B, V, T).transpose(1, 2)
    refused(gk.grpo_loss, good() | {"logits": logits}, ValueError, "grpo_loss", "logits", "stride")
    call = {"logits": logits, "targets": torch.zeros(B, T, dtype=LONG)}
    refused(gk.per_token_logps, call, ValueError, "per_token_logps", "logits", "stride")
    narrow = torch.zeros(B, T, 2)[..., :1]
    assert gk.per_token_logps(narrow, torch.zeros(B, T, dtype=LONG)).logps.abs().max() == 0, "one column has no stride"


# devices


@pytest.mark.parametrize(
    "name", ["completion_ids", "advantages", "completion_mask", "old_per_token_logps", "ref_per_token_logps"]
)
def test_tensors_on_two_devices_are_refused(name: str) -> None:
    """The meta device stands for any other."""
    call = good()
    call[name] = call[name].to("meta")
    refused(gk.grpo_loss, call, ValueError, "grpo_loss", name, "meta", "cpu")


def test_log_probs_on_two_devices_are_refused() -> None:
    call = {"logits": torch.zeros(B, T, V), "targets": torch.zeros(B, T, dtype=LONG)}
    for name, value in (("targets", call["targets"]), ("mask", torch.ones(B, T)), ("temperature", torch.ones(B, 1))):
        refused(gk.per_token_logps, call | {name: value.to("meta")}, ValueError, "per_token_logps", name, "meta", "cpu")
    device = refused(
        gk.grpo_loss,
        packed() | {"cu_seqlens": torch.zeros(5, dtype=LONG, device="meta")},
        ValueError,
        "grpo_loss",
        "cu_seqlens",
    )
    assert "meta" in device


def test_groups_on_another_device_are_refused() -> None:
    groups = torch.zeros(4, dtype=LONG, device="meta")
    call = {"rewards": torch.ones(4), "group_ids": groups}
    refused(gk.group_advantages, call, ValueError, "group_advantages", "group_ids", "meta", "cpu")


# modules and the rollout check


def test_the_module_refuses_what_is_no_config() -> None:
    for value in ({"loss_type": "grpo"}, "grpo"):
        with pytest.raises(TypeError, match="config"):
            gk.GRPOLoss(value)(**{k: v for k, v in good().items() if k != "config"})
    call = good()
    config = call.pop("config")
    call["completion_mask"] = torch.ones(B, T + 1)
    with pytest.raises(ValueError, match="completion_mask"):
        gk.GRPOLoss(config)(**call)


@pytest.mark.parametrize(
    ("change", "error", "argument"),
    [
        ({"recomputed": torch.zeros(2, 4)}, ValueError, "(engine|recomputed)"),
        ({"mask": torch.ones(2, 4)}, ValueError, "mask"),
        ({"engine": [[0.0]]}, TypeError, "engine"),
        ({"recomputed": 1.0}, TypeError, "recomputed"),
        ({"engine": torch.zeros(2, 3, dtype=LONG)}, TypeError, "engine"),
    ],
)
def test_the_rollout_check_refuses(change: dict[str, Any], error: type[Exception], argument: str) -> None:
    call = {"engine": torch.zeros(2, 3), "recomputed": torch.zeros(2, 3), "mask": None} | change
    refused(gk.check_rollout_logps, call, error, "check_rollout_logps", argument)
