"""Counters of the communicators, exported where vLLM exports its own.

vLLM's workers are processes that nobody scrapes. Where it runs prometheus_client in its mode of several processes
(``PROMETHEUS_MULTIPROC_DIR``), counters that a worker keeps are added up by the process that is scraped; a collector
of the worker's own would not be seen. So what `eplb_core.observers.Stats` counts is copied into plain counters, which
serve in one process as well.
"""

from __future__ import annotations

import threading
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge

from eplb_core.observers import Stats
from eplb_core.observers.prometheus import StatsCollector

_GAUGE_MODES = {"eplb_slowest_step_seconds": "max", "eplb_layers_in_flight": "livesum"}


class Exporter:
    """Copies the counts of any number of `Stats` into counters of a registry.

    Parameters
    ----------
    registry : CollectorRegistry
        Where the counters are registered.
    """

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self._registry = registry
        self._lock = threading.Lock()
        self._metrics: dict[str, Any] = {}
        self._told: dict[tuple[str, ...], float] = {}

    def publish(self, name: str, stats: Stats) -> None:
        """Bring the counters up to what a communicator has counted by now.

        Parameters
        ----------
        name : str
            Name of the communicator, the label ``communicator``.
        stats : Stats
            What it has counted since it was built.
        """
        with self._lock:
            for family in StatsCollector({name: stats}).collect():
                for sample in family.samples:
                    self._copy(family, sample.labels, float(sample.value), str(id(stats)))

    def _copy(self, family: Any, labels: dict[str, str], value: float, whose: str) -> None:
        metric = self._metrics.get(family.name)
        if metric is None:
            metric = self._metrics[family.name] = self._made(family, list(labels))
        child = metric.labels(**labels)
        if family.type == "gauge":
            child.set(value)
            return
        key = (family.name, whose, *labels.values())
        child.inc(value - self._told.get(key, 0.0))
        self._told[key] = value

    def _made(self, family: Any, labels: list[str]) -> Any:
        if family.type == "counter":
            return Counter(family.name, family.documentation, labels, registry=self._registry)
        mode: Any = _GAUGE_MODES[family.name]
        return Gauge(family.name, family.documentation, labels, registry=self._registry, multiprocess_mode=mode)

    def forget(self, stats: Stats) -> None:
        """Drop what is remembered of a communicator that is closed; its counts stay."""
        with self._lock:
            whose = str(id(stats))
            self._told = {key: value for key, value in self._told.items() if key[1] != whose}


exporter: Exporter | None = None
"""One of the process; made by the first communicator."""


def the_exporter() -> Exporter:
    """Return the exporter of this process."""
    global exporter  # noqa: PLW0603 - a process has one registry
    if exporter is None:
        exporter = Exporter()
    return exporter
