"""A control plane is made on every rank or on none, and what is wrong on one rank is told on all of them."""

from __future__ import annotations

import gc
import os
import signal
import socket
import threading
import time

import pytest
import torch
import torch.distributed as dist

import eplb_core as eplb
from eplb_core.control import founding, hosts
from eplb_core.control.hosts import Location, read_boot_id, read_network_id, why_unreachable
from eplb_core.control.listen import listen
from eplb_core.control.store import StoreGone
from eplb_core.errors import ConfigError, MetadataError
from eplb_core.testing.model import Model, shuffles
from eplb_core.testing.ranks import Rank, Ranks, run_ranks
from tests.support.addresses import NOT_OURS, free_range
from tests.support.namespaces import ip, move_into_a_network_of_its_own, needs_namespaces

QUICK_S = 5.0
"""More than anything here takes, less than any limit that is not meant to run out."""


def make_one(group, given: dict[str, object]):
    """Make a control plane; return how it ended, and after how long."""
    dist.ProcessGroup.barrier(group).wait()
    started = time.monotonic()
    try:
        control = eplb.ControlPlane.from_process_group(group, **given)
    except ConfigError as error:
        return time.monotonic() - started, error.code, str(error)
    return time.monotonic() - started, "", control.location


def makes_several(rank: Rank, attempts: list[dict[int, dict[str, object]]]):
    """Make a control plane again and again, with what this rank was given each time."""
    group = rank.device_group()
    return [make_one(group, given.get(rank.rank, {})) for given in attempts]


def refusals(world_size: int, attempts: list[dict[int, dict[str, object]]]) -> list[str]:
    """Return what every rank says of each attempt, which is the same."""
    texts = []
    for results in zip(*run_ranks(world_size, makes_several, attempts), strict=True):
        for seconds, code, text in results:
            assert (code, seconds < QUICK_S) == ("EPLB-C009", True), text
        said = {text for _, _, text in results}
        assert len(said) == 1
        texts.append(said.pop())
    return texts


# --- what one rank was given ------------------------------------------------------------------------------------------

WRONG = [
    ({"host": NOT_OURS}, f"host='{NOT_OURS}' is not an address of this machine"),
    ({"host": "no host"}, "host='no host' cannot be resolved: "),
    ({"host": "0.0.0.0"}, "host='0.0.0.0' is not a single address at which the other ranks reach this one"),
    ({"host": ""}, "host='' is not an address, nor the name of one"),
    ({"host": "x" * 300}, f"host='{'x' * 80}' is not an address, nor the name of one"),
    ({"host": 5}, "host= should be a str, got int"),
    ({"ports": 5000}, "ports=5000 should be the lowest and the highest port allowed, between 1 and 65535"),
    ({"ports": (6000, 5000)}, "ports=(6000, 5000) should be the lowest and the highest port"),
    ({"ports": (0, 70000)}, "ports=(0, 70000) should be the lowest and the highest port"),
]


@pytest.mark.parametrize("where", [0, 2])
def test_what_is_wrong_on_one_rank_is_told_on_all_at_once(where) -> None:
    texts = refusals(3, [{where: given} for given, _ in WRONG])
    for text, (_, said) in zip(texts, WRONG, strict=True):
        assert text.startswith(f"The control plane cannot be made: rank {where}: {said}")


def test_every_rank_that_is_wrong_is_named() -> None:
    (text,) = refusals(3, [{0: {"host": NOT_OURS}, 2: {"host": "0.0.0.0"}}])
    assert f"rank 0: host='{NOT_OURS}' is not an address of this machine; rank 2: host='0.0.0.0' is no" in text


def with_its_ports_in_use(rank: Rank):
    taken = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)] if rank.rank == 1 else []
    ports = sorted(each.getsockname()[1] for each in taken)
    return make_one(rank.device_group(), {"ports": (ports[0], ports[0])} if taken else {})


def test_ports_that_are_in_use_are_told_on_all_ranks() -> None:
    for seconds, code, text in run_ranks(2, with_its_ports_in_use):
        assert (code, seconds < QUICK_S) == ("EPLB-C009", True)
        assert "rank 1: no port of ports=(" in text
        assert "can be listened on at host='127.0.0.1': Address already in use" in text


