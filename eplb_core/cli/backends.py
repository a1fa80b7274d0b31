"""``eplb backends``: what is installed, what is usable here and why the rest is not, and what would be chosen."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from eplb_core.cli.console import nothing_else_on_stdout, stdout, write, write_points, write_table


def backends(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")] = False,
    use_async: Annotated[
        bool, typer.Option("--async/--no-async", help="Judge for rearrangement in the background, or for synchronous.")
    ] = True,
    device: Annotated[
        str | None,
        typer.Option(
            metavar="cpu|cuda|...",
            show_default="cuda where a GPU is seen, else cpu",
            help="Device type of the weights.",
        ),
    ] = None,
    probe: Annotated[
        bool,
        typer.Option("--probe", help="Also run each backend's and allocator's own check, in a process of its own."),
    ] = False,
    probe_limit: Annotated[float, typer.Option(min=0.1, metavar="SECONDS", help="Limit of each probe.")] = 60.0,
) -> None:
    """Show installed backends: where they come from, whether they are usable here, and which would be chosen."""
    if device is not None and not re.fullmatch(r"[a-z][a-z0-9_]*", device):
        raise typer.BadParameter(f"{device!r} is not a device type, such as cpu or cuda", param_hint="--device")
    with nothing_else_on_stdout():
        from eplb_core.cli.device import UnknownDeviceTypeError, likely_device_type, why_no_device
        from eplb_core.cli.inventory import take_inventory
        from eplb_core.discovery.discover import discover

        device_type = device or likely_device_type()
        try:
            no_device = why_no_device(device_type)
        except UnknownDeviceTypeError as error:
            raise typer.BadParameter(str(error), param_hint="--device") from error
        inventory = take_inventory(discover(), use_async=use_async, device_type=device_type, no_device=no_device)
        if probe and no_device:
            for item in (*inventory["backends"], *inventory["staging"]):
                item["probe"] = {"ok": False, "facts": {}, "problem": no_device, "seconds": 0.0}
        elif probe:
            from eplb_core.cli.probe import Kind, probe_all

            names: list[tuple[Kind, str]] = [("backend", backend["name"]) for backend in inventory["backends"]]
            names += [("staging", allocator["name"]) for allocator in inventory["staging"]]
            found = probe_all(names, device=inventory["device"], limit_s=probe_limit)
            for item, result in zip([*inventory["backends"], *inventory["staging"]], found, strict=True):
                item["probe"] = result
    if as_json:
        print(json.dumps(inventory, indent=2))
    else:
        _render(stdout(), inventory, no_device)


def _render(console: Console, inventory: Mapping[str, Any], no_device: str | None) -> None:
    mode = "async" if inventory["async"] else "synchronous"
    core = f"eplb-core {inventory['eplb_core']} (API {inventory['api_version']})"
    write(console, f"{core}, judged for {mode} EPLB with weights on {inventory['device']}")
    console.print()
    if inventory["backends"]:
        write_table(console, _backends_table(inventory["backends"], use_async=inventory["async"]))
        write(console, "Auto: chosen automatically, the highest first; named = only when asked for.")
        console.print()
    choice = inventory["choice"]
    taken = f"{choice['name']}, {choice['why']}"
    if choice["name"] is None:
        taken = f"none, as {no_device or 'no backend is both usable and taken unasked'}"
    write(console, f"Automatic choice: {taken}", hanging="  ")
    probed = [item for item in (*inventory["backends"], *inventory["staging"]) if "probe" in item]
    if probed and no_device:
        console.print()
        write(console, f"Probes: none works, as {no_device}")
        probed = []
    for backend in inventory["backends"]:
        if backend in probed:
            _render_probe(console, backend)
    for title, kind in (("Staging", "staging"), ("Policy", "policies")):
        if inventory[kind]:
            console.print()
            write_table(console, _others_table(title, inventory[kind]))
        for item in inventory[kind]:
            if item in probed:
                _render_probe(console, item)
    _render_problems(console, inventory)


def _backends_table(backends: list[dict[str, Any]], *, use_async: bool) -> Table:
    table = Table(show_edge=False, pad_edge=False, padding=(0, 1), expand=False)
    table.add_column("Backend", no_wrap=True)
    table.add_column("From", overflow="fold")
    table.add_column("API", justify="right", no_wrap=True)
    table.add_column("Async", overflow="fold", ratio=2)
    table.add_column("Auto", no_wrap=True)
    table.add_column("Usable here", overflow="fold", ratio=3)
    for backend in backends:
        table.add_row(
            Text(backend["name"], style="bold"),
            Text(f"{backend['distribution']} {backend['version']}"),
            Text(str(backend["api_version"])),
            _async_cell(backend),
            Text("named" if backend["auto_priority"] is None else str(backend["auto_priority"])),
            Text("no: not async", style="yellow") if use_async and not backend["async_safe"] else _usable_cell(backend),
        )
    return table


def _async_cell(backend: Mapping[str, Any]) -> Text:
    if backend["async_safe"]:
        return Text("yes", style="green")
    undeclared = "undeclared, counts as unsafe" if backend["async_safe"] is None else ""
    return Text(": ".join(filter(None, ["no", backend["async_reason"] or undeclared])), style="yellow")


def _usable_cell(item: Mapping[str, Any]) -> Text:
    if item["usable"]:
        return Text("yes", style="green")
    hint = f"\n{item['install_hint']}" if item["install_hint"] else ""
    return Text.assemble((f"no: {item['why_not']}", "yellow"), hint)


def _others_table(title: str, items: list[dict[str, Any]]) -> Table:
    table = Table(show_edge=False, pad_edge=False, padding=(0, 1))
    table.add_column(title, no_wrap=True)
    table.add_column("From", overflow="fold")
    table.add_column("Usable here", overflow="fold")
    table.add_column("Summary", overflow="fold")
    for item in items:
        origin = f"{item['distribution']} {item['version']}"
        table.add_row(Text(item["name"], style="bold"), Text(origin), _usable_cell(item), Text(item["summary"]))
    return table


def _render_probe(console: Console, item: Mapping[str, Any]) -> None:
    probe = item["probe"]
    verdict = "works" if probe["ok"] else f"does not work: {probe['problem']}"
    console.print()
    write(console, f"Probe of {item['name']}, {probe['seconds']:.1f} s: {verdict}", hanging="  ")
    write_points(console, (f"{fact}: {value}" for fact, value in probe["facts"].items()))


def _render_problems(console: Console, inventory: Mapping[str, Any]) -> None:
    conflicts = inventory["conflicts"]
    problems = {
        "Skipped plugins": [
            f"{_origin(failure)}: {failure['reason']}{'' if failure['distribution'] else _entry_points(inventory)}"
            for failure in inventory["failures"]
        ],
        "Claimed by more than one distribution, so refused": [
            f"{clash['kind']} {clash['name']}: {' and '.join(map(_origin, clash['claimants']))}" for clash in conflicts
        ],
        "Left out by EPLB_PLUGINS": [_origin(origin) for origin in inventory["excluded"]],
    }
    for title, lines in problems.items():
        if lines:
            console.print()
            write(console, title, style="bold")
            write_points(console, lines)


def _entry_points(inventory: Mapping[str, Any]) -> str:
    listed = (*inventory["backends"], *inventory["staging"], *inventory["policies"])
    claimants = (origin for clash in inventory["conflicts"] for origin in clash["claimants"])
    known = [*listed, *claimants, *inventory["excluded"], *inventory["failures"]]
    names = {each["entry_point"] for each in known if each["distribution"] not in ("", "eplb-core")}
    return f"; there are {', '.join(sorted(names)) or 'none'}"


def _origin(origin: Mapping[str, str]) -> str:
    owner = f"{origin['distribution']} {origin['version']}".strip()
    where = f", in {origin['location']}" if origin.get("location") else ""
    return origin["entry_point"] + (f" ({owner}{where})" if owner else "")
