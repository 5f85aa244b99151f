"""The queue of publishes: nothing lost, doubled or reordered, wherever a ledger ends."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from magnetar.broker.log.core.log_queue import LogQueue, Queued


def test_entries_go_out_with_their_indexes_and_come_back_in_order() -> None:
    queue: LogQueue[str] = LogQueue(100)
    queue.opened(7)
    assert [queue.add(text, count).index for text, count in (("a", 3), ("b", 1), ("c", 2))] == [102, 103, 105]
    assert [(each.item, each.entry_id) for each in queue.send(1000)] == [("a", 0), ("b", 1), ("c", 2)]
    assert queue.confirmed(0).item == "a"
    with pytest.raises(AssertionError, match="in order"):
        queue.confirmed(2)


def test_what_the_ended_ledger_holds_is_confirmed_and_the_rest_goes_on_in_order() -> None:
    queue: LogQueue[str] = LogQueue(0)
    queue.opened(7)
    for text in "abc":
        queue.add(text, 1)
    list(queue.send(1000))
    queue.stopped()
    queue.add("d", 1)
    assert not list(queue.send(1000))
    assert [each.item for each in queue.ended(0)] == ["a"]
    queue.opened(8)
    again = [(each.item, each.entry_id, each.index) for each in queue.send(1000)]
    assert again == [("b", 0, 1), ("c", 1, 2), ("d", 2, 3)]


def test_m31_what_is_given_up_is_in_order_and_nowhere_any_more() -> None:
    queue: LogQueue[str] = LogQueue(0)
    queue.opened(7)
    queue.add("a", 1)
    list(queue.send(1000))
    queue.add("b", 1)
    assert [each.item for each in queue.give_up()] == ["a", "b"]
    assert (len(queue), queue.head) == (0, None)
    queue.opened(8)
    assert not list(queue.send(1000))


def test_a_ledger_takes_no_more_entries_than_it_may() -> None:
    queue: LogQueue[str] = LogQueue(0)
    queue.opened(7)
    for text in "abcde":
        queue.add(text, 1)
    assert [each.item for each in queue.send(2)] == ["a", "b"]
    assert not list(queue.send(2))
    queue.stopped()
    queue.ended(1)
    queue.opened(8)
    assert [(each.item, each.entry_id) for each in queue.send(2)] == [("c", 0), ("d", 1)]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(["add", "send", "confirm", "end"]), max_size=80), st.randoms(use_true_random=False))
def test_the_log_is_what_was_published_whatever_fails(steps: list[str], rng: object) -> None:
    queue: LogQueue[int] = LogQueue(0)
    ledgers: list[list[Queued[int]]] = [[]]
    queue.opened(0)
    confirmed: list[int] = []
    added = 0
    for step in [*steps, "send", "end"]:
        if step == "add":
            queue.add(added, 1)
            added += 1
        elif step == "send":
            ledgers[-1] += queue.send(1000)
        elif step == "confirm" and queue.head is not None:
            confirmed.append(queue.confirmed(queue.head.entry_id).item)
        elif step == "end":
            stored = rng.randint(len(ledgers[-1]) - queue.sent_entries, len(ledgers[-1]))  # type: ignore[attr-defined]
            queue.stopped()
            confirmed += [each.item for each in queue.ended(stored - 1)]
            del ledgers[-1][stored:]
            ledgers.append([])
            queue.opened(len(ledgers))
        queue.check()
    ledgers[-1] += queue.send(1000)
    assert [each.item for ledger in ledgers for each in ledger] == list(range(added))
    assert confirmed == list(range(len(confirmed)))
    assert [each.item for each in queue.give_up()] == list(range(len(confirmed), added))
