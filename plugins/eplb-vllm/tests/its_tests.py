"""vLLM's own tests of EPLB: fetched from the sdist of the release that is installed, changed for host memory, run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import xml.etree.ElementTree as ET
from collections import Counter
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).parent
FILES = ("__init__.py", "eplb_utils.py", "test_eplb_execute.py", "test_eplb_fused_moe_layer.py", "test_eplb_utils.py")
FETCH_LIMIT_S = 300.0


class CannotFetchError(Exception):
    """The sdist could not be had."""


def fetch() -> Path:
    """Return the sdist of the vLLM that is installed; it is kept in the environment that vLLM is in."""
    release = version("vllm")
    folder = Path(sys.prefix) / "share" / "eplb-vllm-tests"
    folder.mkdir(parents=True, exist_ok=True)
    kept = folder / f"vllm-{release}.tar.gz"
    if kept.is_file():
        return kept
    command = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-build-isolation"]
    command += ["--no-deps", "--no-binary", "vllm", "-d", str(folder), f"vllm=={release}"]
    # pip asks an sdist for its metadata; these two let vLLM's setup.py answer without a compiler.
    env = {**os.environ, "VLLM_VERSION_OVERRIDE": release, "VLLM_TARGET_DEVICE": "empty"}
    env.pop("RES_OPTIONS", None)  # which keeps the tests from asking name servers; pip has to
    try:
        subprocess.run(command, env=env, check=True, capture_output=True, text=True, timeout=FETCH_LIMIT_S)
    except subprocess.CalledProcessError as error:
        raise CannotFetchError((error.stderr.strip().splitlines() or ["pip said nothing"])[-1]) from error
    except subprocess.TimeoutExpired as error:
        raise CannotFetchError(str(error)) from error
    return kept


def unpack(sdist: Path, folder: Path, port: int, core: dict | None) -> Path:
    """Write the tests, changed in device, process group, port and start method alone; with the key where `core` is."""
    tests = folder / "tests" / "distributed"
    tests.mkdir(parents=True)
    (folder / "tests" / "__init__.py").touch()
    with tarfile.open(sdist) as archive:
        for member in archive:
            _, _, path = member.name.partition("/")
            if member.isfile() and path in {f"tests/distributed/{name}" for name in FILES}:
                text = archive.extractfile(member).read().decode()
                (tests / Path(path).name).write_text(_changed(text, port, core))
    (tests / "__init__.py").touch()
    (folder / "conftest.py").write_text(
        f"import sys; sys.path.insert(0, {str(HERE)!r})\n"
        "import on_cpu\n"
        "on_cpu.stand_in_for_an_accelerator()\n"
        "on_cpu.let_its_nixl_use_host_memory()\n"
        "import eplb_vllm; eplb_vllm.register()\n"
    )
    return folder


def _changed(text: str, port: int, core: dict | None) -> str:
    text = text.replace('"nccl"', '"gloo"').replace('"cuda"', '"cpu"').replace('"spawn"', '"fork"')
    text = text.replace('"12345"', f'"{port}"')
    # "cpu:1" is another device to torch than "cpu", though there is but one.
    text = re.sub(r'torch\.device\(f"\{[^"]*\}:\{\w+\}"\)', 'torch.device("cpu")', text)
    if core is not None:
        text = text.replace("VllmConfig()", f"VllmConfig(additional_config={{'eplb_core': {core!r}}})")
    return text


def run(folder: Path, words: str, limit_s: float) -> tuple[Counter, str]:
    """Run them in a process of their own; return how many of each outcome, by function, and what pytest said."""
    report = folder / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", "--rootdir"]
    command += [str(folder), "-c", os.devnull, f"--junitxml={report}", "-k", words, str(folder / "tests")]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=limit_s)
    outcomes: Counter = Counter()
    if report.is_file():
        for case in ET.parse(report).getroot().iter("testcase"):
            kinds = {child.tag for child in case}
            outcome = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
            outcomes[case.get("name").partition("[")[0], outcome] += 1
    return outcomes, ended.stdout[-6000:] + ended.stderr[-2000:]
