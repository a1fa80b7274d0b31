"""The conformance kit: inherit `BackendConformance`, set ``backend_name``, and every claim of a backend is a test.

Each test's docstring says what its failure means. The checks run in real processes on loopback, which stay from one
test to the next; after a failure they are replaced, so that no test inherits what another one broke.
"""

from __future__ import annotations

import functools
import inspect
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NoReturn, TypeVar

import numpy as np
import pytest

from eplb_core.backend import API_VERSION, BackendInfo
from eplb_core.discovery.discover import discover, load_target
from eplb_core.discovery.select import resolve
from eplb_core.errors import EplbError
from eplb_core.testing import scenarios_bytes, scenarios_failure, scenarios_growth, scenarios_order
from eplb_core.testing.expectation import PREFIX, NotReached, Unmet, expect, told
from eplb_core.testing.model import shuffles
from eplb_core.testing.pool import RankPool, Subject
from eplb_core.testing.usable import device_for, why_not_here

KIT_VERSION = 1
"""Rises when the kit asks for more than it did: a backend that passed may then fail."""

NOT_RUN = "eplb not run"
"""Property of reports of tests that were not run, because of what another one shows or is missing: the reason."""

_GATE = "eplb_gate"
_MIB = 1 << 20
_SLACK_NBYTES = 24 * _MIB  # what a library, and malloc, may take once
_HOOKS = ("register_buffers", "exchange_metadata", "transfer", "wait")
_METHODS = ("progress", "abort", "close")
_DEVICE_GROUP = (
    "The kit gives it a gloo group as the host's with 'eplb verify --device-group', or with device_group = True in a "
    "class of your own."
)
_KNOWN_DEVICES = {"*", "cpu", "cuda", "xpu", "npu", "hpu", "mps", "privateuseone", "meta", "xla", "mtia", "musa", "mlu"}

Test = TypeVar("Test", bound=Callable[..., Any])


def _kit(test: Test) -> Test:
    """Put what a failure means, the docstring, in front of what failed; but only where that is what failed."""

    @functools.wraps(test)
    def wrapper(*args: Any, **given: Any) -> Any:
        try:
            return test(*args, **given)
        except Unmet as failed:
            raise Unmet(f"{inspect.cleandoc(test.__doc__ or '')}\n\n{failed}") from None
        except NotReached as failed:
            raise NotReached(str(failed)) from None  # without the frames of the kit
        except Exception as error:
            text = f"{PREFIX}the backend raised before this could be checked\n{told(error)}"
            raise NotReached(text) from error

    return wrapper  # type: ignore[return-value]


def _needs(capability: str) -> Callable[[Test], Test]:
    """Run a test only where the backend declares a capability."""

    def mark(test: Test) -> Test:
        setattr(test, _GATE, capability)
        return test

    return mark


