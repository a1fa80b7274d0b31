"""Traces of rearrangements as Chrome trace JSON, for Perfetto and chrome://tracing."""

from __future__ import annotations

import json
import os
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from eplb_core.backend import Event
from eplb_core.errors import BenchError
from eplb_core.observers.base import Observer, Step

if TYPE_CHECKING:
    from eplb_core.backend import TransferPlan

_FORMAT = "eplb-trace-1"
_EVENTS_TRACK = 0
_SLOT_TRACK = 1  # + slot
_PEER_TRACK = 16  # + 2 * peer + slot


@dataclass(frozen=True)
class _Record:
    """One span or instant; instants have no end."""

    track: int
    name: str
    began_ns: int
    ended_ns: int | None
    facts: Mapping[str, Any] = field(default_factory=dict)


class ChromeTrace(Observer):
    """Records a span for each layer, each of its steps, and each peer it exchanges rows with.

    A process of the trace is a rank. Its tracks are the landing slots, for two layers may be under way at once, with
    one more for every peer of a slot; and one for agreements and aborts. On a slot's track a span of the layer holds
    those of "transfer" (the hook), "wait" (the hook) and "vote" (from this rank's ballot until its commit is done). The
    span of a peer goes from the start of the transfer to the end of the wait: observers do not see when the rows of a
    single peer were complete. Its bytes are those of the plan.

    Parameters
    ----------
    rank : int
        This rank, which the trace shows as a process of its own.
    max_records : int
        Most spans and instants kept; the oldest go first. One takes less than 1 KiB.

    Notes
    -----
    Times are this host's wall clock when the observer was made, carried on by a monotonic clock: ranks of several
    hosts stand side by side as well as their clocks agree. The format is the JSON object format of the "Trace Event
    Format" document that chrome://tracing comes with: complete events ("X"), instants ("i") and metadata ("M"), times
    in microseconds.
    """

    name = "chrome trace"

    def __init__(self, rank: int, max_records: int = 50_000) -> None:
        super().__init__()
        if max_records < 1:
            raise ValueError(f"max_records is {max_records}")
        self.rank = rank
        self._lock = threading.Lock()
        self._records: deque[_Record] = deque(maxlen=max_records)
        self._dropped = 0
        self._communicator = ""
        self._steps: dict[int, list[Step]] = {}
        self._zero_ns = time.perf_counter_ns()
        self._zero_unix_ns = time.time_ns()

    def ends(self, step: Step) -> None:
        """Record a step, and with the last one its layer and peers."""
        slot = _SLOT_TRACK + step.plan.slot
        facts: dict[str, Any] = {"generation": step.plan.generation}
        if step.error is not None:
            facts["error"] = f"{type(step.error).__name__}: {step.error}"
        if step.name == "vote":
            facts["outcome"] = "abort" if step.aborted else "commit"
        self._add(_Record(slot, step.name, step.began_ns, step.ended_ns, facts))
        steps = self._steps.setdefault(step.plan.layer, [])
        steps.append(step)
        if step.name == "wait":
            self._add_peers(step.plan, steps[0].began_ns, step.ended_ns)
        if step.name == "vote" or step.error is not None:
            self._add_layer(step.plan, steps[0].began_ns, step.ended_ns)

    def told(self, event: Event) -> None:
        """Record agreements and aborts."""
        self._communicator = event.name
        if event.kind in ("agree", "abort"):
            self._steps.clear()
            facts: dict[str, Any] = {"generation": event.generation, "epoch": event.epoch}
            if event.kind == "abort":
                facts.update(layer=event.layer, reason=event.reason)
            self._add(_Record(_EVENTS_TRACK, event.kind, time.perf_counter_ns(), None, facts))

    def write(self, path: str | os.PathLike[str]) -> Path:
        """Write what was recorded so far as one file; call it from any thread.

        Parameters
        ----------
        path : path-like
            A file, or a folder that exists: then ``eplb-<communicator>-rank<rank>.trace.json`` in it.

        Returns
        -------
        Path
            The file; it appears whole or not at all.

        Raises
        ------
        BenchError
            It cannot be written (EPLB-B004).
        """
        target = Path(path)
        if target.is_dir():
            safe = "".join(c if c.isalnum() or c in "-_." else "_" for c in self._communicator or "default")
            target /= f"eplb-{safe}-rank{self.rank}.trace.json"
        with self._lock:
            records, dropped = list(self._records), self._dropped
        title = f"rank {self.rank} ({self._communicator or 'no rearrangement yet'})"
        events = _metadata(self.rank, self.rank, title, {record.track for record in records})
        # A span that begins with another and outlasts it must come first, or viewers nest them the wrong way round.
        records.sort(key=lambda record: (record.began_ns, -(record.ended_ns or 0)))
        events += [self._event(record) for record in records]
        facts = {
            "format": _FORMAT,
            "rank": self.rank,
            "communicator": self._communicator,
            "zero_unix_ns": self._zero_unix_ns,
            "dropped_records": dropped,
        }
        _write(target, events, facts)
        return target

    def _add_peers(self, plan: TransferPlan, began_ns: int, ended_ns: int) -> None:
        for peer in np.union1d(plan.sends.peer, plan.receives.peer).tolist():
            facts = {"layer": plan.layer, "generation": plan.generation}
            for way, moves in (("sent", plan.sends), ("received", plan.receives)):
                of_peer = moves.peer == peer
                facts[f"rows_{way}"] = int(of_peer.sum())
                facts[f"nbytes_{way}"] = int(moves.nbytes[of_peer].sum())
            track = _PEER_TRACK + 2 * peer + plan.slot
            self._add(_Record(track, f"layer {plan.layer}", began_ns, ended_ns, facts))

    def _add_layer(self, plan: TransferPlan, began_ns: int, ended_ns: int) -> None:
        self._steps.pop(plan.layer, None)
        facts = {
            "generation": plan.generation,
            "sequence": plan.sequence,
            "nbytes_sent": int(plan.sends.nbytes.sum()),
            "nbytes_received": int(plan.receives.nbytes.sum()),
        }
        self._add(_Record(_SLOT_TRACK + plan.slot, f"layer {plan.layer}", began_ns, ended_ns, facts))

    def _add(self, record: _Record) -> None:
        with self._lock:
            self._dropped += len(self._records) == self._records.maxlen
            self._records.append(record)

    def _event(self, record: _Record) -> dict[str, Any]:
        event: dict[str, Any] = {
            "name": record.name,
            "cat": "eplb",
            "ph": "i" if record.ended_ns is None else "X",
            "pid": self.rank,
            "tid": record.track,
            "ts": (record.began_ns - self._zero_ns) / 1000,
            "args": dict(record.facts),
        }
        if record.ended_ns is None:
            event["s"] = "p"
        else:
            event["dur"] = (record.ended_ns - record.began_ns) / 1000
        return event


