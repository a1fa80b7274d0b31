"""A CuPy that cannot be used says why and what to do, by its allocators alone; everything else goes on."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from eplb_cupy import library
from eplb_cupy.library import distributions, why_misinstalled

ROOT = Path(__file__).parents[3]
needs_cupy = pytest.mark.skipif(not distributions(), reason="needs CuPy")


def folder(path: Path, *names: str) -> list[str]:
    for name in names:
        (path / name).mkdir(parents=True)
    return [str(path)]


# --- what is installed ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("metadata", "name"),
    [
        ("cupy_cuda12x-13.6.0.dist-info", "cupy-cuda12x"),
        ("cupy_cuda13x-14.2.0.dist-info", "cupy-cuda13x"),
        ("cupy_rocm_7_0-14.2.0.dist-info", "cupy-rocm-7-0"),
        ("cupy_rocm_5_0-13.6.0.dist-info", "cupy-rocm-5-0"),
        ("amd_cupy-13.5.1.dist-info", "amd-cupy"),
        ("cupy-14.2.0.dist-info", "cupy"),
        ("cupy-14.2.0-py3.11-linux-x86_64.egg-info", "cupy"),
    ],
)
def test_every_distribution_that_holds_cupy_is_known_by_its_metadata(tmp_path, metadata, name):
    assert list(distributions(folder(tmp_path, metadata))) == [name]


def test_distributions_that_merely_use_it_are_none(tmp_path):
    used = folder(tmp_path, "eplb_cupy-0.1.0.dist-info", "cupy_xarray-0.1.4.dist-info", "cupychol-0.1.5.dist-info")
    assert distributions(used) == {}


def test_two_distributions_together_are_refused_with_how_to_get_rid_of_them(tmp_path, monkeypatch):
    both = folder(tmp_path, "cupy_cuda12x-14.2.0.dist-info", "cupy_cuda13x-14.2.0.dist-info")
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert why_misinstalled(both) == (
        "cupy-cuda12x and cupy-cuda13x are installed together and overwrite each other's files: "
        "pip uninstall cupy-cuda12x cupy-cuda13x, then pip install cupy-cuda12x"
    )


WRONG_CUDA = (
    "cupy-cuda13x 14.2.0 was built for another CUDA than torch (12.8): "
    "pip uninstall cupy-cuda13x, then pip install cupy-cuda12x"
)


@pytest.mark.parametrize(
    ("cuda", "said"),
    [
        ("12.8", WRONG_CUDA),
        ("13.0", None),
        (None, None),
    ],
)
def test_a_cupy_for_another_cuda_than_torchs_is_refused_with_the_right_one(tmp_path, monkeypatch, cuda, said):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    assert why_misinstalled(folder(tmp_path, "cupy_cuda13x-14.2.0.dist-info")) == said


def test_a_missing_driver_is_named_with_what_to_do(monkeypatch):
    monkeypatch.setattr(library, "_NVIDIA_DRIVER", "libno_such_driver.so.1")
    text = library.why_no_driver()
    assert text is not None
    assert text.startswith("there is no NVIDIA driver")
    assert "leave staging unset" in text


# --- what comes of it -------------------------------------------------------------------------------------------------

FAKE = """
import types
from types import SimpleNamespace
{body}
"""
BUILT_FOR_12 = """
runtime = SimpleNamespace(runtimeGetVersion=lambda: 12090, is_hip=False)
cuda = SimpleNamespace(runtime=runtime, alloc_pinned_memory=lambda nbytes: None)
__version__ = "13.6.0"
"""

PROGRAM = """
import sys
import torch
torch.version.cuda = {cuda!r}
import eplb_core as eplb
from eplb_core.errors import ConfigError
from torch.distributed import HashStore

def build(staging, name):
    weights = [[torch.zeros(2, 8)]]
    control = eplb.ControlPlane.from_store(HashStore(), rank=0, world_size=1)
    config = eplb.EPLBConfig(communicator="torch_gloo", staging=staging, use_async=False)
    with eplb.Communicator(config, weights, control, name=name) as comm:
        return comm.rearrange([[0, 1]], [[1, 0]]).committed_layers

try:
    build("cupy_pinned", "first")
except ConfigError as error:
    print(error.code, error)
print(build(None, "second"), "cupy" in sys.modules)
"""


def run(
    tmp_path: Path, body: str, *, cuda: str | None = None, metadata: tuple[str, ...] = (), driver: bool = True
) -> str:
    """Run a host that names ``cupy_pinned``, then none, with a CuPy of the test's own; return what it printed.

    With `driver` one is taken to be there, so that what comes after it shows.
    """
    site = tmp_path / "site"
    folder(site, "cupy", *metadata)
    (site / "cupy" / "__init__.py").write_text(FAKE.format(body=textwrap.dedent(body)))
    found = "import eplb_cupy.library\neplb_cupy.library.why_no_driver = lambda: None\n" if driver else ""
    paths = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-c", found + PROGRAM.format(cuda=cuda)],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return " ".join(done.stdout.split())


@needs_cupy
@pytest.mark.parametrize(
    "raised",
    [
        "ImportError('libnvrtc.so.13: cannot open')",
        "SystemExit(3)",
        "RuntimeError('half installed')",
        "OSError('gone')",
    ],
)
def test_an_import_that_raises_anything_is_a_refusal_and_torchs_staging_goes_on(tmp_path, raised):
    said = run(tmp_path, f"raise {raised}")
    kind, text = raised.split("(")[0], raised.split("(")[1].strip("')")
    assert said.startswith(
        f"EPLB-C014 Staging allocator 'cupy_pinned' cannot be used: CuPy does not import ({kind}: {text}): "
        "pip install --force-reinstall cupy"
    )
    assert said.endswith("(0,) False")


@needs_cupy
def test_a_cupy_that_turns_out_to_be_of_another_cuda_is_refused(tmp_path):
    own = next(iter(distributions()))
    major = "13" if own == "cupy-cuda13x" else "12"
    said = run(tmp_path, BUILT_FOR_12.replace("12090", "11080"), cuda=f"{major}.0")
    assert f"CuPy 13.6.0 was built for another CUDA than torch ({major}.0)" in said
    assert f"then pip install cupy-cuda{major}x" in said
    assert "(0,) True" in said


@needs_cupy
def test_two_distributions_are_refused_before_either_is_imported(tmp_path):
    other = "cupy_cuda12x" if "cupy-cuda13x" in distributions() else "cupy_cuda13x"
    said = run(tmp_path, "raise SystemExit(9)", metadata=(f"{other}-14.0.0.dist-info",))
    assert "cannot be used: cupy-cuda12x and cupy-cuda13x are installed together" in said
    assert said.endswith("(0,) False")


@needs_cupy
@pytest.mark.skipif(library.why_no_driver() is None, reason="there is a driver")
def test_without_a_driver_it_is_refused_before_cupy_is_imported(tmp_path):
    said = run(tmp_path, "raise SystemExit(9)", driver=False)
    assert "cannot be used: there is no NVIDIA driver (libcuda.so.1) here" in said
    assert said.endswith("(0,) False")


@needs_cupy
@pytest.mark.skipif(library.why_no_driver() is None, reason="there is a driver")
def test_its_probe_says_that_no_memory_can_be_had(monkeypatch):
    done = subprocess.run(
        [sys.executable, "-m", "eplb_core.cli.probe", "staging", "cupy_pinned", "cpu"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "EPLB-C014" in done.stdout
    assert "cudaErrorInsufficientDriver" in done.stdout
    assert "Install the GPU's driver" in done.stdout
