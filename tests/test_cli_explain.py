"""``eplb explain``: every code is explained, however it is asked for, and a wrong one is met with a guess."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pluggy
import pytest
from typer.testing import CliRunner

from eplb_core.cli.app import app
from eplb_core.cli.explain import close_codes, find_text
from eplb_core.errors import error_class
from eplb_core.errors.codes import CATALOGUE

ROOT = Path(__file__).parents[1]


def run(*arguments: str):
    return CliRunner().invoke(app, ["explain", *arguments])


def folded(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize("code", CATALOGUE)
def test_a_code_is_explained_in_full(code):
    result = run(code)
    shown = folded(result.stdout)
    entry = CATALOGUE[code]
    assert result.exit_code == 0
    assert shown.startswith(f"{code} {error_class(code).__name__} ")
    for part in (entry.meaning, entry.when, *entry.situations, *entry.solutions):
        assert folded(part) in shown
    for title in ("Meaning", "When", "Common situations", "Solutions"):
        assert f"\n{title}\n" in result.stdout


@pytest.mark.parametrize(
    "asked",
    [
        "EPLB-T003",
        "eplb-t003",
        "T003",
        "t003",
        "t3",
        "[EPLB-T003]",
        " T-003 ",
        "PeerLostError: Rank 2 is gone (layer 5, phase vote). [EPLB-T003]",
    ],
)
def test_a_code_is_recognised_however_it_is_written(asked):
    assert run(asked).stdout == run("EPLB-T003").stdout != ""


def shape(text):
    """Two codes may have one text: of a rank that does not come, and of one that could not be started."""
    return re.sub(r"\{[^}]*\}", "{}", text).rstrip(".")


@pytest.mark.parametrize("code", CATALOGUE)
def test_a_whole_message_without_its_code_is_recognised(code):
    text = CATALOGUE[code].text
    numbers = dict.fromkeys(re.findall(r"\{(\w+):", text), 2.5)
    fields = {name: f"some {name}" for name in re.findall(r"\{([a-z_]+)", text)} | numbers
    message = text.format(*["this"] * len(re.findall(r"\{\d", text)), **fields)
    said_alike = {other for other, entry in CATALOGUE.items() if shape(entry.text) == shape(text)}
    assert find_text(f"rank 3: SomeError: {message} And more detail.") in said_alike


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ("Stalled for 3 s ...", "EPLB-T002"),
        ("stalled for 3.0 s in layer 2,\n  phase wait, waiting for rank 1.", "EPLB-T002"),
        ("No usable EPLB backend", "EPLB-C007"),
        ("Rank 2 is gone", "EPLB-T003"),
    ],
)
def test_a_message_that_was_cut_short_or_broken_into_lines_is_recognised(message, code):
    assert run(message).stdout == run(code).stdout != ""


def test_a_letter_alone_is_met_with_all_its_codes_in_order():
    result = run("T")
    assert result.exit_code == 2
    listed = re.findall(r"^EPLB-\w+", result.stderr, re.MULTILINE)
    assert listed == [code for code in CATALOGUE if code.startswith("EPLB-T")]


def test_of_codes_that_are_equally_close_the_first_comes_first():
    listed = close_codes("T01")
    assert listed[0] == "EPLB-T001"
    assert len(listed) <= 4


@pytest.mark.parametrize("message", ["CUDA out of memory on rank 3", "RuntimeError: connection reset by peer", ""])
def test_a_strangers_message_is_no_code_of_ours(message):
    assert find_text(message) is None


@pytest.mark.parametrize("command", ["backends", "demo", "explain", "new-backend", "verify"])
def test_help_names_arguments_in_capitals_and_shows_no_type_for_flags(command):
    shown = CliRunner().invoke(app, [command, "--help"]).stdout
    assert "<bool>" not in shown
    usage = {
        "backends": "[OPTIONS]",
        "demo": "[OPTIONS]",
        "explain": "[OPTIONS] [CODE]",
        "new-backend": "[OPTIONS] NAME [DIR]",
        "verify": "[OPTIONS] NAME",
    }
    assert re.search(rf"Usage: \w+ {command} {re.escape(usage[command])} *$", shown, re.MULTILINE)


def test_without_a_code_all_are_listed_with_their_texts():
    result = run()
    lines = folded(result.stdout)
    assert result.exit_code == 0
    assert re.findall(r"^EPLB-\w+", result.stdout, re.MULTILINE) == list(CATALOGUE)
    assert "EPLB-C007 No usable EPLB backend." in lines
    assert "EPLB-T003 Rank <rank> is gone (<where>)." in lines
    assert "{" not in lines


def test_an_unknown_code_is_met_with_close_ones_and_status_2():
    result = run("T0O3")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "No error has the code 'T0O3'" in result.stderr
    assert re.search(r"^EPLB-T003  Rank", result.stderr, re.MULTILINE)


def test_what_resembles_no_code_is_refused_without_a_guess():
    result = run("segfault")
    assert result.exit_code == 2
    assert not re.search(r"^EPLB-", result.stderr, re.MULTILINE)
    assert "'eplb explain' lists all codes." in result.stderr


def test_nothing_is_wider_than_100_columns_or_padded():
    for code in CATALOGUE:
        for line in run(code).stdout.splitlines():
            assert len(line) <= 100
            assert line == line.rstrip()


def test_the_command_says_in_one_line_what_to_install_when_typer_and_rich_are_missing(tmp_path):
    # An interpreter without site-packages, given pluggy alone.
    (tmp_path / "pluggy").symlink_to(Path(pluggy.__file__).parent)
    script = f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(tmp_path)!r}]; from eplb_core.cli import main; main()"
    result = subprocess.run([sys.executable, "-I", "-S", "-c", script], capture_output=True, text=True, timeout=60)
    assert result.returncode == 1
    assert result.stderr == "eplb needs typer and rich: pip install 'eplb-core[cli]'\n"
