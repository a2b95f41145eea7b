"""`grpo-kernels inspect`: its counts are those of kernels whose loops are known, and it says why it cannot look."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from uninterpreted import answer, printed_by

pytest.importorskip("triton")
import triton
import triton.language as tl
from triton import knobs
from triton.compiler import ASTSource

from grpo_kernels import cli
from grpo_kernels.backends.triton import compile as compiling
from grpo_kernels.backends.triton import sass
from grpo_kernels.inspection import hardware, records, rivals
from grpo_kernels.inspection.tables import plain

LANES, ELEMENTS = 32, 4  # one warp; float32 elements of 16 bytes


# --- kernels whose loops are known ------------------------------------------------------------------------------------


@triton.jit
def known_kernel(
    source, out, V, stride, a, b,
    LOADS: tl.constexpr, FMAS: tl.constexpr, EXPONENTIALS: tl.constexpr, SUM: tl.constexpr, STORE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    lane = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    scalar = 0.0
    for start in tl.range(0, V, BLOCK, loop_unroll_factor=1):
        x = tl.load(source + start + lane)
        for array in tl.static_range(1, LOADS):
            x += tl.load(source + array * stride + start + lane)
        for _ in tl.static_range(FMAS):
            x = tl.fma(x, a, b)
        for _ in tl.static_range(EXPONENTIALS):
            x = tl.exp2(x)
        if STORE:
            tl.store(out + start + lane, x)
        elif SUM:
            scalar = scalar * a + tl.sum(x)
        else:
            total = tl.fma(x, a, total)
    if SUM:
        tl.store(out, scalar)
    elif not STORE:
        tl.store(out + lane, total)


@dataclass(frozen=True)
class Known:
    """One variant of the kernel above."""

    target: str
    loads: int = 1
    fmas: int = 0
    exponentials: int = 0
    sums: bool = False
    stores: bool = False
    warps: int = 1
    itemsize: int = 4

    @property
    def name(self) -> str:
        return f"known {self.loads} {self.fmas} {self.exponentials} {self.sums} {self.stores} {self.warps}"


def compile_known(known: Known) -> compiling.Compiled:
    signature = {"source": "*fp32", "out": "*fp32", "V": "i32", "stride": "i32", "a": "fp32", "b": "fp32"}
    constants = {
        "LOADS": known.loads, "FMAS": known.fmas, "EXPONENTIALS": known.exponentials, "SUM": known.sums,
        "STORE": known.stores, "BLOCK": known.warps * LANES * ELEMENTS,
    }  # fmt: skip
    signature |= dict.fromkeys(constants, "constexpr")
    names = known_kernel.arg_names
    sixteen = {(number,): [["tt.divisibility", 16]] for number in range(4)}
    source = ASTSource(known_kernel, signature, {(names.index(k),): v for k, v in constants.items()}, sixteen)
    gpu = compiling.gpu_target(known.target)
    binary = triton.compile(source, target=gpu, options={"num_warps": known.warps})
    return compiling.Compiled("known_kernel", binary, gpu.warp_size, 0.0)


NVIDIA = {"sm_90": 1, "sm_100": 2}  # multiply-adds of float32 in one instruction
VARIANTS: list[dict[str, Any]] = [
    *({"fmas": k} for k in (0, 1, 4)),
    *({"exponentials": k} for k in (1, 3)),
    *({"loads": k} for k in (2, 3)),
    {"stores": True},
    {"sums": True},
    {"sums": True, "warps": 4},
]
KNOWN = [Known(target, **variant) for target in NVIDIA for variant in VARIANTS]


def known_loops() -> list[Any]:
    found = []
    for known, reading in sass.read_all(KNOWN, compiler=compile_known).items():
        assert isinstance(reading, sass.Reading), reading
        (entry,) = records.record(known, reading)["loops"]
        found.append([known.target, known.name, entry])
    return found


@functools.cache
def loops() -> dict[tuple[str, str], dict[str, Any]]:
    return {(target, name): loop for target, name, loop in printed_by(__file__, known_loops.__name__)}


def loop_of(target: str, **variant: Any) -> dict[str, Any]:
    return loops()[target, Known(target, **variant).name]


@pytest.mark.parametrize("target", NVIDIA)
def test_fused_multiply_adds_of_a_loop_are_counted_one_by_one(target: str) -> None:
    bare = loop_of(target, fmas=0)
    assert bare["elements"] % ELEMENTS == 0
    for k in (1, 4):
        loop = loop_of(target, fmas=k)
        assert loop["elements"] == bare["elements"]
        assert (loop["instructions"] - bare["instructions"]) * NVIDIA[target] == k * loop["elements"]
        assert loop["special"] == 0


@pytest.mark.parametrize("target", NVIDIA)
def test_exponentials_of_a_loop_are_counted_one_by_one(target: str) -> None:
    for k in (1, 3):
        loop = loop_of(target, exponentials=k)
        assert loop["special"] == k * loop["elements"]


@pytest.mark.parametrize("target", NVIDIA)
def test_loads_and_stores_of_a_loop_are_counted_with_their_widths(target: str) -> None:
    rounds = loop_of(target)["elements"] // ELEMENTS  # the assembler unrolls
    assert loop_of(target)["loads"] == {"128": rounds}
    for k in (2, 3):
        loop = loop_of(target, loads=k)
        assert (loop["loads"], loop["stores"]) == ({"128": k * rounds}, {})
    both = loop_of(target, stores=True)
    assert both["loads"] == both["stores"] == {"128": both["elements"] // ELEMENTS}
    assert both["bytes"] == 8 * both["elements"]
    assert (both["sweep"], loop_of(target)["sweep"]) == ("backward", "forward")


@pytest.mark.parametrize("target", NVIDIA)
def test_barriers_and_shuffles_of_a_loop_are_counted(target: str) -> None:
    assert (loop_of(target)["barriers"], loop_of(target)["shuffles"]) == (0, 0)
    warp, program = loop_of(target, sums=True), loop_of(target, sums=True, warps=4)
    assert (warp["barriers"], warp["shuffles"]) == (0, 5 * warp["elements"] // ELEMENTS)  # log2 of 32 lanes
    assert program["barriers"] >= 1
    assert program["shuffles"] == (5 + 2) * program["elements"] // ELEMENTS  # and of 4 warps


# --- what bounds a loop -----------------------------------------------------------------------------------------------


def test_the_bound_is_that_of_the_slowest_unit() -> None:
    gpu = hardware.GPU("one", "sm_90", multiprocessors=1, clock=1.0, memory=1.0, tensor=1.0, l2=1)
    # a second: 1 byte, 4 * 32 instructions of a lane, 16 special ones
    assert hardware.bound(gpu, instructions=64.0, special=4.0, traffic=1.0) == ("HBM", 1.0)
    assert hardware.bound(gpu, instructions=256.0, special=4.0, traffic=1.0) == ("issue", 0.5)
    assert hardware.bound(gpu, instructions=64.0, special=64.0, traffic=1.0) == ("MUFU", 0.25)


def test_the_room_beside_a_logit_is_that_of_the_data_sheets() -> None:
    """At full bandwidth: instructions, and special ones, beside each 16-bit logit that is read."""
    room = {
        gpu.name: [
            unit * gpu.multiprocessors * gpu.clock * 2 / gpu.memory
            for unit in (gpu.issued * hardware.LANES, gpu.special)
        ]
        for gpu in hardware.GPUS
    }
    assert room["H200"] == pytest.approx([13.9, 1.74], rel=0.01)
    assert room["B200"] == pytest.approx([9.3, 1.16], rel=0.01)
    assert room["H100"] == pytest.approx([20.0, 2.50], rel=0.01)


def test_a_device_is_found_by_its_name() -> None:
    names = ("NVIDIA H200", "NVIDIA H100 80GB HBM3", "NVIDIA B200", "Tesla T4")
    assert [gpu and gpu.name for gpu in map(hardware.gpu_of, names)] == ["H200", "H100", "B200", None]


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def uninterpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def run_inspect(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(Path(cli.__file__).parents[1])
    command = [sys.executable, "-m", "grpo_kernels.cli", "inspect", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def inspected(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], list[str]]:
    folder = tmp_path_factory.mktemp("binaries") / "new"
    done = run_inspect(
        "--targets", "sm_90", "gfx942", "--kernels", "row_grad bfloat16", "row_scale_", "liger", "trl", "--rivals",
        "--json", "--save", str(folder),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), sorted(path.name for path in folder.iterdir())


def test_json_names_registers_loops_and_bounds(inspected: tuple[dict[str, Any], list[str]]) -> None:
    report, _ = inspected
    assert report["triton"] == triton.__version__
    kernels = {(entry["name"], entry["target"]): entry for entry in report["kernels"]}
    plain_variant = kernels["row_grad bfloat16", "sm_90"]
    assert 16 <= plain_variant["registers"] <= 64
    assert (plain_variant["spills"], plain_variant["stack"], plain_variant["shared"]) == (0, 0, 0)
    (loop,) = [loop for loop in plain_variant["loops"] if loop["bulk"] and loop["sweep"] == "backward"]
    assert loop["bytes"] == 4 * loop["elements"]
    assert loop["bounds"] == {"H100": ["HBM", 1.0], "H200": ["HBM", 1.0]}
    assert set(loop["loads"]) == set(loop["stores"]) == {"128"}
    assert kernels["row_scale_ bfloat16", "gfx942"]["kernel"] == "scale_kernel"


def test_save_names_binaries_by_kernel_features_and_target(inspected: tuple[dict[str, Any], list[str]]) -> None:
    names = inspected[1]
    for name in (
        "row_grad_bwd_kernel.row_grad.bfloat16.sm_90.cubin",
        "row_grad_bwd_kernel.row_grad.bfloat16.entropy.softcap.sm_90.cubin",
        "row_grad_bwd_kernel.row_grad.bfloat16.softcap.gfx942.hsaco",
        "scale_kernel.row_scale_.bfloat16.sm_90.cubin",
    ):
        assert name in names


@pytest.mark.parametrize(
    ("project", "version", "sweep", "instructions"),
    [("liger", "0.8.5", "forward", 12.1), ("liger", "0.8.5", "backward", 16.8), ("trl", "1.16.0", "forward", 25.0)],
)
def test_rivals_stand_in_the_same_table(
    inspected: tuple[dict[str, Any], list[str]], project: str, version: str, sweep: str, instructions: float
) -> None:
    if (reason := rivals.missing(project)) is not None:
        pytest.skip(reason)
    installed = importlib.metadata.version(rivals.PACKAGES[project])
    if (installed, triton.__version__) != (version, "3.7.1"):
        pytest.skip(f"the number is that of {project} {version} and Triton 3.7.1")
    kernels = {(entry["name"], entry["target"]): entry for entry in inspected[0]["kernels"]}
    entry = kernels[f"{project} {sweep} bfloat16", "sm_90"]
    (loop,) = [loop for loop in entry["loops"] if loop["bulk"] and loop["sweep"] == sweep]
    assert loop["instructions"] / loop["elements"] == pytest.approx(instructions, abs=0.06)
    if project == "trl":
        assert loop["barriers"] == 9


def test_the_table_has_a_line_for_every_sweep_of_a_kernel() -> None:
    loop = {
        "sweep": "forward", "bulk": True, "elements": 8, "instructions": 48, "special": 8, "bytes": 16,
        "loads": {"128": 1}, "stores": {}, "barriers": 0, "shuffles": 0, "bounds": {"H200": ["HBM", 1.0]},
    }  # fmt: skip
    entry = {"name": "a b", "target": "sm_90", "registers": 40, "spills": 0, "stack": 0, "shared": 512}
    entry["loops"] = [loop, loop, loop | {"sweep": "backward"}, loop | {"sweep": "zeros"}]
    found = records.lines([entry, entry | {"loops": []}, {"name": "c", "target": "sm_90", "error": "no\nidea"}])
    assert [line[:7] for line in found] == [
        ["sm_90", "a b", "40", "0", "0", "512", "forward"],
        ["", "", "", "", "", "", "backward"],
        ["sm_90", "a b", "40", "0", "0", "512", "none"],
        ["sm_90", "c", "does not compile: no", "", "", "", ""],
    ]
    assert found[0][7:] == ["6.00", "1.00", "2.00", "1×128", "", "0", "0", "H200 HBM 100%"]
    assert {len(line) for line in found} == {len(records.COLUMNS)}
    assert plain("title", records.COLUMNS, found).count("\n") == 5


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(["inspect", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    return printed.err


@pytest.mark.usefixtures("uninterpreted")
def test_without_triton_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "triton" else find_spec(name))
    assert "inspect: Triton is not installed" in refused(capsys)


@pytest.mark.usefixtures("uninterpreted")
def test_without_a_disassembler_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(knobs.NvidiaTool, "from_path", staticmethod(lambda _path: None))
    assert "Cannot find cuobjdump" in refused(capsys)
    assert sass.missing_tools(["gfx942"]) is None


def test_interpreted_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert "TRITON_INTERPRET is 1" in refused(capsys)


@pytest.mark.usefixtures("uninterpreted")
def test_unknown_targets_and_kernels_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--targets must be among sm_80, sm_90" in refused(capsys, "--targets", "sm_91")
    assert "--kernels must be parts of names such as 'row_stats" in refused(capsys, "--kernels", "row_stat_")


def test_a_missing_rival_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(rivals.MODULES, "liger", "no_such_package.kernels")
    assert rivals.missing("liger") == "liger-kernel is not installed"
    monkeypatch.setitem(rivals.MODULES, "liger", "torch.no_such_module")
    assert rivals.missing("liger") == "the installed liger-kernel has no torch.no_such_module"


if __name__ == "__main__":
    answer(known_loops)
