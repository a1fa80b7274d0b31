"""When live weights cannot be read where they lie, the probe of ``nixl`` says so, and which staging helps."""

from __future__ import annotations

import shutil
import subprocess

import pytest

pytest.importorskip("eplb_nixl")
from eplb_nixl.options import NixlOptions
from eplb_nixl.probe import live_weights

# The one function of the driver that is asked: can the memory be exported by an IPC handle, and by which others?
DRIVER = """
int cuPointerGetAttribute(void *data, int attribute, unsigned long long pointer) {
    if (attribute == 10) *(int *)data = LEGACY;
    if (attribute == 14) *(unsigned long long *)data = HANDLES;
    return 0;
}
"""


@pytest.fixture
def driver(tmp_path):
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("needs a C compiler")

    def build(legacy: int, handles: int) -> str:
        source, library = tmp_path / "driver.c", tmp_path / f"libdriver{legacy}{handles}.so"
        source.write_text(DRIVER.replace("LEGACY", str(legacy)).replace("HANDLES", str(handles)))
        subprocess.run([compiler, "-shared", "-fPIC", str(source), "-o", str(library)], check=True, timeout=60)
        return str(library)

    return build


@pytest.mark.parametrize("mode", ["auto", "staged"])
def test_memory_without_a_handle_is_said_to_be_staged_and_how_to_keep_it_off_tcp(device, driver, mode):
    said = live_weights(NixlOptions(mode=mode), str(device), driver(legacy=0, handles=1))
    assert said.startswith("cannot be registered for RDMA or NVLink: torch's memory lies in memory without a CUDA IPC")
    assert "staging='cupy_device' keeps off TCP" in said
    assert ("mode auto copies rows into send buffers first" if mode == "auto" else "mode is staged") in said


@pytest.mark.parametrize(("legacy", "handles"), [(1, 0), (0, 8)])
def test_memory_that_can_be_exported_is_said_to_be_read_where_it_lies(device, driver, legacy, handles):
    said = live_weights(NixlOptions(), str(device), driver(legacy, handles))
    assert said.endswith("can be registered and read where it lies")


def test_host_memory_can_always_be_read_where_it_lies():
    assert live_weights(NixlOptions(), "cpu") == "in host memory, which is read where it lies"
