"""What pynccl says where it cannot be used, before and after it is asked for, and what the real NCCL does there."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import eplb_core as eplb
from eplb_core.errors import ConfigError, DiscoveryError
from eplb_pynccl import nccl4py_binding
from eplb_pynccl.binding import NcclError, spell
from eplb_pynccl.options import PyNcclOptions
from tests.support import stub_nccl


def has_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


without_a_driver = pytest.mark.skipif(has_driver(), reason="there is an NVIDIA driver here")
with_a_compiler = pytest.mark.skipif(stub_nccl.compiler() is None, reason="needs a C compiler")


def python(code: str, *arguments: str) -> str:
    """Run statements in an interpreter of its own, which may load an NCCL for good; return what they print."""
    run = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


def test_it_is_declared_unsafe_for_async_and_taken_only_when_named():
    info = eplb.discover().backends["pynccl"]
    assert (info.async_safe, info.async_reason) == (False, "NCCL multi-stream conflicts")
    assert (info.device_types, info.auto_priority, info.batched) == (("cuda",), None, True)


@pytest.mark.parametrize("communicator", ["pynccl", "torch_nccl"])
def test_async_is_refused_with_the_text_that_users_search_for(communicator, monkeypatch):
    monkeypatch.setenv("EPLB_PLUGINS", "nixl,pynccl,torch_gloo,torch_nccl")  # others may be installed, and safe
    with pytest.raises(ConfigError) as caught:
        eplb.select(eplb.EPLBConfig(communicator=communicator), device_type="cuda", catalog=eplb.discover())
    assert str(caught.value).startswith(
        f"{communicator} communicator is incompatible with async EPLB due to NCCL multi-stream conflicts. "
        "Use 'torch_gloo' or 'nixl' instead, or leave communicator unset for automatic selection."
    )


@without_a_driver
def test_eplb_backends_says_precisely_why_it_is_not_usable_here():
    command = [sys.executable, "-m", "eplb_core.cli", "backends", "--json", "--no-async", "--device", "cuda"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    (row,) = [each for each in json.loads(run.stdout)["backends"] if each["name"] == "pynccl"]
    assert "there is no NVIDIA driver here (libcuda.so.1: cannot open shared object file" in json.dumps(row)
    assert "check nvidia-smi, or that the container was given the GPU" in json.dumps(row)


@without_a_driver
def test_naming_it_without_a_driver_is_refused_with_what_to_check():
    with pytest.raises(ConfigError) as caught:
        eplb.select(eplb.EPLBConfig(communicator="pynccl", use_async=False), device_type="cuda")
    assert caught.value.code == "EPLB-C005"
    assert "there is no NVIDIA driver here" in str(caught.value)


def test_looking_for_what_is_missing_imports_nothing():
    code = (
        "import sys, eplb_pynccl.hooks as hooks\n"
        "hooks.eplb_register_backends().available()\n"
        "print([n for n in ('torch', 'numpy', 'pydantic', 'nccl', 'cuda', 'cupy') if n in sys.modules])"
    )
    assert python(code) == "[]"


def test_missing_bindings_and_a_missing_library_are_told_apart(tmp_path):
    code = (
        "import sys, ctypes, eplb_pynccl.presence as presence\n"
        "blocked = sys.argv[1].split(',')\n"
        "sys.modules.update({name: None for name in blocked if name})\n"
        "if not blocked[0]:\n"
        "    sys.path[:] = [folder for folder in sys.path if 'site-packages' not in folder]\n"
        "    presence.find_spec = lambda name: True\n"
        "print(presence.why_not())"
    )
    assert python(code, "nccl,cupy").startswith("neither nccl4py nor CuPy is installed: pip install eplb-pynccl[cu12]")
    if not _system_has_nccl():
        assert python(code, "").startswith("libnccl.so.2 is not installed: pip install nvidia-nccl-cu12")


def _system_has_nccl() -> bool:
    code = "import ctypes; ctypes.CDLL('libnccl.so.2')"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, check=False).returncode == 0


PROBE = """
import sys
from eplb_core.errors import EplbError
from eplb_pynccl.backend import PyNcclBackend
from eplb_pynccl.options import PyNcclOptions
try:
    print(PyNcclBackend.probe(PyNcclOptions(library=sys.argv[1] or None, binding=sys.argv[2])))
except EplbError as error:
    print(error)
