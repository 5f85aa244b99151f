"""Which message may be handled, beside a naive model."""

import random

import pytest

from magnetar.client.core.listening import KeyQueues


def begun(queues: KeyQueues[int]) -> list[int]:
    found = []
    while (item := queues.begin_next()) is not None:
        found.append(item.value)
        queues.check()
    return found


def test_one_of_each_key_is_handled_at_a_time_in_order_and_a_stuck_key_delays_no_other() -> None:
    queues: KeyQueues[int] = KeyQueues(10)
    for number, key in enumerate("aabacb"):
        assert queues.add(number, key, number)
    assert begun(queues) == [0, 2, 4]
    assert (len(queues), len(queues._begun), queues.count_following("a")) == (3, 3, 2)
    queues.finish(2)
    assert begun(queues) == [5], "0 still runs: a waits"
    queues.finish(0)
    assert begun(queues) == [1]
    queues.finish(1)
    assert begun(queues) == [3]


def test_what_has_no_key_waits_for_the_number_of_handlers_alone() -> None:
    queues: KeyQueues[int] = KeyQueues(2)
    for number in range(4):
        queues.add(number, None, number)
    assert begun(queues) == [0, 1]
    queues.finish(1)
    assert begun(queues) == [2]


def test_a_copy_of_what_waits_or_is_handled_is_not_added_and_one_of_what_is_done_is() -> None:
    queues: KeyQueues[int] = KeyQueues(1)
    assert queues.add("p", "k", 1)
    assert not queues.add("p", "k", 2), "it waits"
    assert begun(queues) == [1]
    assert not queues.add("p", "k", 3), "it is handled"
    queues.finish("p")
    assert queues.add("p", "k", 4)


def test_what_is_discarded_lets_what_follows_it_begin_and_is_told_in_order() -> None:
    queues: KeyQueues[int] = KeyQueues(1)
    for number, key in enumerate("aabab"):
        queues.add(number, key, number)
    assert begun(queues) == [0]
    assert queues.discard(lambda each: each in (3, 2)) == [2, 3]
    assert queues.waiting() == [1, 4]
    queues.check()
    queues.finish(0)
    assert begun(queues) == [4], "it was ready first"
    assert queues.discard(lambda _: True) == [1]
    queues.finish(4)
    assert begun(queues) == []


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_the_messages_of_a_key_begin_in_order_one_at_a_time_and_none_is_lost(seed: int) -> None:
    rng = random.Random(seed)
    queues: KeyQueues[tuple[str | None, int]] = KeyQueues(rng.choice([1, 3, 8]))
    running: dict[int, str | None] = {}
    waiting: dict[int, str | None] = {}
    number = 0
    for _ in range(600):
        action = rng.random()
        if action < 0.45:
            key = rng.choice(["a", "b", "c", None])
            place = rng.choice([number, *running, *waiting]) if rng.random() < 0.2 else number
            key = running.get(place, waiting.get(place, key))
            assert queues.add(place, key, (key, place)) == (place not in running and place not in waiting)
            if place == number:
                waiting[place] = key
                number += 1
        elif action < 0.7 and (item := queues.begin_next()) is not None:
            key, place = item.value
            if key is not None:
                assert key not in running.values(), "two of a key at a time"
                assert place == min(each for each in waiting if waiting[each] == key), "not in order"
            del waiting[place]
            running[place] = key
        elif action < 0.95 and running:
            place = rng.choice(list(running))
            queues.finish(place)
            del running[place]
        elif action >= 0.95:
            gone = {each for each in waiting if rng.random() < 0.3}
            assert [place for _, place in queues.discard(lambda each, gone=gone: each[1] in gone)] == sorted(gone)
            waiting = {place: key for place, key in waiting.items() if place not in gone}
        queues.check()
        assert queues.waiting() == [(key, place) for place, key in sorted(waiting.items())]
        free = [key is None or key not in running.values() for key in waiting.values()]
        assert queues.may_begin == (any(free) and len(running) < queues.concurrency)
