"""The contract documents itself: every hook has an example that runs, and notes for whoever implements it."""

from __future__ import annotations

import doctest
import inspect
import re

import pytest

from eplb_core.hookspecs import PROJECT, BackendSpec, DiscoverySpec

NOTES = ("Stream", "Thread", "Ordering", "Ownership")
SECTION = re.compile(r"^(\w+)\n-+$", re.MULTILINE)


def hooks_of(spec):
    return [hook for name, hook in vars(spec).items() if hasattr(hook, f"{PROJECT}_spec")]


DISCOVERY = hooks_of(DiscoverySpec)
BACKEND = hooks_of(BackendSpec)


def section(hook, title):
    parts = SECTION.split(inspect.getdoc(hook))
    sections = dict(zip(parts[1::2], parts[2::2], strict=True))
    assert title in sections, f"{hook.__name__} has no section {title}"
    return sections[title]


def test_the_contract_has_the_hooks_that_the_design_names():
    assert [hook.__name__ for hook in DISCOVERY] == [
        "eplb_register_backends",
        "eplb_register_staging",
        "eplb_register_policies",
    ]
    assert [hook.__name__ for hook in BACKEND] == [
        "register_buffers",
        "exchange_metadata",
        "transfer",
        "wait",
        "observe",
    ]


def test_one_backend_answers_each_hook_and_all_observers_are_told():
    first = {hook.__name__: getattr(hook, f"{PROJECT}_spec")["firstresult"] for hook in BACKEND}
    assert first == {
        "register_buffers": True,
        "exchange_metadata": True,
        "transfer": True,
        "wait": True,
        "observe": False,
    }


@pytest.mark.parametrize("hook", DISCOVERY + BACKEND, ids=lambda hook: hook.__name__)
def test_the_example_of_a_hook_runs(hook):
    [example] = doctest.DocTestFinder(recurse=False).find(hook, hook.__name__, globs={})
    assert any("@hookimpl" in step.source for step in example.examples)
    assert any(f"def {hook.__name__}(" in step.source for step in example.examples)
    said = []
    result = doctest.DocTestRunner().run(example, out=said.append)
    assert result.failed == 0, "".join(said)
    assert result.attempted == len(example.examples) > 1


@pytest.mark.parametrize("hook", DISCOVERY + BACKEND, ids=lambda hook: hook.__name__)
def test_a_hook_describes_what_it_returns_and_every_argument(hook):
    assert section(hook, "Returns").strip()
    arguments = [name for name in inspect.signature(hook).parameters if name != "self"]
    if arguments:
        described = re.findall(r"^(\w+) : .+\n +\S", section(hook, "Parameters"), re.MULTILINE)
        assert described == arguments


@pytest.mark.parametrize("hook", BACKEND, ids=lambda hook: hook.__name__)
def test_a_backend_hook_has_the_four_notes_in_their_order_and_says_what_it_raises(hook):
    notes = re.findall(r"^(\w+): \S", section(hook, "Notes"), re.MULTILINE)
    assert tuple(notes) == NOTES
    assert re.search(r"^\w+Error\n +\S", section(hook, "Raises"), re.MULTILINE)
