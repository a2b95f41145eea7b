"""What the compilers made of the kernels: registers, spills, shared memory, and the loops over the vocabulary."""

from __future__ import annotations

import functools
import multiprocessing
import os
import re
import subprocess
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, Protocol, TypeVar

from triton import knobs

from .compile import Compiled


class Subject(Protocol):
    """What can be compiled and read: a variant of one of our kernels, or of another project's."""

    @property
    def target(self) -> str:
        """An entry of the launch tables."""

    @property
    def itemsize(self) -> int:
        """Bytes of a logit."""

    @property
    def name(self) -> str:
        """Words that tell it from the others, apart from its target."""


SubjectT = TypeVar("SubjectT", bound=Subject)


@dataclass(frozen=True)
class Loop:
    """An innermost loop with global memory accesses: what one thread does in one round."""

    masked: bool  # every access under a mask: the rest of a row, not its bulk
    instructions: int
    loads: tuple[int, ...]  # bits of each access, in order
    stores: tuple[int, ...]
    special: int  # on the special function unit: exponentials, and reciprocals
    barriers: int
    shuffles: int
    itemsize: int  # bytes of a logit

    @property
    def reads(self) -> bool:
        """Whether it reads global memory."""
        return bool(self.loads)

    @property
    def writes(self) -> bool:
        """Whether it writes global memory."""
        return bool(self.stores)

    @property
    def elements(self) -> int:
        """Logits of a thread and round: what it reads, or what it writes without reading."""
        return sum(self.loads or self.stores) // 8 // self.itemsize

    @property
    def narrowest(self) -> int:
        """Bits of the narrowest access."""
        return min(self.loads + self.stores)

    @property
    def per_element(self) -> float:
        """Instructions per logit."""
        return self.instructions / self.elements

    @property
    def special_per_element(self) -> float:
        """Instructions of the special function unit per logit."""
        return self.special / self.elements

    @property
    def bytes_per_element(self) -> float:
        """Bytes read and written per logit."""
        return sum(self.loads + self.stores) / 8 / self.elements


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

    @property
    def bulk(self) -> list[Loop]:
        """The loops over the bulk of a row: those without masks, and all of a kind that has none without."""
        plain = {(loop.reads, loop.writes) for loop in self.loops if not loop.masked}
        return [loop for loop in self.loops if not loop.masked or (loop.reads, loop.writes) not in plain]

    def main_loops(self, *, reads: bool, writes: bool) -> list[Loop]:
        """The loops of the bulk that read, write, or do both."""
        return [loop for loop in self.bulk if (loop.reads, loop.writes) == (reads, writes)]


@dataclass(frozen=True)
class Dialect:
    """How an assembly language spells what is counted."""

    instruction: str
    label: str
    header: str  # of a label: an innermost loop may begin there
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
    header="",
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
    label=r"(\.LBB\w+):",
    header="Inner Loop Header",  # LLVM says so itself; a jump back can also be an odd order of blocks
    jump=r"s_c?branch\w*\s+(\.LBB\w+)",
    load=r"(global|buffer|flat)_load",
    store=r"(global|buffer|flat)_store",
    special=r"\bv_(exp|rcp|log|sqrt|rsq)_",
    barrier=r"\bs_barrier",
    shuffle=r"_dpp|\bds_(bpermute|permute|swizzle)|\bv_permlane",
    widths={"dwordx4": 128, "dwordx3": 96, "dwordx2": 64, "dword": 32, "short": 16, "byte": 8},
)


def missing_tools(targets: Iterable[str]) -> str | None:
    """Why kernels for these targets cannot be read here; None if they can. AMD's are read from the compiler's text."""
    if not any(target.startswith("sm_") for target in targets):
        return None
    for tool in ("cuobjdump", "nvdisasm"):
        try:
            getattr(knobs.nvidia, tool)
        except RuntimeError as error:
            return f"{error}. It comes with Triton and with CUDA; TRITON_{tool.upper()}_PATH says where it is"
    return None


