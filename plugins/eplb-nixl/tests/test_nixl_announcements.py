"""What a staged source announces: of a plan, of one epoch and generation, and never taken for another transfer."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eplb_core.backend import TransferPlan
from eplb_nixl.announcements import Announced, Announcement, MisannouncedError

EPOCH = 4
PLAN = TransferPlan(generation=7, sequence=2**40, layer=3, slot=1, sends=None, receives=None)  # type: ignore[arg-type]
MESSAGE = Announcement.of(PLAN, EPOCH).to_bytes()


def told(*messages: bytes) -> Announced:
    announced = Announced(EPOCH)
    for message in messages:
        announced.take(message)
    return announced


@given(*(st.integers(0, 2**64 - 1),) * 3, *(st.integers(0, 2**32 - 1),) * 2)
def test_every_announcement_comes_back_as_it_was(epoch, generation, sequence, layer, slot):
    said = Announcement(epoch, generation, sequence, layer, slot)
    assert Announcement.from_bytes(said.to_bytes()) == said


@given(st.binary(max_size=80))
def test_other_notifications_are_none_of_ours(message):
    assert Announcement.from_bytes(message) is None
    assert not told(message, b"", MESSAGE[:-1], MESSAGE + b"x", b"NIXL" + MESSAGE[4:]).has(PLAN)


def test_a_plans_rows_are_there_once_they_are_announced_and_until_the_transfer_is_over():
    announced = told()
    assert not announced.has(PLAN)
    announced.take(MESSAGE)
    assert announced.has(PLAN)
    assert not announced.has(replace(PLAN, layer=4))
    announced.forget(PLAN)
    assert not announced.has(PLAN)


def test_an_announcement_of_another_epoch_or_of_a_generation_that_is_over_is_nothing_to_go_by():
    later = replace(PLAN, generation=8)
    assert not told(Announcement.of(PLAN, EPOCH + 1).to_bytes()).has(PLAN)
    assert not told(MESSAGE).has(later)
    assert told(Announcement.of(later, EPOCH).to_bytes(), MESSAGE).has(later)


def test_a_late_end_does_not_forget_the_next_generations_announcement():
    later = replace(PLAN, generation=8)
    announced = told(MESSAGE, Announcement.of(later, EPOCH).to_bytes())
    announced.forget(PLAN)
    assert announced.has(later)


@pytest.mark.parametrize("other", [{"sequence": 2**40 + 1}, {"slot": 0}])
def test_a_source_that_means_another_transfer_by_the_same_layer_is_refused(other):
    said = Announcement.of(replace(PLAN, **other), EPOCH)
    with pytest.raises(MisannouncedError, match=r"announced layer 3 as transfer .* this rank's plan has transfer"):
        told(said.to_bytes()).has(PLAN)


def test_layers_that_were_given_up_are_forgotten_with_their_generation():
    announced = told(*(Announcement.of(replace(PLAN, layer=layer), EPOCH).to_bytes() for layer in range(61)))
    announced.take(Announcement.of(replace(PLAN, generation=8), EPOCH).to_bytes())
    assert len(announced._by_layer) == 1
