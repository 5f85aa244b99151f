"""The core of a listener: decides which of the messages that a consumer has received may be handled now (`KeyQueues`).

    queues.add(place, key, message)    False: an item at this place waits or is handled: the caller drops the copy
    queues.begin_next()                the next message that may be handled; None: none may
    queues.finish(place)               its handler has ended
    queues.discard(unwanted)           removes waiting messages, which are delivered again, or never
    queues.check()

**Order.** Of the messages with one key, one is handled at a time, in the order in which they were added; with the key
None there is no order. A message that is free to begin waits only for `concurrency`, and with levels of priority for
the turn of its level. So a key whose handler hangs delays no other key, as long as the receiver queue has room: the
messages that wait here are still part of it (client/consume/listening.py). **Copies.** A broker delivers a message
again when the connection was lost, when its acknowledgement is late, or when another message of its batch failed. If a
message at the same place is handled, or waits, the copy is not added: the acknowledgement or negative acknowledgement
of the first is that of both. Guards: tests/client/core/test_listening.py (a walk beside a naive model)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, NamedTuple, TypeVar

from .levels import LevelQueues, make_empty_queue

T = TypeVar("T")


class QueuedItem(NamedTuple, Generic[T]):
    """An item of a KeyQueues. `number`: its number in the order in which items were added, from 1. `place`: what
    identifies the item. `key`: items with the same key are handled one after the other; None: no order. `value`: what
    the caller added."""

    number: int
    place: Hashable
    key: Hashable | None
    value: T


class KeyQueues(Generic[T]):
    """Items that wait to be handled, with a queue for each key of which an item is handled or may begin. `concurrency`:
    how many items may be handled at a time. `ready`: an empty LevelQueues for the items that may begin; None: they
    begin in the order in which they became free."""

    def __init__(self, concurrency: int, ready: LevelQueues[QueuedItem[T]] | None = None) -> None:
        self.concurrency = concurrency
        self._number = 0
        # may begin: nothing of their keys is before them
        self._ready: deque[QueuedItem[T]] | LevelQueues[QueuedItem[T]] = deque() if ready is None else ready
        self._following: dict[Hashable, deque[QueuedItem[T]]] = {}  # busy key → what follows what is ready or begun
        self._begun: dict[Hashable, QueuedItem[T]] = {}  # by place
        self._places: set[Hashable] = set()  # of all items

    def __len__(self) -> int:
        """Returns how many items wait."""
        return len(self._places) - len(self._begun)

    @property
    def may_begin(self) -> bool:
        """Returns whether an item is free to begin and fewer than `concurrency` have begun, so that `begin_next`
        returns an item."""
        return bool(self._ready) and len(self._begun) < self.concurrency

    def add(self, place: Hashable, key: Hashable | None, value: T) -> bool:
        """Adds an item at the end. Returns True; False, and adds nothing, if an item with the same place waits or has
        begun."""
        if place in self._places:
            return False
        self._places.add(place)
        self._number += 1
        self._enqueue(QueuedItem(self._number, place, key, value))
        return True

    def _enqueue(self, item: QueuedItem[T]) -> None:
        if item.key is None:
            self._ready.append(item)
        elif (following := self._following.get(item.key)) is not None:
            following.append(item)
        else:
            self._following[item.key] = deque()
            self._ready.append(item)

    def begin_next(self) -> QueuedItem[T] | None:
        """Removes the next item that may begin from those that wait, counts it as begun and returns it. Returns None if
        none may begin. The caller must call `finish` when the item is handled."""
        if not self.may_begin:
            return None
        item = self._ready.popleft()
        self._begun[item.place] = item
        return item

    def finish(self, place: Hashable) -> None:
        """Fact: the handling of the item at `place`, which has begun, has ended. The next item of its key may begin."""
        item = self._begun.pop(place)
        self._places.discard(place)
        if item.key is not None:
            following = self._following[item.key]
            if following:
                self._ready.append(following.popleft())
            else:
                del self._following[item.key]

    def count_following(self, key: Hashable | None) -> int:
        """Returns how many items wait for the end of the item of this key that is first: it has begun, or may begin. 0
        for None."""
        return len(self._following.get(key, ()))

    def waiting(self) -> list[T]:
        """Returns the values of the waiting items, in the order in which they were added."""
        return [item.value for item in self._waiting()]

    def _waiting(self) -> list[QueuedItem[T]]:
        return sorted([*self._ready, *(item for following in self._following.values() for item in following)])

    def discard(self, unwanted: Callable[[T], bool]) -> list[T]:
        """Removes the waiting items for whose value `unwanted` returns True. Returns their values in the order in which
        they were added."""
        gone = list[T]()
        items, self._ready = self._waiting(), make_empty_queue(self._ready)
        self._following = {item.key: deque() for item in self._begun.values() if item.key is not None}
        for item in items:
            if unwanted(item.value):
                gone.append(item.value)
                self._places.discard(item.place)
            else:
                self._enqueue(item)
        return gone

    def __iter__(self) -> Iterator[QueuedItem[T]]:
        """Yields what has begun, the longest begun first."""
        return iter(list(self._begun.values()))

    def check(self) -> None:
        """Raises AssertionError if an invariant is broken."""
        waiting = self._waiting()
        assert len(self._begun) <= self.concurrency, "more is handled than may be"
        assert self._places == {item.place for item in waiting} | set(self._begun), "an item is lost, or left over"
        assert len(self._places) == len(waiting) + len(self._begun), "an item is there twice"
        heads = [item.key for item in (*self._ready, *self._begun.values()) if item.key is not None]
        assert len(heads) == len(set(heads)), "two items of one key may be handled at a time"
        assert set(heads) == set(self._following), "a key is busy with nothing, or waits for nothing"
