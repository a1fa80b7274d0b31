"""After a failure: what is in doubt is settled the same everywhere, and a new epoch begins."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch.distributed as dist

import eplb_core as eplb
from eplb_core.errors import EplbError, StoreLostError, TransferError
from eplb_core.hookspecs import hookimpl
from eplb_core.testing.faults import FaultInjector
from eplb_core.testing.model import Model, shuffles
from eplb_core.testing.ranks import Rank, Ranks, run_ranks
from tests.support.backends import BackendCase, case_config, case_options, device_group, every_backend_under_faults

LAYERS = [[512, 16]] * 4


def config(backend: str, timeout_s: float = 20.0) -> eplb.EPLBConfig:
    return case_config(backend, timeout_s=timeout_s)


class DiesDeciding:
    """Rank 0, which hosts the store, is killed at the vote on layer 1: before it decides, or after."""

    name = "dies deciding"

    def __init__(self, rank: Rank, after: bool) -> None:
        self.rank, self.after = rank, after

    @hookimpl
    def observe(self, event):
        import os
        import signal

        kind = "commit" if self.after else "vote"
        if (event.kind, event.layer, event.generation) == (kind, 1, 2):
            os.kill(os.getpid(), signal.SIGKILL)


def loses_its_store(rank: Rank, backend: str, after: bool):
    dist.init_process_group("gloo", store=rank.store("world"), rank=rank.rank, world_size=rank.world_size)
    control = eplb.ControlPlane.from_process_group(dist.group.WORLD)
    assert control.hosts_store is (rank.rank == 0)
    maps = shuffles(3, len(LAYERS), rank.world_size, 4, redundant=2)
    model = Model(rank.rank, 4, LAYERS)
    model.fill(maps[0])
    observers = [DiesDeciding(rank, after)] if rank.rank == 0 else []
    group = device_group(rank, backend)
    comm = eplb.Communicator(
        config(backend), model.weights, control, group, options=case_options(), observers=observers
    )
    comm.rearrange(maps[0], maps[1])
    started = time.monotonic()
    with pytest.raises(EplbError) as caught:  # noqa: PT012 - in either of the two
        comm.rearrange(maps[1], maps[2])
        comm.rearrange(maps[2], maps[0])
    seconds = time.monotonic() - started
    with pytest.raises(EplbError) as refused:
        comm.rearrange(maps[1], maps[2])
    store = rank.store("second")
    new_control = eplb.ControlPlane.from_store(store, rank=rank.rank, world_size=rank.world_size)
    group = device_group(rank, backend, [1, 2], "second")
    report = comm.rebuild(20, control=new_control, ranks=[1, 2], device_group=group)
    held = report.physical_to_logical_map
    mixed = model.wrong_rows(held)
    gone = held.copy()
    gone[:, :4] = -1
    wanted = gone.copy()
    wanted[:, 4:] = gone[:, 4:][:, ::-1]
    comm.rearrange(gone, wanted)
    story = {
        "kind": type(caught.value).__name__,
        "text": str(caught.value),
        "seconds": seconds,
        "refused": refused.value.code,
        "told": caught.value.report.physical_to_logical_map.tolist(),
        "in doubt": caught.value.report.layers_in_doubt,
        "still in doubt": report.layers_in_doubt,
        "map": held.tolist(),
        "mixed": mixed,
        "after": model.wrong_rows(wanted),
    }
    comm.close()
    return story


@every_backend_under_faults
@pytest.mark.parametrize("after", [False, True], ids=["before the decision", "after it"])
@pytest.mark.slow
def test_a_lost_store_leaves_the_same_placement_on_all_survivors(backend: BackendCase, after: bool) -> None:
    with Ranks(3, loses_its_store, backend.name, after, env=backend.env) as ranks:
        outcomes = ranks.join(60, without=(0,))
    for outcome in outcomes[1:]:
        assert outcome.error is None, outcome.error
    stories = [outcome.value for outcome in outcomes[1:]]
    assert stories[0]["map"] == stories[1]["map"]
    doubts = {layer for story in stories for layer in story["in doubt"]}
    for layer, (one, other) in enumerate(zip(stories[0]["told"], stories[1]["told"], strict=True)):
        assert one == other or layer in doubts
    for story in stories:
        assert story["still in doubt"] == ()
        assert story["seconds"] < 3
        assert story["kind"] in ("StoreLostError", "PeerLostError"), story["text"]
        assert story["refused"] == "EPLB-T004"
        assert story["mixed"] == []
        assert story["after"] == []


class Waits:
    """Holds this rank's ballot on layer 1 of generation 2 until the test says so."""

    name = "waits"

    def __init__(self, rank: Rank) -> None:
        self.rank = rank

    @hookimpl
    def observe(self, event):
        if (event.kind, event.layer, event.generation) == ("vote", 1, 2):
            self.rank.store("gate").set("reached", b"1")
            self.rank.listen()


