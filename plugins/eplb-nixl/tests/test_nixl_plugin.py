"""What the plugin declares, what it imports when, its options, its probe."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

import eplb_core as eplb
from eplb_nixl import library, probe
from eplb_nixl.backend import NixlBackend
from eplb_nixl.library import NixlError, why_not
from eplb_nixl.options import NixlOptions
from eplb_nixl.transport import restriction

CODE = """
import json, os, sys
before = dict(os.environ)
import eplb_nixl.hooks
info = eplb_nixl.hooks.eplb_register_backends()
why_not = info.available()
loaded = {name.partition(".")[0] for name in sys.modules}
heavy = sorted(loaded & {"torch", "numpy", "pydantic"})
nixl = sorted(name for name in loaded if "nixl" in name)
print(json.dumps({"heavy": heavy, "why_not": why_not, "nixl": nixl, "same": before == dict(os.environ)}))
"""


def in_a_child(code: str, **environment: str) -> dict:
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={**os.environ, **environment}
    )
    return json.loads([line for line in ran.stdout.splitlines() if line.startswith("{")][-1])


def test_the_descriptor_is_found_and_says_what_the_backend_is():
    info = eplb.discover().backends["nixl"]
    assert (info.label, info.auto_priority, info.device_types) == ("NIXL", 100, ("*",))
    assert info.async_safe is True
    assert info.zero_copy
    assert info.elastic_safe
    assert not info.batched
    assert why_not() is None


def test_neither_the_descriptor_nor_its_availability_imports_anything_heavy():
    said = in_a_child(CODE)
    assert said == {"heavy": [], "why_not": None, "nixl": ["eplb_nixl"], "same": True}


def package(folder: Path, name: str, text: str = "") -> None:
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text("")
    (folder / name / "_api.py").write_text(text)


WITHOUT_SITE = """
import json, sys
from eplb_nixl import library
import importlib.machinery
library.find_spec = lambda name: importlib.machinery.PathFinder.find_spec(name, PATHS)
print(json.dumps({"why": library.why_not(), "name": library._candidate()}))
"""


@pytest.mark.parametrize(
    ("packages", "expected"),
    [
        ([], None),
        (["rixl"], "rixl"),
        (["nixl_cu12"], "nixl_cu12"),
        (["nixl_cu12", "nixl_cu13"], "nixl_cu13"),
        (["nixl", "nixl_cu12", "rixl"], "nixl"),
        (["nixl_rocm"], "nixl_rocm"),
        (["nixl"], None),
    ],
)
def test_which_package_is_taken(tmp_path, packages, expected):
    for name in packages:
        package(tmp_path, name)
    said = in_a_child(WITHOUT_SITE.replace("PATHS", repr([str(tmp_path)])))
    assert said["name"] == expected
    if expected is None:
        assert "nixl-cu12" in said["why"]
    else:
        assert said["why"] is None


def test_a_torch_that_is_there_decides_between_the_wheels(tmp_path, monkeypatch):
    for name in ("nixl_cu12", "nixl_cu13"):
        package(tmp_path, name)
    import importlib.machinery

    import torch

    monkeypatch.setattr(
        library, "find_spec", lambda name: importlib.machinery.PathFinder.find_spec(name, [str(tmp_path)])
    )
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert library._candidate() == "nixl_cu12"
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert library._candidate() == "nixl_cu13"


def test_a_nixl_that_does_not_load_is_said_and_not_replaced(tmp_path):
    package(tmp_path, "nixl_cu13", "raise ImportError('libcudart.so.13: cannot open shared object file')")
    package(tmp_path, "rixl")
    code = f"""
import json, sys, importlib.machinery
sys.path.insert(0, {str(tmp_path)!r})
from eplb_nixl import library
library.find_spec = lambda name: importlib.machinery.PathFinder.find_spec(name, [{str(tmp_path)!r}])
try:
    library.load_library()
except library.NixlError as error:
    print(json.dumps({{"text": str(error)}}))
