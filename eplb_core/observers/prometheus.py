"""Counters of `Stats` for a Prometheus registry (extra ``prometheus``)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from eplb_core.observers.stats import Stats

_PLAIN = {
    "rearrangements": "Rearrangements begun.",
    "layers_committed": "MoE layers committed on this rank.",
    "rows_received": "Expert rows received from other ranks.",
    "rows_sent": "Expert rows sent to other ranks.",
}


class StatsCollector(Collector):
    """Reads any number of `Stats` whenever the registry is scraped; counting itself costs nothing more.

    Labels are ``communicator``, ``step`` ("transfer", "wait", "vote") and ``code`` (of an error): their values are
    few, whatever the numbers of layers, experts and ranks. The rank of a process is known to the scraper as its target.

    Parameters
    ----------
    stats : Mapping[str, Stats]
        By the value of the label ``communicator``: one for each communicator of the process, under its name.

    Examples
    --------
    >>> from prometheus_client import CollectorRegistry, generate_latest
    >>> registry = CollectorRegistry()
    >>> registry.register(StatsCollector({"default": Stats()}))
    >>> "eplb_received_bytes_total" in generate_latest(registry).decode()
    True
    """

    def __init__(self, stats: Mapping[str, Stats]) -> None:
        self._stats = dict(stats)

    def collect(self) -> Iterator[Metric]:
        """Yield every family, also those that count nothing yet."""
        snapshots = {name: stats.snapshot() for name, stats in self._stats.items()}
        for field, text in _PLAIN.items():
            counter = CounterMetricFamily(f"eplb_{field}", text, labels=["communicator"])
            for communicator, snapshot in snapshots.items():
                counter.add_metric([communicator], getattr(snapshot, field))
            yield counter
        for way in ("received", "sent"):
            text = f"Bytes of expert weights {way}."
            counter = CounterMetricFamily(f"eplb_{way}_bytes", text, labels=["communicator"])
            for communicator, snapshot in snapshots.items():
                counter.add_metric([communicator], getattr(snapshot, f"nbytes_{way}"))
            yield counter
        aborts = CounterMetricFamily("eplb_aborts", "Rearrangements aborted.", labels=["communicator", "code"])
        steps = CounterMetricFamily("eplb_steps", "Steps of layers ended.", labels=["communicator", "step"])
        seconds = CounterMetricFamily("eplb_step_seconds", "Seconds in steps.", labels=["communicator", "step"])
        failures = CounterMetricFamily("eplb_step_failures", "Steps that failed.", labels=["communicator", "step"])
        slowest = GaugeMetricFamily("eplb_slowest_step_seconds", "The longest step.", labels=["communicator", "step"])
        text = "Layers between the start of their transfer and their commit."
        in_flight = GaugeMetricFamily("eplb_layers_in_flight", text, labels=["communicator"])
        for communicator, snapshot in snapshots.items():
            for code, count in snapshot.aborts.items():
                aborts.add_metric([communicator, code], count)
            for family, values in (
                (steps, snapshot.steps),
                (seconds, snapshot.seconds),
                (failures, snapshot.failures),
                (slowest, snapshot.slowest_s),
            ):
                for step, value in values.items():
                    family.add_metric([communicator, step], value)
            in_flight.add_metric([communicator], snapshot.layers_in_flight)
        yield from (aborts, steps, seconds, failures, slowest, in_flight)
