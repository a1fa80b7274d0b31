"""The walk itself: it leaves no order out, and the store in memory answers as a real one does."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from eplb_core.control.store import StoreClient
from eplb_core.errors import EplbError
from eplb_core.voting.operations import Count, Delete, Get, Pause, Put, PutFirst
from tests.protocol.meetings import Call, meet, old_run
from tests.protocol.ranks import THE_RULES, TIMED_OUT, attend
from tests.protocol.store import perform

TWO = (0, 1)
EMPTY_POLLS = 1
"""That each rank may make in the walk without shortcuts; limits run out after them or without."""


def along(rank, history):
    """Run a rank's protocol along what has happened to it: what it asks for then, or how it has ended."""
    steps = attend(THE_RULES, rank, TWO).steps
    read = []
    try:
        operation = steps.send(None)
        for answer in history:
            if isinstance(operation, Get):
                read.append(answer)
                if len(read) < len(operation.keys):
                    continue
                answer, read = read, []
            operation = steps.send(answer)
    except StopIteration:
        return None, "connected"
    except EplbError as error:
        return None, error.code
    return (Get(operation.keys[len(read) :]) if isinstance(operation, Get) else operation), None


def what_can_happen(rank, history, polls, contents):
    operation, _ = along(rank, history)
    if isinstance(operation, Pause):
        yield (*history, TIMED_OUT), polls, contents
        if polls < EMPTY_POLLS:
            yield (*history, None), polls + 1, contents
    elif isinstance(operation, Get):
        yield (*history, contents.get(operation.keys[0])), polls, contents
    elif operation is not None:
        answer, contents = perform(operation, contents)
        yield (*history, answer), polls, contents


def every_history(contents):
    """Run every order of operations of two ranks that meet; return what stores and ends there are."""
    first = ((0, (), 0), (1, (), 0)), frozenset(contents.items())
    seen, todo = {first}, [first]
    while todo:
        ranks, stored = todo.pop()
        for place, (rank, history, polls) in enumerate(ranks):
            for *after, contents_after in what_can_happen(rank, history, polls, dict(stored)):
                there = list(ranks)
                there[place] = (rank, *after)
                state = tuple(there), frozenset(contents_after.items())
                if state not in seen:
                    seen.add(state)
                    todo.append(state)
    return {(stored, *(along(rank, history)[1] for rank, history, _ in ranks)) for ranks, stored in seen}


def ends(local):
    if local.end is None:
        return None
    return local.end.detail if local.end.why == "gave up" else local.end.why


@pytest.mark.parametrize("old", [{}, "old run"], ids=["new store", "store of an old run"])
def test_a_walk_reaches_exactly_what_is_reached_when_every_history_is_run_on_its_own(old):
    contents = old_run(TWO) if old else {}
    found = meet({rank: [Call(TWO)] for rank in TWO}, contents).explore()
    reached = set()
    for *locals_, stored in found.states:
        keys = {key: value for key, value in stored.contents.items() if not key.startswith("cast/")}
        reached.add((frozenset(keys.items()), *map(ends, locals_)))
    assert reached == every_history(contents)


KEYS = st.sampled_from(["a", "b", "c"])
VALUES = st.binary(min_size=1, max_size=3)
OPERATIONS = st.one_of(
    st.builds(Put, KEYS, VALUES),
    st.builds(PutFirst, KEYS, VALUES),
    st.builds(Get, st.lists(KEYS, min_size=1, max_size=3).map(tuple)),
    st.builds(Count, st.just("count")),
    st.builds(Delete, st.lists(KEYS, min_size=1, max_size=2).map(tuple)),
)


@given(st.lists(OPERATIONS, max_size=12))
def test_the_store_in_memory_answers_as_a_real_one_does(operations):
    client, contents = StoreClient(dist.HashStore(), "test", timeout_s=5.0), {}
    for operation in operations:
        answer, contents = perform(operation, contents)
        assert operation.on(client) == answer