def read_all(
    subjects: Iterable[SubjectT],
    workers: int = 2,
    *,
    compiler: Callable[[SubjectT], Compiled],
    save: Path | None = None,
) -> dict[SubjectT, Reading | str]:
    """Compile and read every subject from nothing; for one that does not compile, the reason.

    Args:
        subjects: what to compile.
        workers: processes, spawned anew.
        compiler: makes a compiled kernel of one of them; a function of a module.
        save: a folder for the binaries.
    """
    subjects = list(dict.fromkeys(subjects))
    attempt = functools.partial(_attempt, compiler, save)
    context = multiprocessing.get_context("spawn")
    with TemporaryDirectory() as folder, ProcessPoolExecutor(workers, context, _cache_in, (folder,)) as pool:
        return dict(zip(subjects, pool.map(attempt, subjects), strict=True))


def _cache_in(folder: str) -> None:
    os.environ["TRITON_CACHE_DIR"] = folder


def _attempt(compiler: Callable[[SubjectT], Compiled], save: Path | None, subject: SubjectT) -> Reading | str:
    try:
        compiled = compiler(subject)
        if save is not None:
            kind = "cubin" if "cubin" in compiled.binary.asm else "hsaco"
            words = [compiled.name, *subject.name.split(), subject.target, kind]
            (save / ".".join(words)).write_bytes(compiled.binary.asm[kind])
        return read(compiled, subject.itemsize)
    except Exception as error:  # noqa: BLE001  (whatever a compiler raises is the reason)
        return f"{type(error).__name__}: {error}"


def read(compiled: Compiled, itemsize: int) -> Reading:
    """Read a compiled kernel over logits of so many bytes, on NVIDIA with the disassembler that comes with Triton."""
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
        binary.metadata.num_warps * compiled.warp_size, compiled.seconds, tuple(loops(text, dialect, itemsize)),
    )  # fmt: skip


def _number(pattern: str, text: str) -> int:
    match = re.search(pattern, text)
    if match is None:
        raise RuntimeError(f"read: the compiler's output must contain {pattern!r}. This Triton writes another format.")
    return int(match[1])


def _disassembled(cubin: bytes) -> tuple[str, str]:
    """SASS and resource usage."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)

        def run(tool: Any, *options: str) -> str:
            return subprocess.run([tool.path, *options, file], capture_output=True, text=True, check=True).stdout

        return run(knobs.nvidia.nvdisasm, "-c", "-ndf"), run(knobs.nvidia.cuobjdump, "-res-usage")


def loops(text: str, dialect: Dialect, itemsize: int) -> Iterator[Loop]:
    """The innermost loops of an assembly text that touch global memory, in the order of the code."""
    code: list[str] = []
    labels: dict[str, int] = {}
    headers: list[int] = []
    for line in re.sub(r"\n\s+;", " ;", text).splitlines():  # a comment goes on over several lines
        if label := re.match(dialect.label, line):
            labels[label[1]] = len(code)
            headers += [len(code)] if re.search(dialect.header, line) else []
        elif written := re.match(dialect.instruction, line):
            code.append(written[1])
    jumps = ((at, re.search(dialect.jump, instruction)) for at, instruction in enumerate(code))
    ends = {labels[jump[1]]: at + 1 for at, jump in jumps if jump and labels.get(jump[1], at + 1) <= at}
    bodies = [range(start, end) for start, end in ends.items()]  # up to the last of the jumps to where it starts
    for body in sorted(bodies, key=lambda body: body.stop):
        around_another = any(other != body and other.start in body and other[-1] in body for other in bodies)
        innermost = not around_another and any(header in body for header in headers)
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
        masked, len(body), tuple(loads), tuple(stores),
        count(dialect.special), count(dialect.barrier), count(dialect.shuffle), itemsize,
    )  # fmt: skip


def _masked(at: int, body: list[str]) -> bool:
    """Whether an access happens in some lanes alone: under a predicate, or at an address chosen lane by lane."""
    if body[at].startswith("@"):
        return True
    address = re.match(r"buffer_\w+ \S+ (v\d+), s\[", body[at])
    writers = [line for line in body[:at] if address and re.match(rf"\w+ {address[1]},", line)]
    return bool(writers) and writers[-1].startswith("v_cndmask")
