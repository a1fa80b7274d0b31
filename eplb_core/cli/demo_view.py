"""Output of the demo: progress while it runs, then what moved, how fast, and whether every byte is right.

With ``--json`` it is one document, stable within a ``schema``; unknown keys may be added, none is dropped::

    schema     1
    ok         did every rank finish, and is every byte right?
    workload   {model, origin, scale, num_layers, num_layers_found, num_experts, num_redundant_experts, top_k,
               world_size, tensors: [{name, shape, dtype}], nbytes_per_expert, nbytes}
    backend    {name, why, rejected: {name: why not}, empty where --backend named one}
    rounds     [{round, balancedness_before, balancedness_after, layers_committed, nbytes_moved (between ranks),
               nbytes_local, seconds (slowest rank), gb_per_s, rows_checked, nbytes_checked, rows_wrong}]
    wrong      [{rank, round, row}], the first few of each rank
    failures   [{rank, error, code, message}], in order of happening
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from eplb_core.cli.console import stderr, stdout, write, write_points
from eplb_core.launch.failure import RankFailure

SCHEMA = 1

_LEAST_NBYTES_OF_A_RATE = 5_000_000
_PHASES = {"load": "loading experts", "move": "moving layers", "verify": "checking layers"}


class DemoView:
    """Shows one run of the demo from the events of its ranks.

    Parameters
    ----------
    as_json : bool
        Show nothing until the end, then one JSON document.

    Attributes
    ----------
    bars : rich.progress.Progress
        A context manager: bars are drawn while it is entered.
    """

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._out = stdout()
        self._err = stderr()
        self._workload: dict[str, Any] = {}
        self._backend: dict[str, Any] = {}
        self._rounds: list[dict[str, Any]] = []
        self._wrong: list[dict[str, Any]] = []
        self.bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self._out,
            transient=True,
            disable=as_json or not self._out.is_terminal,
        )
        self._bar_of: dict[tuple[str, int], Any] = {}

    def on_event(self, rank: int, kind: str, data: dict[str, Any]) -> None:
        """Show an event that a rank reports."""
        if kind == "workload":
            self._workload = data
            self._show(_workload_lines(data))
        elif kind == "choice":
            self._backend = data
            self._show([f"backend {data['name']}: {data['why']}"])
            if not self._as_json:
                write_points(self._out, (f"not {name}: {why}" for name, why in data["rejected"].items()))
        elif kind == "progress":
            self._advance(data)
        elif kind == "round":
            data["gb_per_s"] = data["nbytes_moved"] / data["seconds"] / 1e9 if data["seconds"] else 0.0
            self._show(_round_lines(data, self._workload, explained=bool(self._rounds)))
            self._rounds.append(data)
        elif kind == "wrong":
            self._wrong.append({"rank": rank, **data})
            self._err.print(f"rank {rank}, round {data['round']}: {data['row']}", soft_wrap=True)

    def conclude(self, failures: Sequence[RankFailure]) -> int:
        """Show how the run ended.

        Parameters
        ----------
        failures : sequence of RankFailure
            In the order in which they happened.

        Returns
        -------
        int
            Exit status: 0 when every rank finished and every byte is right.
        """
        ok = bool(self._rounds) and not failures and not any(done["rows_wrong"] for done in self._rounds)
        if self._as_json:
            print(json.dumps(self._document(ok, failures), indent=2))
        for (error, message, trace), ranks in _alike(failures).items():
            who = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, sorted(ranks)))}"
            write(self._err, f"{who}: {error}: {message}", hanging="  ", style="red")
            if trace:
                self._err.print(trace, soft_wrap=True)
        codes = sorted({failure.code for failure in failures if failure.code})
        if codes:
            hints = " or ".join(f"'eplb explain {code}'" for code in codes)
            write(self._err, f"{hints} says what that means and what to do.")
        return 0 if ok else 1

    def _document(self, ok: bool, failures: Sequence[RankFailure]) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "ok": ok,
            "workload": self._workload,
            "backend": self._backend,
            "rounds": self._rounds,
            "wrong": self._wrong,
            "failures": [
                {"rank": failure.rank, "error": failure.error, "code": failure.code, "message": failure.message}
                for failure in failures
            ],
        }

    def _advance(self, data: Mapping[str, Any]) -> None:
        key = data["phase"], data["round"]
        if key not in self._bar_of:
            title = _PHASES[data["phase"]] + (f", round {data['round']}" if data["round"] else "")
            self._bar_of[key] = self.bars.add_task(title, total=data["total"])
        self.bars.update(self._bar_of[key], completed=data["done"])
        if data["done"] == data["total"]:
            self.bars.update(self._bar_of[key], visible=False)

    def _show(self, lines: Sequence[str]) -> None:
        if not self._as_json:
            for line in lines:
                write(self._out, line, hanging="    ")


def _alike(failures: Sequence[RankFailure]) -> dict[tuple[str, str, str], list[int]]:
    """Group ranks with equal failures; the traceback of a typed error is left out."""
    groups: dict[tuple[str, str, str], list[int]] = {}
    for failure in failures:
        trace = "" if failure.code else failure.trace
        groups.setdefault((failure.error, failure.message, trace), []).append(failure.rank)
    return groups


def _workload_lines(data: Mapping[str, Any]) -> list[str]:
    layers = f"{data['num_layers']} of {_number(data['num_layers_found'], 'MoE layer')}"
    widths = f", widths divided by {data['scale']}" if data["scale"] > 1 else ""
    num_local = (data["num_experts"] + data["num_redundant_experts"]) // data["world_size"]
    slots = f"{_number(data['world_size'], 'rank')} x {_number(num_local, 'physical expert')}"
    return [
        f"{data['model']} ({data['origin']}): {layers}, {data['num_experts']} experts, top-{data['top_k']}",
        f"one expert of a layer{widths}: {_size(data['nbytes_per_expert'])}",
        *(f"  {tensor['name']} {tensor['dtype']} {tensor['shape']}" for tensor in data["tensors"]),
        f"{slots} ({data['num_redundant_experts']} redundant), {_size(data['nbytes'])} of weights",
    ]


def _round_lines(data: Mapping[str, Any], workload: Mapping[str, Any], *, explained: bool) -> list[str]:
    moved = f"{_size(data['nbytes_moved'])} between ranks and {_size(data['nbytes_local'])} within them"
    # For few bytes the rate shows the cost of the calls, not the speed.
    speed = f", {data['gb_per_s']:.2f} GB/s" if data["nbytes_moved"] >= _LEAST_NBYTES_OF_A_RATE else ""
    verdict = f"{data['rows_wrong']} ROWS ARE WRONG" if data["rows_wrong"] else "all right"
    return [
        f"round {data['round']}",
        f"  balancedness {data['balancedness_before']:.3f} -> {data['balancedness_after']:.3f}",
        *(["    (mean over hottest rank, average of the layers; 1 is perfect)"] if not explained else []),
        f"  moved {moved} in {data['seconds']:.3f} s{speed}",
        f"  committed {len(data['layers_committed'])} of {_number(workload['num_layers'], 'layer')}",
        f"  checked {_number(data['rows_checked'], 'row')}, {_size(data['nbytes_checked'])}: {verdict}",
    ]


def _number(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"


def _size(nbytes: float) -> str:
    for unit in ("B", "kB", "MB"):
        if nbytes < 999.5:  # which three digits still show as less than 1000
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.2f} GB"
