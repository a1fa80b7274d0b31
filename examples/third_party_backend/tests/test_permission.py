"""Permission to read other processes: what is refused is said, with the reason, by the probe and at connect."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest
from pydantic import ValidationError

from eplb_core.errors import DiscoveryError
from eplb_vmread import hooks, permission
from eplb_vmread.backend import VmReadBackend
from eplb_vmread.options import VmReadOptions

NUMBER = {"x86_64": 310, "aarch64": 270}  # of process_vm_readv

# Forbids itself the system call, as a container's seccomp profile does, and asks.
UNDER_SECCOMP = """
import ctypes, sys
number, code = int(sys.argv[1]), int(sys.argv[2])
libc = ctypes.CDLL(None, use_errno=True)

class Filter(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint16), ("jt", ctypes.c_uint8), ("jf", ctypes.c_uint8), ("k", ctypes.c_uint32)]

class Program(ctypes.Structure):
    _fields_ = [("len", ctypes.c_uint16), ("filter", ctypes.POINTER(Filter))]

lines = (Filter * 4)(
    Filter(0x20, 0, 0, 0),                   # load the number of the system call
    Filter(0x15, 0, 1, number),              # is it this one?
    Filter(0x06, 0, 0, 0x00050000 | code),   # then fail with this code
    Filter(0x06, 0, 0, 0x7FFF0000),          # else go on
)
zero = ctypes.c_ulong(0)
if libc.prctl(38, ctypes.c_ulong(1), zero, zero, zero) or libc.prctl(22, ctypes.c_ulong(2),
        ctypes.byref(Program(4, lines)), zero, zero):
    sys.exit(77)
from eplb_vmread.permission import why_not
print(why_not())
"""


def under_seccomp(code: int) -> str:
    number = NUMBER.get(platform.machine())
    if number is None:
        pytest.skip(f"the number of the system call on {platform.machine()} is not known here")
    command = [sys.executable, "-c", UNDER_SECCOMP, str(number), str(code)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if result.returncode == 77:
        pytest.skip("seccomp filters cannot be installed here")
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def yama(monkeypatch, tmp_path, scope: str, capable: bool) -> None:
    (tmp_path / "ptrace_scope").write_text(f"{scope}\n")
    monkeypatch.setattr(permission, "YAMA_SCOPE", tmp_path / "ptrace_scope")
    monkeypatch.setattr(permission, "may_trace_all", lambda: capable)


def test_it_is_usable_where_these_tests_run():
    assert permission.why_not() is None
    assert hooks.eplb_register_backends().available() is None
    facts = VmReadBackend.probe(VmReadOptions())
    assert facts["process_vm_readv"] == "works"
    assert facts["pid namespace"].startswith("pid:[")


@pytest.mark.parametrize("code", [1, 38], ids=["EPERM", "ENOSYS"])
def test_a_container_that_forbids_the_system_call_is_told_apart(code):
    reason = under_seccomp(code)
    assert reason.startswith("process_vm_readv is not allowed here (")
    assert "--cap-add SYS_PTRACE" in reason


@pytest.mark.parametrize(
    ("scope", "capable", "said"),
    [
        ("0", False, None),
        ("1", False, None),
        ("2", True, None),
        ("2", False, "with CAP_SYS_PTRACE only (kernel.yama.ptrace_scope=2)"),
        ("3", True, "until the next boot"),
    ],
)
def test_what_yama_forbids_to_everyone_is_known_before_connect(monkeypatch, tmp_path, scope, capable, said):
    yama(monkeypatch, tmp_path, scope, capable)
    reason = permission.why_not()
    assert reason is None if said is None else said in reason
    if said is None:
        assert VmReadBackend.probe(VmReadOptions())["yama"] == f"ptrace_scope={scope}"
    else:
        with pytest.raises(DiscoveryError, match="EPLB-D004") as caught:
            VmReadBackend.probe(VmReadOptions())
        assert said in str(caught.value)


def test_a_kernel_without_yama_needs_no_word_to_it(monkeypatch, tmp_path):
    monkeypatch.setattr(permission, "YAMA_SCOPE", tmp_path / "no such file")
    assert permission.yama_scope() is None
    assert permission.allow_readers("auto") == "unchanged"
    assert permission.allow_readers("unchanged") == "unchanged"


@pytest.mark.parametrize("readers", ["any", "siblings"])
def test_yama_is_told_who_may_read_or_is_not_there(readers):
    assert permission.allow_readers(readers) == ("unchanged" if permission.yama_scope() is None else readers)


def test_a_refusal_says_what_to_do(monkeypatch, tmp_path):
    yama(monkeypatch, tmp_path, "1", False)
    monkeypatch.setattr(permission.os, "getuid", lambda: 12345)
    assert "run all ranks as one user" in permission.remedy(1, permission.os.getpid())
    monkeypatch.undo()
    yama(monkeypatch, tmp_path, "1", False)
    assert "readers='any'" in permission.remedy(1, permission.os.getpid())
    yama(monkeypatch, tmp_path, "0", False)
    assert "undumpable" in permission.remedy(1, permission.os.getpid())
    assert permission.remedy(3, permission.os.getpid()) == ""


def test_options_that_do_not_exist_are_refused():
    assert VmReadOptions().readers == "auto"
    for wrong in ({"readers": "all"}, {"reader": "any"}):
        with pytest.raises(ValidationError):
            VmReadOptions(**wrong)


def test_declaring_the_backend_imports_neither_it_nor_a_library():
    heavy = "'torch', 'numpy', 'pydantic', 'eplb_vmread.backend', 'eplb_vmread.options'"
    code = f"import sys, eplb_vmread.hooks as h; h.eplb_register_backends(); print({{{heavy}}} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.stdout.strip() == "set()", result.stderr
