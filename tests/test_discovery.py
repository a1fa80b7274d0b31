"""Discovery: sound plugins load whatever else is installed, and every other one is named with its reason."""

from __future__ import annotations

import functools
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from eplb_core.backend import BackendInfo
from eplb_core.discovery.discover import discover
from eplb_core.discovery.load import load_target
from eplb_core.errors import DiscoveryError

SITES = Path(__file__).parent / "data" / "sites"

REPORT = """
import json, sys
from eplb_core import discover

catalog = discover()
kinds = {"backend": catalog.backends, "staging": catalog.staging, "policy": catalog.policies}
json.dump(
    {
        **{kind: list(infos) for kind, infos in kinds.items()},
        "failures": [
            [str(f), f.entry_point, f.distribution, f.version, f.reason, str(f.error), type(f.error.__cause__).__name__]
            for f in catalog.failures
        ],
        "conflicts": {f"{kind} {name}": list(map(str, who)) for (kind, name), who in catalog.conflicts.items()},
        "origins": {f"{kind} {name}": str(origin) for (kind, name), origin in catalog.origins.items()},
        "excluded": [origin.entry_point for origin in catalog.excluded],
        "modules": [name for name in sys.modules if name.startswith("eplb_")],
    },
    sys.stdout,
)
"""

SELECT = """
import json, sys
from eplb_core import EPLBConfig, select

try:
    choice = select(EPLBConfig(communicator=json.loads(sys.argv[1]), use_async=False), device_type="cpu")
    answer = {"name": choice.name, "reasons": choice.reasons}
except Exception as error:
    chain = []
    while error is not None:
        chain.append([type(error).__name__, str(error)])
        error = error.__cause__
    answer = {"chain": chain}
json.dump(answer, sys.stdout)
"""

# Entry point of the faulty distribution: what its failure must say, and what the plugin raised if it raised.
FAULTS = {
    "another_name": ("it declares the backend 'somebody_else', but an entry point is named after its backend", None),
    "api_true": ("expected API 1, got True", None),
    "backend_hook": ("unknown hook 'transfer'", "PluginValidationError"),
    "bad_async_safe": ("BackendInfo.async_safe must be True, False or None, got 'yes'", None),
    "bad_available": ("BackendInfo.available must be callable or None, got True", None),
    "bad_device_types": ("BackendInfo.device_types must be a tuple of torch device types or ('*',), got ['cpu']", None),
    "bad_name": ("BackendInfo.name must be letters, digits, '.', '_' and '-', got 'bad name'", None),
    "bad_options": ("BackendInfo.options must be a pydantic model, 'module:Class' or None", None),
    "bad_priority": ("BackendInfo.auto_priority must be an integer from 0 on or None, got -1", None),
    "bad_requires": ("BackendInfo.requires must be a tuple of module names, got 'nixl'", None),
    "bad_summary": ("BackendInfo.summary must be one line of text, got 'two\\nlines'", None),
    "bad_target": ("BackendInfo.target must be of the form 'module:Class', got 'eplb_faults.backend.Backend'", None),
    "base_exception": ("import raised StopAll: at once", "StopAll"),
    "extra_argument": ("Argument(s) {'device'} are declared in the hookimpl", "PluginValidationError"),
    "future_field": ("eplb_register_backends raised TypeError", "TypeError"),
    "half_decorated": ("eplb_register_staging lacks the @hookimpl decorator", None),
    "hook_exits": ("eplb_register_backends raised SystemExit: bye", "SystemExit"),
    "hook_raises": (
        "eplb_register_backends raised OSError: libmissing.so.7: cannot open shared object file",
        "OSError",
    ),
    "import_error": ("No module named 'eplb_library_that_is_not_installed'", "ModuleNotFoundError"),
    "misspelt": ("unknown hook 'eplb_register_backend'", "PluginValidationError"),
    "no_attribute": ("import raised AttributeError", "AttributeError"),
    "no_hooks": ("it implements none of the hooks eplb_register_backends", None),
    "no_module": ("import raised ModuleNotFoundError", "ModuleNotFoundError"),
    "no_value": ("the entry point's value 'not a module!' names no module", None),
    "other_marker": ("eplb_register_backends lacks the @hookimpl decorator", None),
    "reserved": ("the policy name 'default' belongs to eplb-core", None),
    "returns_empty_list": ("eplb_register_backends returned an empty list, expected BackendInfo", None),
    "returns_mixed_list": ("eplb_register_backends returned a list that holds str, expected BackendInfo", None),
    "returns_none": ("eplb_register_backends returned None, expected BackendInfo", None),
    "returns_policy": ("eplb_register_backends returned PolicyInfo, expected BackendInfo", None),
    "returns_text": ("eplb_register_backends returned str, expected BackendInfo", None),
    "silent_exception": ("import raised Mute: (its message cannot be printed)", "Mute"),
    "syntax_error": ("import raised SyntaxError", "SyntaxError"),
    "system_exit": ("import raised SystemExit: 3", "SystemExit"),
    "twice": ("it declares the backend 'twice' twice", None),
    "undecorated": ("eplb_register_backends lacks the @hookimpl decorator", None),
    "unhatched": ("it declares the backend 'hatched', but an entry point is named after its backend", None),
    "wrapper": ("eplb_register_backends is a wrapper", None),
    "wrong_api": ("expected API 1, got 99", None),
}


