"""Importing the core, discovering and selecting load no heavy library, print nothing and set no variable."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SITES = Path(__file__).parent / "data" / "sites"
HEAVY = {"torch", "numpy", "nixl", "nixl_cu12", "cupy", "nccl"}

PROBE = """
import json, os, sys

before = dict(os.environ)
{doing}
report = {{"modules": sorted(sys.modules), "environment": dict(os.environ) == before, "found": {found}}}
with open(sys.argv[1], "w") as file:
    json.dump(report, file)
"""


def probed(tmp_path, doing, found="None", **environment):
    """Run statements in an interpreter of its own; what they loaded, what they changed, and that they were silent."""
    # Few variables: what this process has imported may have set the very one that the child must not set.
    kept = {name: os.environ[name] for name in ("HOME", "LD_LIBRARY_PATH", "PATH", "PYTHONPATH") if name in os.environ}
    path = os.pathsep.join([str(SITES / "sound"), *filter(None, [kept.get("PYTHONPATH")])])
    answer = tmp_path / "answer.json"
    child = subprocess.run(
        [sys.executable, *["-O"] * sys.flags.optimize, "-c", PROBE.format(doing=doing, found=found), str(answer)],
        env=kept | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"} | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    assert (child.stdout, child.stderr) == ("", "")
    return json.loads(answer.read_text())


def test_importing_the_core_loads_no_library(tmp_path):
    report = probed(tmp_path, "import eplb_core")
    assert not (HEAVY | {"pydantic"}) & set(report["modules"])
    assert report["environment"]


def test_the_plugin_authors_names_load_no_library(tmp_path):
    report = probed(tmp_path, "from eplb_core import API_VERSION, BackendInfo, EplbError, hookimpl")
    assert not (HEAVY | {"pydantic"}) & set(report["modules"])


def test_discovering_all_that_is_installed_loads_no_library(tmp_path):
    report = probed(tmp_path, "import eplb_core; catalog = eplb_core.discover()", "sorted(catalog.backends)")
    assert "pigeon" in report["found"]
    assert not (HEAVY | {"pydantic"}) & set(report["modules"])
    assert report["environment"]


@pytest.mark.parametrize("communicator", ["'pigeon'", "None"])
def test_selecting_loads_neither_torch_nor_the_backend(tmp_path, communicator):
    doing = f"import eplb_core as eplb; choice = eplb.select(eplb.EPLBConfig(communicator={communicator}), 'cpu')"
    report = probed(tmp_path, doing, "choice.name", EPLB_PLUGINS="pigeon")
    assert report["found"] == "pigeon"
    assert not (HEAVY | {"eplb_pigeon.backend"}) & set(report["modules"])
    assert report["environment"]


def test_selecting_among_all_that_is_installed_loads_no_library(tmp_path):
    doing = "import eplb_core as eplb; choice = eplb.select(eplb.EPLBConfig(), 'cpu')"
    report = probed(tmp_path, doing, "sorted(choice.reasons)")
    assert {"pigeon", "heron"} <= set(report["found"])
    assert not HEAVY & set(report["modules"])
    assert report["environment"]


def test_every_public_name_is_listed_before_it_is_loaded(tmp_path):
    doing = "import eplb_core; missing = sorted(set(eplb_core.__all__) - set(dir(eplb_core)))"
    report = probed(tmp_path, doing, "missing")
    assert report["found"] == []
    assert not HEAVY & set(report["modules"])


def test_a_name_that_does_not_exist_is_an_attribute_error():
    import eplb_core

    with pytest.raises(AttributeError, match="has no attribute 'Communicater'"):
        eplb_core.Communicater  # noqa: B018 - the access is the test