def test_a_host_of_another_machine_is_refused_where_the_store_is_the_engines_own() -> None:
    with pytest.raises(ConfigError, match=f"host='{NOT_OURS}' is not an address of this machine") as caught:
        eplb.ControlPlane.from_store(dist.HashStore(), rank=0, world_size=1, host=NOT_OURS)
    assert caught.value.code == "EPLB-C009"


def test_a_name_of_this_machine_is_as_good_as_its_address() -> None:
    control = eplb.ControlPlane.from_store(dist.HashStore(), rank=0, world_size=1, host="localhost")
    assert (control.host, control.host_given, control.location.loopback) == ("localhost", True, True)


# --- ports ------------------------------------------------------------------------------------------------------------


def ports_in_use(rank: Rank, low: int, high: int):
    group = rank.device_group()
    control = eplb.ControlPlane.from_process_group(group, ports=(low, high))
    return control._store.port, control.ports


def test_the_store_listens_within_the_ports_allowed_past_those_in_use() -> None:
    low, high = free_range(4)
    with socket.create_server(("127.0.0.1", low)):
        stores = run_ranks(2, ports_in_use, low, high)
    assert {allowed for _, allowed in stores} == {(low, high)}
    assert {port for port, _ in stores} <= set(range(low + 1, high + 1))
    assert len({port for port, _ in stores}) == 1


def test_fewer_ports_than_ranks_and_store_are_refused_before_anyone_needs_them() -> None:
    low, high = free_range(3)
    (text,) = refusals(3, [{rank: {"ports": (low, high)} for rank in range(3)}])
    assert f"ports={(low, high)} are too few for 3 rank(s) of one host, which need 4" in text


def test_a_listener_goes_from_port_to_port_until_one_is_free() -> None:
    low, high = free_range(3)
    taken = []
    try:
        for port in range(low, high + 1):
            taken.append(listen("127.0.0.1", (low, high), backlog=1))
            assert taken[-1].getsockname()[1] == port
        with pytest.raises(ConfigError, match="Address already in use"):
            listen("127.0.0.1", (low, high), backlog=1)
    finally:
        for each in taken:
            each.close()


# --- who can reach whom -----------------------------------------------------------------------------------------------


def place(boot: str = "a", network: str = "a 1", host: str | None = None, loopback: bool = False) -> Location:
    return Location(boot, network, host or "127.0.0.1", host is not None, loopback or host is None)


@pytest.mark.parametrize(
    ("places", "why"),
    [
        ([place(), place()], None),
        ([place(host="10.0.0.1"), place()], None),
        ([place(host="10.0.0.1"), place("b", "b 1", "10.0.0.2")], None),
        ([place(host="10.0.0.1"), place("b", "b 1")], "the ranks are on 2 hosts, and rank(s) [1] gave no host="),
        (
            [place(), place("a", "a 2"), place("a", "a 2", "10.0.0.2")],
            "the ranks are in 2 network namespaces (containers) of one host, and rank(s) [0, 1] gave no host=",
        ),
        (
            [place(host="10.0.0.1"), place("b", "b 1", "node-b", loopback=True)],
            "the ranks are on 2 hosts, and rank 1 gave host='node-b', which is loopback: the others do not reach it",
        ),
    ],
)
def test_ranks_of_several_networks_give_addresses_that_the_others_reach(places, why) -> None:
    locations = {rank: Location.from_json(each.to_json()) for rank, each in enumerate(places)}
    assert why_unreachable(locations) == why


def test_a_network_is_named_by_its_machine_and_its_namespace(monkeypatch, tmp_path) -> None:
    assert read_network_id().startswith(f"{read_boot_id()} net:[")
    monkeypatch.setattr(hosts, "NETWORK_NAMESPACE", tmp_path / "none")
    assert read_network_id() == read_boot_id()


def in_a_container_of_its_own(rank: Rank, host: str | None):
    group = rank.device_group()  # which stays connected over the network that it was made in
    if rank.rank == 1:
        move_into_a_network_of_its_own()
    return make_one(group, {"host": host})