def run_child(script, sites, *arguments, **environment):
    """Run a script in an interpreter of its own, with the sites on its path as site-packages are."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("EPLB_")}
    path = os.pathsep.join([*map(str, sites), *filter(None, [kept.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, *["-O"] * sys.flags.optimize, "-c", script, *arguments],
        env=kept | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"} | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def answer_of(script, sites, *arguments, **environment):
    child = run_child(script, sites, *arguments, **environment)
    assert child.returncode == 0, child.stderr
    return json.loads(child.stdout)


def discovered(*names, **environment):
    return answer_of(REPORT, [SITES / name for name in names], **environment)


def selected(communicator, *names, **environment):
    return answer_of(SELECT, [SITES / name for name in names], json.dumps(communicator), **environment)


@functools.cache
def among_faults():
    return discovered("faulty", "unreadable", "sound")


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_plugin_is_skipped_and_kept_with_distribution_version_and_reason(fault):
    """Case 14."""
    reason, cause = FAULTS[fault]
    [failure] = [failure for failure in among_faults()["failures"] if failure[1] == fault]
    text, _, distribution, version, full_reason, error, raised = failure
    assert reason in full_reason
    assert (distribution, version) == ("eplb-faults", "1.2.3")
    assert all(part in text for part in (fault, distribution, version, full_reason))
    sentence = full_reason if full_reason.endswith("?") else f"{full_reason}."
    assert error == f"Plugin {fault!r} of eplb-faults 1.2.3 was skipped: {sentence} [EPLB-D001]"
    assert raised == (cause or "NoneType")
    assert "\n" not in text


def test_every_faulty_plugin_of_the_data_has_its_expectation():
    faulty = {failure[1] for failure in among_faults()["failures"] if failure[2] == "eplb-faults"}
    assert faulty == FAULTS.keys()
    assert not faulty & {*among_faults()["backend"], *among_faults()["staging"], *among_faults()["policy"]}


def test_a_misspelt_hook_is_told_the_right_name():
    [reason] = [failure[4] for failure in among_faults()["failures"] if failure[1] == "misspelt"]
    assert reason.endswith("did you mean 'eplb_register_backends'?")


def test_sound_plugins_load_beside_faulty_ones():
    found = among_faults()
    assert {"pigeon", "heron", "egret", "hatched"} <= set(found["backend"])
    assert {"torch", "heron_pool"} <= set(found["staging"])
    assert {"default", "heron_greedy"} <= set(found["policy"])
    assert found["origins"]["backend pigeon"] == f"eplb-pigeon 1.0 (in {SITES / 'sound'})"
    assert found["origins"]["policy default"].startswith("eplb-core ")


def test_one_module_behind_two_entry_points_offers_each_name_once():
    assert among_faults()["conflicts"] == {}
    assert among_faults()["origins"]["backend egret"].startswith("eplb-heron 2.1")


def test_no_target_is_imported_by_discovery():
    modules = among_faults()["modules"]
    assert "eplb_pigeon.hooks" in modules
    assert "eplb_pigeon.backend" not in modules


def test_a_distribution_that_cannot_be_read_is_named_and_hides_no_other():
    failures = {failure[2]: failure for failure in among_faults()["failures"]}
    assert "its entry points cannot be read" in failures["eplb-garbled"][4]
    assert failures["a distribution without METADATA"][1] == "nameless"


def test_an_interrupt_by_the_user_is_no_fault_of_a_plugin():
    child = run_child(REPORT, [SITES / "interrupt"])
    assert child.returncode != 0
    assert "KeyboardInterrupt" in child.stderr


def test_what_is_listed_twice_or_behind_a_symbolic_link_counts_once(tmp_path):
    """Case 15."""
    link = tmp_path / "link"
    link.symlink_to(SITES / "sound")
    faults = tmp_path / "faults"
    faults.symlink_to(SITES / "faulty")
    names = ["sound", "faulty", "sound", "faulty"]
    found = answer_of(REPORT, [*(SITES / name for name in names), link, faults])
    assert found["conflicts"] == {}
    assert {"pigeon", "heron", "egret"} <= set(found["backend"])
    entry_points = [failure[1] for failure in found["failures"]]
    assert sorted(set(entry_points)) == sorted(entry_points)


def test_an_editable_install_whose_metadata_is_found_twice_counts_once(tmp_path):
    metadata = tmp_path / "eplb_pigeon-1.0.dist-info"
    metadata.mkdir()
    for name in ("METADATA", "entry_points.txt"):
        original = (SITES / "sound" / metadata.name / name).read_text()
        # Build tools do not agree on '-' and '_' in the name.
        (metadata / name).write_text(original.replace("Name: eplb-pigeon", "Name: eplb_Pigeon"))
    found = answer_of(REPORT, [tmp_path, SITES / "sound"])
    assert found["conflicts"] == {}
    assert "pigeon" in found["backend"]


def test_a_name_claimed_by_two_distributions_is_offered_by_neither():
    found = discovered("original", "fork", "sound")
    original, fork = f"eplb-swift 1.0 (in {SITES / 'original'})", f"eplb-swift-fork 0.9 (in {SITES / 'fork'})"
    assert found["conflicts"] == {"backend swift": [original, fork], "staging swift_pool": [original, fork]}
    assert "swift" not in found["backend"]
    assert "swift_pool" not in found["staging"]
    assert "pigeon" in found["backend"]


def test_two_releases_of_one_distribution_are_no_identical_duplicates():
    found = discovered("sound", "newer")
    assert found["conflicts"] == {
        "backend pigeon": [f"eplb-pigeon 1.0 (in {SITES / 'sound'})", f"eplb-pigeon 1.1 (in {SITES / 'newer'})"]
    }


@pytest.mark.parametrize("sites", [("original", "fork"), ("fork", "original")])
def test_selecting_a_name_in_conflict_names_both_distributions(sites):
    """Case 15."""
    [[kind, text]] = selected("swift", *sites)["chain"]
    assert kind == "DiscoveryError"
    assert text.startswith("Backend 'swift' is claimed by more than one distribution: ")
    assert "eplb-swift 1.0" in text
    assert "eplb-swift-fork 0.9" in text
    assert "[EPLB-D002]" in text


def test_the_automatic_choice_skips_a_name_in_conflict_with_that_reason():
    answer = selected(None, "original", "fork", "sound", EPLB_PLUGINS="swift,pigeon")
    assert answer["name"] == "pigeon"
    assert "claimed by more than one distribution: eplb-swift 1.0" in answer["reasons"]["swift"]


def test_a_backend_whose_plugin_failed_is_unknown_because_of_what_the_plugin_raised():
    chain = selected("import_error", "faulty")["chain"]
    assert [kind for kind, _ in chain] == ["ConfigError", "DiscoveryError", "ModuleNotFoundError"]
    assert chain[0][1].startswith("Unknown communicator 'import_error'. Its plugin was skipped: ")
    assert "eplb_library_that_is_not_installed" in chain[0][1]


def test_a_backend_whose_plugin_failed_has_its_reason_when_another_is_chosen():
    answer = selected("pigeon", "faulty", "sound")
    assert answer["name"] == "pigeon"
    assert answer["reasons"]["system_exit"] == "import raised SystemExit: 3 (eplb-faults 1.2.3)"


def test_only_plugins_named_in_eplb_plugins_are_loaded():
    found = discovered("sound", "faulty", EPLB_PLUGINS=" pigeon ,, no_hooks")
    assert found["backend"] == ["pigeon"]
    assert [failure[1] for failure in found["failures"]] == ["no_hooks"]
    assert {"heron", "egret", "system_exit"} <= set(found["excluded"])
    assert "eplb_heron" not in found["modules"]


def test_of_two_backends_in_one_module_only_the_allowed_one_is_offered():
    assert discovered("sound", EPLB_PLUGINS="egret")["backend"] == ["egret"]


def test_an_empty_eplb_plugins_allows_none():
    found = discovered("sound", EPLB_PLUGINS="")
    assert found["backend"] == []
    assert found["policy"] == ["default"]


def test_a_name_in_eplb_plugins_that_nobody_offers_is_a_failure():
    found = discovered("sound", EPLB_PLUGINS="pigeon,pidgeon")
    [[text, entry_point, distribution, _, reason, error, _]] = found["failures"]
    assert (entry_point, distribution) == ("pidgeon", "")
    assert text == f"pidgeon: {reason}"
    assert error == "EPLB_PLUGINS names 'pidgeon', which no installed distribution offers. [EPLB-D005]"


def test_a_backend_that_eplb_plugins_leaves_out_is_unknown_and_says_so():
    [[_, text]] = selected("pigeon", "sound", EPLB_PLUGINS="heron")["chain"]
    assert text.startswith("Unknown communicator 'pigeon'. eplb-pigeon 1.0")
    assert "EPLB_PLUGINS leaves it out" in text


@pytest.mark.parametrize(
    ("sites", "allowed", "code"),
    [
        (["sound", "faulty"], "pigeon,wrong_api", "EPLB-D001"),
        (["unreadable"], "nothing", "EPLB-D001"),
        (["original", "fork"], "swift", "EPLB-D002"),
        (["sound"], "pigeon,pidgeon", "EPLB-D005"),
    ],
)
def test_strict_discovery_raises_at_once_what_else_would_be_kept(sites, allowed, code):
    strict = run_child(REPORT, [SITES / site for site in sites], EPLB_PLUGINS=allowed, EPLB_STRICT="1")
    assert strict.returncode == 1
    assert f"[{code}]" in strict.stderr.splitlines()[-1]
    assert discovered(*sites, EPLB_PLUGINS=allowed, EPLB_STRICT="0")


def test_strict_discovery_of_sound_plugins_is_content():
    assert discovered("sound", EPLB_PLUGINS="pigeon,heron,egret", EPLB_STRICT="1")["failures"] == []


def test_discovery_keeps_nothing_from_one_call_to_the_next(monkeypatch):
    monkeypatch.syspath_prepend(SITES / "sound")
    monkeypatch.setenv("EPLB_PLUGINS", "pigeon")
    first, second = discover(), discover()
    assert first == second
    assert first is not second
    monkeypatch.setenv("EPLB_PLUGINS", "")
    assert not discover().backends


def test_a_catalog_cannot_be_changed(monkeypatch):
    monkeypatch.setenv("EPLB_PLUGINS", "")
    catalog = discover()
    with pytest.raises(TypeError):
        catalog.policies["mine"] = catalog.policies["default"]
    with pytest.raises(AttributeError):
        catalog.failures = ()


def test_a_target_is_loaded_by_its_dotted_path(monkeypatch):
    monkeypatch.syspath_prepend(SITES / "sound")
    assert load_target("eplb_core.backend:BackendInfo") is BackendInfo
    assert load_target("eplb_pigeon.backend:PigeonBackend.Nest").__qualname__ == "PigeonBackend.Nest"


@pytest.mark.parametrize(
    ("target", "text", "cause"),
    [
        ("eplb_faults.system_exit:Backend", "import raised SystemExit: 3", SystemExit),
        ("eplb_faults.import_error:Backend", "No module named", ModuleNotFoundError),
        ("eplb_faults.no_hooks:Backend", "has no attribute 'Backend'", AttributeError),
        ("eplb_faults.no_hooks", "it is not of the form 'module:Class'", type(None)),
        ("eplb faults:Backend", "it is not of the form 'module:Class'", type(None)),
    ],
)
def test_a_target_that_cannot_be_loaded_is_one_typed_error(monkeypatch, target, text, cause):
    monkeypatch.syspath_prepend(SITES / "faulty")
    with pytest.raises(DiscoveryError) as caught:
        load_target(target)
    assert caught.value.code == "EPLB-D006"
    assert target in str(caught.value)
    assert text in str(caught.value)
    assert type(caught.value.__cause__) is cause
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
