"""Pending adds alone: order, quorum, freeze, and replacing an ensemble."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnetar.ledger.writer_core import AddAcked, PendingAdds, PendingAddWithPayload, SendAdd, Striping

ENSEMBLE = ("a", "b", "c")


def pending(*payloads: str, shape: tuple[int, int, int] = (3, 3, 2)) -> PendingAdds[PendingAddWithPayload[str]]:
    adds: PendingAdds[PendingAddWithPayload[str]] = PendingAdds(Striping(*shape), ENSEMBLE)
    for payload in payloads:
        adds.add_and_make_sends(PendingAddWithPayload(payload), 1)
    return adds


def acked(adds: PendingAdds[PendingAddWithPayload[str]], entry: int, slot: int) -> list[int]:
    done = [add.entry for add in adds.record_ack(AddAcked(entry, slot, adds.ensemble[slot]))]
    adds.check()
    return done


def test_an_entry_goes_to_its_write_set_with_the_lac_of_that_moment() -> None:
    adds = pending(shape=(3, 2, 2))
    sends = [
        *adds.add_and_make_sends(PendingAddWithPayload("x"), 4),
        *adds.add_and_make_sends(PendingAddWithPayload("y"), 4),
    ]
    assert [(s.add.entry, s.slot, s.bookie, s.lac) for s in sends] == [
        (0, 0, "a", -1), (0, 1, "b", -1), (1, 1, "b", -1), (1, 2, "c", -1),
    ]  # fmt: skip
    acked(adds, 0, 0)
    acked(adds, 0, 1)
    assert adds.add_and_make_sends(PendingAddWithPayload("z"), 4)[0].lac == 0
    assert (adds.length, adds.length_confirmed) == (12, 4)


def test_an_entry_with_a_quorum_waits_for_those_before_it() -> None:
    adds = pending("x", "y", "z")
    assert acked(adds, 1, 0) == []
    assert acked(adds, 1, 1) == []
    assert acked(adds, 0, 2) == []
    assert acked(adds, 0, 1) == [0, 1]
    assert (adds.lac, len(adds)) == (1, 1)


def test_replace_compares_per_entry_to_whom_it_was_sent() -> None:
    """a → d → a: an entry that was sent to d only goes to a again (#4459); one that a has is left alone."""
    adds = pending("x")
    acked(adds, 0, 0)
    adds.mark_slot_failed(0, "a")
    sends = adds.replace_ensemble(("d", "b", "c"))
    assert [(s.add.entry, s.slot, s.bookie) for s in sends] == [(0, 0, "d")]
    adds.add_and_make_sends(PendingAddWithPayload("y"), 1)
    sends = adds.replace_ensemble(("a", "b", "c"))
    assert [(s.add.entry, s.slot, s.bookie) for s in sends] == [(0, 0, "a"), (1, 0, "a")]
    adds.check()


def test_a_failed_slot_that_is_not_replaced_is_left_out_and_may_doom_an_entry() -> None:
    adds = pending("x")
    assert adds.mark_slot_failed(0, "a")
    assert not adds.mark_slot_failed(0, "z"), "who does not stand there cannot fail there"
    assert not adds.is_head_unconfirmable
    assert [send.slot for send in adds.add_and_make_sends(PendingAddWithPayload("y"), 1)] == [1, 2]
    assert adds.mark_slot_failed(1, "b")
    assert adds.is_head_unconfirmable
    assert adds.is_any_unconfirmable


def test_an_ack_before_the_failure_still_counts() -> None:
    adds = pending("x")
    acked(adds, 0, 0)
    adds.mark_slot_failed(0, "a")
    adds.mark_slot_failed(1, "b")
    assert not adds.is_head_unconfirmable
    assert acked(adds, 0, 2) == [0]


def test_check_finds_an_ack_of_a_bookie_that_does_not_stand_there() -> None:
    adds = pending("x")
    acked(adds, 0, 0)
    adds.ensemble = ("d", "b", "c")
    with pytest.raises(AssertionError, match="from the bookie of its slot"):
        adds.check()


Step = tuple[str, int, int]


KINDS = st.sampled_from(["push", "ack", "ack", "replace", "freeze"])
SHAPES = st.sampled_from([(3, 3, 2), (3, 2, 2), (3, 3, 1), (3, 2, 1)])


@given(SHAPES, st.lists(st.tuples(KINDS, st.integers(0, 9), st.integers(0, 2)), max_size=60))
def test_whatever_happens_confirmations_are_dense_in_order_and_held_by_a_quorum(
    shape: tuple[int, int, int], steps: list[Step]
) -> None:
    adds = pending(shape=shape)
    confirmed: list[int] = []
    told: dict[int, set[tuple[int, str]]] = {}
    names = iter(f"new{i}" for i in range(100))
    sent: list[SendAdd[PendingAddWithPayload[str]]] = []
    for kind, number, slot in steps:
        if kind == "push":
            sent += adds.add_and_make_sends(PendingAddWithPayload("p"), 1)
        elif kind == "ack" and sent:
            send = sent[number % len(sent)]
            told.setdefault(send.add.entry, set()).add((send.slot, send.bookie))
            for add in adds.record_ack(AddAcked(send.add.entry, send.slot, send.bookie)):
                confirmed.append(add.entry)
                holders = told[add.entry] & set(enumerate(adds.ensemble))
                assert len(holders) >= shape[2], "Qa bookies of the ensemble in force have it"
        elif kind == "replace":
            ensemble = list(adds.ensemble)
            ensemble[slot] = next(names)
            sent += adds.replace_ensemble(ensemble)
        elif kind == "freeze":
            adds.frozen = not adds.frozen
            confirmed += [add.entry for add in adds.take_confirmed()]
        adds.check()
    assert confirmed == list(range(len(confirmed)))