"""


@without_a_driver
def test_the_probe_without_a_driver_says_so():
    text = python(PROBE, "", "nccl4py")
    assert text.startswith("Backend pynccl failed its probe: there is no NVIDIA driver here")
    assert text.endswith("[EPLB-D004]")


def test_a_library_that_does_not_load_is_named(tmp_path):
    path = tmp_path / "libnccl.so.2"
    path.write_bytes(b"not a library")
    text = python(PROBE, str(path), "nccl4py")
    assert f"the option library='{path}' does not load" in text
    assert "[EPLB-D004]" in text


@with_a_compiler
def test_an_old_nccl_is_refused_with_its_version_and_path():
    code = (
        "import ctypes, sys\n"
        "ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL).stub_version(21701)\n"
        "from eplb_pynccl.binding import load_binding, NcclError\n"
        "from eplb_pynccl.options import PyNcclOptions\n"
        "try:\n    load_binding(PyNcclOptions())\nexcept NcclError as error:\n    print(error)"
    )
    library = stub_nccl.build()
    text = python(code, library)
    assert text.startswith(f"NCCL 2.17.1 ({library}) is too old, 2.18.0 is the oldest supported: pip install")


def test_another_nccl4py_is_refused_with_what_to_install(monkeypatch):
    monkeypatch.setattr(nccl4py_binding, "version", lambda _name: "0.7.0")
    with pytest.raises(NcclError, match=r"nccl4py 0\.7\.0 is not supported: pip install 'nccl4py~=0\.6\.0'"):
        nccl4py_binding.load()


@pytest.mark.parametrize(("number", "text"), [(23203, "2.32.3"), (21800, "2.18.0"), (2708, "2.7.8")])
def test_versions_are_spelt_as_nccl_counts_them(number, text):
    assert spell(number) == text


def test_unknown_options_are_refused():
    with pytest.raises(ValueError, match="librari"):
        PyNcclOptions(librari="x")


# --- the real library, as far as it goes without a driver -------------------------------------------------------------

real_library = pytest.mark.skipif(
    find_spec("nvidia.nccl") is None if find_spec("nvidia") else True, reason="needs nvidia-nccl-cu12 or -cu13"
)

REAL = """
import json, sys
from eplb_pynccl.binding import NcclError, load_binding, spell
from eplb_pynccl.options import PyNcclOptions
binding = load_binding(PyNcclOptions(binding=sys.argv[1]))
ids = [binding.unique_id() for _ in range(2)]
facts = {"version": spell(binding.version()), "path": binding.library_path(), "name": binding.name}
facts["ids"] = [len(each) for each in ids] + [ids[0] != ids[1]]
binding.group_start()
binding.group_end()
try:
    binding.init(2, ids[0], 0)
except NcclError as error:
    facts["refused"] = str(error)
print(json.dumps(facts))
"""


@real_library
@without_a_driver
@pytest.mark.parametrize("binding", ["nccl4py", "cupy"])
def test_the_real_nccl_answers_and_refuses_to_connect_without_a_driver(binding):
    if find_spec("nccl" if binding == "nccl4py" else "cupy") is None:
        pytest.skip(f"{binding} is not installed")
    facts = json.loads(python(REAL, binding).splitlines()[-1])
    assert facts["version"].startswith("2.")
    assert Path(facts["path"]).name == "libnccl.so.2"
    assert "nvidia" in facts["path"]
    assert facts["ids"] == [128, 128, True]
    assert "unhandled cuda error" in facts["refused"]
    assert facts["name"].startswith(f"{binding} ")


@real_library
@without_a_driver
def test_nccls_own_words_reach_the_error():
    code = (
        "from eplb_pynccl import nccl4py_binding\n"
        "binding = nccl4py_binding.load()\n"
        "from nccl.bindings import nccl as raw\n"
        "try:\n    binding.in_progress(raw.Comm(0))\nexcept Exception as error:\n    print(type(error).__name__, error)"
    )
    assert python(code).startswith("NcclError InvalidArgument (4): invalid argument")


def test_the_backend_refuses_to_be_built_without_its_library(tmp_path):
    from eplb_pynccl.backend import PyNcclBackend

    class Context:
        rank, members = 0, (0, 1)

    with pytest.raises(DiscoveryError) as caught:
        PyNcclBackend(PyNcclOptions(library=str(tmp_path / "none.so")), Context())
    assert caught.value.code == "EPLB-D004"
