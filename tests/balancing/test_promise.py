"""The promise protocol under every order of its operations, and what each of its rules is there for."""

from __future__ import annotations

import re

import pytest

from eplb_core.balancing.engine_step import EngineStep
from eplb_core.balancing.layer_moves import Move
from eplb_core.balancing.layer_vote import LayerVote
from eplb_core.balancing.promise import Operation, Outcome, PromiseBook
from eplb_core.errors import MetadataError, TransferError
from tests.support.promise_model import Case, Model, Rules

# --- nothing can go wrong ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case",
    [
        Case(),
        Case(layers=2),
        Case(layers=2, slots=1),
        pytest.param(Case(layers=2, generations=2), marks=pytest.mark.slow),
        pytest.param(Case(kill=True), marks=pytest.mark.slow),
        pytest.param(Case(times_out=True), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_no_order_of_operations_ends_badly(case):
    result = Model(case).explore()
    assert result.violation is None, "\n".join(result.schedule)


@pytest.mark.model
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "case",
    [
        Case(layers=2, generations=2, kill=True, times_out=True),
        Case(layers=2, worker_dies=True, times_out=True),
        Case(ranks=3, kill=True),
        Case(ranks=3),
    ],
    ids=str,
)
def test_no_order_of_operations_ends_badly_at_length(case):
    result = Model(case).explore()
    assert result.violation is None, "\n".join(result.schedule)


# --- rules, each taken out --------------------------------------------------------------------------------------------


class PromisesBeforeAllHaveLanded(LayerVote):
    def __init__(self, *given):
        super().__init__(*given)
        self.phase = "promise"


class RegistersOutsideTheLock(LayerVote):
    """Reads the engine's step, and registers what it made of it later."""

    def _after_promise(self, result):
        self.promised = self.book.step + self.book.margin
        self.phase = "register"

    def _register(self):
        return Operation("book")

    def _after_register(self, result):
        self.book.promised[self.layer] = self.promised
        self.phase = "cast"


class RegistersAfterTheStoreKnows(LayerVote):
    def _after_promise(self, result):
        self.promised = self.book.step + self.book.margin
        self.phase = "cast"

    def _after_cast(self, result):
        self.phase = "register"

    def _register(self):
        return Operation("book")

    def _after_register(self, result):
        self.book.promised[self.layer] = self.promised
        self.phase = "count"


class DecidesTheEarliestPromise(LayerVote):
    def _after_tally(self, promises):
        self._propose(Outcome(min(promises.values()), self.rank))


class CountsBeforeItsBallotIsThere(LayerVote):
    """And takes those that are there for all."""

    def _after_promise(self, result):
        super()._after_promise(result)
        self.phase = "count"

    def _after_count(self, count):
        self._last = count == len(self.members)
        self.phase = "cast"

    def _after_cast(self, result):
        self.phase = "tally" if self._last else "look_decision"

    def _missing(self, ballots):
        return None


class BlocksInTheNextTransfer(LayerVote):
    """Waits for the rows of the next layer while its promise is open."""

    def _after_promise(self, result):
        super()._after_promise(result)
        self.phase = "block"

    def _block(self):
        return Operation("pause", "next transfer")

    def _after_block(self, result):
        self.phase = "cast"


class GivesUpItsPromise(EngineStep):
    """When its limit is over it goes on, and says so to nobody."""

    def take(self, result=None):
        if self.phase == "wait" and result:
            self.book.promised.pop(self.layer)
            self.phase = "look"
        else:
            super().take(result)


class DisobeysWhatStands(EngineStep):
    """When its limit is over the layer is aborted, whatever the store says."""

    def take(self, result=None):
        super().take(Outcome(None, self.rank) if self.phase == "settle" else result)


class ForgetsWhatIsDue(PromiseBook):
    def promise(self, layer):
        self.promised[layer] = self.step + self.margin
        return self.promised[layer]


def moves_without_waiting(layers, staging_layers):
    return (Move("stage", layer) for layer in layers)


RULES = {
    "promise only when all have landed": (
        Rules(vote=PromisesBeforeAllHaveLanded),
        Case(),
        "waits while rank . still moves layer 0",
    ),
    "read the step and register under one lock": (
        Rules(vote=RegistersOutsideTheLock),
        Case(),
        "leaves step . without layer 0|was to be committed",
    ),
    "register before the store knows": (
        Rules(vote=RegistersAfterTheStoreKnows),
        Case(),
        "leaves step . without layer 0|was to be committed",
    ),
    "promise at least the next step": (Rules(margin=0), Case(), "leaves step . without layer 0|was to be committed"),
    "S is the latest promise": (
        Rules(vote=DecidesTheEarliestPromise),
        Case(),
        "leaves step . without layer 0|was to be committed",
    ),
    "ballot, then count; never decide on less than all": (
        Rules(vote=CountsBeforeItsBallotIsThere),
        Case(),
        "leaves step . without layer 0|was to be committed",
    ),
    "only a decision clears a promise": (
        Rules(engine=GivesUpItsPromise),
        Case(times_out=True),
        "leaves step . without layer 0|was to be committed",
    ),
    "obey what stands": (Rules(engine=DisobeysWhatStands), Case(times_out=True), "ranks disagree on layer 0"),
    "one compare-and-set": (Rules(put_compares=False), Case(times_out=True), "ranks disagree on layer 0"),
    "nothing blocks while a promise is open": (
        Rules(vote=BlocksInTheNextTransfer, landing_waits_for_device=True),
        Case(layers=2),
        "nobody can go on",
    ),
    "await the copies before the slot's next transfer": (
        Rules(moves=moves_without_waiting),
        Case(layers=3),
        "lands layer 2 where layer 0 is yet to be",
    ),
    "agree after all copies": (
        Rules(agree_waits_for_copies=False),
        Case(generations=2),
        "where layer 0 is yet to be copied|before its copies of 0",
    ),
    "keys outlive their generation": (
        Rules(keys_outlive_generation=False),
        Case(times_out=True),
        "ranks disagree on layer 0",
    ),
    "promise no earlier than what is due": (
        Rules(
            book=ForgetsWhatIsDue,
            # The two phases hide it: a promise then comes after every commit of the layer before.
            vote=PromisesBeforeAllHaveLanded,
            hurried=(1,),
            engines_may_wait_for_rows=True,
        ),
        Case(layers=2),
        "nobody can go on",
    ),
    "counters start at 0 everywhere": (
        Rules(counters_start_equal=False),
        Case(),
        "is committed after pass|leaves step|was to be committed",
    ),
}
"""Rule of DESIGN's section 6 -> who breaks it, what must happen for it to matter, and what goes wrong."""


@pytest.mark.parametrize("rule", RULES)
def test_without_a_rule_some_order_of_operations_ends_badly(rule):
    rules, case, violation = RULES[rule]
    result = Model(case, rules).explore()
    assert result.violation is not None
    schedule = "\n    ".join(result.schedule)
    print(f"\n{rule}: {result.violation} ({result.states} states)\n    {schedule}")
    assert re.search(violation, result.violation), result.violation


@pytest.mark.model
@pytest.mark.timeout(3600)
def test_without_settling_survivors_of_a_kill_may_hold_different_placements():
    result = Model(Case(ranks=3, kill=True), Rules(rebuild_settles=False)).explore()
    assert "the survivors hold different placements" in result.violation


def test_what_hides_a_rule_is_enough_without_it():
    """Whoever promises early must not promise before what is due; two phases alone do as well."""
    early = Rules(vote=PromisesBeforeAllHaveLanded, hurried=(1,), engines_may_wait_for_rows=True)
    assert Model(Case(layers=2), early).explore().violation is None
    assert Model(Case(layers=2), Rules(book=ForgetsWhatIsDue, hurried=(1,))).explore().violation is None


# --- single steps -----------------------------------------------------------------------------------------------------


def executed(vote, store, until=None):
    """Drive a vote over a dict, up to a phase."""
    while (operation := vote.operation()) is not None and vote.phase != until:
        verb, topic, value = operation
        if verb == "set":
            store.setdefault(topic, {})[vote.rank] = value
            vote.take(None)
        elif verb == "add":
            store[f"{topic} count"] = store.get(f"{topic} count", 0) + 1
            vote.take(store[f"{topic} count"])
        elif verb == "put":
            vote.take(store.setdefault(topic, value))
        elif verb == "read all":
            vote.take(store.get(topic, {}))
        else:
            vote.take(store.get(topic))
    return vote


def test_a_layer_is_committed_at_the_latest_promise_of_all_and_not_before():
    books, store = [PromiseBook(), PromiseBook()], {}
    books[1].begin_step(1)
    first = executed(LayerVote(books[0], "layer", 0, (0, 1)), store, until="wait_ready")
    executed(LayerVote(books[1], "layer", 1, (0, 1)), store, until="wait_decision")
    executed(first, store)
    assert (first.outcome.step, books[0].due, books[1].promised) == (4, {"layer": 4}, {"layer": 4})
    for step in range(1, 5):
        engine = EngineStep(books[0], 0)
        while engine.operation() is not None:
            engine.take()
        assert engine.due == (["layer"] if step == 4 else [])


def test_the_worker_sees_a_layer_as_due_until_its_copies_are_enqueued():
    book = PromiseBook(1)
    book.learn("layer", Outcome(1, 0))
    book.begin_step(1)
    assert book.look() == (None, ["layer"])
    assert book.due == {"layer": 1}
    book.committed("layer")
    assert book.due == {}


def test_an_engine_that_is_past_the_step_says_so():
    book = PromiseBook()
    book.begin_step(3)
    with pytest.raises(TransferError, match="was to be committed in step 2, and this rank is in step 3") as error:
        book.learn("layer", Outcome(2, 0))
    assert error.value.code == "EPLB-T020"


def test_a_commit_is_not_obeyed_without_a_promise_of_ones_own():
    vote = LayerVote(PromiseBook(), "layer", 0, (0, 1))
    with pytest.raises(MetadataError, match="without this rank's promise"):
        executed(vote, {"decision": Outcome(4, 1)})


def test_a_ballot_that_is_missing_aborts_the_layer():
    store = {"promise count": 1, "landed count": 1, "landed": {1: None}}
    vote = executed(LayerVote(PromiseBook(), "layer", 0, (0, 1)), store)
    assert vote.outcome.step is None
    assert vote.outcome.error.code == "EPLB-M005"


def test_what_is_dropped_is_never_due_again():
    book = PromiseBook(1)
    book.learn("decided", Outcome(9, 0))
    assert book.drop() == ["decided"]
    book.learn("decided later", Outcome(10, 0))
    assert book.due == {}
    book.forget()
    book.learn("of the next rearrangement", Outcome(11, 0))
    assert list(book.due) == ["of the next rearrangement"]


def test_a_layer_that_is_dropped_is_discarded_by_one_thread_and_not_by_two():
    """The engine discards what was due when the host dropped it; the worker, what it learns afterwards."""
    book = PromiseBook()
    for layer in (1, 2):
        book.promise(layer)
    book.learn(1, Outcome(3, 0))
    assert book.drop() == [1]
    book.learn(1, Outcome(3, 0))  # the worker had not looked yet
    assert not book.take_unwanted(1)
    book.learn(2, Outcome(3, 0))  # by an engine that settled it
    book.learn(2, Outcome(3, 0))
    assert book.take_unwanted(2)
    assert not book.take_unwanted(2)


def test_a_promise_of_the_step_at_hand_is_refused():
    with pytest.raises(ValueError, match="margin=0"):
        PromiseBook(0)
