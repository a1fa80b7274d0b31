"""CuPy with memory to give: page-locked where there is a driver, ordinary where there is none."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
for folder in (ROOT, ROOT / "tests" / "support"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


@pytest.fixture
def pool():
    """CuPy's own pinned pool, empty, over host memory whose every piece is on the books of `pinned_on_host`."""
    pytest.importorskip("cupy")
    from tests.support import pinned_on_host

    pool = pinned_on_host.install()
    if pool is None:
        pytest.skip("there is a driver, so CuPy's pool makes page-locked memory: see tests/gpu")
    gc.collect()
    pool.free_all_blocks()
    pinned_on_host.sizes.clear()
    return pool


@pytest.fixture
def device():
    import fake_device

    yield fake_device.require()
    if fake_device.why_not() is None:
        fake_device.reset()
