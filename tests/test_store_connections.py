"""A connection to the store opens within its limit, whatever state the process that hosts the store is in."""

from __future__ import annotations

import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

import eplb_core as eplb
from eplb_core.control import opening
from eplb_core.control.opening import open_client
from eplb_core.control.sockets import connections_to
from eplb_core.control.store import StoreGone
from eplb_core.errors import ConfigError
from eplb_core.testing.ranks import Rank, Ranks

FRAMES = "frame #"
"""What torch prints of a failure in C++."""


def hosts_a_store(rank: Rank, use_libuv: bool = True) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=use_libuv)
    rank.tell(store.port)
    rank.listen()


class StoreHost:
    """A store in a process of its own, and a control plane over it in this one."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.port = ranks.hear(0, 30)
        client = dist.TCPStore("127.0.0.1", self.port, is_master=False, timeout=timedelta(seconds=300))
        self.store = client
        self.control = eplb.ControlPlane.from_store(dist.PrefixStore("engine", client), rank=0, world_size=1)

    def stop(self) -> None:
        self.ranks.signal(0, signal.SIGSTOP)
        tasks = Path(f"/proc/{self.ranks.pid(0)}/task")  # a thread of it may answer once more before it stops
        assert becomes_true(lambda: all(stat_of(task) in "tT" for task in tasks.iterdir()))

    def go_on(self) -> None:
        self.ranks.signal(0, signal.SIGCONT)

    def kill(self) -> None:
        self.ranks.signal(0, signal.SIGKILL)
        until = time.monotonic() + 10
        while True:  # its sockets are closed a moment later
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
            except OSError:
                return
            assert time.monotonic() < until
            time.sleep(0.01)


@pytest.fixture
def host(request):
    with Ranks(1, hosts_a_store, getattr(request, "param", True)) as ranks:
        yield StoreHost(ranks)


both_servers = pytest.mark.parametrize("host", [True, False], ids=["libuv", "legacy"], indirect=True)


def fails_after(operation: Callable[[], object]) -> tuple[float, str]:
    started = time.monotonic()
    with pytest.raises(StoreGone) as caught:
        operation()
    return time.monotonic() - started, str(caught.value)


def threads_of_ours() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("eplb ")]


def stat_of(task: Path) -> str:
    return (task / "stat").read_text().rpartition(")")[2].split()[0]


def becomes_true(condition: Callable[[], bool], within_s: float = 20.0) -> bool:
    until = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True


# --- a host that is stopped -------------------------------------------------------------------------------------------


@both_servers
def test_a_stopped_store_costs_an_opening_its_limit_and_not_for_ever(host: StoreHost, capfd) -> None:
    host.stop()
    for open_one in (lambda: host.control.client("a", 1.0), lambda: host.control.connection(1.0)):
        seconds, text = fails_after(open_one)
        assert 0.9 < seconds < 6.0
        assert text == f"the store at 127.0.0.1:{host.port} did not answer within 1 s"
    assert becomes_true(lambda: threads_of_ours() == [])
    host.go_on()
    assert host.control.client("a", 20.0).exists("nothing") is False
    assert FRAMES not in capfd.readouterr().err


def test_a_store_that_is_stopped_while_torch_connects_costs_the_limit_too(host: StoreHost, monkeypatch) -> None:
    """torch waits for the store's first answer without any limit."""
    greet = opening._greet

    def then_it_stops(*args) -> None:
        greet(*args)
        host.stop()

    before = connections_to(host.port)
    monkeypatch.setattr(opening, "_greet", then_it_stops)
    for _ in range(2):  # the second finds it stopped before torch meets it, and leaves no thread behind
        seconds, text = fails_after(lambda: host.control.client("a", 1.0))
        assert 0.9 < seconds < 6.0
        assert "did not answer within 1 s" in text
        monkeypatch.undo()
    assert len(threads_of_ours()) == 1
    host.go_on()
    assert becomes_true(lambda: threads_of_ours() == [])  # nobody wants its connection any more, so it is closed
    assert connections_to(host.port) == before
    assert host.control.client("a", 20.0).exists("nothing") is False


def test_a_store_that_is_stopped_later_costs_an_operation_its_limit(host: StoreHost) -> None:
    client = host.control.client("a", 1.0)
    host.stop()
    seconds, text = fails_after(lambda: client.exists("key"))
    assert 0.9 < seconds < 6.0
    assert text.startswith("it did not answer within 1 s")
    seconds, _ = fails_after(lambda: client.exists("key"))  # what comes now may answer the first
    assert seconds < 0.5


def test_a_control_plane_over_a_stopped_store_is_refused_within_the_limit(host: StoreHost) -> None:
    host.stop()
    started = time.monotonic()
    with pytest.raises(ConfigError, match="did not answer within 1 s") as caught:
        eplb.ControlPlane.from_store(host.store, rank=0, world_size=1, timeout_s=1.0)
    assert time.monotonic() - started < 6.0
    assert caught.value.code == "EPLB-C009"


def test_a_process_that_listens_and_never_accepts_is_no_store() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        seconds, text = fails_after(lambda: open_client("127.0.0.1", listener.getsockname()[1], 0.5))
    assert seconds < 1.5
    assert "did not answer within 0.5 s" in text


# --- a host that is gone ----------------------------------------------------------------------------------------------


