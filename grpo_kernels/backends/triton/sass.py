"""What the compilers made of the kernels: registers, spills, shared memory, and the loops over the vocabulary."""

from __future__ import annotations

import multiprocessing
import os
import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from triton import knobs

from .compile import Case, Compiled, compile_case


@dataclass(frozen=True)
class Loop:
    """An innermost loop with global memory accesses: what one thread does in one round."""

    reads: bool
    writes: bool
    masked: bool  # every access under a mask: the rest of a row, not its bulk
    instructions: int
    elements: int
    narrowest: int  # bits of the narrowest access
    exponentials: int  # on the special function unit, reciprocals included
    barriers: int
    shuffles: int

    @property
    def per_element(self) -> float:
        """Instructions per logit."""
        return self.instructions / self.elements


@dataclass(frozen=True)
class Reading:
    """One compiled kernel."""

    kernel: str
    registers: int
    spills: int  # NVIDIA: instructions on local memory; AMD: registers, scalar ones included
    stack: int  # bytes of a thread
    shared: int  # bytes of a program
    threads: int
    seconds: float  # of compilation
    loops: tuple[Loop, ...]

    def main_loops(self, *, reads: bool, writes: bool) -> list[Loop]:
        """The loops without masks that read, write, or do both."""
        return [loop for loop in self.loops if not loop.masked and (loop.reads, loop.writes) == (reads, writes)]


@dataclass(frozen=True)
class Dialect:
    """How an assembly language spells what is counted."""

    instruction: str
    label: str
    jump: str
    load: str
    store: str
    special: str
    barrier: str
    shuffle: str
    widths: dict[str, int]  # bits of an access whose name contains this; the first that fits


SASS: Final = Dialect(
    instruction=r"\s*/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;",
    label=r"\s*(\.L_\w+):",
    jump=r"\bBRA\b.*`\((\.L_\w+)\)",
    load=r"\bLDG\.",
    store=r"\bSTG\.",
    special=r"\bMUFU\.",
    barrier=r"\bBAR\.",
    shuffle=r"\b(SHFL|REDUX)\b",
    widths={".256": 256, ".128": 128, ".64": 64, "U16": 16, "S16": 16, "U8": 8, "S8": 8, "": 32},
)
GCN: Final = Dialect(
    instruction=r"\t([a-z]\w+(?:\s.*)?)$",
    label=r"(\.LBB\w+):.*Inner Loop Header",  # LLVM says so itself; a jump back can also be an odd order of blocks
    jump=r"s_c?branch\w*\s+(\.LBB\w+)",
    load=r"(global|buffer|flat)_load",
    store=r"(global|buffer|flat)_store",
    special=r"\bv_(exp|rcp|log|sqrt|rsq)_",
    barrier=r"\bs_barrier",
    shuffle=r"_dpp|\bds_(bpermute|permute|swizzle)|\bv_permlane",
    widths={"dwordx4": 128, "dwordx3": 96, "dwordx2": 64, "dword": 32, "short": 16, "byte": 8},
)


def read_all(cases: Iterable[Case], workers: int = 2) -> dict[Case, Reading | str]:
    """Compile and read every case from nothing; for one that does not compile, the reason."""
    cases = list(dict.fromkeys(cases))
    with tempfile.TemporaryDirectory(prefix="grpo-kernels-") as folder:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(workers, context, initializer=_cache_in, initargs=(folder,)) as pool:
            return dict(zip(cases, pool.map(_attempt, cases), strict=True))


def _cache_in(folder: str) -> None:
    os.environ["TRITON_CACHE_DIR"] = folder


def _attempt(case: Case) -> Reading | str:
    try:
        return read(case, compile_case(case))
    except Exception as error:  # noqa: BLE001  (whatever a compiler raises is the reason)
        return f"{type(error).__name__}: {error}"


