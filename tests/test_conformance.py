"""The kit on the backends of this repository: what they declare, they can. The example's has its own suite."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

import eplb_core as eplb
from eplb_core.discovery.usable import why_not
from eplb_core.testing.conformance import BackendConformance, kit_tests

pytestmark = pytest.mark.slow


class _UsableOnly(BackendConformance):
    """Skips where the backend's library is not installed."""

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _usable(cls):
        info = eplb.discover().backends.get(cls.backend_name)
        reason = "not installed" if info is None else why_not(info, use_async=False, device_type="cpu", elastic=False)
        if reason is not None:
            pytest.skip(f"{cls.backend_name}: {reason}")


class TestTorchGloo(_UsableOnly):
    backend_name = "torch_gloo"


class TestNixl(_UsableOnly):
    backend_name = "nixl"


class TestTorchNcclOverGloo(_UsableOnly):
    """Its own logic, batches among it, over the group of CPU tensors that it accepts as any other."""

    backend_name = "torch_nccl"
    device_group = True


def run_pytest(folder, text, *arguments):
    (folder / "test_it.py").write_text(textwrap.dedent(text))
    (folder / "pytest.ini").write_text("[pytest]\n")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-c",
        "pytest.ini",
        *arguments,
        "test_it.py",
    ]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=150, check=False, env=os.environ)


def test_deselecting_kit_tests_is_noticed(tmp_path):
    """Also by a conftest, which the class itself cannot see."""
    (tmp_path / "conftest.py").write_text(
        "def pytest_collection_modifyitems(items):\n"
        "    items[:] = [item for item in items if item.name != 'test_a_row_arrives_whole']\n"
    )
    text = """
        from eplb_core.testing.conformance import BackendConformance

        class TestMine(BackendConformance):
            backend_name = "torch_gloo"
    """
    done = run_pytest(tmp_path, text, "-k", "kit_is_complete or arrives or declaration_is_sound")
    assert done.returncode == 1
    assert "not collected: ['test_" in done.stdout
    assert "'test_a_row_arrives_whole'" in done.stdout


def test_an_excused_test_that_passes_is_a_failure(tmp_path):
    text = """
        from eplb_core.testing.conformance import BackendConformance

        class TestMine(BackendConformance):
            backend_name = "torch_gloo"
            excused = {"test_the_declaration_is_sound": "we are not ready"}
    """
    done = run_pytest(tmp_path, text, "-k", "declaration_is_sound")
    assert done.returncode == 1
    assert "[XPASS(strict)] we are not ready" in done.stdout


def test_a_backend_that_cannot_be_used_fails_once_and_the_rest_is_not_run(tmp_path):
    text = """
        from eplb_core.testing.conformance import BackendConformance

        class TestMine(BackendConformance):
            backend_name = "torch_gloo"
            device_type = "gpu"
    """
    done = run_pytest(tmp_path, text, "-rs", "-k", "arrives or declaration_is_sound or wait_")
    assert done.returncode == 1
    assert done.stdout.count("torch_gloo was to move weights on gpu, and torch has no such device here") > 1
    assert "1 error" in done.stdout
    assert "passed" not in done.stdout
    assert "failed" not in done.stdout
    assert "6 skipped" in done.stdout


def test_a_backend_that_cannot_be_built_is_not_accused_of_anything_else(tmp_path):
    text = """
        from eplb_core.testing.conformance import BackendConformance

        class TestMine(BackendConformance):
            backend_name = "torch_gloo"
            options = {"no_such_option": 1}
    """
    alone = run_pytest(tmp_path, text, "-rs", "-k", "arrives or keeps_its_limit")
    assert alone.returncode == 1
    assert "1 error" in alone.stdout, "green, with nothing tested"
    assert "test_a_communicator_can_be_built fails" in alone.stdout
    assert "no_such_option" in alone.stdout
    assert "is not copied" not in alone.stdout
    whole = run_pytest(tmp_path, text, "-rs", "-k", "can_be_built or arrives or keeps_its_limit")
    assert "1 failed, 3 skipped" in whole.stdout
    assert "no_such_option" in whole.stdout


def test_every_kit_test_says_what_its_failure_means():
    for name, test in kit_tests().items():
        meaning = (test.__doc__ or "").strip()
        assert len(meaning) > 40, name
        assert meaning.endswith("."), name
