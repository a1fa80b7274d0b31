"""The error catalogue: every code that is raised stands in it, explained, and is raised in the class it belongs to."""

from __future__ import annotations

import ast
import pickle
import re
import string
from pathlib import Path

import pytest
from typer.main import get_command

from eplb_core import errors
from eplb_core.cli.app import app
from eplb_core.errors import ConfigError, EplbError, TransferError, error_class, error_for
from eplb_core.errors.codes import CATALOGUE

ROOT = Path(__file__).parents[1]
CODE = re.compile(r"EPLB-[A-Z]\d{3}")
FAMILIES = {"C": "ConfigError", "D": "DiscoveryError", "M": "MetadataError"}
FAMILIES |= {"P": "PlanError", "T": "TransferError", "B": "BenchError"}
CLASSES = {name: cls for name, cls in vars(errors).items() if isinstance(cls, type) and issubclass(cls, EplbError)}


def sources():
    return [*ROOT.glob("eplb_core/**/*.py"), *ROOT.glob("plugins/*/src/**/*.py"), *ROOT.glob("examples/**/*.py")]


def placeholders(code):
    return {name for _, name, _, _ in string.Formatter().parse(CATALOGUE[code].text) if name is not None}


def values_of(code):
    """Values that fit a code's text, by position and by name."""
    fields = {name: 1.0 if name == "seconds" else name for name in placeholders(code) if not name.isdigit()}
    return [f"value {name}" for name in sorted(placeholders(code)) if name.isdigit()], fields


def raised():
    """Every construction of one of our errors with a literal code: (where, class or function name, code, call)."""
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            first = node.args[0]
            if isinstance(first, ast.Constant) and isinstance(first.value, str) and CODE.fullmatch(first.value):
                yield f"{path.relative_to(ROOT)}:{node.lineno}", name, first.value, node


def test_every_code_in_the_sources_stands_in_the_catalogue():
    mentioned = {(code, path.name) for path in sources() for code in CODE.findall(path.read_text(encoding="utf-8"))}
    assert len(mentioned) > 10, "the sources were not found"
    assert sorted(place for place in mentioned if place[0] not in CATALOGUE) == []


def test_every_code_of_the_catalogue_is_used_by_the_sources():
    elsewhere = [path for path in sources() if path.name != "codes.py"]
    mentioned = {code for path in elsewhere for code in CODE.findall(path.read_text(encoding="utf-8"))}
    assert sorted(CATALOGUE.keys() - mentioned) == []


def test_an_error_is_raised_in_the_class_of_its_code():
    wrong = [
        (where, name, code)
        for where, name, code, _ in raised()
        if name in CLASSES and not issubclass(CLASSES[name], CLASSES[FAMILIES[code.removeprefix("EPLB-")[0]]])
    ]
    assert wrong == []


def test_an_error_is_raised_with_the_fields_its_text_asks_for():
    wrong = []
    for where, name, code, call in raised():
        given = {keyword.arg for keyword in call.keywords} - {"detail"}
        positions = {str(index) for index in range(len(call.args) - 1)}
        is_spelt_out = None not in given and not any(isinstance(argument, ast.Starred) for argument in call.args)
        if (name in CLASSES or name == "error_for") and is_spelt_out and given | positions != placeholders(code):
            wrong.append((where, code, sorted(given | positions), sorted(placeholders(code))))
    assert wrong == []


@pytest.mark.parametrize("code", CATALOGUE)
def test_a_code_is_explained(code):
    entry = CATALOGUE[code]
    assert CODE.fullmatch(code)
    assert all(text.strip() for text in (entry.text, entry.meaning, entry.when))
    assert entry.situations
    assert entry.solutions
    assert all(line.strip() for line in (*entry.situations, *entry.solutions))
    assert entry.meaning.endswith(".")
    assert entry.when.endswith(".")


@pytest.mark.parametrize("code", CATALOGUE)
def test_an_error_says_its_text_its_detail_and_its_code(code):
    values, fields = values_of(code)
    error = error_for(code, *values, detail="ranks 0 and 3", **fields)
    assert type(error) is error_class(code)
    assert type(error).__name__ == FAMILIES[code.removeprefix("EPLB-")[0]] or issubclass(type(error), TransferError)
    assert str(error) == f"{CATALOGUE[code].text.format(*values, **fields)} ranks 0 and 3 [{code}]"
    assert (error.code, error.fields, error.detail, error.report) == (code, fields, "ranks 0 and 3", None)
    assert str(error_for(code, *values, **fields)).endswith(f" [{code}]")


