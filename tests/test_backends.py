"""Which implementation runs: asked by argument or environment, reported, refused with the reason."""

from __future__ import annotations

import importlib
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import grpo_kernels as gk
from grpo_kernels import backends

LOGITS, IDS = torch.randn(2, 3, 5), torch.tensor([[0, 1, 2], [3, 4, 0]])


def test_the_report_gives_each_a_state() -> None:
    report = gk.backends.report()
    assert set(report) == {"triton", "cpp", "torch"}
    assert report["torch"] == "available"
    assert all(state for state in report.values())


@pytest.mark.parametrize(
    "impl", [name for name, state in backends.report().items() if not state.startswith("available")]
)
def test_what_is_not_there_is_refused_with_the_reason(impl: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match=f"impl='{impl}' is not available: .*impl='torch'"):
        gk.per_token_logps(LOGITS, IDS, impl=impl)
    monkeypatch.setenv(backends.ENVIRONMENT, impl)
    with pytest.raises(RuntimeError, match=f"{backends.ENVIRONMENT}='{impl}' is not available"):
        gk.grpo_loss(LOGITS, IDS, advantages=torch.ones(2))
    assert gk.per_token_logps(LOGITS, IDS, impl="torch").logps.shape == (2, 3)


def test_an_unknown_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ValueError, match=r"per_token_logps: impl must be one of .* got 'tritn'\. Did you mean 'triton'"
    ):
        gk.per_token_logps(LOGITS, IDS, impl="tritn")
    monkeypatch.setenv(backends.ENVIRONMENT, "numpy")
    with pytest.raises(ValueError, match=f"{backends.ENVIRONMENT} must be one of"):
        gk.per_token_logps(LOGITS, IDS)


def test_auto_takes_triton_on_a_gpu_or_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda")
    monkeypatch.setattr(backends, "_unavailable", lambda name, device: None)
    assert backends.resolve("grpo_loss", "auto", device) == "triton"
    monkeypatch.setattr(backends, "_unavailable", lambda name, device: "a reason")
    backends._warned.clear()
    with pytest.warns(UserWarning, match="runs the torch implementation on cuda: a reason"):
        assert backends.resolve("grpo_loss", "auto", device) == "torch"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert backends.resolve("grpo_loss", "auto", device) == "torch"


@pytest.mark.parametrize(("missing", "expected"), [(None, "cpp"), ("a reason", "torch")])
def test_auto_on_the_cpu_is_cpp_if_built_even_where_triton_is_interpreted(
    missing: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(backends.ENVIRONMENT, raising=False)
    monkeypatch.setattr(backends, "_cpp_missing", lambda: missing)
    assert backends.resolve("grpo_loss", "auto", torch.device("cpu")) == expected
    assert backends.resolve("grpo_loss", "auto", torch.device("meta")) == "torch"


def test_without_the_extension_the_reason_is_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(backends.ENVIRONMENT, raising=False)
    monkeypatch.setattr(backends.cpp, "PACKAGE", tmp_path)
    monkeypatch.setattr(backends.cpp, "load", backends.cpp.load.__wrapped__)
    assert "--no-build-isolation" in backends.report()["cpp"]
    with pytest.raises(RuntimeError, match="the C\\+\\+ kernels were not built"):
        gk.per_token_logps(LOGITS, IDS, impl="cpp")
    gk.per_token_logps(LOGITS, IDS)
    assert backends.last_used() == "torch"


def test_the_extension_is_for_cpu_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_cpp_missing", lambda: None)
    with pytest.raises(RuntimeError, match="impl='cpp' is not available: the C\\+\\+ kernels are for CPU tensors"):
        backends.resolve("grpo_loss", "cpp", torch.device("cuda"))


def test_without_triton_the_reason_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(*_arguments: object) -> None:
        raise ModuleNotFoundError("No module named 'triton'", name="triton")

    monkeypatch.setattr(importlib, "import_module", absent)
    backends._look_for_triton.cache_clear()
    try:
        assert "not installed" in backends.report()["triton"]
        with pytest.raises(RuntimeError, match="triton is not installed"):
            gk.per_token_logps(LOGITS, IDS, impl="triton")
        assert gk.per_token_logps(LOGITS, IDS).logps.shape == (2, 3)
    finally:
        monkeypatch.undo()
        backends._look_for_triton.cache_clear()


def test_triton_on_the_cpu_without_the_interpreter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET=1"):
        gk.per_token_logps(LOGITS, IDS, impl="triton")


@pytest.mark.parametrize("loss_type", ["dapo", "bnpo", "cispo", "grpo", "dr_grpo"])
def test_many_processes_without_a_normalizer_warn_once(loss_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token denominator that one rank sees is not the batch's; a mean over sequences is the same on equal ranks."""
    from grpo_kernels import arguments

    monkeypatch.setattr(arguments, "_warned_about_ranks", False)
    for name, value in {"is_available": True, "is_initialized": True, "get_world_size": 2}.items():
        monkeypatch.setattr(torch.distributed, name, lambda value=value: value)
    config = gk.GRPOLossConfig(loss_type=loss_type, epsilon_high=5.0, max_completion_length=3)

    def texts(**options: Any) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            gk.grpo_loss(LOGITS, IDS, config=config, advantages=torch.ones(2), **options)
        return [str(w.message) for w in caught]

    assert texts(normalizer=6.0) == []
    first = texts()
    assert len(first) == (loss_type in ("dapo", "bnpo", "cispo"))
    assert all("on 2 processes" in text and "normalizer" in text for text in first)
    assert texts() == []


def test_data_checks_follow_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device nothing is read unless GRPO_KERNELS_CHECK=1; on the CPU always."""
    from grpo_kernels import checks

    assert checks.reads_data(torch.zeros(1))
    device = torch.empty(1, device="meta")
    assert not checks.reads_data(device)

    class OnDevice:
        is_meta = False
        device = torch.device("cuda")

    assert not checks.reads_data(OnDevice())  # type: ignore[arg-type]
    monkeypatch.setenv(checks.ENVIRONMENT, "1")
    assert checks.reads_data(OnDevice())  # type: ignore[arg-type]


def test_chunks_of_full_height_give_the_same_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Off the CPU the torch rows run in chunks of one height, the last filled up: what fills it must not show."""
    from grpo_kernels.ops import rows

    logits = torch.randn(3, 7, 13)
    ids = torch.randint(-1, 13, (3, 7))
    temperature = torch.rand(3, 7) + 0.5

    def run() -> list[torch.Tensor]:
        leaf = logits.clone().requires_grad_()
        out = gk.per_token_logps(leaf, ids, temperature=temperature, entropy=True)
        assert out.entropy is not None
        (grad,) = torch.autograd.grad(out.logps.sum() + 2 * out.entropy.sum(), leaf)
        return [out.logps, out.entropy, out.lse, grad]

    expected = run()
    monkeypatch.setattr(rows, "_reads_in_place", lambda device: False)
    monkeypatch.setattr(rows, "_CHUNK_DEVICE", 13 * 4)
    for ours, theirs in zip(run(), expected, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("loss", [False, True])
def test_triton_breaks_no_graph(loss: bool) -> None:
    pytest.importorskip("triton")
    logits, ids = torch.randn(1, 2, 5), torch.tensor([[1, 4]])
    ones = torch.ones(1, 2)

    def call(logits: torch.Tensor) -> torch.Tensor:
        if loss:
            return gk.grpo_loss(logits, ids, advantages=ones, old_per_token_logps=-ones, impl="triton").loss
        return gk.per_token_logps(logits, ids, impl="triton").logps.sum()

    expected = call(logits)
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(logits), expected)
