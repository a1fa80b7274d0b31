"""A rank that serves: forward steps of random length, an all-to-all in each, every byte of the weights looked at."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from datetime import timedelta

import numpy as np
import torch

import eplb_core as eplb
from eplb_core.balancing.load_balancer import LoadBalancer
from eplb_core.control.store import StoreClient
from eplb_core.testing.model import Model

NUM_EXPERTS = 8
NUM_ROWS = 4


class StoreCalls:
    """Counts operations on stores by thread."""

    def __init__(self):
        self.of_engine = 0
        self._engine = threading.get_ident()
        self._inside = False
        self._call = StoreClient._call
        calls = self

        def counted(client, operation):
            if calls._inside and threading.get_ident() == calls._engine:
                calls.of_engine += 1
            return calls._call(client, operation)

        StoreClient._call = counted

    @contextmanager
    def counting(self):
        self._inside = True
        try:
            yield
        finally:
            self._inside = False


class Serving:
    """An engine of one rank.

    Parameters
    ----------
    rank : Rank
        Of the test.
    longest_s : float
        A forward pass sleeps up to so long.
    meets : bool
        Is there an all-to-all in each pass? Without, the ranks drift apart.
    **config
        Fields of EPLBConfig.
    """

    def __init__(
        self,
        rank,
        *,
        layers=4,
        experts=NUM_EXPERTS,
        nbytes=(64, 3000),
        observers=(),
        longest_s=0.004,
        meets=True,
        on_commit=None,
        **config,
    ):
        slots = rank.world_size * NUM_ROWS
        self.rank = rank
        self.experts = experts
        self.longest_s = longest_s
        self.map = np.tile(np.arange(slots) % experts, (layers, 1))
        fields = {
            "step_interval": 20,
            "window_size": 10,
            "num_redundant_experts": slots - experts,
            "timeout_s": 20,
        }
        self.config = eplb.EPLBConfig(**(fields | config))
        self.model = Model(rank.rank, NUM_ROWS, [nbytes] * layers)
        self.model.fill(self.map)
        self.group = rank.device_group(topic="all-to-all") if meets else None
        self.commits = []
        self.calls = StoreCalls()
        self.step_s = []
        self.number = 0
        self.comm = eplb.Communicator(self.config, self.model.weights, rank.control(), observers=observers)
        self.lb = LoadBalancer(self.config, self.comm, self.map, experts, on_commit=on_commit)

    def forward(self):
        """One forward pass: some experts are hot, and others after a while."""
        self.number += 1
        hot = np.random.default_rng(self.number // 20).integers(0, self.experts, 2)
        for layer, row in enumerate(self.map):
            self.lb.record(layer, np.where(np.isin(row, hot), 100, 5))
        time.sleep(np.random.default_rng([self.rank.rank, self.number]).random() * self.longest_s)
        if self.group is not None:
            self.group.allreduce([torch.zeros(1)]).wait(timedelta(seconds=60))

    def step(self):
        """End the pass; every row holds what the map says, before and after."""
        began = time.perf_counter()
        with self.calls.counting():
            committed = self.lb.step()
        self.step_s.append(time.perf_counter() - began)
        self.commits.extend((self.number, layer) for layer in committed)
        self.map = self.lb.physical_to_logical_map
        wrong = self.model.wrong_rows(self.map)
        assert not wrong, f"rank {self.rank.rank}, step {self.number}: rows {wrong}"
        return committed

    def serve(self, steps):
        for _ in range(steps):
            self.forward()
            self.step()

    def serve_until(self, enough, limit=3000):
        """Serve until something holds that comes at the same step on every rank: what has been committed."""
        while not enough():
            assert self.number < limit, f"not within {limit} steps: {self.lb.status}"
            self.serve(1)

    def meet(self, topic):
        """Wait for the other ranks, without the load balancer's help."""
        store = self.rank.store(f"meet/{topic}")
        store.add("count", 1)
        while int(store.add("count", 0)) < self.rank.world_size:
            time.sleep(2e-3)

    def close(self):
        self.meet("close")
        self.lb.close()
        self.comm.close()

    def outcome(self):
        status = self.lb.status
        return {
            "commits": self.commits,
            "map": self.map.tolist(),
            "rearrangements": status.num_rearrangements,
            "failures": status.num_failures,
            "waits": status.num_engine_waits,
            "longest_wait_s": status.longest_engine_wait_s,
            "settled": status.num_engine_settled,
            "store_calls": self.calls.of_engine,
            "backend": status.backend,
            "offset": status.counter_offset,
            "step_s": self.step_s,
            "threads": [thread.name for thread in threading.enumerate() if thread.name.startswith("eplb-load")],
        }