@pytest.mark.parametrize("code", CATALOGUE)
def test_an_error_travels_between_processes_as_it_is(code):
    values, fields = values_of(code)
    error = error_for(code, *values, detail="ranks 0 and 3", **fields)
    error.report = {"committed_layers": (0, 1)}
    if hasattr(error, "add_note"):
        error.add_note("seen on rank 3")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert (copy.code, copy.fields, copy.detail, copy.report) == (code, fields, error.detail, error.report)
    assert getattr(copy, "__notes__", []) == getattr(error, "__notes__", [])


@pytest.mark.parametrize("code", CATALOGUE)
def test_a_code_is_refused_by_the_classes_of_other_families(code):
    values, fields = values_of(code)
    letter = code.removeprefix("EPLB-")[0]
    for cls in CLASSES.values():
        if cls.family not in ("", letter):
            with pytest.raises(ValueError, match="is not a code of"):
                cls(code, *values, **fields)


def test_every_family_has_its_class_and_every_letter_its_codes():
    assert {code.removeprefix("EPLB-")[0] for code in CATALOGUE} == FAMILIES.keys()
    assert {letter: CLASSES[name].family for letter, name in FAMILIES.items()} == {
        letter: letter for letter in FAMILIES
    }


def test_the_transfer_errors_that_hosts_tell_apart_have_classes_of_their_own():
    special = {code: error_class(code).__name__ for code in CATALOGUE if error_class(code).__mro__[1] is TransferError}
    assert special == {
        "EPLB-T002": "StalledError",
        "EPLB-T003": "PeerLostError",
        "EPLB-T004": "PoisonedError",
        "EPLB-T005": "StoreLostError",
        "EPLB-T006": "CommitError",
        "EPLB-T023": "StalledError",
    }


def test_configuration_and_plan_errors_are_value_errors():
    assert issubclass(ConfigError, ValueError)
    assert issubclass(CLASSES["PlanError"], ValueError)


def test_a_text_that_users_search_for_is_kept_word_for_word():
    expected = {
        "EPLB-C002": "Async EPLB is only supported with the default policy.",
        "EPLB-C003": "log_balancedness_interval must be greater than 0.",
        "EPLB-T001": "{label} transfer failed with state={state}",
        "EPLB-B002": "Endpoint not ready after {0}s: {1}",
        "EPLB-B003": "Configuration error: {0}",
        "EPLB-B004": "IO error: {0}",
        "EPLB-B005": "JSON error: {0}",
    }
    assert {code: CATALOGUE[code].text for code in expected} == expected
    refusal = CATALOGUE["EPLB-C004"].text.format(
        communicator="pynccl", reason="NCCL multi-stream conflicts", alternatives="'torch_gloo' or 'nixl'"
    )
    assert refusal == (
        "pynccl communicator is incompatible with async EPLB due to NCCL multi-stream conflicts. "
        "Use 'torch_gloo' or 'nixl' instead, or leave communicator unset for automatic selection."
    )
    key = {"label": "NIXL", "peer": 3, "local": ["a"], "remote": ["b"]}
    assert CATALOGUE["EPLB-M002"].text.format(**key) == (
        "NIXL EPLB metadata key mismatch with rank 3: local=['a'], peer=['b']"
    )
    sizes = {"label": "NIXL", "key": (0, "w13"), "peer": 3, "local": 16, "remote": 32}
    assert CATALOGUE["EPLB-M003"].text.format(**sizes) == (
        "NIXL EPLB nbytes_per_expert mismatch for (0, 'w13') with rank 3: local=16, peer=32"
    )


def test_every_command_that_a_text_names_exists():
    texts = [*ROOT.glob("eplb_core/**/*.py"), *ROOT.glob("plugins/*/src/**/*.py"), *ROOT.glob("**/README.md")]
    texts = [path for path in texts if not any(part.startswith(".venv") for part in path.parts)]
    named = {
        name for path in texts for name in re.findall(r"['`]eplb ([a-z][a-z-]*)", path.read_text(encoding="utf-8"))
    }
    assert {"backends", "explain"} <= named
    assert named <= set(get_command(app).commands)


@pytest.mark.parametrize("end", ["", ".", "?", "!"])
def test_a_sentence_that_is_filled_in_last_gets_no_second_full_stop(end):
    assert str(ConfigError("EPLB-C001", problem=f"is it{end}")).endswith(f"is it{end or '.'} [EPLB-C001]")
