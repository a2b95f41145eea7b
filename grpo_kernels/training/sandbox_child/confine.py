"""Limits that a process puts on itself before it runs text it does not trust.

Everywhere: resource limits. On Linux in addition: it dies with its parent, root's capabilities are given up, and a
seccomp filter refuses what would outlive or reach beyond the process (new processes, other programs, sessions, signals,
sockets, tracing).
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import struct
import sys
from typing import Any

_PR_SET_PDEATHSIG = 1
_PR_SET_SECCOMP = 22
_PR_SET_NO_NEW_PRIVS = 38
_SECCOMP_MODE_FILTER = 2
_LINUX_CAPABILITY_VERSION_3 = 0x20080522
_CLONE_THREAD = 0x00010000
_EPERM, _ENOSYS = 1, 38

_REFUSED_SYSCALLS_X86_64 = {
    "fork": 57, "vfork": 58, "execve": 59, "execveat": 322,
    "setsid": 112, "setpgid": 109, "unshare": 272, "setns": 308,
    "kill": 62, "tkill": 200, "tgkill": 234, "rt_sigqueueinfo": 129, "rt_tgsigqueueinfo": 297,
    "pidfd_send_signal": 424, "ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311,
    "socket": 41, "io_uring_setup": 425,
}  # fmt: skip
_REFUSED_SYSCALLS_GENERIC = {
    "execve": 221, "execveat": 281,
    "setsid": 157, "setpgid": 154, "unshare": 97, "setns": 268,
    "kill": 129, "tkill": 130, "tgkill": 131, "rt_sigqueueinfo": 138, "rt_tgsigqueueinfo": 240,
    "pidfd_send_signal": 424, "ptrace": 117, "process_vm_readv": 270, "process_vm_writev": 271,
    "socket": 198, "io_uring_setup": 425,
}  # fmt: skip
_CLONE3 = 435

# machine: (AUDIT_ARCH, clone, refused). Numbers: linux/audit.h, asm/unistd_64.h, asm-generic/unistd.h.
_MACHINES: dict[str, tuple[int, int, dict[str, int]]] = {
    "x86_64": (0xC000003E, 56, _REFUSED_SYSCALLS_X86_64),
    "aarch64": (0xC00000B7, 220, _REFUSED_SYSCALLS_GENERIC),
    "riscv64": (0xC00000F3, 220, _REFUSED_SYSCALLS_GENERIC),
}


def confine(*, parent: int, cpu_seconds: int, memory_bytes: int, file_bytes: int, trusted: bool = False) -> None:
    """Applies the limits to this process, for good; a trusted process gets the resource limits alone.

    Raises OSError when new processes can be refused neither by a filter nor by RLIMIT_NPROC, which does not bind root.
    """
    for limit, soft, hard in (
        (resource.RLIMIT_CPU, cpu_seconds, cpu_seconds + 1),
        (resource.RLIMIT_FSIZE, file_bytes, file_bytes),
        (resource.RLIMIT_NOFILE, 64, 64),
        (resource.RLIMIT_CORE, 0, 0),
    ):
        resource.setrlimit(limit, (soft, hard))
    if sys.platform == "linux":
        # macOS refuses or ignores a limit on the address space.
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
        _die_with(parent)
    if trusted or (sys.platform == "linux" and _refuse_syscalls()):
        return
    if os.geteuid() == 0:
        raise OSError("without a seccomp filter, which this system lacks, root's processes cannot be limited in number")
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))


def _die_with(parent: int) -> None:
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        raise OSError("the parent process ended before this one started")


def _refuse_syscalls() -> bool:
    """Drops capabilities and installs the filter; False where this machine or kernel has none."""
    machine = _MACHINES.get(os.uname().machine)
    if machine is None or sys.maxsize <= 2**32:
        return False
    _drop_capabilities()
    program = _filter(*machine)
    buffer = ctypes.create_string_buffer(program, len(program))
    header = _SockFprog(len(program) // 8, ctypes.addressof(buffer))
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    return _call_prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.addressof(header)) == 0


class _SockFprog(ctypes.Structure):
    _fields_ = [("len", ctypes.c_ushort), ("filter", ctypes.c_void_p)]


def _filter(audit_arch: int, clone: int, refused: dict[str, int]) -> bytes:
    """Classic BPF over `struct seccomp_data` (int nr; u32 arch; u64 ip; u64 args[6])."""
    load, jump_equal, jump_at_least, jump_any_bit, answer = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, kill, error = 0x7FFF0000, 0x80000000, 0x00050000

    def instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
        return struct.pack("=HBBI", code, if_true, if_false, value)

    program = [
        instruction(load, 4),
        instruction(jump_equal, audit_arch, 1, 0),
        instruction(answer, kill),
        instruction(load, 0),
        # x86-64 kernels take x32 numbers, which start here and would pass by the list.
        instruction(jump_at_least, 0x40000000, 0, 1),
        instruction(answer, error | _EPERM),
        # clone3 has its flags in memory, where a filter cannot look; ENOSYS sends the C library back to clone.
        instruction(jump_equal, _CLONE3, 0, 1),
        instruction(answer, error | _ENOSYS),
    ]
    for number in refused.values():
        program += [instruction(jump_equal, number, 0, 1), instruction(answer, error | _EPERM)]
    program += [
        instruction(jump_equal, clone, 0, 3),
        instruction(load, 16),
        instruction(jump_any_bit, _CLONE_THREAD, 1, 0),
        instruction(answer, error | _EPERM),
        instruction(answer, allow),
    ]
    return b"".join(program)


def _drop_capabilities() -> None:
    """Root without capabilities can no longer raise its limits nor act on other users' files and processes."""
    header = struct.pack("=Ii", _LINUX_CAPABILITY_VERSION_3, 0)
    if _libc().capset(header, bytes(24)) != 0:
        raise OSError(ctypes.get_errno(), "capset failed")


def _prctl(option: int, value: int) -> None:
    if _call_prctl(option, value, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value}) failed")


def _call_prctl(option: int, *values: int) -> int:
    prctl = _libc().prctl
    prctl.argtypes = [ctypes.c_int] + [ctypes.c_ulong] * 4
    padding = (0,) * (4 - len(values))
    return int(prctl(option, *values, *padding))


def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)