def until_the_others_landed(rank: Rank, council, vote) -> None:
    """Make progress until rank 0 is at its gate and all others have balloted: over tcp they read only while it does."""
    gate, until = rank.store("gate"), time.monotonic() + 20
    while vote.missing() != [0] or not gate.check(["reached"]):
        assert time.monotonic() < until
        if council.pump is not None:
            council.pump()


def in_doubt(rank: Rank, backend: str, everywhere: bool):
    """Lose the store at layer 1: one rank after its ballot, or all ranks before anyone can decide."""
    maps = shuffles(3, len(LAYERS), rank.world_size, 4)
    model = Model(rank.rank, 4, LAYERS)
    model.fill(maps[0])
    observers = [Waits(rank)] if rank.rank == 0 and not everywhere else []
    group = device_group(rank, backend)
    comm = eplb.Communicator(
        config(backend, 6.0),
        model.weights,
        rank.control("first"),
        group,
        options=case_options(),
        observers=observers,
    )
    comm.rearrange(maps[0], maps[1])
    members, watch = comm._lives.epoch.entered
    if everywhere:
        add = members.client.add

        def lost_before_counting(key: str) -> int:
            if key.startswith(f"{members.namespace}/2/1/"):
                gate, until = rank.store("gate"), time.monotonic() + 20
                gate.add("counting", 1)
                while gate.add("counting", 0) < rank.world_size:  # the others may still read from this rank
                    assert time.monotonic() < until
                    if members.pump is not None:
                        members.pump()
                members.client._gone = "connection reset"
            return add(key)

        members.client.add = lost_before_counting
    elif rank.rank == 1:
        decide = watch.decide

        def lost_after_the_ballot(vote, **keywords):
            if vote.where.startswith("layer 1") and members.generation == 2:
                until_the_others_landed(rank, members, vote)
                members.client._gone = "connection reset"
                rank.tell("lost")
            return decide(vote, **keywords)

        watch.decide = lost_after_the_ballot
    with pytest.raises(EplbError) as caught:
        comm.rearrange(maps[1], maps[2])
    before = caught.value.report.committed_layers
    group = device_group(rank, backend, topic="second")
    held = comm.rebuild(20, control=rank.control("second"), device_group=group).physical_to_logical_map
    assert model.wrong_rows(held) == []
    comm.rearrange(held, maps[0])
    story = (type(caught.value).__name__, str(caught.value), before, held.tolist(), model.wrong_rows(maps[0]))
    comm.close()
    return story


@pytest.mark.slow
@every_backend_under_faults
def test_a_layer_in_doubt_rolls_forward_when_anyone_saw_it_committed(backend: BackendCase) -> None:
    with Ranks(3, in_doubt, backend.name, False, env=backend.env) as ranks:
        assert ranks.hear(1, 40) == "lost"
        ranks.tell(0, "vote")
        results = ranks.values(60)
    assert results[1][0] == StoreLostError.__name__
    assert "Layers in doubt: [1]" in results[1][1]
    assert results[1][2] == (0,)
    assert 1 in results[0][2]
    maps = shuffles(3, len(LAYERS), 3, 4)
    for _, _, _, held, wrong in results:
        assert held[1] == maps[2][1].tolist()  # layer 1 is new on all three, the doubtful one too
        assert held[3] == maps[1][3].tolist()
        assert wrong == []


@every_backend_under_faults
def test_a_layer_in_doubt_everywhere_stays_old(backend: BackendCase) -> None:
    results = run_ranks(2, in_doubt, backend.name, True, env=backend.env)
    maps = shuffles(3, len(LAYERS), 2, 4)
    for kind, _, before, held, wrong in results:
        assert (kind, before, wrong) == (StoreLostError.__name__, (0,), [])
        assert held == [maps[2][0].tolist(), *(maps[1][layer].tolist() for layer in (1, 2, 3))]


