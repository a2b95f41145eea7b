"""What the compilers made of the kernels: registers, spills, shared memory, and the loops over the vocabulary."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from triton import knobs

from .compile import Case, Compiled


@dataclass(frozen=True)
class Loop:
    """An innermost loop with global memory accesses: what one thread does in one round."""

    kind: str  # "read", "read and write", "write"
    masked: bool  # the few columns that need a mask, not the bulk of a row
    instructions: int
    elements: int
    narrowest_load: int  # bits; 0 without loads
    narrowest_store: int
    exponentials: int  # instructions of the special function unit: exponentials and reciprocals
    barriers: int
    shuffles: int
    shared: int  # shared memory instructions
    local: int  # local memory instructions: spills

    @property
    def per_element(self) -> float:
        """Instructions per logit."""
        return self.instructions / self.elements


@dataclass(frozen=True)
class Reading:
    """One compiled kernel."""

    kernel: str
    registers: int
    spills: int  # registers on AMD; local memory instructions on NVIDIA
    stack: int  # bytes a thread
    shared: int  # bytes a program
    threads: int
    seconds: float  # of compilation, from nothing
    loops: tuple[Loop, ...]


@dataclass(frozen=True)
class _Dialect:
    """How an assembly language spells what is counted."""

    instruction: str
    label: str
    jump: str
    load: str
    store: str
    special: str
    barrier: str
    shuffle: str
    shared: str
    local: str
    widths: dict[str, int]  # bits of an access by what its name contains; the first that fits


_SASS: Final = _Dialect(
    instruction=r"\s*/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;",
    label=r"\s*(\.L_\w+):",
    jump=r"\bBRA\b.*`\((\.L_\w+)\)",
    load=r"\bLDG\.",
    store=r"\bSTG\.",
    special=r"\bMUFU\.",
    barrier=r"\bBAR\.",
    shuffle=r"\b(SHFL|REDUX|VOTE)\b",
    shared=r"\b(LDS|STS|LDSM|STSM|ATOMS)\b",
    local=r"\b(LDL|STL)\b",
    widths={".256": 256, ".128": 128, ".64": 64, "U16": 16, "S16": 16, "U8": 8, "S8": 8, "": 32},
)
_GCN: Final = _Dialect(
    instruction=r"\t([a-z]\w+(?:\s.*)?)$",
    label=r"(\.LBB\w+):",
    jump=r"s_c?branch\w*\s+(\.LBB\w+)",
    load=r"(global|buffer|flat)_load",
    store=r"(global|buffer|flat)_store",
    special=r"\bv_(exp|rcp|log|sqrt|rsq)_",
    barrier=r"\bs_barrier",
    shuffle=r"_dpp|\bds_(bpermute|permute|swizzle)|\bv_permlane",
    shared=r"\bds_(read|write|load|store)",
    local=r"\bscratch_",
    widths={"dwordx4": 128, "dwordx3": 96, "dwordx2": 64, "dword": 32, "short": 16, "byte": 8},
)


def read(case: Case, compiled: Compiled) -> Reading:
    """Read a compiled kernel with the disassembler that comes with Triton."""
    binary = compiled.binary
    threads = binary.metadata.num_warps * compiled.warp_size
    if "cubin" in binary.asm:
        dialect, (text, usage) = _SASS, _disassemble(binary.asm["cubin"])
        registers, stack = int(_field(r"REG:(\d+)", usage)), int(_field(r"STACK:(\d+)", usage))
        spills = len(re.findall(dialect.local, text))
    else:
        dialect, text = _GCN, binary.asm["amdgcn"]
        registers = int(_field(r"\.vgpr_count:\s+(\d+)", text))
        stack = int(_field(r"\.private_segment_fixed_size:\s+(\d+)", text))
        spills = sum(int(_field(rf"\.{kind}_spill_count:\s+(\d+)", text)) for kind in ("vgpr", "sgpr"))
    loops = tuple(_loops(text, dialect, case.itemsize))
    return Reading(
        compiled.name, registers, spills, stack, binary.metadata.shared, threads, round(compiled.seconds, 2), loops
    )


def _field(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    if match is None:
        raise RuntimeError(f"read: the compiler's output must contain {pattern!r}. This Triton writes another format.")
    return match[1]


def _disassemble(cubin: bytes) -> tuple[str, str]:
    """SASS and resource usage."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)

        def run(tool: Any, *options: str) -> str:
            return subprocess.run([tool.path, *options, file.name], capture_output=True, text=True, check=True).stdout

        return run(knobs.nvidia.nvdisasm, "-c", "-ndf"), run(knobs.nvidia.cuobjdump, "-res-usage")


def _loops(text: str, dialect: _Dialect, itemsize: int) -> Iterator[Loop]:
    """The innermost loops that touch global memory, in the order of the code."""
    code: list[str] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if label := re.match(dialect.label, line):
            labels[label[1]] = len(code)
        elif instruction := re.match(dialect.instruction, line):
            code.append(instruction[1])
    backward = []
    for at, instruction in enumerate(code):
        jump = re.search(dialect.jump, instruction)
        if jump and labels.get(jump[1], at + 1) <= at:
            backward.append(range(labels[jump[1]], at + 1))
    for body in backward:
        inner = any(other != body and body.start <= other.start and other.stop <= body.stop for other in backward)
        if not inner and (loop := _measured(code[body.start : body.stop], dialect, itemsize)):
            yield loop


def _measured(body: list[str], dialect: _Dialect, itemsize: int) -> Loop | None:
    def found(pattern: str) -> list[str]:
        return [instruction for instruction in body if re.search(pattern, instruction)]

    loads, stores = found(dialect.load), found(dialect.store)
    if not loads and not stores:
        return None
    load_bits, store_bits = ([_width(access, dialect) for access in accesses] for accesses in (loads, stores))
    return Loop(
        kind=" and ".join([name for name, accesses in (("read", loads), ("write", stores)) if accesses]),
        masked=all(_masked(access, body) for access in loads + stores),
        instructions=len(body),
        elements=(sum(load_bits) or sum(store_bits)) // 8 // itemsize,
        narrowest_load=min(load_bits, default=0),
        narrowest_store=min(store_bits, default=0),
        exponentials=len(found(dialect.special)),
        barriers=len(found(dialect.barrier)),
        shuffles=len(found(dialect.shuffle)),
        shared=len(found(dialect.shared)),
        local=len(found(dialect.local)),
    )


def _width(access: str, dialect: _Dialect) -> int:
    operation = access.split()[1 if access.startswith("@") else 0]
    return next(bits for name, bits in dialect.widths.items() if name in operation)


def _masked(access: str, body: list[str]) -> bool:
    """Whether an access happens in some lanes alone: under a predicate, or at an address chosen lane by lane."""
    if access.startswith("@"):
        return True
    register = re.search(r"_load\w+ \S+ (v\d+),|_store\w+ \S+ (v\d+),", access)
    if register is None:
        return False
    name = register[1] or register[2]
    writers = [line for line in body[: body.index(access)] if re.match(rf"\w+ {name},", line)]
    return bool(writers) and writers[-1].startswith("v_cndmask")
