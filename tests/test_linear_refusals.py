"""Bad input of the linear form is refused in words, before any work on hidden or weight, and changes no input."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from refusals import LONG, B, T, V, Watch, good, packed, refused
from test_bad_input import KINDS, LOSS_SHAPES, PACKED_SHAPES, REWARDS, VALUES
from torch import Tensor, nn

import grpo_kernels as gk

NAN = math.nan
H = 3
TOKEN_FUNCTIONS = ["linear_grpo_loss", "linear_per_token_logps"]


def good_loss(rows: dict[str, Any] | None = None) -> dict[str, Any]:
    """A call of `linear_grpo_loss` with nothing wrong in it, from one of `grpo_loss`."""
    call = {k: v for k, v in (rows or good()).items() if k != "logits"}
    shape = call["completion_ids"].shape
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(*shape, H, generator=generator).requires_grad_()
    return call | {"hidden": hidden, "weight": torch.randn(V, H, generator=generator).requires_grad_()}


def good_logps() -> dict[str, Any]:
    call = good_loss()
    return {"hidden": call["hidden"], "weight": call["weight"], "targets": call["completion_ids"]}


def good_call(function: str) -> dict[str, Any]:
    return good_loss() if function == "linear_grpo_loss" else good_logps()


@contextlib.contextmanager
def watched(tensors: list[Any]) -> Iterator[list[str]]:
    """What was done to the storages of `tensors`."""
    watches = [Watch(x) for x in tensors if isinstance(x, Tensor) and x.device.type == "cpu" and x.numel()]
    touched: list[str] = []
    with contextlib.ExitStack() as stack:
        for watch in watches:
            stack.enter_context(watch)
            watch.touched = touched
        yield touched


def refuse(function: str, arguments: dict[str, Any], error: type[Exception], argument: str, *words: str) -> str:
    """`refusals.refused`, with hidden and weight watched."""
    touched: list[str] = []

    def call(**kwargs: Any) -> Any:
        with watched([kwargs.get("hidden"), kwargs.get("weight")]) as seen:
            try:
                return getattr(gk, function)(**kwargs)
            finally:
                touched.extend(seen)

    text = refused(call, arguments, error, function, argument, *words)
    assert not touched, touched
    return text


def test_the_good_calls_are_good() -> None:
    for call in (good_loss(), good_loss(packed())):
        assert torch.isfinite(gk.linear_grpo_loss(**call).loss)
    assert torch.isfinite(gk.linear_per_token_logps(**good_logps()).logps).all()


def test_the_watch_sees_work() -> None:
    for name in ("hidden", "weight"):
        call = good_logps()
        with watched([call[name]]) as touched:
            gk.linear_per_token_logps(**call)
        assert touched, name


# What the linear form has of its own

OPERANDS: dict[str, tuple[dict[str, Any], type[Exception], str, tuple[str, ...]]] = {
    "T + 1 rows": ({"hidden": torch.zeros(B, T + 1, H)}, ValueError, "(hidden|{ids})", ("[:, :-1]",)),
    "T - 1 rows": ({"hidden": torch.zeros(B, T - 1, H)}, ValueError, "(hidden|{ids})", ()),
    "another batch": ({"hidden": torch.zeros(B + 1, T, H)}, ValueError, "(hidden|{ids})", ()),
    "hidden without H": ({"hidden": torch.zeros(B, T)}, ValueError, "(hidden|{ids})", ()),
    "hidden of four axes": ({"hidden": torch.zeros(1, B, T, H)}, ValueError, "hidden", ()),
    "hidden not innermost": (
        {"hidden": torch.zeros(B, H, T).transpose(1, 2)}, ValueError, "hidden", ("stride",),
    ),
    "wide hidden": ({"hidden": torch.zeros(B, T, H + 1)}, ValueError, "(hidden|weight)", (str(H), str(H + 1))),
    "integer hidden": ({"hidden": torch.zeros(B, T, H, dtype=LONG)}, TypeError, "hidden", ()),
    "complex hidden": ({"hidden": torch.zeros(B, T, H, dtype=torch.complex64)}, TypeError, "hidden", ()),
    "list hidden": ({"hidden": [[[0.0] * H] * T] * B}, TypeError, "hidden", ()),
    "transposed weight": ({"weight": torch.zeros(H, V)}, ValueError, "(hidden|weight)", ()),
    "empty weight": ({"weight": torch.zeros(0)}, ValueError, "weight", ("sharded parameter", "gather")),
    "empty matrix": ({"weight": torch.zeros(0, H)}, ValueError, "weight", ("sharded parameter", "gather")),
    "flat weight": ({"weight": torch.zeros(V * H)}, ValueError, "weight", ("sharded parameter", "gather")),
    "weight of three axes": ({"weight": torch.zeros(1, V, H)}, ValueError, "weight", ("sharded parameter",)),
    "integer weight": ({"weight": torch.zeros(V, H, dtype=torch.int8)}, TypeError, "weight", ()),
    "list weight": ({"weight": [[0.0] * H] * V}, TypeError, "weight", ()),
    "module as weight": ({"weight": nn.Linear(H, V)}, TypeError, "weight", ("weight",)),
    "no weight": ({"weight": None}, TypeError, "weight", ()),
    "short bias": ({"bias": torch.zeros(V - 1)}, ValueError, "bias", (str(V),)),
    "column bias": ({"bias": torch.zeros(V, 1)}, ValueError, "bias", ()),
    "0-d bias": ({"bias": torch.zeros(())}, ValueError, "bias", ()),
    "number bias": ({"bias": 0.0}, TypeError, "bias", ()),
    "flag bias": ({"bias": True}, TypeError, "bias", ()),
    "integer bias": ({"bias": torch.zeros(V, dtype=LONG)}, TypeError, "bias", ()),
    "unknown mode": ({"mode": "quick"}, ValueError, "mode", ("quick", "fast", "lean", "auto")),
    "mode None": ({"mode": None}, ValueError, "mode", ()),
    "unknown logits": ({"logits_dtype": "bfloat17"}, ValueError, "logits_dtype", ("float32", "input")),
    "no chunk": ({"chunk_bytes": 0}, ValueError, "chunk_bytes", ("0",)),
    "negative chunk": ({"chunk_bytes": -1}, ValueError, "chunk_bytes", ("-1",)),
    "float chunk": ({"chunk_bytes": 1e6}, TypeError, "chunk_bytes", ()),
    "flag chunk": ({"chunk_bytes": True}, TypeError, "chunk_bytes", ()),
    "text chunk": ({"chunk_bytes": "1MiB"}, TypeError, "chunk_bytes", ()),
    "unknown impl": ({"impl": "cuda"}, ValueError, "impl", ("cuda", "torch")),
    "live id V": ({"{ids}": torch.full((B, T), V)}, ValueError, "{ids}", (str(V),)),
    "float ids": ({"{ids}": torch.zeros(B, T)}, TypeError, "{ids}", ()),
    "temperature [B]": ({"temperature": torch.ones(B)}, ValueError, "temperature", ("[B, 1]",)),
    "temperature 0": ({"temperature": 0.0}, ValueError, "temperature", ("> 0",)),
    "temperature of one row": (
        {"temperature": torch.tensor([[1.0], [1.0], [-2.0], [1.0]])}, ValueError, "temperature", (),
    ),
}  # fmt: skip


@pytest.mark.parametrize("function", TOKEN_FUNCTIONS)
@pytest.mark.parametrize("case", OPERANDS)
def test_operands_and_options_are_checked_in_both_functions(case: str, function: str) -> None:
    change, error, argument, words = OPERANDS[case]
    ids = "completion_ids" if function == "linear_grpo_loss" else "targets"
    change = {name.replace("{ids}", ids): value for name, value in change.items()}
    refuse(function, good_call(function) | change, error, argument.replace("{ids}", ids), *words)


LOGPS: dict[str, tuple[dict[str, Any], type[Exception], str, tuple[str, ...]]] = {
    "fast": ({"mode": "fast"}, ValueError, "mode", ("lean",)),
    "mask": ({"mask": torch.ones(B, T + 1)}, ValueError, "mask", ()),
    "mask kind": ({"mask": torch.ones(B, T, dtype=torch.complex64)}, TypeError, "mask", ()),
    "entropy": ({"entropy": 1}, TypeError, "entropy", ()),
    "softcap 0": ({"softcap": 0.0}, ValueError, "softcap", ()),
    "softcap NaN": ({"softcap": NAN}, ValueError, "softcap", ()),
    "scale": ({"logit_scale": -1.0}, ValueError, "logit_scale", ()),
}


@pytest.mark.parametrize("case", LOGPS)
def test_log_probs_refuse(case: str) -> None:
    change, error, argument, words = LOGPS[case]
    refuse("linear_per_token_logps", good_logps() | change, error, argument, *words)


def test_fast_mode_refuses_what_needs_whole_sequences() -> None:
    config = gk.GRPOLossConfig(loss_type="grpo", importance_sampling_level="sequence")
    refuse("linear_grpo_loss", good_loss() | {"mode": "fast", "config": config}, ValueError, "mode", "lean")


COUNTS: dict[str, tuple[Any, type[Exception]]] = {
    "too many": (B * T + 1, ValueError),
    "too few": (B * T - 1, ValueError),
    "negative": (-1, ValueError),
    "float": (12.0, TypeError),
    "flag": (True, TypeError),
    "tensor": (torch.tensor(12), TypeError),
}


@pytest.mark.parametrize("case", COUNTS)
def test_a_wrong_number_of_live_tokens_is_refused(case: str) -> None:
    value, error = COUNTS[case]
    refuse("linear_grpo_loss", good_loss() | {"num_live_tokens": value}, error, "num_live_tokens")


def test_the_number_of_live_tokens_is_that_of_mask_and_ids() -> None:
    call = good_loss()
    call["completion_mask"] = torch.ones(B, T).index_fill(1, torch.tensor([1]), 0)
    call["completion_ids"] = call["completion_ids"].index_fill(0, torch.tensor([2]), -100)
    assert torch.isfinite(gk.linear_grpo_loss(**call, num_live_tokens=6).loss)
    refuse("linear_grpo_loss", call | {"num_live_tokens": 12}, ValueError, "num_live_tokens", "6", "12")


# What the loss on logits refuses too


def without_logits(cases: dict[str, tuple[dict[str, Any], Any, Any]]) -> list[str]:
    return [name for name, (change, *_) in cases.items() if "logits" not in change]


@pytest.mark.parametrize("case", without_logits(LOSS_SHAPES))
def test_the_loss_refuses_shapes(case: str) -> None:
    change, argument, words = LOSS_SHAPES[case]
    refuse("linear_grpo_loss", good_loss() | change, ValueError, argument, *words)


@pytest.mark.parametrize("case", [name for name in PACKED_SHAPES if name != "logits"])
def test_the_loss_refuses_packed_shapes(case: str) -> None:
    change, argument = PACKED_SHAPES[case]
    refuse("linear_grpo_loss", good_loss(packed()) | change, ValueError, argument)


def test_flat_ids_need_cu_seqlens_in_the_loss() -> None:
    flat = good_loss(packed()) | {"cu_seqlens": None}
    refuse("linear_grpo_loss", flat, ValueError, "completion_ids", "cu_seqlens")


@pytest.mark.parametrize("case", [name for name, (change, _) in KINDS.items() if "logits" not in change])
def test_the_loss_refuses_kinds(case: str) -> None:
    change, argument = KINDS[case]
    refuse("linear_grpo_loss", good_loss() | change, TypeError, argument)


@pytest.mark.parametrize("case", without_logits(VALUES))
def test_the_loss_refuses_values(case: str) -> None:
    change, argument, words = VALUES[case]
    refuse("linear_grpo_loss", good_loss() | change, ValueError, argument, *words)


@pytest.mark.parametrize("name", ["old_per_token_logps", "ref_per_token_logps"])
def test_the_loss_refuses_live_log_probs_that_are_not_finite(name: str) -> None:
    call = good_loss()
    call[name][1, 2] = NAN
    refuse("linear_grpo_loss", call, ValueError, name, "finite")


@pytest.mark.parametrize("case", REWARDS)
def test_the_loss_refuses_rewards_and_groups(case: str) -> None:
    change, error, argument = REWARDS[case]
    call = good_loss() | {"advantages": None, "rewards": torch.tensor([1.0, 0.0, 0.5, 2.0])} | change
    speaker = "(linear_grpo_loss|group_advantages)"

    def loss(**kwargs: Any) -> Any:
        return gk.linear_grpo_loss(**kwargs)

    refused(loss, call, error, speaker, argument)


# Devices, the meta device standing for any other


@pytest.mark.parametrize("name", ["weight", "bias", "completion_ids", "advantages", "completion_mask", "temperature"])
def test_tensors_on_two_devices_are_refused(name: str) -> None:
    call = good_loss() | {"bias": torch.zeros(V), "temperature": torch.ones(B, 1)}
    call[name] = call[name].detach().to("meta")
    refuse("linear_grpo_loss", call, ValueError, name, "meta", "cpu")
    if name in ("weight", "bias", "temperature"):
        logps = good_logps() | {name: call[name]}
        refuse("linear_per_token_logps", logps, ValueError, name, "meta", "cpu")


# Heads that are not one plain tensor


class LoraLinear(nn.Module):
    """The shape of a LoRA-wrapped head, as peft makes it."""

    def __init__(self) -> None:
        super().__init__()
        self.base_layer = nn.Linear(H, V, bias=False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(H, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, V, bias=False)})

    @property
    def weight(self) -> Tensor:
        return self.base_layer.weight


@pytest.mark.parametrize("function", TOKEN_FUNCTIONS)
def test_a_lora_wrapped_head_is_refused(function: str) -> None:
    """Its weight alone would leave the adapter out, silently."""
    refuse(function, good_call(function) | {"weight": LoraLinear()}, TypeError, "weight", "LoRA")


def test_a_lora_wrapped_head_of_peft_is_refused() -> None:
    peft = pytest.importorskip("peft")
    model = nn.Sequential()
    model.add_module("lm_head", nn.Linear(H, V, bias=False))
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["lm_head"]))
    head = wrapped.base_model.model.lm_head
    refuse("linear_grpo_loss", good_loss() | {"weight": head}, TypeError, "weight", "LoRA")


# Not built yet


@pytest.mark.parametrize("argument", ["process_group", "sampling_mask"])
@pytest.mark.parametrize("function", TOKEN_FUNCTIONS)
def test_what_is_not_built_says_so(function: str, argument: str) -> None:
    with pytest.raises(NotImplementedError, match=f"^{function}: {argument}"):
        getattr(gk, function)(**good_call(function), **{argument: (torch.zeros(1), torch.zeros(2))})


def test_several_targets_are_not_built() -> None:
    several = good_logps() | {"targets": torch.zeros(B, T, 2, dtype=LONG)}
    with pytest.raises(NotImplementedError, match=r"^linear_per_token_logps:.*K targets"):
        gk.linear_per_token_logps(**several)


@pytest.mark.parametrize("impl", ["triton", "cpp"])
@pytest.mark.parametrize("function", TOKEN_FUNCTIONS)
def test_an_absent_implementation_says_why(function: str, impl: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(gk.backends, "_cpp_missing", lambda: "not built")
    with pytest.raises(RuntimeError, match=f"^{function}: .*{impl}"):
        getattr(gk, function)(**good_call(function), impl=impl)


def test_the_module_refuses_what_is_no_config() -> None:
    for value in ({"loss_type": "grpo"}, "grpo"):
        with pytest.raises(TypeError, match=r"^LinearGRPOLoss: config"):
            gk.LinearGRPOLoss(value)
    call = good_loss() | {"completion_mask": torch.ones(B, T + 1)}
    config = call.pop("config")
    with pytest.raises(ValueError, match="completion_mask"):
        gk.LinearGRPOLoss(config)(**call)


def test_inplace_is_no_argument_of_the_linear_form() -> None:
    functions: list[Callable[..., Any]] = [gk.linear_grpo_loss, gk.linear_per_token_logps]
    for function, call in zip(functions, (good_loss(), good_logps()), strict=True):
        with pytest.raises(TypeError, match="inplace"):
            function(**call, inplace=True)
