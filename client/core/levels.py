"""Levels of priority: which level a consumer receives from next (`LevelTurns`), the queues of the items that wait at
each level (`LevelQueues`), and the names of the topics of the levels.

A log cannot be reordered, so a topic with levels is several topics, one for each level: `t-priority-0` (the most
urgent), `t-priority-1` and so on. A producer sends a message to the topic of its level. A consumer has a queue for each
level, and draws from the queues in turns. Each of these topics keeps its own order, cursor, retries and dead letters.

    queues = LevelQueues(LevelTurns(3, (8, 4, 1)), level_of)
    queues.extend(items)             each item goes to the end of the queue of its level
    queues.popleft()                 the first item of the level whose turn it is; IndexError: all are empty
    queues.appendleft(item)          to the front of the queue of its level
    queues.check()

**Turns.** Each level has a due time, which grows by its stride with each item that is drawn; strides are inverse to the
weights. The level with the earliest due time is next, of several the most urgent one. An empty level is passed over,
and gains nothing: when it has an item again it is due now at the earliest. So, among levels that always have items,
each gets its share of the draws, up to one draw for each level. A level with an item waits for at most
`LevelTurns.overtaking_items_max` draws. Without weights (strictly) all strides are 0: the most urgent level with an
item is next, and the others may wait for ever. **Order.** Items of one level leave in the order in which they came.
**Threads.** The queues are deques: an item is drawn once, whatever threads draw. Two threads that draw at the same time
may count as one draw. Guards: tests/client/core/test_levels.py (a random walk beside a naive model)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from itertools import repeat, starmap
from math import lcm
from typing import Any, Generic, TypeVar

from ...proto.names import TopicName

T = TypeVar("T")
Other = TypeVar("Other")

LEVELS_MAX = 10
"""Most levels of a topic: each is a topic, with a subscription and a queue in the client."""
WEIGHT_MAX = 1000
STRICT_WEIGHTS = "strict"
"""The `weights` of a consumer that receives from the most urgent level that has a message."""


def make_level_topic(topic: TopicName, level: int) -> TopicName:
    """Returns the topic of a level: `t-priority-0` is that of the most urgent level of `t`. Of a partition, returns the
    topic of its partitioned topic. Raises InvalidName if the longer name is not valid."""
    return TopicName.parse(f"{topic.base.full}-priority-{level}")


def split_by_level(topics: Iterable[TopicName], levels: int | None) -> list[tuple[TopicName, int]]:
    """Returns the topics of all levels of `topics`, each with its level. If `levels` is None, returns `topics`
    themselves, each with level 0. Raises the errors of `make_level_topic`."""
    if levels is None:
        return [(topic, 0) for topic in topics]
    return [(make_level_topic(topic, level), level) for topic in topics for level in range(levels)]


def make_default_weights(levels: int) -> tuple[int, ...]:
    """Returns the default weights of `levels` levels, the most urgent first: 8, 4, 1 for three levels. Level i has 2 **
    (`levels` - i), and the last level has 1."""
    return (*(2 ** (levels - level) for level in range(levels - 1)), 1)


class LevelTurns:
    """Decides from which level the next item is drawn. See the head of the module."""

    def __init__(self, levels: int, weights: Sequence[int]) -> None:
        """Makes the turns of `levels` levels. `weights`: one for each level, the most urgent first; empty: the most
        urgent level with an item is always next."""
        assert not weights or len(weights) == levels, "each level has a weight"
        self.levels, self.weights = levels, tuple(weights)
        common = lcm(*weights) if weights else 0
        self._strides = [common // weight for weight in weights] or [0] * levels
        self._due = [0] * levels
        self._now = 0  # the due time of the latest draw

    def choose_level(self, queues: Sequence[Sized]) -> int | None:
        """Returns the level whose turn it is among those with items; None if all queues are empty. Changes nothing."""
        found: int | None = None
        earliest = 0
        for level, queue in enumerate(queues):
            if len(queue):
                due = max(self._due[level], self._now)
                if found is None or due < earliest:
                    found, earliest = level, due
        return found

    def on_drawn(self, level: int) -> None:
        """Fact: an item of the level was drawn. Its next turn comes later, by the weight of the level."""
        self._now = max(self._due[level], self._now)
        self._due[level] = self._now + self._strides[level]

    def overtaking_items_max(self, level: int) -> int:
        """Returns how many items of other levels are drawn at most while the level has an item. There must be weights:
        without them there is no limit."""
        own = self.weights[level]
        return sum(-(-weight // own) + 1 for each, weight in enumerate(self.weights) if each != level)

    def check(self) -> None:
        """Raises AssertionError if an invariant is broken."""
        for level, (due, stride) in enumerate(zip(self._due, self._strides, strict=True)):
            assert 0 <= due <= self._now + stride, f"level {level} waits longer than its stride"


class LevelQueues(Generic[T]):
    """A queue for each level, with the methods of a deque that a receiver queue uses. `level_of` returns the level of
    an item."""

    def __init__(self, turns: LevelTurns, level_of: Callable[[T], int]) -> None:
        self.turns = turns
        self.level_of = level_of
        self._queues = [deque[T]() for _ in range(turns.levels)]
        # never end: an empty deque raises
        self._firsts = [starmap(queue.popleft, repeat(())) for queue in self._queues]

    def make_empty(self) -> LevelQueues[T]:
        """Returns empty queues that share the LevelTurns of these."""
        return LevelQueues(self.turns, self.level_of)

    def make_queues_for(self, item_of: Callable[[Other], T]) -> LevelQueues[Other]:
        """Returns empty queues for other objects, with their own LevelTurns of the same weights. `item_of` returns the
        item whose level an object has."""
        level_of = self.level_of
        return LevelQueues(LevelTurns(self.turns.levels, self.turns.weights), lambda other: level_of(item_of(other)))

    def __len__(self) -> int:
        return sum(map(len, self._queues))

    def __iter__(self) -> Iterator[T]:
        """Yields the items, those of the most urgent level first."""
        return iter(self.copy())

    def __getitem__(self, first: int) -> T:
        """Returns the item that `popleft` returns next, without removing it; `first` is 0. Raises IndexError if all
        queues are empty."""
        level = self.turns.choose_level(self._queues)
        if level is None:
            raise IndexError("all levels are empty")
        return self._queues[level][first]

    def copy(self) -> list[T]:
        """Returns the items as a list, those of the most urgent level first."""
        return [item for queue in self._queues for item in queue.copy()]

    def append(self, item: T) -> None:
        self._queues[self.level_of(item)].append(item)

    def extend(self, items: Iterable[T]) -> None:
        for item in items:
            self.append(item)

    def appendleft(self, item: T) -> None:
        self._queues[self.level_of(item)].appendleft(item)

    def extendleft(self, items: Iterable[T]) -> None:
        for item in items:
            self.appendleft(item)

    def popleft(self) -> T:
        """Removes the first item of the level whose turn it is, and returns it. Raises IndexError if all queues are
        empty. If Ctrl-C interrupts the call, the item stays in its queue."""
        while (level := self.turns.choose_level(self._queues)) is not None:
            self.turns.on_drawn(level)
            try:
                for item in self._firsts[level]:  # no call of `popleft`: Ctrl-C would fall between it and its result
                    return item
            except IndexError:
                continue  # another thread was faster
        raise IndexError("all levels are empty")

    def check(self) -> None:
        """Raises AssertionError if an invariant is broken."""
        self.turns.check()
        for level, queue in enumerate(self._queues):
            assert all(self.level_of(item) == level for item in queue), f"level {level} has items of another one"


LevelOrPlainQueue = deque[Any] | LevelQueues[Any]
"""What keeps items in their order: of one level, or of several."""


def make_empty_queue(like: deque[T] | LevelQueues[T]) -> deque[T] | LevelQueues[T]:
    """Returns an empty queue of the kind of `like`."""
    return like.make_empty() if isinstance(like, LevelQueues) else deque()
