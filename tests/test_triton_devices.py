"""On which device and with which tile a kernel runs, told with stand-ins for CUDA; and what it takes from Triton."""

from __future__ import annotations

import ast
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import grpo_kernels as gk
from grpo_kernels import backends

pytest.importorskip("triton")
import triton.language as tl
from triton.runtime.errors import OutOfResources

from grpo_kernels.backends.triton import launch

PACKAGE = Path(gk.__file__).parent
SECOND = SimpleNamespace(device=torch.device("cuda", 1), shape=(4, 8))  # all that a launch asks of a tensor


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The current device, 0, of a machine with an A100 and an H100."""
    current = [0]

    class Guard:
        def __init__(self, device: torch.device) -> None:
            self.index = device.index

        def __enter__(self) -> None:
            self.before, current[0] = current[0], self.index

        def __exit__(self, *_: object) -> None:
            current[0] = self.before

    monkeypatch.setattr(torch.cuda, "device", Guard)
    monkeypatch.setattr(launch, "INTERPRETED", False)
    monkeypatch.setattr(launch, "device_target", lambda index: launch.Target(("sm_80", "sm_90")[index], 32, True))
    monkeypatch.setattr(launch, "_fitting", {})
    return current


def test_launches_go_to_the_device_of_the_tensors(current: list[int]) -> None:
    seen = []
    launch.launch(SECOND, lambda tile, target: seen.append((current[0], target.name)))
    assert (seen, current) == ([(1, "sm_90")], [0])


def test_a_failed_launch_leaves_the_current_device(current: list[int]) -> None:
    def fail(tile: launch.Tile, target: launch.Target) -> None:
        raise RuntimeError("no kernel image")

    with pytest.raises(RuntimeError, match="no kernel image"):
        launch.launch(SECOND, fail)
    assert current == [0]


@pytest.mark.parametrize("named", ["targets", "mask", "temperature"])
def test_tensors_on_two_devices_are_refused_by_name(named: str) -> None:
    tensors = {"targets": torch.zeros(2, 3).long(), "mask": torch.ones(2, 3), "temperature": torch.ones(2, 3)}
    moved = {name: value if name == named else value.to("meta") for name, value in tensors.items()}
    with pytest.raises(ValueError, match=rf"per_token_logps: {named} must .*device.*got .*cpu"):
        gk.per_token_logps(torch.empty(2, 3, 5, device="meta"), impl="triton", **moved)


ENTRIES = {
    (8, 0): "sm_80", (8, 6): "sm_80", (8, 9): "sm_80", (9, 0): "sm_90", (10, 0): "sm_100", (10, 3): "sm_100",
    (11, 0): "sm_100", (12, 0): "sm_120", (12, 1): "sm_120",
}  # fmt: skip


@pytest.mark.parametrize("capability", ENTRIES, ids=str)
def test_a_device_has_the_newest_entry_that_is_not_newer(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    properties = SimpleNamespace(major=capability[0], minor=capability[1], warp_size=32)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    assert launch.device_target.__wrapped__(0) == launch.Target(ENTRIES[capability], 32, True)


# --- devices that are too old or too small ----------------------------------------------------------------------------


@pytest.fixture
def turing(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """A device of compute capability 7.5."""
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.delenv(backends.ENVIRONMENT, raising=False)
    backends._warned.clear()
    yield torch.device("cuda", 0)
    backends._warned.clear()


def test_a_device_that_is_too_old_runs_torch_and_says_so_once(turing: torch.device) -> None:
    reason = r"runs the torch implementation on cuda: the kernels need compute capability 8\.0, this device has 7\.5"
    with pytest.warns(UserWarning, match=reason):
        assert backends.resolve("grpo_loss", "auto", turing) == "torch"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert backends.resolve("grpo_loss", "auto", turing) == "torch"


def test_a_device_that_is_too_old_is_refused_by_name(turing: torch.device) -> None:
    reason = r"impl='triton' is not available: the kernels need compute capability 8\.0.*7\.5\. Use impl='torch'"
    with pytest.raises(RuntimeError, match=reason):
        backends.resolve("grpo_loss", "triton", turing)


def test_a_device_with_too_little_of_something_gets_a_smaller_tile_once(
    current: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    tried = []

    def run(tile: launch.Tile, target: launch.Target) -> None:
        tried.append(tile)
        if tile != launch.SMALLEST:
            raise OutOfResources(70_000, 65_536, "shared memory")

    with caplog.at_level(logging.WARNING, logger=launch.__name__):
        launch.launch(SECOND, run)
        launch.launch(SECOND, run)
    assert tried == [launch.TILES["sm_90"], launch.SMALLEST, launch.SMALLEST]
    (record,) = caplog.records
    assert record.getMessage().startswith("sm_90: out of resource: shared memory, Required: 70000")
    assert record.getMessage().endswith("using a smaller tile from now on")


def test_what_does_not_fit_even_then_raises(current: list[int]) -> None:
    def run(tile: launch.Tile, target: launch.Target) -> None:
        raise OutOfResources(70_000, 65_536, "shared memory")

    with pytest.raises(OutOfResources):
        launch.launch(SECOND, run)


# --- what the kernels take from Triton: documented names alone, since its distributions move the others ---------------

LANGUAGE = {
    "PropagateNan", "arange", "bfloat16", "constexpr", "debug_barrier", "exp", "exp2", "float16", "float32", "float64",
    "fma", "full", "inline_asm_elementwise", "int32", "int64", "load", "log", "max", "maximum", "min", "minimum",
    "multiple_of", "num_programs", "pointer_type", "program_id", "range", "reshape", "split", "sqrt", "static_range",
    "store", "sum", "where", "zeros",
}  # fmt: skip
TOOLS = {"jit", "cdiv", "next_power_of_2"}
KERNELS = [path for path in sorted(Path(launch.__file__).parent.glob("*.py")) if "@triton.jit" in path.read_text()]


def test_the_names_exist_in_this_triton() -> None:
    import triton

    assert {name for name in LANGUAGE if name not in tl.__all__ or not hasattr(tl, name)} == set()
    assert {name for name in TOOLS if name not in triton.__all__} == set()


@pytest.mark.parametrize("path", [*KERNELS, Path(launch.__file__)], ids=lambda path: path.name)
def test_kernels_import_triton_and_its_language_alone(path: Path) -> None:
    nodes = list(ast.walk(ast.parse(path.read_text())))
    plain = {(alias.name, alias.asname) for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    assert {name for name in plain if name[0].startswith("triton")} <= {("triton", None), ("triton.language", "tl")}
    parts = {
        f"{node.module}.{alias.name}"
        for node in nodes
        if isinstance(node, ast.ImportFrom) and node.level == 0
        for alias in node.names
    }
    assert {part for part in parts if part.startswith("triton")} <= {"triton.runtime.errors.OutOfResources"}


@pytest.mark.parametrize("path", [*KERNELS, Path(launch.__file__), PACKAGE / "formulas.py"], ids=lambda path: path.name)
def test_kernels_use_documented_names_alone(path: Path) -> None:
    used = {
        (node.value.id, node.attr)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    }
    assert {name for owner, name in used if owner == "tl"} <= LANGUAGE
    assert {name for owner, name in used if owner == "triton"} <= TOOLS
    assert any(owner == "tl" for owner, _ in used)