def read(case: Case, compiled: Compiled) -> Reading:
    """Read a compiled kernel, on NVIDIA with the disassembler that comes with Triton."""
    binary = compiled.binary
    if "cubin" in binary.asm:
        dialect, (text, usage) = SASS, _disassembled(binary.asm["cubin"])
        registers, stack = _number(r"REG:(\d+)", usage), _number(r"STACK:(\d+)", usage)
        spills = len(re.findall(r"\b(?:LDL|STL)\b", text))
    else:
        dialect, text = GCN, binary.asm["amdgcn"]
        registers, stack, *spilled = (
            _number(rf"\.{name}:\s+(\d+)", text)
            for name in ("vgpr_count", "private_segment_fixed_size", "vgpr_spill_count", "sgpr_spill_count")
        )
        spills = sum(spilled)
    return Reading(
        compiled.name, registers, spills, stack, binary.metadata.shared,
        binary.metadata.num_warps * compiled.warp_size, compiled.seconds, tuple(loops(text, dialect, case.itemsize)),
    )  # fmt: skip


def _number(pattern: str, text: str) -> int:
    match = re.search(pattern, text)
    if match is None:
        raise RuntimeError(f"read: the compiler's output must contain {pattern!r}. This Triton writes another format.")
    return int(match[1])


def _disassembled(cubin: bytes) -> tuple[str, str]:
    """SASS and resource usage."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)

        def run(tool: Any, *options: str) -> str:
            return subprocess.run([tool.path, *options, file], capture_output=True, text=True, check=True).stdout

        return run(knobs.nvidia.nvdisasm, "-c", "-ndf"), run(knobs.nvidia.cuobjdump, "-res-usage")


def loops(text: str, dialect: Dialect, itemsize: int) -> Iterator[Loop]:
    """The innermost loops of an assembly text that touch global memory, in the order of the code."""
    code: list[str] = []
    labels: dict[str, int] = {}
    for line in re.sub(r"\n\s+;", " ;", text).splitlines():  # a comment goes on over several lines
        if label := re.match(dialect.label, line):
            labels[label[1]] = len(code)
        elif written := re.match(dialect.instruction, line):
            code.append(written[1])
    jumps = ((at, re.search(dialect.jump, instruction)) for at, instruction in enumerate(code))
    bodies = [range(labels[jump[1]], at + 1) for at, jump in jumps if jump and labels.get(jump[1], at + 1) <= at]
    for body in bodies:
        innermost = not any(other != body and other.start in body and other[-1] in body for other in bodies)
        if innermost and (loop := _measured(code[body.start : body.stop], dialect, itemsize)):
            yield loop


def _measured(body: list[str], dialect: Dialect, itemsize: int) -> Loop | None:
    def count(pattern: str) -> int:
        return sum(re.search(pattern, instruction) is not None for instruction in body)

    bits: dict[str, list[int]] = {dialect.load: [], dialect.store: []}
    masked = True
    for at, instruction in enumerate(body):
        for pattern, widths in bits.items():
            if re.search(pattern, instruction):
                operation = instruction.split()[instruction.startswith("@")]  # what may stand before it is a predicate
                widths.append(next(width for name, width in dialect.widths.items() if name in operation))
                masked = masked and _masked(at, body)
    loads, stores = bits.values()
    if not loads + stores:
        return None
    return Loop(
        bool(loads), bool(stores), masked, len(body), sum(loads or stores) // 8 // itemsize, min(loads + stores),
        count(dialect.special), count(dialect.barrier), count(dialect.shuffle),
    )  # fmt: skip


def _masked(at: int, body: list[str]) -> bool:
    """Whether an access happens in some lanes alone: under a predicate, or at an address chosen lane by lane."""
    if body[at].startswith("@"):
        return True
    address = re.match(r"buffer_\w+ \S+ (v\d+), s\[", body[at])
    writers = [line for line in body[:at] if address and re.match(rf"\w+ {address[1]},", line)]
    return bool(writers) and writers[-1].startswith("v_cndmask")