@needs_namespaces
@pytest.mark.parametrize(
    ("host", "said"),
    [(None, "and rank(s) [0, 1] gave no host="), ("localhost", "and rank 0 gave host='localhost', rank 1 gave host=")],
)
def test_two_containers_of_one_machine_are_not_taken_for_one_host(host, said) -> None:
    for seconds, code, text in run_ranks(2, in_a_container_of_its_own, host):
        assert (code, seconds < QUICK_S) == ("EPLB-C009", True)
        assert f"the ranks are in 2 network namespaces (containers) of one host, {said}" in text


def cannot_reach_the_store(rank: Rank):
    group = rank.device_group()
    own = f"10.9.9.{rank.rank + 1}"
    move_into_a_network_of_its_own(own)
    return make_one(group, {"host": own})


@needs_namespaces
def test_a_store_that_one_rank_does_not_reach_is_told_on_all() -> None:
    for seconds, code, text in run_ranks(2, cannot_reach_the_store):
        assert (code, seconds < QUICK_S) == ("EPLB-C009", True)
        assert "rank 1: it cannot reach the store of rank 0 at 10.9.9.1:" in text
        assert "Network is unreachable" in text


def over_a_cable(rank: Rank):
    """Two networks with a cable between them, as containers on a bridge have; weights move over it."""
    group = rank.device_group()
    move_into_a_network_of_its_own()
    own = f"10.9.9.{rank.rank + 1}"
    if rank.rank == 0:
        rank.tell("ready")
        ip("link", "add", "cable0", "type", "veth", "peer", "name", "cable1", "netns", str(rank.listen()))
        rank.tell("laid")
    else:
        rank.tell(os.getpid())
        rank.listen()
    ip("addr", "add", f"{own}/24", "dev", f"cable{rank.rank}")
    ip("link", "set", f"cable{rank.rank}", "up")
    dist.ProcessGroup.barrier(group).wait()
    control = eplb.ControlPlane.from_process_group(group, host=own)
    maps = shuffles(2, 2, 2, 4)
    model = Model(rank.rank, 4, [[64], [64]])
    model.fill(maps[0])
    config = eplb.EPLBConfig(use_async=False, communicator="torch_gloo", timeout_s=20)
    with eplb.Communicator(config, model.weights, control) as comm:
        comm.rearrange(maps[0], maps[1])
    return model.wrong_rows(maps[1])


@needs_namespaces
def test_weights_move_between_two_containers_that_give_their_addresses() -> None:
    with Ranks(2, over_a_cable) as ranks:
        other = ranks.hear(1, 30)
        assert ranks.hear(0, 30) == "ready"
        ranks.tell(0, other)
        assert ranks.hear(0, 30) == "laid"
        ranks.tell(1, "go on")
        assert ranks.values(60) == [[], []]


# --- all or none ------------------------------------------------------------------------------------------------------


def whose_peer_leaves_half_way(rank: Rank):
    gather = founding._gather

    def leaves_before_the_second(*args):
        if rank.rank == 1 and args[-1].startswith("a rank was lost"):
            os.kill(os.getpid(), signal.SIGKILL)
        return gather(*args)

    founding._gather = leaves_before_the_second
    return make_one(rank.device_group(), {})


def test_a_rank_that_dies_before_all_had_reached_the_store_leaves_nobody_with_a_control_plane() -> None:
    with Ranks(3, whose_peer_leaves_half_way) as ranks:
        first, _, third = ranks.join(30)
    for seconds, code, text in (first.value, third.value):
        assert (code, seconds < QUICK_S) == ("EPLB-C009", True)
        assert "a rank was lost before all had reached the store" in text


def outlives_the_store(rank: Rank, log: str):
    control = eplb.ControlPlane.from_process_group(rank.device_group())
    rank.tell("made")
    if rank.rank == 0:
        rank.listen()  # for ever: it is killed
    rank.listen()
    with open(log, "wb") as file:
        os.dup2(file.fileno(), 2)
    started = time.monotonic()
    with pytest.raises(StoreGone) as caught:
        control.client("default", 60.0)
    return time.monotonic() - started, str(caught.value)


def test_the_death_of_the_stores_host_before_others_have_built_is_known_at_once(tmp_path) -> None:
    """torch would try again for minutes, and print pages of C++ frames."""
    log = tmp_path / "stderr"
    with Ranks(2, outlives_the_store, str(log)) as ranks:
        assert {ranks.hear(rank, 30) for rank in range(2)} == {"made"}
        ranks.signal(0, signal.SIGKILL)
        ranks.join(20, without=(1,))  # it is gone
        ranks.tell(1, "go on")
        _, second = ranks.join(20)
    seconds, text = second.value
    assert seconds < 1.0
    assert text.endswith("is gone: the connection was refused (rank 0 of the group hosts it)")
    assert log.read_text() == ""


