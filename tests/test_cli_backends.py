"""``eplb backends``: what is installed is shown as it is, broken parts too, and no backend is imported for it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch

from eplb_core.cli import device

INFO = 'BackendInfo({name!r}, "moves rows", API_VERSION, "{target}", {fields})'


class Site:
    """A folder on the path in which distributions are installed, and the command run with it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, file: str, text: str) -> None:
        path = self.folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))

    def install(self, dist: str, version: str, entry_point: str, hooks: str) -> None:
        module = f"{dist.replace('-', '_')}_{entry_point}_hooks"
        self.write(f"{module}.py", hooks)
        info = f"{dist.replace('-', '_')}-{version}.dist-info"
        self.write(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {dist}\nVersion: {version}\n")
        self.write(f"{info}/entry_points.txt", f"[eplb_core.plugins]\n{entry_point} = {module}\n")

    def install_backend(self, name: str, dist: str = "", version: str = "1.2.3", target: str = "", **fields) -> None:
        given = ", ".join(f"{key}={value}" for key, value in fields.items())
        info = INFO.format(name=name, target=target or "nowhere:Backend", fields=given)
        hooks = ["from eplb_core import API_VERSION, BackendInfo, hookimpl"]
        hooks += ["@hookimpl", "def eplb_register_backends():", f"    return {info}", ""]
        self.install(dist or f"eplb-{name}", version, name, "\n".join(hooks))

    def run(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        paths = os.pathsep.join(filter(None, [str(self.folder), os.environ.get("PYTHONPATH")]))
        clean = {key: value for key, value in os.environ.items() if not key.startswith("EPLB_") and key != "COLUMNS"}
        return subprocess.run(
            [sys.executable, "-m", "eplb_core.cli", "backends", *arguments],
            env={**clean, "PYTHONPATH": paths, **environment},
            capture_output=True,
            text=True,
            timeout=120,
        )

    def document(self, *arguments: str, **environment: str):
        result = self.run("--json", *arguments, **environment)
        assert result.returncode == 0, result.stderr
        return json.loads(result.stdout)

    def backend(self, name: str, *arguments: str, **environment: str):
        return next(b for b in self.document(*arguments, **environment)["backends"] if b["name"] == name)


@pytest.fixture
def site(tmp_path):
    return Site(tmp_path / "site")


def folded(text: str) -> str:
    return " ".join(text.replace("│", " ").split())


def test_a_backend_is_shown_with_its_origin_and_whether_it_is_usable(site):
    site.install_backend("swift", version="4.5.6", async_safe=True, auto_priority=7)
    table = site.run("--device", "cpu").stdout
    row = next(line for line in table.splitlines() if line.startswith("swift"))
    assert folded(row) == "swift eplb-swift 4.5.6 1 yes 7 yes"


def test_why_a_backend_is_not_usable_is_shown_with_what_to_install(site):
    site.install_backend("absent", async_safe=True, requires="('no_such_library',)", install_hint="'pip install lib'")
    shown = site.run("--device", "cpu").stdout
    assert "no: no_such_library is not installed" in folded(shown)
    assert "pip install lib" in shown
    document = site.backend("absent", "--device", "cpu")
    assert (document["usable"], document["why_not"]) == (False, "no_such_library is not installed")
    assert document["install_hint"] == "pip install lib"


@pytest.mark.parametrize(
    ("requires", "reason", "hinted"),
    [
        ("('json',)", "there is no driver here", False),
        ("()", "there is no driver here", False),
        ("()", "neither of one and other is installed", True),
        ("()", "it is not installed: pip install lib", False),
        ("('json', 'no_such_library')", "never asked", True),
    ],
)
def test_what_to_install_is_said_only_where_a_package_is_missing(site, requires, reason, hinted):
    site.install_backend(
        "absent", async_safe=True, requires=requires, available=f"lambda: {reason!r}", install_hint="'pip install lib'"
    )
    assert site.backend("absent", "--device", "cpu")["install_hint"] == ("pip install lib" if hinted else "")


def test_async_safety_is_judged_only_for_async(site):
    site.install_backend("unsafe", async_safe=False, async_reason="'stream conflicts'")
    site.install_backend("silent")
    assert "stream conflicts" in site.backend("unsafe", "--async", "--device", "cpu")["why_not"]
    assert site.backend("unsafe", "--no-async", "--device", "cpu")["usable"]
    assert site.backend("silent", "--device", "cpu")["async_safe"] is None
    shown = site.run("--device", "cpu", EPLB_PLUGINS="unsafe,silent").stdout
    assert "no: stream" in shown
    assert "no: undeclared" in shown
    assert folded(shown).count("conflicts") == 1


def test_the_device_type_decides_what_is_usable(site):
    site.install_backend("hosted", async_safe=True, device_types="('cpu',)")
    assert site.backend("hosted", "--device", "cpu")["usable"]
    assert "not on cuda" in site.backend("hosted", "--device", "cuda")["why_not"]


def test_an_impossible_device_type_is_refused(site):
    result = site.run("--device", "gpu 0")
    assert result.returncode == 2
    assert "'gpu 0' is not a device type" in result.stderr


def test_a_device_type_that_torch_does_not_know_is_refused(site):
    result = site.run("--device", "xyz")
    assert result.returncode == 2
    assert "'xyz' is not a device type that torch knows" in folded(result.stderr)


def test_nothing_is_usable_on_a_device_that_torch_does_not_see(site):
    site.write("probes.py", PROBES)
    site.install_backend("anywhere", async_safe=True, auto_priority=9, target="probes:Works", device_types="('*',)")
    site.install_backend("hosted", async_safe=True, device_types="('cpu',)")
    given = ("--device", "xla", "--probe")  # torch knows it, and has no code for it
    document = site.document(*given, EPLB_PLUGINS="anywhere,hosted")
    found = {item["name"]: item for item in (*document["backends"], *document["staging"])}
    reason = "torch sees no xla device here"
    assert {name: item["why_not"] for name, item in found.items()} == {
        "anywhere": reason,
        "hosted": "it moves weights on cpu, not on xla",
        "torch": reason,
    }
    assert document["choice"] == {"name": None, "why": reason}
    assert [(item["probe"]["ok"], item["probe"]["problem"]) for item in found.values()] == [(False, reason)] * 3
    shown = folded(site.run(*given, EPLB_PLUGINS="anywhere,hosted").stdout)
    assert f"Automatic choice: none, as {reason}" in shown
    assert shown.count(f"Probes: none works, as {reason}") == 1
    assert all(policy["usable"] for policy in document["policies"])


def test_a_device_counts_as_seen_when_torch_counts_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert device._ask_torch("cuda") == "seen"
    assert device._ask_torch("meta") == "not seen"
    assert device.why_no_device("cpu") is None


def test_without_a_gpu_no_allocators_insides_are_shown(site):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    document = site.document("--device", "cuda", "--probe")
    for item in (*document["backends"], *document["staging"]):
        assert item["probe"]["problem"] == "torch sees no cuda device here"


def test_the_automatic_choice_is_named_with_its_reason(site):
    site.install_backend("swift", async_safe=True, auto_priority=100000)
    choice = site.document("--device", "cpu")["choice"]
    assert choice == {"name": "swift", "why": "highest auto_priority (100000) among the usable"}
    shown = folded(site.run("--device", "cpu").stdout)
    assert "Automatic choice: swift, highest auto_priority (100000) among the usable" in shown


def test_that_nothing_can_be_chosen_is_no_failure_of_the_command(site):
    result = site.run("--device", "cpu", EPLB_PLUGINS="")
    assert result.returncode == 0
    assert "Automatic choice: none, as no backend is both usable and taken unasked" in folded(result.stdout)


def test_a_broken_plugin_is_listed_with_distribution_version_and_reason_beside_the_healthy(site):
    site.install("eplb-broken", "0.9", "broken", "raise RuntimeError('no such driver')")
    site.install_backend("swift", async_safe=True)
    shown = folded(site.run("--device", "cpu").stdout)
    assert "Skipped plugins - broken (eplb-broken 0.9): import raised RuntimeError: no such driver" in shown
    document = site.document("--device", "cpu")
    failure = next(f for f in document["failures"] if f["entry_point"] == "broken")
    assert (failure["distribution"], failure["version"]) == ("eplb-broken", "0.9")
    assert "swift" in {backend["name"] for backend in document["backends"]}


def test_a_name_claimed_twice_is_listed_with_both_distributions(site):
    site.install_backend("swift", dist="eplb-one", version="1.0", async_safe=True, auto_priority=100000)
    site.install_backend("swift", dist="eplb-two", version="2.0", async_safe=True, auto_priority=100000)
    document = site.document("--device", "cpu")
    (conflict,) = (c for c in document["conflicts"] if c["name"] == "swift")
    assert {(c["distribution"], c["version"]) for c in conflict["claimants"]} == {
        ("eplb-one", "1.0"),
        ("eplb-two", "2.0"),
    }
    assert document["choice"]["name"] != "swift"
    shown = folded(site.run("--device", "cpu").stdout)
    assert "eplb-one 1.0" in shown
    assert "eplb-two 2.0" in shown


def test_what_eplb_plugins_leaves_out_is_said(site):
    site.install_backend("swift", async_safe=True)
    site.install_backend("other", async_safe=True)
    document = site.document("--device", "cpu", EPLB_PLUGINS="swift")
    assert [backend["name"] for backend in document["backends"]] == ["swift"]
    assert "other" in {origin["entry_point"] for origin in document["excluded"]}
    assert "Left out by EPLB_PLUGINS" in site.run("--device", "cpu", EPLB_PLUGINS="swift").stdout
    names = [origin["entry_point"] for origin in document["excluded"]]
    assert names == sorted(names)


def test_an_unknown_name_in_eplb_plugins_is_met_with_those_there_are(site):
    site.install_backend("swift", async_safe=True)
    site.install_backend("other", async_safe=True)
    shown = folded(site.run("--device", "cpu", EPLB_PLUGINS="swft,other").stdout)
    (listed,) = re.findall(r"no installed distribution offers it; there are ([\w, ]+)", shown)
    assert {"swift", "other"} <= set(listed.replace(",", "").split())
    assert shown.count("swft") == 1


def test_what_auto_means_is_said_below_the_table(site):
    site.install_backend("swift", async_safe=True, auto_priority=7)
    assert "Auto: chosen automatically, the highest first; named = only when asked for." in site.run().stdout


def test_strict_discovery_ends_the_command_with_the_typed_error(site):
    site.install("eplb-broken", "0.9", "broken", "raise RuntimeError('no such driver')")
    result = site.run(EPLB_STRICT="1", EPLB_PLUGINS="broken")
    assert result.returncode == 1
    assert "DiscoveryError: Plugin 'broken' of eplb-broken 0.9 was skipped" in result.stderr
    assert "'eplb explain EPLB-D001'" in result.stderr


def test_the_json_document_has_all_its_keys_and_nothing_else_is_printed(site):
    site.install_backend("swift", async_safe=True, target="noisy:Backend")
    hooks = site.folder / "eplb_swift_swift_hooks.py"
    hooks.write_text("import os\nprint('from Python: \N{SNOWMAN}')\nos.write(1, b'from C')\n" + hooks.read_text())
    result = site.run("--json", "--device", "cpu")
    assert "from C" in result.stderr
    assert result.stdout.isascii()
    document = json.loads(result.stdout)
    assert set(document) == {
        "schema", "eplb_core", "api_version", "device", "async", "choice", "backends", "staging", "policies",
        "failures", "conflicts", "excluded",
    }  # fmt: skip
    assert document["schema"] == 1
    backend = next(b for b in document["backends"] if b["name"] == "swift")
    assert set(backend) == {
        "name", "summary", "distribution", "version", "entry_point", "api_version", "async_safe", "async_reason",
        "device_types", "elastic_safe", "zero_copy", "batched", "auto_priority", "requires", "usable", "why_not",
        "install_hint",
    }  # fmt: skip
    assert "default" in {policy["name"] for policy in document["policies"]}
    assert "torch" in {staging["name"] for staging in document["staging"]}


def test_tables_fit_100_columns_and_have_no_colour_when_piped(site):
    hint = "'pip install ' + 'something-with-a-very-long-name ' * 20"
    site.install_backend("a_backend_with_quite_a_long_name", async_safe=False, async_reason=hint, install_hint=hint)
    site.install("eplb-broken", "0.9", "broken", "raise RuntimeError('why ' * 100)")
    shown = site.run("--device", "cpu").stdout
    assert "\x1b" not in shown
    assert max(map(len, shown.splitlines())) <= 100
    assert "a_backend_with_quite_a_long_name" in shown
    narrow = site.run("--device", "cpu", COLUMNS="80").stdout
    assert 70 < max(map(len, narrow.splitlines())) <= 80
    assert max(map(len, site.run("--device", "cpu", COLUMNS="1").stdout.splitlines())) >= 40


def test_no_backend_is_imported_without_probe(site):
    marker = site.folder / "imported"
    site.write(
        "loud.py", f"open({str(marker)!r}, 'w').close()\nclass Backend:\n    probe = classmethod(lambda *_: {{}})\n"
    )
    site.install_backend("swift", async_safe=True, target="loud:Backend")
    site.run("--device", "cpu")
    site.run("--json", "--device", "cpu")
    assert not marker.exists()
    site.run("--device", "cpu", "--probe", EPLB_PLUGINS="swift")
    assert marker.exists()


def test_neither_torch_nor_any_backends_library_is_imported(site):
    script = (
        "import sys; sys.argv = ['eplb', 'backends']\n"
        "from eplb_core.cli import main\n"
        "try: main()\n"
        "finally: print('LOADED', [m for m in ('torch', 'nixl', 'cupy', 'numpy') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert "LOADED []" in result.stdout, result.stdout + result.stderr


PROBES = """
    import os, time
    class Works:
        @classmethod
        def probe(cls, options):
            print("noise on stdout")
            return {"library": "libswift 1.0", "memory": "host"}
    class Raises:
        @classmethod
        def probe(cls, options):
            raise OSError("libswift.so.2 is missing; pip install swift")
    class Crashes:
        @classmethod
        def probe(cls, options):
            os.abort()
    class Hangs:
        @classmethod
        def probe(cls, options):
            time.sleep(3600)
"""


def test_probes_show_facts_and_contain_whatever_goes_wrong(site):
    site.write("probes.py", PROBES)
    for name in ("works", "raises", "crashes"):
        site.install_backend(name, async_safe=True, target=f"probes:{name.title()}")
    document = site.document("--device", "cpu", "--probe", EPLB_PLUGINS="works,raises,crashes")
    found = {backend["name"]: backend["probe"] for backend in document["backends"]}
    assert found["works"]["facts"] == {"library": "libswift 1.0", "memory": "host"}
    assert "libswift.so.2 is missing; pip install swift" in found["raises"]["problem"]
    assert "status -6" in found["crashes"]["problem"]
    assert [name for name in found if found[name]["ok"]] == ["works"]


def test_a_backend_without_a_probe_is_said_to_have_none(site):
    site.write("plain.py", "class Backend:\n    pass\n")
    site.install_backend("plain", async_safe=True, target="plain:Backend")
    probe = site.backend("plain", "--device", "cpu", "--probe", EPLB_PLUGINS="plain")["probe"]
    assert probe["ok"]
    assert probe["facts"] == {"probe": "it has none"}


def test_a_probe_that_hangs_is_killed_at_the_limit(site):
    site.write("probes.py", PROBES)
    site.install_backend("hangs", async_safe=True, target="probes:Hangs")
    started = time.monotonic()
    probe = site.backend("hangs", "--device", "cpu", "--probe", "--probe-limit", "1", EPLB_PLUGINS="hangs")["probe"]
    assert time.monotonic() - started < 60
    assert probe["problem"] == "it had no answer after 1 s and was killed"
    assert not probe["ok"]


def test_probe_results_are_shown_below_the_table(site):
    site.write("probes.py", PROBES)
    site.install_backend("works", async_safe=True, target="probes:Works")
    shown = site.run("--device", "cpu", "--probe", EPLB_PLUGINS="works").stdout
    assert "Probe of works" in shown
    assert "  - library: libswift 1.0" in shown


STAGING = """
from eplb_core import API_VERSION, hookimpl
from eplb_core.backend import StagingInfo
@hookimpl
def eplb_register_staging():
    return [
        StagingInfo("big", "pages", API_VERSION, "pages:Big"),
        StagingInfo("broken", "pages", API_VERSION, "pages:Broken"),
        StagingInfo("far", "pages", API_VERSION, "pages:Far", device_types=("cuda",)),
    ]
"""
PAGES = """
from eplb_core.errors import ConfigError
class Big:
    @classmethod
    def probe(cls, device):
        return {"pages": f"2 MiB for {device}"}
class Broken:
    @classmethod
    def probe(cls, device):
        raise ConfigError("EPLB-C014", staging="broken", reason="there are no pages")
class Far:
    pass
"""


def test_staging_allocators_are_probed_for_the_weights_device_and_shown(site):
    site.write("pages.py", PAGES)
    site.install("eplb-pages", "1.0", "pages", STAGING)
    document = site.document("--device", "cpu", "--probe", EPLB_PLUGINS="pages")
    found = {staging["name"]: staging for staging in document["staging"]}
    assert found["torch"]["probe"]["facts"]["host memory"] == "not pinned"
    assert found["big"]["probe"]["facts"] == {"pages": "2 MiB for cpu"}
    assert not found["broken"]["probe"]["ok"]
    assert "Staging allocator 'broken' cannot be used: there are no pages." in found["broken"]["probe"]["problem"]
    assert found["far"]["why_not"] == "it stages for cuda, not for cpu"
    assert found["far"]["probe"]["facts"] == {"probe": "it has none"}
    shown = folded(site.run("--device", "cpu", "--probe", EPLB_PLUGINS="pages").stdout)
    assert "- pages: 2 MiB for cpu" in shown
    assert "does not work: Staging allocator 'broken' cannot be used: there are no pages." in shown
