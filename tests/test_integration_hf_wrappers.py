"""The loss of a model inside LoRA, DDP and FSDP, and beside other threads that use the model."""

from __future__ import annotations

import copy
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers
from hf_support import batch, causal_lm, from_logits
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

import grpo_kernels as gk
from grpo_kernels.integrations.hf import causal_lm_grpo_loss, causal_lm_head, check_head


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_lora_trains_and_its_head_is_the_base_models() -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed; the extra [train] lists it")
    model, given = causal_lm("Qwen2"), batch()
    wrapped = peft.get_peft_model(
        copy.deepcopy(model), peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    )
    loss = causal_lm_grpo_loss(wrapped, **given).loss
    torch.testing.assert_close(loss, from_logits(wrapped, gk.GRPOLossConfig(), given).loss, rtol=1e-9, atol=0)
    loss.backward()
    assert all(p.grad is not None for name, p in wrapped.named_parameters() if "lora_" in name)
    assert causal_lm_head(wrapped).weight.grad is None
    onto_the_head = peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(target_modules=["lm_head"]))
    with pytest.raises(ValueError, match=r"no adapter on its head.*got Linear. .*modules_to_save"):
        causal_lm_grpo_loss(onto_the_head, **given)
    saved = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"]))
    causal_lm_grpo_loss(saved, **given).loss.backward()
    assert causal_lm_head(saved).weight.grad is not None
    with saved.disable_adapter():
        assert causal_lm_head(saved).weight is saved.get_base_model().lm_head.original_module.weight


@pytest.fixture
def one_process() -> Iterator[None]:
    with tempfile.TemporaryDirectory() as folder:
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{os.path.join(folder, 'meeting')}", rank=0, world_size=1
        )
        yield
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"static_graph": True}])
def test_ddp_reduces_the_gradients(options: dict[str, bool], one_process: None) -> None:
    model, given = causal_lm("Qwen2"), batch()
    causal_lm_grpo_loss(model, **given).loss.backward()
    alone = [parameter.grad.clone() for parameter in model.parameters()]
    reduced: list[Tensor] = []
    parallel = DistributedDataParallel(model, **options)

    def halved(_: object, bucket: torch.distributed.GradBucket) -> torch.futures.Future[Tensor]:
        reduced.append(bucket.buffer())
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer() / 2)
        return done

    halved.__annotations__ |= {"bucket": torch.distributed.GradBucket, "return": torch.futures.Future[torch.Tensor]}
    parallel.register_comm_hook(None, halved)
    for _ in range(2):
        model.zero_grad()
        causal_lm_grpo_loss(parallel, **given).loss.backward()
    assert reduced
    for parameter, grad in zip(model.parameters(), alone, strict=True):
        torch.testing.assert_close(parameter.grad, grad / 2, rtol=1e-9, atol=1e-12)


LAYER = transformers.models.qwen2.modeling_qwen2.Qwen2DecoderLayer


def fsdp1(model: Any, **options: Any) -> Any:
    return FullyShardedDataParallel(
        model, device_id=torch.device("cpu"), auto_wrap_policy=ModuleWrapPolicy({LAYER}), **options
    )


def fsdp2(model: Any) -> Any:
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    for layer in model.modules():
        if isinstance(layer, LAYER):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def with_lora(model: Any) -> Any:
    peft = pytest.importorskip("peft", reason="peft is not installed; the extra [train] lists it")
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)).double()