# --- who hosts the store leaves last ----------------------------------------------------------------------------------


def fails_where_the_store_lives(rank: Rank, limit_s: float, others: str):
    control = eplb.ControlPlane.from_process_group(rank.device_group())
    maps = shuffles(2, 1, rank.world_size, 4)
    model = Model(rank.rank, 4, [[64]])
    config = eplb.EPLBConfig(use_async=False, communicator="torch_gloo", timeout_s=limit_s)
    rank.tell("made")
    rank.listen()
    started = time.monotonic()
    if rank.rank == 0:
        with pytest.raises(MetadataError):
            eplb.Communicator(config, [[torch.zeros(4, 128)[:, ::2]]], control, tensor_names=["w13"])
        rank.tell(time.monotonic() - started)
        os._exit(0)
    if others == "never come":
        return None
    with pytest.raises(MetadataError) as caught, eplb.Communicator(config, model.weights, control) as comm:
        comm.rearrange(maps[0], maps[1])
    return time.monotonic() - started, caught.value.code, str(caught.value)


def test_the_reason_of_the_rank_that_hosts_the_store_reaches_those_that_build_later() -> None:
    with Ranks(3, fails_where_the_store_lives, 30.0, "come") as ranks:
        assert [ranks.hear(rank, 30) for rank in range(3)] == ["made"] * 3
        ranks.tell(0, "go on")
        with pytest.raises(TimeoutError):  # it stays: nobody has read why it fails
            ranks.hear(0, 0.5)
        for rank in (1, 2):
            ranks.tell(rank, "go on")
        assert ranks.hear(0, 20) < 20
        first, *others = ranks.join(60)
    assert first.killed
    for other in others:
        seconds, code, text = other.value
        assert (code, seconds < QUICK_S) == ("EPLB-M006", True)
        assert "Rank 0 could not take part: " in text
        assert "'w13'" in text


def test_the_stores_host_does_not_stay_for_ranks_that_are_gone() -> None:
    with Ranks(2, fails_where_the_store_lives, 60.0, "come") as ranks:
        assert [ranks.hear(rank, 30) for rank in range(2)] == ["made"] * 2
        ranks.signal(1, signal.SIGKILL)
        ranks.tell(0, "go on")
        assert ranks.hear(0, 30) < 20


def test_the_stores_host_does_not_stay_for_ever() -> None:
    with Ranks(2, fails_where_the_store_lives, 1.0, "never come") as ranks:
        assert [ranks.hear(rank, 30) for rank in range(2)] == ["made"] * 2
        ranks.tell(0, "go on")
        assert 0.9 < ranks.hear(0, 30) < 4.0
        ranks.tell(1, "go home")


# --- names ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def control() -> eplb.ControlPlane:
    return eplb.ControlPlane.from_store(dist.HashStore(), rank=0, world_size=1)


def test_a_name_is_taken_once_until_it_is_given_back(control) -> None:
    control.claim("main")
    control.claim("draft")
    with pytest.raises(
        ConfigError, match="a communicator named 'main' is open on this control plane already"
    ) as caught:
        control.claim("main")
    assert caught.value.code == "EPLB-C010"
    control.release("main")
    control.release("main")
    control.claim("main")


def test_a_name_is_free_again_when_its_holder_is_gone(control) -> None:
    class Holder:
        pass

    first, second = Holder(), Holder()
    control.claim("main", first)
    with pytest.raises(ConfigError):
        control.claim("main", second)
    control.release("main", second)  # which does not have it
    with pytest.raises(ConfigError):
        control.claim("main", second)
    del first
    gc.collect()
    control.claim("main", second)


def test_of_many_threads_one_gets_a_name(control) -> None:
    start, refused = threading.Barrier(16), []

    def claim() -> None:
        start.wait(20)
        try:
            control.claim("main")
        except ConfigError as error:
            refused.append(error.code)

    threads = [threading.Thread(target=claim) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert refused == ["EPLB-C010"] * 15