def merge_traces(sources: Sequence[str | os.PathLike[str]], target: str | os.PathLike[str]) -> Path:
    """Merge the files of several ranks or communicators into one.

    Parameters
    ----------
    sources : sequence of path-like
        Files that `ChromeTrace.write` wrote.
    target : path-like
        The file to write.

    Returns
    -------
    Path
        The file; its time begins with the earliest source.

    Raises
    ------
    BenchError
        A file cannot be read or written (EPLB-B004), or is no trace of ours (EPLB-B005).
    """
    traces = sorted(
        (_read(Path(source)) for source in sources),
        key=lambda trace: (trace["otherData"]["communicator"], trace["otherData"]["rank"]),
    )
    if not traces:
        raise BenchError("EPLB-B004", "there are no traces to merge")
    zero_ns = min(trace["otherData"]["zero_unix_ns"] for trace in traces)
    events: list[dict[str, Any]] = []
    for process, trace in enumerate(traces):
        later_us = (trace["otherData"]["zero_unix_ns"] - zero_ns) / 1000
        for event in trace["traceEvents"]:
            moved = {"ts": event["ts"] + later_us} if "ts" in event else {}
            sorting = {"args": {"sort_index": process}} if event["name"] == "process_sort_index" else {}
            events.append({**event, "pid": process, **moved, **sorting})
    merged = [trace["otherData"] for trace in traces]
    _write(Path(target), events, {"format": f"{_FORMAT}-merged", "zero_unix_ns": zero_ns, "merged": merged})
    return Path(target)


def _metadata(process: int, sort_index: int, title: str, tracks: set[int]) -> list[dict[str, Any]]:
    def meta(what: str, track: int, **facts: Any) -> dict[str, Any]:
        return {"name": what, "ph": "M", "pid": process, "tid": track, "args": facts}

    events = [meta("process_name", 0, name=title), meta("process_sort_index", 0, sort_index=sort_index)]
    for track in sorted(tracks):
        peer, slot = divmod(track - _PEER_TRACK, 2)
        if track == _EVENTS_TRACK:
            name = "agree, abort"
        elif track < _PEER_TRACK:
            name = f"slot {track - _SLOT_TRACK}"
        else:
            name = f"slot {slot}, with rank {peer}"
        order = track if track < _PEER_TRACK else _PEER_TRACK * (1 + slot) * 1000 + peer
        events += [meta("thread_name", track, name=name), meta("thread_sort_index", track, sort_index=order)]
    return events


def _read(path: Path) -> dict[str, Any]:
    try:
        trace: Any = json.loads(path.read_bytes())
    except OSError as error:
        raise BenchError("EPLB-B004", f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise BenchError("EPLB-B005", f"{path}: {error}") from error
    facts = trace.get("otherData") if isinstance(trace, dict) else None
    if not isinstance(facts, dict) or facts.get("format") != _FORMAT or not isinstance(trace.get("traceEvents"), list):
        raise BenchError("EPLB-B005", f"{path} is not one rank's trace as ChromeTrace.write leaves it")
    return dict(trace)


def _write(path: Path, events: list[dict[str, Any]], facts: Mapping[str, Any]) -> None:
    body = {"displayTimeUnit": "ms", "otherData": facts, "traceEvents": events}
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        try:
            partial.write_text(json.dumps(body, separators=(",", ":")), encoding="utf-8")
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise BenchError("EPLB-B004", f"{path}: {error.strerror}") from error