SHARDED: dict[str, Callable[[Any], Any]] = {
    "FSDP1": lambda model: fsdp1(model, use_orig_params=True),
    "FSDP1, flat": lambda model: fsdp1(model, use_orig_params=False),
    "FSDP2": fsdp2,
    "FSDP1 around LoRA": lambda model: fsdp1(with_lora(model), use_orig_params=True),
    "FSDP2 around LoRA": lambda model: fsdp2(with_lora(model)),
}


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`:UserWarning")
@pytest.mark.filterwarnings("ignore:.*has both parameters with requires_grad=True and False:UserWarning")
@pytest.mark.parametrize(
    ("how", "tied"),
    # a second step of a tied model with frozen weights fails in FSDP1 of one process by itself
    [pytest.param(how, tied) for how in SHARDED for tied in (False, True) if not (tied and how == "FSDP1 around LoRA")],
)
def test_a_sharded_model_gives_the_loss_of_its_own_logits(how: str, tied: bool, one_process: None) -> None:
    model, given = SHARDED[how](causal_lm("Qwen2", tied)), batch()
    losses = []
    for _ in range(2):  # the first one checks the head
        loss = causal_lm_grpo_loss(model, **given).loss
        loss.backward()
        losses.append(loss.detach())
    norms = [float(p.grad.norm()) for p in model.parameters() if p.grad is not None]
    assert norms
    assert max(norms) > 0
    logits = model(input_ids=given["input_ids"], attention_mask=given["attention_mask"]).logits
    rest = {name: given[name] for name in ("advantages", "old_per_token_logps", "completion_mask")}
    theirs = gk.grpo_loss(logits[:, 3:-1], given["input_ids"][:, 4:], **rest).loss.detach()
    for loss in losses:
        torch.testing.assert_close(loss, theirs, rtol=1e-9, atol=0)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # dynamo's own
def test_a_compiled_model_is_checked_and_trained() -> None:
    model, given = causal_lm("Qwen2", num_hidden_layers=1), batch()
    theirs = from_logits(model, gk.GRPOLossConfig(), given).loss
    compiled = torch.compile(model, backend="eager")
    compiled(given["input_ids"])  # before the hooks of the check are there
    torch.testing.assert_close(causal_lm_grpo_loss(compiled, **given).loss, theirs, rtol=1e-9, atol=0)


class Beside:
    """Work of another thread that stops in the backbone until it may go on."""

    def __init__(self, model: Any, work: Callable[[], Any]) -> None:
        self.result: Any = None
        self._inside, self._go = threading.Event(), threading.Event()

        def stop(_module: Any, _inputs: Any) -> None:
            if threading.current_thread() is self._thread:
                self._inside.set()
                assert self._go.wait(60)

        def run() -> None:
            self.result = work()

        self._hook = model.base_model.register_forward_pre_hook(stop)
        self._thread = threading.Thread(target=run)
        self._thread.start()
        assert self._inside.wait(60)

    def finish(self) -> Any:
        self._go.set()
        self._thread.join()
        self._hook.remove()
        return self.result


def test_another_thread_generates_while_a_loss_runs() -> None:
    model, given = causal_lm("Qwen2"), batch()
    plain, tokens = model(given["input_ids"]).logits, model.generate(given["input_ids"], max_new_tokens=3)
    expected = causal_lm_grpo_loss(model, **given).loss
    beside = Beside(model, lambda: causal_lm_grpo_loss(model, **given).loss)
    assert torch.equal(model(given["input_ids"]).logits, plain)
    assert torch.equal(model.generate(given["input_ids"], max_new_tokens=3), tokens)
    assert torch.equal(beside.finish(), expected)
    assert "forward" not in vars(model)


def test_another_thread_uses_the_model_while_its_head_is_checked() -> None:
    model, given = causal_lm("Qwen2"), batch()
    plain = model(given["input_ids"]).logits
    beside = Beside(model, lambda: check_head(model))
    assert torch.equal(model(given["input_ids"]).logits, plain)
    beside.finish()


def test_losses_that_overlap_are_each_their_own() -> None:
    model, given = causal_lm("Qwen2"), batch()
    other = given | {"advantages": -2 * given["advantages"]}
    first, second = causal_lm_grpo_loss(model, **given).loss, causal_lm_grpo_loss(model, **other).loss
    a = Beside(model, lambda: causal_lm_grpo_loss(model, **given).loss)
    b = Beside(model, lambda: causal_lm_grpo_loss(model, **other).loss)
    assert torch.equal(a.finish(), first)
    assert torch.equal(b.finish(), second)
    assert "forward" not in vars(model)
    assert model(given["input_ids"]).logits.shape == (3, 9, 37)


def test_copies_in_other_threads_are_refused() -> None:
    model = causal_lm("Qwen2")
    parallel = nn.DataParallel(model)
    causal_lm_grpo_loss(parallel, **batch())
    parallel.device_ids = [0, 1]
    with pytest.raises(ValueError, match=r"in the thread that calls it, got nn.DataParallel over 2 .*Distributed"):
        causal_lm_grpo_loss(parallel, **batch())


def test_a_wrapper_that_never_calls_the_model_is_told() -> None:
    class Memory(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

        def forward(self, **_: Any) -> float:
            return 0.0

    model = causal_lm("Qwen2")
    check_head(model)
    with pytest.raises(RuntimeError, match=r"Memory did not call the forward of Qwen2ForCausalLM in this thread"):
        causal_lm_grpo_loss(Memory(model), **batch())