@both_servers
def test_a_store_whose_host_is_gone_is_gone_at_once_without_pages_of_frames(host: StoreHost, capfd) -> None:
    """torch would try a refused port again for its whole timeout, here five minutes."""
    client = host.control.client("a", 60.0)
    client.set("key", b"value")
    assert client.read("key") == b"value"
    host.kill()
    seconds, text = fails_after(lambda: client.read("key"))
    assert seconds < 0.5
    assert text == "its process is gone: it closed the connection"
    for _ in range(2):
        seconds, text = fails_after(lambda: host.control.client("a", 60.0))
        assert seconds < 3.0
        assert text == f"the store at 127.0.0.1:{host.port} is gone: the connection was refused"
    assert FRAMES not in capfd.readouterr().err


def test_a_closed_client_is_gone_and_so_is_its_socket(host: StoreHost) -> None:
    before = connections_to(host.port)
    client = host.control.client("a", 20.0)
    assert len(connections_to(host.port)) == len(before) + 1
    client.close()
    assert connections_to(host.port) == before
    seconds, text = fails_after(lambda: client.set("key", b""))
    assert seconds < 0.5
    assert "closed on this side" in text


# --- limits, and whose they are ---------------------------------------------------------------------------------------


def receive_limits(port: int) -> set[float]:
    found = set()
    for descriptor, _ in connections_to(port):
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            seconds, micros = struct.unpack("ll", connection.getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, 16))
            found.add(seconds + micros / 1e6)
    return found


def test_a_connection_has_its_limit_and_the_host_engines_own_keeps_none(host: StoreHost) -> None:
    client = host.control.client("a", 2.5)
    raw = host.control.connection(7.0)
    assert receive_limits(host.port) == {0.0, host.control.timeout_s, 2.5, 7.0}
    assert raw.timeout == timedelta(seconds=7)
    assert host.store.timeout == timedelta(seconds=300)
    del raw, client


def test_connections_that_threads_open_at_once_have_their_own_limits(host: StoreHost) -> None:
    limits = [5.0 + number for number in range(8)]
    clients = [None] * len(limits)

    def open_one(place: int) -> None:
        clients[place] = host.control.client("a", limits[place])

    threads = [threading.Thread(target=open_one, args=(place,)) for place in range(len(limits))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert receive_limits(host.port) == {0.0, host.control.timeout_s, *limits}
    assert all(client.add("counter") == place + 1 for place, client in enumerate(clients))


# --- other kinds of store ---------------------------------------------------------------------------------------------


class PythonStore(dist.Store):
    """A store as an engine may write one: over another, and with one connection."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = dist.HashStore()

    def set(self, key, value):
        self.inner.set(key, value)

    def get(self, key):
        return self.inner.get(key)

    def check(self, keys):
        return self.inner.check(keys)


class WithClone(PythonStore):
    def clone(self):
        return self


def file_store(tmp_path) -> dist.Store:
    return dist.FileStore(str(tmp_path / "store"), -1)


@pytest.mark.parametrize(
    "make",
    [
        lambda _: dist.HashStore(),
        file_store,
        lambda _: dist.PrefixStore("outer", dist.PrefixStore("inner", dist.HashStore())),
        lambda tmp_path: dist.PrefixStore("outer", file_store(tmp_path)),
        lambda _: WithClone(),
    ],
    ids=["hash", "file", "prefixed hash", "prefixed file", "python"],
)
def test_stores_of_other_kinds_are_connected_to_as_often_as_is_asked(make, tmp_path) -> None:
    store = make(tmp_path)
    control = eplb.ControlPlane.from_store(store, rank=0, world_size=1)
    first, second = control.client("a", 5.0), control.client("a", 5.0)
    first.set("key", b"value")
    assert second.read("key") == b"value"
    assert control.client("b", 5.0).read("key") is None
    assert store.get("a/key") == b"value"  # in the namespace that the engine's own store has


@pytest.mark.parametrize(
    "wrap", [lambda store: store, lambda store: dist.PrefixStore("outer", store)], ids=["bare", "prefixed"]
)
def test_a_store_with_a_single_connection_is_refused(wrap) -> None:
    with pytest.raises(ConfigError, match=r"Store cannot be connected to once more: it has no clone\(\)") as caught:
        eplb.ControlPlane.from_store(wrap(PythonStore()), rank=0, world_size=1)
    assert caught.value.code == "EPLB-C009"


@pytest.mark.parametrize("limit", [0, -1.0, float("nan"), float("inf"), "5", True, None])
def test_a_limit_that_is_none_is_refused(limit) -> None:
    with pytest.raises(ConfigError, match=r"timeout_s=.* should be a number of seconds above 0"):
        eplb.ControlPlane.from_store(dist.HashStore(), rank=0, world_size=1, timeout_s=limit)


# --- the thread that is let go ----------------------------------------------------------------------------------------


def test_what_a_call_returns_after_it_was_let_go_is_discarded() -> None:
    from eplb_core.control.attempt import Attempt

    may_end, discarded = threading.Event(), []

    def late() -> str:
        may_end.wait(20)
        return "late"

    attempt = Attempt(late, "test", discard=discarded.append)
    assert attempt.wait(0.05) is False
    attempt.let_go()
    assert discarded == []
    may_end.set()
    assert becomes_true(lambda: discarded == ["late"])


def test_what_a_call_raises_is_raised_where_it_is_asked_for() -> None:
    from eplb_core.control.attempt import within

    with pytest.raises(ZeroDivisionError):
        within(5.0, lambda: 1 // 0, "test")
    with pytest.raises(TimeoutError, match="a test took longer than"):
        within(0.01, threading.Event().wait, "a test")
