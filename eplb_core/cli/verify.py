"""``eplb verify``: the conformance kit on an installed backend, and what each failure means."""

from __future__ import annotations

import dataclasses
import json
import time
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from eplb_core.cli.console import nothing_else_on_stdout, stderr, stdout, write, write_table

if TYPE_CHECKING:
    from eplb_core.testing.verdict import Verdict

_STYLES = {
    "passed": "green",
    "failed": "bold red",
    "not reached": "red",
    "not run": "red",
    "not claimed": "dim",
}
_ALWAYS_COUNTED = ("passed", "failed")
_DETAIL_LINES = 12
_NAMED = 8


def verify(
    name: Annotated[str, typer.Argument(help="Name of an installed backend.")],
    env: Annotated[
        list[str] | None, typer.Option("--env", metavar="KEY=VALUE", help="Environment of the ranks; repeatable.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="Device type of the weights; cpu where the backend can.")] = None,
    test: Annotated[
        list[str] | None,
        typer.Option(
            "--test", metavar="TEST", help="Only this test of the kit, or a pattern such as 'wait*'; repeatable."
        ),
    ] = None,
    device_group: Annotated[
        bool, typer.Option("--device-group", help="Give the backend a gloo group as the host's device_group.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the verdicts as JSON.")] = False,
) -> None:
    """Run the conformance kit on a backend: what passed, and what each failure means.

    Status 1 when a test fails, 2 when the backend cannot be examined on this machine.
    """
    if find_spec("pytest") is None:
        write(stderr(), "eplb verify needs pytest: pip install 'eplb-core[testing]'")
        raise typer.Exit(2)
    from eplb_core.discovery.discover import discover
    from eplb_core.discovery.select import resolve
    from eplb_core.testing.usable import why_not_here
    from eplb_core.testing.verdict import GOOD, examine

    unusable = why_not_here(resolve(discover(), "backend", name), device)
    if unusable is not None:
        stderr().print(f"nothing was tested: {unusable}", soft_wrap=True)
        raise typer.Exit(2)
    pairs = [entry.partition("=") for entry in env or []]
    if any(not separator for _, separator, _ in pairs):
        raise typer.BadParameter("expected KEY=VALUE", param_hint="--env")
    console, started = stderr(), time.monotonic()
    done = 0

    def told(verdict: Verdict) -> None:
        nonlocal done
        done += 1
        if console.is_terminal:
            console.print(f"\r{done:3} {verdict.test:<60}", end="")

    with nothing_else_on_stdout():
        given = {key: value for key, _, value in pairs}
        try:
            verdicts = examine(
                name, env=given, device_type=device, device_group=device_group, tests=test or (), told=told
            )
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--test") from error
    if console.is_terminal:
        console.print("\r" + " " * 66 + "\r", end="")
    seconds = time.monotonic() - started
    passed = all(verdict.outcome in GOOD for verdict in verdicts)
    if as_json:
        print(json.dumps({"backend": name, "passed": passed, "seconds": round(seconds, 1), "tests": _plain(verdicts)}))
    else:
        _show(stdout(), name, verdicts, seconds)
    raise typer.Exit(0 if passed else 1)


def _plain(verdicts: list[Verdict]) -> list[dict[str, object]]:
    return [dataclasses.asdict(verdict) for verdict in verdicts]


def _show(console: Console, name: str, verdicts: list[Verdict], seconds: float) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("test", "", "s"):
        table.add_column(title, justify="right" if title == "s" else "left", overflow="fold")
    for verdict in verdicts:
        ended = Text(verdict.outcome, style=_STYLES[verdict.outcome])
        table.add_row(verdict.test, ended, f"{verdict.seconds:.1f}")
    write_table(console, table)
    groups: dict[tuple[str, str], list[Verdict]] = {}
    for verdict in verdicts:
        if verdict.outcome not in {"passed", "not claimed"}:
            groups.setdefault((verdict.outcome, verdict.detail), []).append(verdict)
    for outcome in ("failed", "not reached", "not run"):
        for (kind, detail), alike in groups.items():
            if kind == outcome:
                console.print()
                _show_alike(console, outcome, detail, alike)
    console.print()
    counts = {outcome: sum(verdict.outcome == outcome for verdict in verdicts) for outcome in _STYLES}
    shown = [f"{number} {outcome}" for outcome, number in counts.items() if number or outcome in _ALWAYS_COUNTED]
    write(console, f"{name}: {', '.join(shown)}, in {seconds:.0f} s")


def _show_alike(console: Console, outcome: str, detail: str, alike: list[Verdict]) -> None:
    """Show tests with equal text once; the meaning is shown only when it was checked."""
    if outcome == "failed":
        for verdict in alike:
            write(console, verdict.test, style="bold red")
            write(console, verdict.meaning, indent="  ")
    else:
        many = f"{len(alike)} tests {outcome}: " if len(alike) > 1 else f"{outcome}: "
        names = ", ".join(verdict.test for verdict in alike)
        if outcome == "not run" and len(alike) > _NAMED:  # the table lists them
            names = f"{names.partition(', ')[0]} and others"
        write(console, many + names, hanging="  ", style=_STYLES[outcome])
    lines = detail.splitlines()
    for line in lines[:3] + ["..."] * (len(lines) > _DETAIL_LINES) + lines[3:][-(_DETAIL_LINES - 3) :]:
        console.print(Text(f"    {line}"), soft_wrap=True)
