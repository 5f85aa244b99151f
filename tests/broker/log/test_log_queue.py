"""The queue of publishes: nothing lost, doubled or reordered, wherever a ledger ends."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from magnetar.broker.log.log_queue_core import LogQueue, QueuedPublish


def add(queue: LogQueue[QueuedPublish], item: object, count: int = 1) -> int:
    """Its index."""
    entry = QueuedPublish()
    entry.frames = (str(item).encode(),)
    queue.add(entry, count)
    return entry.index


def item(entry: QueuedPublish) -> str:
    return bytes(entry.frames[0]).decode()


def sent(queue: LogQueue[QueuedPublish], entries_max: int = 1000) -> list[QueuedPublish]:
    """All that the ledger is to take now."""
    taken = []
    while queue.pending and queue.ledger_id >= 0 and queue.next_entry < entries_max:
        taken.append(queue.pending[0])
        queue.on_entry_sent()
    return taken


def test_entries_go_out_with_their_indexes_and_come_back_in_order() -> None:
    queue: LogQueue[QueuedPublish] = LogQueue(100)
    queue.start_ledger(7)
    assert [add(queue, text, count) for text, count in (("a", 3), ("b", 1), ("c", 2))] == [102, 103, 105]
    assert [(item(each), each.entry) for each in sent(queue)] == [("a", 0), ("b", 1), ("c", 2)]
    assert [item(each) for each in queue.take_confirmed(1)] == ["a", "b"]
    assert not queue.take_confirmed(1)
    assert [item(each) for each in queue.take_confirmed(5)] == ["c"]


def test_m31_what_is_given_up_is_in_order_and_nowhere_any_more() -> None:
    queue: LogQueue[QueuedPublish] = LogQueue(0)
    queue.start_ledger(7)
    add(queue, "a")
    sent(queue)
    add(queue, "b")
    assert [item(each) for each in queue.take_all()] == ["a", "b"]
    assert (len(queue), queue.sent_entry_count) == (0, 0)
    queue.start_ledger(8)
    assert not sent(queue)


def test_a_ledger_takes_no_more_entries_than_it_may() -> None:
    queue: LogQueue[QueuedPublish] = LogQueue(0)
    queue.start_ledger(7)
    for text in "abcde":
        add(queue, text)
    assert [item(each) for each in sent(queue, 2)] == ["a", "b"]
    assert not sent(queue, 2)
    queue.on_ledger_stopped()
    queue.end_ledger(1)
    queue.start_ledger(8)
    assert [(item(each), each.entry) for each in sent(queue, 2)] == [("c", 0), ("d", 1)]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(["add", "send", "confirm", "end"]), max_size=80), st.randoms(use_true_random=False))
def test_the_log_is_what_was_published_whatever_fails(steps: list[str], rng: object) -> None:
    queue: LogQueue[QueuedPublish] = LogQueue(0)
    ledgers: list[list[QueuedPublish]] = [[]]
    queue.start_ledger(0)
    stored_items: list[str] = []
    added = 0
    for step in [*steps, "send", "end"]:
        if step == "add":
            add(queue, added)
            added += 1
        elif step == "send":
            ledgers[-1] += sent(queue)
        elif step == "confirm" and queue.sent_entry_count:
            first = queue.next_entry - queue.sent_entry_count
            stored_items += [item(each) for each in queue.take_confirmed(rng.randint(first - 1, queue.next_entry - 1))]  # type: ignore[attr-defined]
        elif step == "end":
            stored = rng.randint(len(ledgers[-1]) - queue.sent_entry_count, len(ledgers[-1]))  # type: ignore[attr-defined]
            queue.on_ledger_stopped()
            stored_items += [item(each) for each in queue.end_ledger(stored - 1)]
            del ledgers[-1][stored:]
            ledgers.append([])
            queue.start_ledger(len(ledgers))
        queue.check()
    ledgers[-1] += sent(queue)
    assert [item(each) for ledger in ledgers for each in ledger] == list(map(str, range(added)))
    assert stored_items == list(map(str, range(len(stored_items))))
    assert [item(each) for each in queue.take_all()] == list(map(str, range(len(stored_items), added)))
