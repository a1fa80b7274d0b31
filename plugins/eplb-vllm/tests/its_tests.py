"""vLLM's own tests of EPLB: fetched from the sdist of the release that is installed, changed for host memory, run."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tarfile
import time
import traceback
import xml.etree.ElementTree as ET
from collections import Counter
from importlib.metadata import version
from pathlib import Path

import on_cpu
import pytest

import eplb_vllm

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


def texts_of(sdist: Path) -> dict[str, str]:
    """Return the tests' files as they are, by name."""
    wanted = {f"tests/distributed/{name}" for name in FILES}
    texts = {}
    with tarfile.open(sdist) as archive:
        for member in archive:
            _, _, path = member.name.partition("/")
            content = archive.extractfile(member) if path in wanted else None
            if content is not None:
                texts[Path(path).name] = content.read().decode()
    return texts


def write(texts: dict[str, str], folder: Path, port: int, core: dict | None) -> None:
    """Write them, changed in device, process group, port and start method alone; with the key where `core` is."""
    tests = folder / "tests" / "distributed"
    tests.mkdir(parents=True)
    for name, text in texts.items():
        (tests / name).write_text(_changed(text, port, core))
    (folder / "tests" / "__init__.py").touch()
    (tests / "__init__.py").touch()


def _changed(text: str, port: int, core: dict | None) -> str:
    text = text.replace('"nccl"', '"gloo"').replace('"cuda"', '"cpu"').replace('"spawn"', '"fork"')
    text = text.replace('"12345"', f'"{port}"')
    # "cpu:1" is another device to torch than "cpu", though there is but one.
    text = re.sub(r'torch\.device\(f"\{[^"]*\}:\{\w+\}"\)', 'torch.device("cpu")', text)
    if core is not None:
        text = text.replace("VllmConfig()", f"VllmConfig(additional_config={{'eplb_core': {core!r}}})")
    return text


def run(folder: Path, words: str, limit_s: float) -> tuple[Counter, str]:
    """Run them in a fork of this process; return how many of each outcome, by function, and what pytest said."""
    report, said = folder / "report.xml", folder / "said.txt"
    arguments = ["-q", "-p", "no:cacheprovider", "--rootdir", str(folder), "-c", os.devnull]
    arguments += [f"--junitxml={report}", "-k", words, str(folder / "tests")]
    child = os.fork()
    if child == 0:
        _run_here(folder, arguments, said)
    try:
        _wait(child, limit_s)
    finally:
        text = said.read_text()[-8000:] if said.is_file() else ""
    outcomes: Counter = Counter()
    if report.is_file():
        for case in ET.parse(report).getroot().iter("testcase"):
            kinds = {element.tag for element in case}
            outcome = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
            outcomes[case.get("name").partition("[")[0], outcome] += 1
    return outcomes, text


def _run_here(folder: Path, arguments: list[str], said: Path) -> None:
    descriptor = os.open(said, os.O_WRONLY | os.O_CREAT)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout = os.fdopen(1, "w")
    sys.stderr = os.fdopen(2, "w")
    try:
        os.chdir(folder)
        sys.path.insert(0, str(folder))
        on_cpu.let_its_nixl_use_host_memory()
        eplb_vllm.register()
        pytest.main(arguments)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _wait(child: int, limit_s: float) -> None:
    until = time.monotonic() + limit_s
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > until:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise AssertionError(f"vLLM's tests were not over within {limit_s:g} s")
        time.sleep(0.05)
