"""The ring of connections is closed within its limit, or an error says who did not reach whom, and where."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from eplb_core.errors import ConfigError, EplbError, StalledError, TransferError, error_for
from eplb_core.voting.liveness import Ring
from tests.support.addresses import NOT_OURS, free_range


def ring(rank: int, **given) -> Ring:
    return Ring(**{"host": "127.0.0.1", "name": "default", "rank": rank, "epoch": 1, "members": (0, 1)} | given)


def nothing() -> None:
    return None


@contextmanager
def silent_address() -> Iterator[tuple[str, int]]:
    """Make an address at which connections are neither taken nor refused, as behind a firewall that drops them."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(64):  # until its queue is full
            connection = stack.enter_context(socket.socket())
            connection.setblocking(False)
            connection.connect_ex(listener.getsockname())
        probe = stack.enter_context(socket.socket())
        probe.settimeout(0.2)
        with pytest.raises(TimeoutError):
            probe.connect(listener.getsockname())
        yield listener.getsockname()


@pytest.fixture
def first() -> Iterator[Ring]:
    made = ring(0)
    yield made
    made.close(goodbye=False)


def test_a_neighbour_behind_a_firewall_is_named_with_its_address_and_port(first) -> None:
    with silent_address() as (host, port):
        started = time.monotonic()
        with pytest.raises(TransferError) as caught:
            first.connect((host, port), 2.0, nothing)
        assert time.monotonic() - started < 2.0  # before the neighbour says no more than that nobody came
    assert caught.value.code == "EPLB-T014"
    assert str(caught.value).startswith(f"Rank 0 could not reach rank 1 at {host}:{port}: no answer within 1.5 s.")


def test_a_neighbour_that_refuses_is_named_at_once(first) -> None:
    low, _ = free_range(1)
    started = time.monotonic()
    with pytest.raises(TransferError) as caught:
        first.connect(("127.0.0.1", low), 30.0, nothing)
    assert time.monotonic() - started < 1.0
    assert str(caught.value).startswith(f"Rank 0 could not reach rank 1 at 127.0.0.1:{low}: Connection refused.")


def test_a_neighbour_whose_name_means_nothing_here_is_named(first) -> None:
    with pytest.raises(TransferError, match=r"could not reach rank 1 at no host:80: "):
        first.connect(("no host", 80), 30.0, nothing)


def test_while_a_neighbour_does_not_answer_the_refusal_of_another_rank_is_heard(first) -> None:
    refusal = error_for("EPLB-M006", rank=2, reason="its tensors are strided")
    with silent_address() as address:
        started = time.monotonic()
        with pytest.raises(EplbError) as caught:
            first.connect(address, 30.0, lambda: refusal)
        assert time.monotonic() - started < 1.0
    assert caught.value is refusal


def test_a_neighbour_that_does_not_come_is_told_where_it_should_have_come_to(first) -> None:
    second = ring(1)
    try:
        with pytest.raises(StalledError) as caught:
            first.connect(("127.0.0.1", second.port), 0.5, nothing)
        port = first.port
    finally:
        second.close(goodbye=False)
    assert "liveness ring, waiting for rank 1. It should have connected to rank 0 at 127.0.0.1" in str(caught.value)
    assert f":{port}. [EPLB-T002]" in str(caught.value)


def test_a_ring_listens_within_the_ports_allowed_while_it_connects() -> None:
    low, high = free_range(3)
    rings = [ring(rank, ports=(low, high)) for rank in (0, 1)]
    ports = [each.port for each in rings]
    assert ports == [low, low + 1]
    threads = [
        threading.Thread(target=rings[rank].connect, args=(("127.0.0.1", ports[1 - rank]), 10.0, nothing))
        for rank in (0, 1)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    again = ring(0, ports=(low, high))  # the ports of a ring that is closed are free for the next
    assert again.port == low
    assert [each.poll() for each in rings] == [None, None]
    for each in (*rings, again):
        each.close(goodbye=True)


def test_a_ring_at_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(ConfigError, match=f"host='{NOT_OURS}' is not an address of this machine") as caught:
        ring(0, host=NOT_OURS)
    assert caught.value.code == "EPLB-C009"
