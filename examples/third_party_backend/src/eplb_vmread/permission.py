"""Permission: may this process read others of the same user, why not, and what can be done about it."""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from pathlib import Path

YAMA_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")
_CAP_SYS_PTRACE = 19
_PR_SET_PTRACER = 0x59616D61  # linux/prctl.h
_PR_SET_PTRACER_ANY = ctypes.c_ulong(-1).value


def why_not() -> str | None:
    """Return why this machine cannot use the backend, or None; loads libc and nothing else.

    Whether a given peer may be read is only known at connect: it depends on that process, too.
    """
    if not sys.platform.startswith("linux"):
        return "process_vm_readv exists on Linux alone"
    try:
        readv = ctypes.CDLL(None, use_errno=True).process_vm_readv
    except (OSError, AttributeError):
        return "this C library has no process_vm_readv"
    try:
        pid_namespace()
    except OSError as error:
        return f"/proc cannot be read: {error.strerror}"
    scope = yama_scope()
    if scope == 3:
        return "Yama forbids reading other processes (kernel.yama.ptrace_scope=3, until the next boot)"
    if scope == 2 and not may_trace_all():
        return "Yama allows reading other processes with CAP_SYS_PTRACE only (kernel.yama.ptrace_scope=2)"
    source, target = ctypes.c_uint64(0x5EED), ctypes.c_uint64(0)
    theirs = (ctypes.c_uint64 * 2)(ctypes.addressof(source), 8)
    ours = (ctypes.c_uint64 * 2)(ctypes.addressof(target), 8)
    readv.restype = ctypes.c_ssize_t
    zero, one = ctypes.c_ulong(0), ctypes.c_ulong(1)
    if readv(os.getpid(), ours, one, theirs, one, zero) != 8 or target.value != source.value:
        code = ctypes.get_errno()
        # A process may always read itself, so what forbids this is no rule about processes but about system calls.
        if code in (errno.EPERM, errno.ENOSYS):
            return (
                f"process_vm_readv is not allowed here ({os.strerror(code)}), as seccomp profiles of older container "
                "runtimes have it: add the system call to the profile, or run with --cap-add SYS_PTRACE"
            )
        return f"process_vm_readv does not work: {os.strerror(code)}"
    return None


def yama_scope() -> int | None:
    """Return ``kernel.yama.ptrace_scope``; None on a kernel without Yama."""
    try:
        return int(YAMA_SCOPE.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def may_trace_all() -> bool:
    """Does this process have CAP_SYS_PTRACE?"""
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    capabilities = next((line.split()[1] for line in status.splitlines() if line.startswith("CapEff:")), "0")
    return bool(int(capabilities, 16) >> _CAP_SYS_PTRACE & 1)


def allow_readers(readers: str) -> str:
    """Tell Yama who may read this process; say what was done.

    Parameters
    ----------
    readers : str
        See `VmReadOptions.readers`. It holds for the life of the process: other communicators may need it.
    """
    if readers == "auto":
        readers = "siblings" if yama_scope() == 1 else "unchanged"
    if readers == "unchanged":
        return readers
    tracer = _PR_SET_PTRACER_ANY if readers == "any" else os.getppid()
    libc = ctypes.CDLL(None, use_errno=True)
    arguments = [ctypes.c_ulong(value) for value in (tracer, 0, 0, 0)]
    if libc.prctl(ctypes.c_int(_PR_SET_PTRACER), *arguments) != 0:
        code = ctypes.get_errno()
        if code != errno.EINVAL:  # a kernel without Yama does not know the call, and does not need it
            raise OSError(code, os.strerror(code))
        return "unchanged"
    return readers


def pid_namespace() -> str:
    """Return what names the namespace in which this process's id means something, such as ``pid:[4026531836]``."""
    return str(Path("/proc/self/ns/pid").readlink())


def boot_id() -> str:
    """Return what tells this host, since it was started, from all others."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def remedy(code: int, pid: int) -> str:
    """Return what to do about a refused read of another process, from what can be seen of it."""
    if code != errno.EPERM:
        return ""
    try:
        owner = Path(f"/proc/{pid}").stat().st_uid
    except OSError:
        owner = None
    if owner is not None and owner != os.getuid() and not may_trace_all():
        return f"Process {pid} runs as user {owner}, this one as {os.getuid()}: run all ranks as one user."
    if yama_scope() == 1:
        return (
            "Yama (kernel.yama.ptrace_scope=1) allows it to relatives only: where the ranks have no common parent, set "
            "the option readers='any' on all of them, or ptrace_scope to 0."
        )
    return "The process may have more capabilities than this one, another user namespace, or be undumpable."
