"""The pages under docs/ say what is so: rooms, rules and the tests that hold them, words, links."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.test_architecture import ROOMS

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PROTOCOL = (DOCS / "protocol.md").read_text()
PAGES = sorted([*DOCS.rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])

RULES = re.findall(r"^- \*\*([ILP]\d+)\*\*", PROTOCOL, re.MULTILINE)
ROWS = dict(re.findall(r"^\| ([ILP]\d+) \| (`.*::.*) \|$", PROTOCOL, re.MULTILINE))
NAMED = sorted({test for row in ROWS.values() for test in re.findall(r"`([^`]+)`", row)})


@cache
def sentences_of(path: Path) -> frozenset[str]:
    functions = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef))
    return frozenset(node.name for node in functions if node.name.startswith("test_"))


def test_the_rules_are_numbered_without_gaps():
    invariants = [rule for rule in RULES if rule[0] == "I"]
    lives = [rule for rule in RULES if rule[0] == "L"]
    background = [rule for rule in RULES if rule[0] == "P"]
    assert invariants == [f"I{number}" for number in range(1, 13)]
    assert lives == [f"L{number}" for number in range(1, len(lives) + 1)]
    assert background == [f"P{number}" for number in range(1, len(background) + 1)]


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_has_a_test_that_breaks_with_it(rule):
    assert "::test_" in ROWS.get(rule, "")


def test_the_table_has_no_rule_that_the_page_does_not_state():
    assert set(ROWS) <= set(RULES)


@pytest.mark.parametrize("named", NAMED)
def test_a_test_that_the_table_names_exists(named):
    path, _, name = named.partition("::")
    assert name in sentences_of(ROOT / path)


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_names_modules_that_exist(rule):
    table = re.search(rf"^\| {rule} \| (?!.*::)(.*) \|$", PROTOCOL, re.MULTILINE)
    stated = re.search(rf"^- \*\*{rule}\*\* ((?:.|\n  )*)", PROTOCOL, re.MULTILINE)
    modules = re.findall(r"`([a-z_/]+\.py)`", table[1] if table else stated[1])
    assert modules
    missing = [module for module in modules if not any((at / module).is_file() for at in (ROOT / "eplb_core", ROOT))]
    assert not missing


def test_the_rooms_are_listed_in_the_order_that_is_checked():
    page = (DOCS / "architecture.md").read_text()
    assert tuple(re.findall(r"^\d+\. `(\w+)`$", page, re.MULTILINE)) == ROOMS


def test_every_room_is_described():
    page = (DOCS / "architecture.md").read_text()
    heads = " ".join(re.findall(r"^\*\*(`.*?`)\.\*\*", page, re.MULTILINE))
    assert set(re.findall(r"`(\w+)`", heads)) == set(ROOMS)


@pytest.mark.parametrize("room", ["control", "plan", "wire", "discovery", "voting", "memory", "rearrange"])
def test_the_paragraph_of_a_room_names_all_its_modules_and_no_other(room):
    page = (DOCS / "architecture.md").read_text()
    paragraph = re.search(rf"^\*\*`{room}`\.\*\*((?:.|\n(?!\n))*)", page, re.MULTILINE)[1]
    modules = {path.stem for path in (ROOT / "eplb_core" / room).glob("*.py")} - {"__init__"}
    assert set(re.findall(r"`(\w+)`", paragraph)) == modules


@pytest.mark.parametrize("way", ["The way of a byte", "The way of a map"])
def test_a_way_goes_through_modules_that_exist(way):
    page = (DOCS / "architecture.md").read_text()
    section = page.split(f"## {way}\n")[1].split("\n## ")[0]
    modules = re.findall(r"`(\w+/\w+)`", section)
    assert modules
    assert [module for module in modules if not (ROOT / "eplb_core" / f"{module}.py").is_file()] == []


def test_a_word_of_the_glossary_stands_once_and_in_order():
    page = (DOCS / "glossary.md").read_text()
    words = [word for word in re.findall(r"^\| ([^|]+?) \|", page, re.MULTILINE) if word != "word"]
    assert len(words) == 26
    assert words == sorted(set(words))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_link_leads_somewhere(page):
    links = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_is_reached_from_the_readme(page):
    reached, new = set(), [ROOT / "README.md"]
    while new:
        at = new.pop().resolve()
        if at not in reached and at.suffix == ".md":
            reached.add(at)
            new += [at.parent / link for link in re.findall(r"\]\((?!https?:)([^)#]+)", at.read_text())]
    assert page.resolve() in reached


def test_codes_that_pages_name_are_in_the_catalogue():
    from eplb_core.errors.codes import CATALOGUE

    named = {code for page in PAGES for code in re.findall(r"EPLB-[A-Z]\d{3}", page.read_text())}
    assert named <= set(CATALOGUE)


READABLE = ("plan", "wire", "weights", "discovery", "memory", "control", "observers")


@pytest.mark.parametrize("room", READABLE)
def test_no_parameter_is_described_by_whose_it_is_alone(room):
    empty = re.compile(r"^ +(Of the communicator|Of the layer|See there|See above)\.$", re.MULTILINE)
    modules = sorted((ROOT / "eplb_core" / room).rglob("*.py"))
    assert [str(path) for path in modules if empty.search(path.read_text())] == []
