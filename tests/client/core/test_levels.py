"""From which level the next message comes: walks beside a naive model, and shares that are counted."""

import random
from collections import deque

import pytest

from magnetar.client.core.levels import (
    LevelQueues,
    LevelTurns,
    make_default_weights,
    make_empty_queue,
    make_level_topic,
    split_by_level,
)
from magnetar.proto.names import TopicName

Item = tuple[int, int]
"""A level, and the number of an item."""


def made(weights: tuple[int, ...], levels: int | None = None) -> LevelQueues[Item]:
    return LevelQueues(LevelTurns(levels or len(weights), weights), lambda item: item[0])


def drawn(queues: LevelQueues[Item], count: int) -> list[int]:
    found = []
    for _ in range(count):
        found.append(queues.popleft()[0])
        queues.check()
    return found


def test_the_topics_of_levels_are_named_after_their_topic_and_three_levels_weigh_8_4_1() -> None:
    topic = TopicName.parse("persistent://a/b/t")
    assert make_level_topic(topic, 2).full == "persistent://a/b/t-priority-2"
    assert [(name.local, level) for name, level in split_by_level([topic], 2)] == [
        ("t-priority-0", 0), ("t-priority-1", 1),
    ]  # fmt: skip
    assert split_by_level([topic], None) == [(topic, 0)]
    assert [make_default_weights(count) for count in (2, 3, 4)] == [(4, 1), (8, 4, 1), (16, 8, 4, 1)]


def test_levels_that_always_have_items_get_their_shares() -> None:
    weights = (8, 4, 1)
    queues = made(weights)
    queues.extend((level, number) for number in range(1300) for level in range(3))
    for count in (13, 130, 1300):
        again = made(weights)
        again.extend((level, number) for number in range(1300) for level in range(3))
        found = drawn(again, count)
        for level, weight in enumerate(weights):
            assert abs(found.count(level) - count * weight / 13) <= len(weights)
    assert drawn(queues, 13).count(2) == 1


def test_an_empty_level_costs_no_other_one_and_saves_nothing_for_later() -> None:
    queues = made((8, 4, 1))
    queues.extend((2, number) for number in range(1000))
    assert drawn(queues, 500) == [2] * 500
    queues.extend((0, number) for number in range(1000))
    found = drawn(queues, 90)
    assert found[0] == 0, "it is due now"
    assert abs(found.count(2) - 10) <= 2, "what it did not take before is not made up for"


def test_of_levels_that_were_empty_for_long_the_most_urgent_one_is_next() -> None:
    queues = made((8, 4, 1))
    queues.extend([(0, 0), (0, 1), (0, 2), (0, 3), (1, 4)])
    drawn(queues, 5)
    queues.extend((2, number) for number in range(100))
    drawn(queues, 50)
    queues.extend([(1, 5), (0, 6)])
    assert drawn(queues, 2) == [0, 1]


def test_strictly_the_most_urgent_level_that_has_an_item_is_next() -> None:
    queues = made((), 3)
    queues.extend([(2, 0), (1, 1), (2, 2), (1, 3)])
    assert queues.popleft() == (1, 1)
    queues.append((0, 4))
    assert drawn(queues, 4) == [0, 1, 2, 2]
    with pytest.raises(IndexError):
        queues.popleft()


def test_what_is_put_back_is_the_first_of_its_level_and_turns_go_on_in_an_empty_copy() -> None:
    queues = made((4, 1))
    queues.extend([(0, 1), (1, 2), (0, 3)])
    taken = [queues.popleft(), queues.popleft()]
    queues.extendleft(reversed(taken))
    assert list(queues) == [(0, 1), (0, 3), (1, 2)]
    other = make_empty_queue(queues)
    assert isinstance(other, LevelQueues)
    assert (len(other), other.turns) == (0, queues.turns)
    assert make_empty_queue(deque([1])) == deque()


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_a_level_keeps_its_order_loses_nothing_and_waits_a_bounded_time(seed: int) -> None:
    rng = random.Random(seed)
    levels = rng.randint(2, 5)
    weights = tuple(rng.randint(1, 20) for _ in range(levels)) if rng.random() < 0.8 else ()
    queues = made(weights, levels)
    model = [deque[Item]() for _ in range(levels)]
    waited = [0] * levels  # draws of others since it has an item, or since its last draw
    number = 0
    for _ in range(1500):
        action = rng.random()
        if action < 0.45:
            item = (rng.randrange(levels), number)
            number += 1
            queues.append(item)
            model[item[0]].append(item)
        elif action < 0.9 and len(queues):
            first = queues[0]
            item = queues.popleft()
            assert item == first, "the front is what is drawn"
            assert item == model[item[0]].popleft(), "not in its level's order"
            if not weights:
                assert not any(model[level] for level in range(item[0])), "a more urgent one waits"
            for level in range(levels):
                waited[level] = waited[level] + 1 if level != item[0] and model[level] else 0
                assert not weights or waited[level] <= queues.turns.overtaking_items_max(level), "a level starves"
            if rng.random() < 0.1:
                queues.appendleft(item)
                model[item[0]].appendleft(item)
        elif action >= 0.97:
            kept, queues = list(queues), queues.make_empty()
            queues.extend(kept)
        queues.check()
        assert len(queues) == sum(map(len, model))
        assert queues.copy() == [item for queue in model for item in queue]