def refuses_too_much_quarantine(rank: Rank, backend: str):
    """A backend whose transfers cannot be drained, failing again and again."""
    maps = shuffles(2, len(LAYERS), 2, 4)
    model = Model(rank.rank, 4, LAYERS)
    model.fill(maps[0])
    injector = FaultInjector("wait", "raise", 1, 2)
    comm = eplb.Communicator(config(backend), model.weights, rank.control(), observers=[injector])
    quarantined, landing = [], comm._lives.epoch.landing.nbytes
    for _ in range(4):
        injector.acted = False
        comm._lives.epoch.backend.abort = lambda handle, reason: False
        comm._lives.epoch.backend.close = lambda force=False: None
        with pytest.raises(EplbError):  # noqa: PT012 - in either of the two
            comm.rearrange(comm.report.physical_to_logical_map if quarantined else maps[0], maps[1])
            comm.rearrange(maps[1], maps[0])
        try:
            quarantined.append(comm.rebuild(20).quarantined_nbytes)
        except TransferError as error:
            comm.close(force=True)
            return quarantined, landing, error.code
    return quarantined, landing, None


def test_memory_of_undrained_transfers_is_quarantined_counted_and_bounded() -> None:
    """I11."""
    for quarantined, landing, code in run_ranks(2, refuses_too_much_quarantine, "torch_gloo"):
        assert quarantined == [landing, 2 * landing]
        assert code == "EPLB-T009"


def rebuild_with_wrong_ranks(rank: Rank):
    model = Model(rank.rank, 4, LAYERS)
    comm = eplb.Communicator(config("torch_gloo", 2.0), model.weights, rank.control())
    codes = []
    for ranks in ([1 - rank.rank], [rank.rank, 7]):
        with pytest.raises(TransferError) as caught:
            comm.rebuild(2, ranks=ranks)
        codes.append(caught.value.code)
    comm.close(force=True)
    return codes


def test_a_rebuild_that_names_impossible_members_is_refused() -> None:
    assert run_ranks(2, rebuild_with_wrong_ranks) == [["EPLB-T009", "EPLB-T009"]] * 2


def rebuilds_without_quorum(rank: Rank):
    if rank.rank == 1:
        rank.listen()
        return None
    model = Model(rank.rank, 4, LAYERS)
    comm = eplb.Communicator(config("torch_gloo", 2.0), model.weights, rank.control())
    started = time.monotonic()
    with pytest.raises(EplbError) as caught:
        comm.rebuild(1.0)
    rank.tell("done")
    comm.close(force=True)
    return str(caught.value), time.monotonic() - started


def test_a_member_that_does_not_come_to_a_rebuild_is_named_within_the_limit() -> None:
    with Ranks(2, rebuilds_without_quorum) as ranks:
        assert ranks.hear(0, 20) == "done"
        ranks.tell(1, "go home")
        (text, seconds), _ = ranks.values(20)
    assert text.startswith("Endpoint not ready after 1s: rank 1 (not seen at the store ")
    assert "connect, phase meeting" in text
    assert seconds < 3


def with_a_stopped_store(rank: Rank, port: int):
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=30))
    control = eplb.ControlPlane.from_store(store, rank=rank.rank, world_size=rank.world_size)
    maps = shuffles(2, len(LAYERS), 2, 4)
    model = Model(rank.rank, 4, LAYERS)
    model.fill(maps[0])
    comm = eplb.Communicator(config("torch_gloo", 1.5), model.weights, control)
    comm.rearrange(maps[0], maps[1])
    rank.tell("ready")
    rank.listen()
    started = time.monotonic()
    with pytest.raises(StoreLostError):
        comm.rearrange(maps[1], maps[0])
    seconds = time.monotonic() - started
    comm.close(force=True)
    return seconds, model.wrong_rows(maps[1])


def hosts_a_store(rank: Rank):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    rank.tell(store.port)
    rank.listen()


def test_a_store_whose_host_is_stopped_is_found_within_the_limit() -> None:
    """torch's client would wait for ever."""
    import signal

    with Ranks(1, hosts_a_store) as host, Ranks(2, with_a_stopped_store, host.hear(0, 20)) as ranks:
        for rank in range(2):
            assert ranks.hear(rank, 30) == "ready"
        host.signal(0, signal.SIGSTOP)
        for rank in range(2):
            ranks.tell(rank, "go on")
        for seconds, wrong in ranks.values(30):
            assert seconds < 1.5 + 2
            assert wrong == []