class BackendConformance:
    """Tests that every backend must pass. Inherit, set `backend_name`, and run pytest.

    A test that fails shows first what its failure means, if what it is about does not hold. If the backend raised
    before that could be seen, it shows ``not reached`` and what was raised, and says nothing of what it did not see.

    Where the backend cannot be used (not installed, its ``requires`` or ``available`` say no, no such device here), the
    first test fails with the reason and the others are skipped with it: one reason, and no green run that has tested
    nothing. A suite that is to pass on machines without the device says so itself:
    ``pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")``. Likewise, when the class
    is not whole or no communicator can be built, the test of that fails and all that need one are skipped.

    Attributes
    ----------
    backend_name : str
        The backend under test; its distribution must be installed.
    options : mapping of str to object or None
        Options of the backend, for all tests.
    env : mapping of str to str
        Environment of the ranks, for instance a transport.
    device_type : str or None
        Where the weights live; None is ``cpu`` where the backend declares it, else its first device that is here.
    device_group : bool
        Does the backend need the host's process group (``device_group=``)? The kit then gives it a gloo group.
    excused : mapping of str to str
        Kit tests that this backend cannot pass yet, and why. They run all the same, are shown with the reason, and
        must fail: one that passes is no longer excused.

    Examples
    --------
    >>> class TestMine(BackendConformance):
    ...     backend_name = "mine"
    """

    backend_name: ClassVar[str] = ""
    options: ClassVar[Mapping[str, Any] | None] = None
    env: ClassVar[Mapping[str, str]] = {}
    device_type: ClassVar[str | None] = None
    device_group: ClassVar[bool] = False
    excused: ClassVar[Mapping[str, str]] = {}

    def __init_subclass__(cls, **given: Any) -> None:
        """Refuse a class that replaces or removes kit tests."""
        super().__init_subclass__(**given)
        replaced = [name for name in kit_tests() if name in vars(cls)]
        if replaced:
            raise TypeError(
                f"{cls.__name__} replaces or drops kit tests: {', '.join(replaced)}. Tests of your own need names of "
                "their own; a kit test that cannot pass yet goes into `excused`, with the reason."
            )
        unknown = sorted(set(cls.excused) - set(kit_tests()))
        if unknown:
            raise TypeError(f"{cls.__name__}.excused names no tests of the kit: {', '.join(unknown)}")

    # --- fixtures ----------------------------------------------------------------------------------------------------

    @pytest.fixture(scope="class")
    @classmethod
    def ranks(cls) -> Iterator[RankPool]:
        """Three processes, kept for the whole class."""
        with RankPool(3, cls.env) as pool:
            yield pool

    @pytest.fixture
    def info(self) -> BackendInfo:
        """Return what the plugin declares."""
        return resolve(discover(), "backend", self.backend_name)

    @pytest.fixture
    def subject(self, info: BackendInfo) -> Subject:
        """Return the backend as the ranks build it."""
        return self._subject(info)

    def _subject(self, info: BackendInfo) -> Subject:
        return Subject(self.backend_name, self.options, device_for(info, self.device_type), self.device_group)

    @pytest.fixture(scope="class")
    @classmethod
    def measured(cls) -> dict[str, Any]:
        """Return what was measured once for several tests."""
        return {}

    @pytest.fixture(autouse=True)
    def _gated(self, request: pytest.FixtureRequest, measured: dict[str, Any]) -> None:
        test = getattr(request.node, "originalname", request.node.name)
        try:
            info = resolve(discover(), "backend", self.backend_name)
            unusable = why_not_here(info, self.device_type)
        except EplbError as error:
            unusable = str(error)
        if unusable is not None:
            _stop(request, measured, unusable)
        capability = getattr(getattr(type(self), test, None), _GATE, None)
        if capability is not None and getattr(info, capability) is not True:
            pytest.skip(f"{self.backend_name} does not declare {capability}")
        if "ranks" in request.fixturenames:
            self._stop_unless_it_can_be_built(request, measured, info, test)
        if test in self.excused:
            request.applymarker(pytest.mark.xfail(reason=self.excused[test], strict=True))

    def _stop_unless_it_can_be_built(
        self, request: pytest.FixtureRequest, measured: dict[str, Any], info: BackendInfo, test: str
    ) -> None:
        whole, built = "test_the_class_is_whole", "test_a_communicator_can_be_built"
        lacks = _what_it_lacks(info)
        if lacks and whole not in self.excused:
            _stop(request, measured, f"{whole} fails:\n{lacks}", shown_by=whole)
        if test == built:
            return
        problem = self._problem_of_building(request.getfixturevalue("ranks"), self._subject(info), measured)
        if problem and built not in self.excused:
            _stop(request, measured, f"{built} fails:\n{problem}", shown_by=built)

    def _problem_of_building(self, ranks: RankPool, subject: Subject, measured: dict[str, Any]) -> str:
        if "building" not in measured:
            try:
                ranks.run(scenarios_growth.is_built, subject, timeout_s=30)
                problem = ""
            except (Unmet, NotReached) as failed:
                problem = str(failed)
                if "device_group" in problem and not subject.device_group:
                    problem += f"\n{_DEVICE_GROUP}"
            measured["building"] = problem
        return str(measured["building"])

    # --- the kit itself ----------------------------------------------------------------------------------------------

    @_kit
    def test_the_kit_is_complete(self, request: pytest.FixtureRequest) -> None:
        """Tests of the kit were dropped, replaced or deselected, so passing the rest proves nothing."""
        replaced = [n for n, test in kit_tests().items() if inspect.getattr_static(type(self), n, None) is not test]
        expect(not replaced, f"replaced or dropped: {replaced}")
        left_out = sorted(set(kit_tests()) - _tests_of(request))
        expect(not left_out, f"not collected: {left_out}")

    # --- what the plugin declares ------------------------------------------------------------------------------------

    @_kit
    def test_the_declaration_is_light(self, info: BackendInfo) -> None:
        """Asking what is installed imports the backend or its library: every host pays for it, chosen or not."""
        module = info.target.partition(":")[0]
        program = (
            f"import sys; sys.path[:] = {sys.path!r}\n"
            f"import json, eplb_core; found = eplb_core.discover()\n"
            f"info = found.backends[{info.name!r}]; info.available and info.available()\n"
            f"print(json.dumps([m for m in ({module!r}, 'torch', 'numpy') if m in sys.modules]))"
        )
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
        expect(done.returncode == 0, f"discovery fails in a new process: {done.stderr[-500:]}")
        loaded = json.loads(done.stdout.splitlines()[-1])
        expect(not loaded, f"after discover(), these are imported: {loaded}")

    @_kit
    def test_the_declaration_is_sound(self, info: BackendInfo) -> None:
        """Something declared cannot be true: a device type torch does not have, or another version of the contract."""
        expect(info.api_version == API_VERSION, f"api_version is {info.api_version}, this core's is {API_VERSION}")
        unknown = [name for name in info.device_types if name not in _KNOWN_DEVICES]
        expect(not unknown, f"device_types {unknown}: none of torch's device types")

    @_kit
    def test_the_class_is_whole(self, info: BackendInfo) -> None:
        """The class lacks a hook, its decorator, a method or an attribute; building a communicator fails or guesses."""
        lacks = _what_it_lacks(info)
        expect(not lacks, lacks)

    @_kit
    def test_a_communicator_can_be_built(self, ranks: RankPool, subject: Subject, measured: dict[str, Any]) -> None:
        """The constructor or `register_buffers` raises, or never returns: no host gets as far as a transfer."""
        problem = self._problem_of_building(ranks, subject, measured)
        expect(not problem, problem)

    @_kit
    def test_unknown_options_are_refused(self, info: BackendInfo) -> None:
        """A misspelt option is taken in silence, and the operator believes that it is set."""
        model: Any = load_target(info.options) if isinstance(info.options, str) else info.options
        if model is None:
            return  # the core refuses whatever is given
        try:
            model(**{**(self.options or {}), "no_such_option_of_any_backend": 1})
        except ValueError:
            return
        raise Unmet(f"{model.__name__} accepts an option that it does not have; set extra='forbid'")

    @_kit
    def test_equal_ranks_fit_together(self, ranks: RankPool, subject: Subject) -> None:
        """Ranks built alike call each other different: `shared_options` holds something that a rank has of its own."""
        stories = ranks.run(scenarios_growth.describes_itself, subject)
        first = stories[0]["shared"]
        differing = {key for story in stories for key in first if story["shared"].get(key) != first[key]}
        expect(not differing, f"shared_options that differ between ranks built alike: {sorted(differing)}")

    @_kit
    def test_metadata_is_small(self, ranks: RankPool, subject: Subject) -> None:
        """Metadata grows with the number of rows; with hundreds of ranks, connecting takes minutes."""
        nbytes = ranks.run(scenarios_growth.describes_itself, subject)[0]["nbytes"]
        expect(nbytes <= 64 << 10, f"metadata of 61 layers x 6 tensors x 32 rows takes {nbytes} bytes of 65536")

    @_kit
    def test_foreign_metadata_is_refused(self, ranks: RankPool, subject: Subject) -> None:
        """Bytes that another program or version wrote are taken for addresses: weights go anywhere, or it crashes."""
        problems = ranks.run(scenarios_failure.refuses_foreign_metadata, subject)[0]
        expect(not problems, "; ".join(problems))

    @_kit
    def test_nothing_is_pickled(self, ranks: RankPool, subject: Subject) -> None:
        """A pickle travels between ranks: whoever can write to the wire can run code in every engine."""
        for rank, calls in enumerate(ranks.run(scenarios_growth.serialises, subject)):
            expect(not calls, f"rank {rank}: {calls}")

    # --- every byte --------------------------------------------------------------------------------------------------

    @_kit
    def test_a_row_arrives_whole(self, ranks: RankPool, subject: Subject) -> None:
        """A part of a row, often its end, is not copied: the expert computes with stale weights and nobody notices."""
        old, new = [[0, 1]], [[1, 0]]
        for nbytes in (7, 64, 4096, 300_001):
            ranks.run(scenarios_bytes.rearranges, subject, [old, new], [[nbytes]])

    @_kit
    def test_rows_go_where_the_plan_says(self, ranks: RankPool, subject: Subject) -> None:
        """Rows are numbered otherwise than in the plan: experts take each other's places."""
        old, new = [[0, 1, 2, 3, 4, 5, 6, 7]], [[6, 4, 5, 7, 1, 3, 2, 0]]
        ranks.run(scenarios_bytes.rearranges, subject, [old, new], [[48]])

    @_kit
    def test_layers_are_not_confused(self, ranks: RankPool, subject: Subject) -> None:
        """Rows come from another layer than the plan's."""
        old, new = [[0, 1, 2, 3]] * 3, [[2, 3, 0, 1]] * 3
        ranks.run(scenarios_bytes.rearranges, subject, [old, new], [[40]] * 3)

    @_kit
    def test_tensors_are_not_confused(self, ranks: RankPool, subject: Subject) -> None:
        """Rows come from another tensor of the same expert; with equal sizes nothing else would show it."""
        ranks.run(scenarios_bytes.rearranges, subject, [[[0, 1]], [[1, 0]]], [[40, 40, 40]])

    @_kit
    def test_bits_travel_unread(self, ranks: RankPool, subject: Subject) -> None:
        """Values are converted on the way: NaNs, quantised formats and packed integers change."""
        ranks.run(scenarios_bytes.moves_bits, subject)

    @_kit
    def test_scalar_and_empty_rows_travel(self, ranks: RankPool, subject: Subject) -> None:
        """A tensor with one number per expert, or with none, upsets the sizes of what stands beside it."""
        ranks.run(scenarios_bytes.moves_scalars_and_empty_rows, subject)

    @_kit
    def test_one_row_serves_several_peers(self, ranks: RankPool, subject: Subject) -> None:
        """A row that goes to more than one rank reaches only one of them, or is gone for the second."""
        old, new = [[0, 1, 2, 3, 4, 5]], [[0, 1, 0, 3, 0, 5]]
        ranks.run(scenarios_bytes.rearranges, subject, [old, new], [[56, 8]], world_size=3)

    @_kit
    def test_empty_slots_and_duplicates_are_placements(self, ranks: RankPool, subject: Subject) -> None:
        """Slots that are empty (-1), or that hold an expert twice, are counted as rows that arrive."""
        maps = [[[7, 1, 2, 3, 4, -1]], [[7, -1, 1, 7, 7, 4]], [[-1, 4, 1, 4, 7, 1]]]
        ranks.run(scenarios_bytes.rearranges, subject, maps, [[32, 8]])

    @_kit
    def test_many_rows_and_large_ones_travel(self, ranks: RankPool, subject: Subject) -> None:
        """A limit of the transport (a message's size, a vector's length) cuts what is larger than usual."""
        ranks.run(scenarios_bytes.rearranges, subject, [[[0, 1]], [[1, 0]]], [[9 * _MIB + 3]])
        old = np.arange(4096)[None]
        ranks.run(scenarios_bytes.rearranges, subject, [old, np.roll(old, 2048, axis=1)], [[8]])

    @_kit
    def test_any_shuffle_arrives(self, ranks: RankPool, subject: Subject) -> None:
        """Some placement among three ranks goes wrong: sources that serve and receive at once, in several layers."""
        for staging_layers in (1, 2):
            maps = shuffles(4, 4, 3, 6, redundant=3, seed=staging_layers)
            fields = {"staging_layers": staging_layers}
            ranks.run(scenarios_bytes.rearranges, subject, maps, [[96, 1, 40]] * 4, fields, world_size=3)

    @_kit
    def test_a_rank_without_moves_keeps_step(self, ranks: RankPool, subject: Subject) -> None:
        """What a rank does depends on how much it moved before, so that it and its peers count differently."""
        maps = [np.arange(6)[None].repeat(2, 0)]
        for first, second in ((0, 2), (0, 2), (1, 4), (0, 3), (5, 2)):
            following = maps[-1].copy()
            following[:, [first, second]] = following[:, [second, first]]
            maps.append(following)
        ranks.run(scenarios_bytes.rearranges, subject, maps, [[64], [64]], None, 1, world_size=3)

    @_kit
    def test_receipts_count_the_bytes(self, ranks: RankPool, subject: Subject) -> None:
        """What reports and dashboards show of traffic is wrong."""
        ranks.run(scenarios_bytes.counts_bytes, subject)

    @_kit
    def test_the_hosts_landing_rows_are_used(self, ranks: RankPool, subject: Subject) -> None:
        """A host that passes its own ``landing=`` gets an error or wrong bytes ("rows" layout)."""
        ranks.run(scenarios_bytes.lands_in_the_hosts_memory, subject)

    @_kit
    def test_rows_travel_as_they_are_now(self, ranks: RankPool, subject: Subject) -> None:
        """Bytes of an earlier generation travel again: a copy is kept although the host has written new weights."""
        ranks.run(scenarios_bytes.follows_the_hosts_changes, subject)

    @_kit
    def test_communicators_of_one_process_are_apart(self, ranks: RankPool, subject: Subject) -> None:
        """State is kept per process or per class, and a second model's communicator reads the first one's rows."""
        ranks.run(scenarios_bytes.keeps_communicators_apart, subject)

    @_kit
    def test_a_new_communicator_starts_from_nothing(self, ranks: RankPool, subject: Subject) -> None:
        """Addresses or state of a closed communicator outlive it, and its successor reads freed memory."""
        ranks.run(scenarios_bytes.lives_again, subject)

    # --- order -------------------------------------------------------------------------------------------------------

    @_kit
    def test_transfer_does_not_wait(self, ranks: RankPool, subject: Subject) -> None:
        """`transfer` waits for a peer, or returns no handle: layers cannot overlap, ranks may wait in a circle."""
        ranks.run(scenarios_order.returns_from_transfer_at_once, subject)

    @_kit
    def test_wait_returns_with_the_rows(self, ranks: RankPool, subject: Subject) -> None:
        """`wait` returns before the rows are in landing memory; what is committed then is whatever lay there."""
        ranks.run(scenarios_order.waits_for_a_late_source, subject)

    @_kit
    def test_two_layers_in_flight_keep_their_slots(self, ranks: RankPool, subject: Subject) -> None:
        """The next layer lands where the last one still waits for its commit."""
        ranks.run(scenarios_order.keeps_two_layers_apart, subject)

    @_kit
    def test_live_rows_are_never_written(self, ranks: RankPool, subject: Subject) -> None:
        """Rows arrive in the live weights before anyone has voted: an abort then leaves a mixed layer."""
        ranks.run(scenarios_order.writes_landing_memory_alone, subject)

    @_kit
    def test_the_plan_is_left_alone(self, ranks: RankPool, subject: Subject) -> None:
        """The plan's arrays are written, although the core and every observer still read them."""
        ranks.run(scenarios_order.leaves_the_plan_alone, subject)

    @_kit
    def test_nothing_happens_after_wait(self, ranks: RankPool, subject: Subject) -> None:
        """Live rows are read, or landing memory is written, after `wait` has returned: commits tear the bytes."""
        ranks.run(scenarios_order.is_done_when_wait_returns, subject)

    @_kit
    def test_progress_does_not_wait(self, ranks: RankPool, subject: Subject) -> None:
        """`progress` blocks, and with it every vote of the core."""
        ranks.run(scenarios_order.returns_from_progress_at_once, subject)

    # --- failures ----------------------------------------------------------------------------------------------------

    @_kit
    def test_wait_keeps_its_limit(self, ranks: RankPool, subject: Subject) -> None:
        """`wait` outlasts its `timeout_s`: an engine whose peer hangs, hangs with it."""
        story, peer = ranks.run(scenarios_failure.waits_for_nobody, subject, True, timeout_s=25)
        limit_s = scenarios_failure.LIMIT_S
        expect("outlasted" not in peer, peer.get("outlasted", ""))
        expect(story["seconds"] < limit_s + 2, f"wait(timeout_s={limit_s}) took {story['seconds']:.1f} s")

    @_kit
    def test_wait_never_swallows_a_failure(self, ranks: RankPool, subject: Subject) -> None:
        """`wait` returns a receipt for rows that never came: garbage is committed on every rank."""
        runs: tuple[tuple[str, Callable[..., Any], int, tuple[int, ...]], ...] = (
            ("the peer never started", scenarios_failure.waits_for_nobody, 2, ()),
            ("the peer never started and another rank died", scenarios_failure.waits_beside_a_death, 3, (2,)),
        )
        for what, scenario, world_size, without in runs:
            story, peer = ranks.run(scenario, subject, world_size=world_size, timeout_s=25, without=without)[:2]
            if "outlasted" in peer:
                raise NotReached(f"{PREFIX}{peer['outlasted']}")
            missing = story.get("missing", [])
            expect(not missing, f"{what}, and wait returned without an error and without (tensor, row) {missing[:8]}")

    @_kit
    def test_failures_are_typed(self, ranks: RankPool, subject: Subject) -> None:
        """A failure comes as a bare exception: hosts cannot tell it, and 'eplb explain' has nothing to say."""
        story, peer = ranks.run(scenarios_failure.waits_for_nobody, subject, timeout_s=25)
        if "outlasted" in peer:
            raise NotReached(f"{PREFIX}{peer['outlasted']}")
        if story.get("missing"):
            raise NotReached(f"{PREFIX}the peer never started, and wait raised nothing")
        expect(story.get("typed", True), f"the limit ran out, and wait raised {story['error']}: {story.get('text')}")

    @_kit
    def test_wait_ends_when_a_peer_gives_up(self, ranks: RankPool, subject: Subject) -> None:
        """A rank that failed is heard only at the time-out: `wait` does not consult ``context.cancelled()``."""
        ranks.run(scenarios_failure.hears_that_a_peer_gave_up, subject)

    @_kit
    def test_an_abort_costs_no_weight(self, ranks: RankPool, subject: Subject) -> None:
        """After an aborted layer, what the backend left behind damages the next rearrangement."""
        ranks.run(scenarios_failure.stays_usable_after_an_abort, subject, timeout_s=60)

    @_kit
    def test_abort_drains_what_it_says(self, ranks: RankPool, subject: Subject) -> None:
        """`abort` says that memory is untouched from now on, and it is not; or it takes longer than its second."""
        ranks.run(scenarios_failure.drains_what_it_says_it_drained, subject)

    @_kit
    def test_a_dead_rank_is_survived(self, ranks: RankPool, subject: Subject) -> None:
        """After a rank's death the others learn it late, cannot rebuild without it, or hold wrong bytes."""
        for story in ranks.run(scenarios_failure.loses_a_rank, subject, world_size=3, timeout_s=60, without=(2,))[:2]:
            expect(bool(story["error"]), "rank 2 was killed in the middle of a layer, and rearrange succeeded")
            expect(story["seconds"] < 5, f"it took {story['seconds']:.1f} s to learn that a rank is dead")
            expect("ank 2" in story["text"], f"the error does not name the dead rank: {story['text']}")
            expect(not story["mixed"], f"after the death (layer, tensor, row) {story['mixed'][:8]} are mixed")
            expect(not story["after"], f"after rebuild: wrong bytes in (layer, tensor, row) {story['after'][:8]}")

    @_kit
    def test_a_forced_close_is_prompt(self, ranks: RankPool, subject: Subject) -> None:
        """`close(force=True)` waits for a peer or a thread: an engine that must go down hangs."""
        ranks.run(scenarios_failure.closes_at_once, subject)

    @_kit
    def test_later_peers_are_added(self, ranks: RankPool, subject: Subject) -> None:
        """A second `exchange_metadata`, which names new peers only, loses those of the first."""
        ranks.run(scenarios_failure.meets_peers_one_by_one, subject, world_size=3)

    # --- growth ------------------------------------------------------------------------------------------------------

    def _rounds(self, ranks: RankPool, subject: Subject, measured: dict[str, Any]) -> Sequence[dict[str, Any]]:
        if "rounds" not in measured:
            measured["rounds"] = ranks.run(scenarios_growth.goes_round_and_round, subject, timeout_s=60)
        rounds: Sequence[dict[str, Any]] = measured["rounds"]
        return rounds

    def _grows(self, what: str, slack: int, rounds: Sequence[dict[str, Any]]) -> None:
        for rank, story in enumerate(rounds):
            before, after = story["before"][what], story["after"][what]
            made = scenarios_growth.ROUNDS - scenarios_growth.WARM_UP
            expect(after <= before + slack, f"rank {rank}: {what} went from {before} to {after} in {made} rounds")

    @_kit
    def test_descriptors_do_not_grow(self, ranks: RankPool, subject: Subject, measured: dict[str, Any]) -> None:
        """Every rearrangement leaves a file, socket or pipe open; after some days the engine can open none."""
        self._grows("descriptors", 2, self._rounds(ranks, subject, measured))

    @_kit
    def test_threads_do_not_grow(self, ranks: RankPool, subject: Subject, measured: dict[str, Any]) -> None:
        """Every rearrangement leaves a thread behind; the process ends up with thousands."""
        self._grows("threads", 1, self._rounds(ranks, subject, measured))

    @_kit
    def test_memory_does_not_grow(self, ranks: RankPool, subject: Subject, measured: dict[str, Any]) -> None:
        """Every rearrangement keeps memory: handles or copies that nobody releases."""
        self._grows("memory KiB", 4 << 10, self._rounds(ranks, subject, measured))

    @_kit
    def test_store_keys_do_not_grow(self, ranks: RankPool, subject: Subject, measured: dict[str, Any]) -> None:
        """Every rearrangement leaves keys in the store that all ranks share."""
        self._grows("store keys", 12, self._rounds(ranks, subject, measured))

    @_kit
    def test_no_process_is_started(self, ranks: RankPool, subject: Subject, measured: dict[str, Any]) -> None:
        """The backend starts processes: daemonic engine workers may not, and nobody ends them."""
        for rank, story in enumerate(self._rounds(ranks, subject, measured)):
            expect(story["after"]["children"] == 0, f"rank {rank} has {story['after']['children']} child process(es)")

    @_kit
    def test_the_environment_is_left_alone(self, ranks: RankPool, subject: Subject, measured: dict[str, Any]) -> None:
        """Environment variables change under the host and whatever else runs in its process."""
        for rank, story in enumerate(self._rounds(ranks, subject, measured)):
            expect(not story["environment"], f"rank {rank}: changed {story['environment']}")

    @_kit
    def test_close_returns_everything(self, ranks: RankPool, subject: Subject) -> None:
        """Every communicator leaves descriptors or threads behind: engines that reload models run out of them."""
        for rank, seen in enumerate(ranks.run(scenarios_growth.lives_many_times, subject, timeout_s=60)):
            for what in ("descriptors", "threads"):
                numbers = [footprint[what] for footprint in seen]
                expect(max(numbers[4:]) <= max(numbers[1:3]), f"rank {rank}: {what} after each life: {numbers}")

    @_kit
    def test_staging_is_bounded(self, ranks: RankPool, subject: Subject) -> None:
        """More is staged than `staging_layers` layers: memory of the engine runs out in the middle of serving."""
        for story in ranks.run(scenarios_growth.takes_memory, subject, 12, _MIB):
            limit = story["landing"] + 2 * story["layer"] + _SLACK_NBYTES
            text = f"{story['grown'] // _MIB} MiB came, landing {story['landing'] // _MIB} MiB of it"
            expect(story["grown"] <= limit, f"{text}; 2 layers of {story['layer'] // _MIB} MiB may be staged")

    # --- only where it is claimed ------------------------------------------------------------------------------------

    @_kit
    @_needs("async_safe")
    def test_async_safe_a_worker_thread_may_transfer(self, ranks: RankPool, subject: Subject) -> None:
        """async_safe is declared, and a thread other than the one that built the communicator cannot transfer."""
        ranks.run(scenarios_order.runs_beside_the_engine, subject)

    @_kit
    @_needs("async_safe")
    def test_async_safe_the_engine_goes_on(self, ranks: RankPool, subject: Subject) -> None:
        """async_safe is declared, and a `wait` in a worker thread stops the engine's own thread."""
        ranks.run(scenarios_order.lets_the_engine_run, subject)

    @_kit
    @_needs("zero_copy")
    def test_zero_copy_takes_no_memory_for_rows(self, ranks: RankPool, subject: Subject) -> None:
        """zero_copy is declared, and rows are copied somewhere on their way: memory grows by a layer."""
        for story in ranks.run(scenarios_growth.takes_memory, subject, 2, 12 * _MIB):
            limit = story["landing"] + _SLACK_NBYTES
            text = f"{story['grown'] // _MIB} MiB came, landing {story['landing'] // _MIB} MiB of it"
            expect(story["grown"] <= limit, f"{text}, and a layer has {story['layer'] // _MIB} MiB")

    @_kit
    @_needs("zero_copy")
    def test_zero_copy_the_source_stays_frozen(self, ranks: RankPool, subject: Subject) -> None:
        """zero_copy is declared, and rows are read before the host's last write to them or after the vote."""
        ranks.run(scenarios_bytes.follows_the_hosts_changes, subject)
        ranks.run(scenarios_order.is_done_when_wait_returns, subject)

    @_kit
    @_needs("elastic_safe")
    def test_elastic_safe_a_rank_may_join_late(self, ranks: RankPool, subject: Subject) -> None:
        """elastic_safe is declared, and a rank that comes later cannot join those that already move weights."""
        ranks.run(scenarios_failure.joins_late, subject, world_size=3, timeout_s=60)

    @_kit
    @_needs("batched")
    def test_batched_every_batch_is_moved(self, ranks: RankPool, subject: Subject) -> None:
        """Batched is declared, and rows beyond the first ``max_ops_per_batch`` are lost or come in other batches."""
        maps = shuffles(3, 2, 3, 8, seed=15)
        for fields in ({"max_ops_per_batch": 3}, {"max_ops_per_batch": 4, "enable_migration_batching": True}):
            ranks.run(scenarios_bytes.rearranges, subject, maps, [[64, 24]] * 2, fields, world_size=3)