"""
    text = in_a_child(code)["text"]
    assert "nixl_cu13 does not load" in text
    assert "libcudart.so.13" in text
    assert "pip install eplb-nixl[cu12]" in text


def test_options_are_described_frozen_and_closed():
    assert all(field.description for field in NixlOptions.model_fields.values())
    with pytest.raises(ValidationError, match="Extra inputs"):
        NixlOptions(modus="staged")
    with pytest.raises(ValidationError, match="frozen"):
        NixlOptions().mode = "staged"  # type: ignore[misc]
    with pytest.raises(ValidationError, match="require_transport names UCX transports"):
        NixlOptions(backends=("LIBFABRIC",), require_transport=("rc",))
    assert NixlOptions(require_transport="rc, cuda_copy").require_transport == ("rc", "cuda_copy")
    assert NixlOptions(backends=["UCX"]).backends == ("UCX",)


def test_a_transport_is_required_by_leaving_ucx_no_other():
    assert restriction((), {"UCX_TLS": "tcp"}) == ""
    assert restriction(("rc",), {}) == "rc"
    assert restriction(("rc", "cuda_copy"), {"UCX_TLS": "cuda_copy,rc"}) == ""
    with pytest.raises(NixlError, match="start every rank with UCX_TLS=rc,cuda_copy"):
        restriction(("rc", "cuda_copy"), {})
    with pytest.raises(NixlError, match="UCX_TLS=rc,tcp allows tcp"):
        restriction(("rc",), {"UCX_TLS": "rc,tcp"})


PROBE = """
import json, sys
from eplb_nixl.backend import NixlBackend
from eplb_nixl.options import NixlOptions
try:
    print(json.dumps({"facts": dict(NixlBackend.probe(NixlOptions(**json.loads(sys.argv[1]))))}))
except Exception as error:
    print(json.dumps({"kind": type(error).__name__, "text": str(error)}))
"""


def probed(options: dict, **environment: str) -> dict:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("UCX_")}
    ran = subprocess.run(
        [sys.executable, "-c", PROBE, json.dumps(options)],
        capture_output=True,
        text=True,
        check=True,
        env={**clean, **environment},
    )
    return json.loads([line for line in ran.stdout.splitlines() if line.startswith("{")][-1])


def test_the_probe_reports_versions_paths_and_memory():
    facts = probed({})["facts"]
    assert facts["nixl"] == f"{library.load_library().version} ({library.load_library().module})"
    assert facts["ucx"][0].isdigit()
    assert Path(facts["libucp"]).exists()
    assert facts["backends"] == "UCX"
    assert facts["memory types"].startswith("DRAM")
    assert "transport" not in facts


def test_a_required_transport_carries_a_read_or_the_probe_fails():
    facts = probed({"require_transport": ["tcp"]})["facts"]
    assert facts["transport"].startswith("tcp ")
    refused = probed({"require_transport": ["rc"]})
    assert refused["kind"] == "NixlError"
    assert "required transport: rc" in refused["text"]
    elsewhere = probed({"require_transport": ["rc"]}, UCX_TLS="tcp")
    assert "UCX_TLS=tcp allows tcp" in elsewhere["text"]


def test_a_backend_of_nixl_that_is_not_there_is_named():
    assert "NO_SUCH_PLUGIN" in probed({"backends": ["NO_SUCH_PLUGIN"]})["text"]


def test_two_ucx_libraries_are_warned_about_by_path(monkeypatch, caplog):
    paths = ["/usr/lib/libucp.so.0", "/opt/hpcx/lib/libucp.so.0"]
    monkeypatch.setattr(probe, "loaded_ucp", lambda: paths)
    with caplog.at_level(logging.WARNING, "eplb_nixl.probe"):
        facts = NixlBackend.probe(None)
    assert all(path in caplog.text for path in paths)
    assert facts["libucp"] == ", ".join(paths)


def test_the_only_libucp_of_this_process_is_found():
    library.load_library()
    from eplb_nixl.agent import Agent

    Agent(library.load_library(), "eplb-test-paths").close()
    (path,) = library.loaded_ucp()
    assert Path(path).name.startswith("libucp")
    assert library.ucx_version(path).count(".") == 2
    assert library.ucx_version("/nonexistent/libucp.so") == "unknown"


@pytest.mark.parametrize(("level", "greets"), [(None, False), ("INFO", True)])
def test_an_agent_greets_only_users_who_asked_nixl_for_a_level(level, greets):
    script = (
        "from eplb_nixl.agent import Agent; from eplb_nixl.library import load_library; import logging\n"
        "agent = Agent(load_library(), 'quiet'); agent.close()\n"
        "logging.getLogger('nixl.test').info('still heard')"
    )
    environment = {name: value for name, value in os.environ.items() if name != "NIXL_LOG_LEVEL"}
    environment |= {"NIXL_LOG_LEVEL": level} if level else {}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=True)
    said = done.stdout + done.stderr
    assert ("Initialized NIXL agent" in said) is greets
    assert "still heard" in said  # NIXL's own logger is left as it was