def kit_tests() -> dict[str, Callable[..., Any]]:
    """Return every test of the kit by name, in the order in which they stand."""
    return {name: test for name, test in vars(BackendConformance).items() if name.startswith("test_")}


def gate_of(name: str) -> str | None:
    """Return the capability without which a kit test is skipped."""
    gate: str | None = getattr(kit_tests()[name], _GATE, None)
    return gate


def _what_it_lacks(info: BackendInfo) -> str:
    """Return what keeps a backend's class from being one; empty when it is whole."""
    try:
        cls = load_target(info.target)
    except Exception as error:
        return f"{info.target} cannot be imported: {told(error)}"
    undecorated = [hook for hook in _HOOKS if not hasattr(getattr(cls, hook, None), "eplb_impl")]
    if undecorated:
        return f"missing, or without @hookimpl: {undecorated}"
    missing = [name for name in _METHODS if not callable(getattr(cls, name, None))]
    missing += [] if hasattr(cls, "shared_options") else ["shared_options"]
    if missing:
        return f"missing: {missing}"
    for attribute, known in (("landing_layout", ("rows", "packed_by_peer")), ("landing_device", ("weights", "host"))):
        if getattr(cls, attribute, None) not in known:
            return f"{attribute} must be one of {known}"
    return ""


def _stop(request: pytest.FixtureRequest, measured: dict[str, Any], reason: str, shown_by: str = "") -> NoReturn:
    """Skip a test that cannot be run; where no test that is run shows the reason, the first one of them fails."""
    brief = reason.splitlines()[0].rstrip(":")
    seen = shown_by in _tests_of(request)
    request.node.user_properties.append((NOT_RUN, brief if seen else reason))
    if not seen and "stopped" not in measured:
        measured["stopped"] = reason
        pytest.fail(reason, pytrace=False)
    pytest.skip(f"not run: {brief}")


def _tests_of(request: pytest.FixtureRequest) -> set[str]:
    """Return the tests of a test's class that this run of pytest holds."""
    cls = request.node.cls
    return {getattr(item, "originalname", item.name) for item in request.session.items if _class_of(item) is cls}


def _class_of(item: pytest.Item) -> type | None:
    return getattr(item, "cls", None)
