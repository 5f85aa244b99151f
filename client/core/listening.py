"""The core of a listener: which of the messages that a consumer has received may be handled now (`KeyQueues`), and
whether handlers may be called at all (`BreakerCore`).

    queues.add(place, key, message)    False: it is there already, waiting or handled: the caller drops the copy
    queues.begin_next()                the next message that may be handled; None: none may
    queues.finish(place)               its handler has ended
    queues.discard(unwanted)           messages that wait are removed: they are delivered again, or never
    queues.check()

**Order.** Of the messages with one key, one is handled at a time, in the order in which they were added; `key` None: no
order. A message that is free to begin waits only for `concurrency`. So a key whose handler hangs delays no other key,
as long as the receiver queue has room: what waits here is still part of it (client/consume/listening.py).
**Copies.** A broker delivers a message again when the connection was lost, when its acknowledgement is late, or when
another message of its batch failed. A message at the same place that is handled, or waits, is not added a second time:
the acknowledgement or the negative acknowledgement of the first means both.
Guards: tests/client/core/test_listening.py (a walk beside a naive model)."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from math import inf
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class QueuedItem(NamedTuple, Generic[T]):
    """An item of a KeyQueues. `number`: it was added as the so-manyth."""

    number: int
    place: Hashable
    key: Hashable | None
    value: T


class KeyQueues(Generic[T]):
    """A queue for each key that is busy. `concurrency`: how many items may be handled at a time."""

    def __init__(self, concurrency: int) -> None:
        self.concurrency = concurrency
        self._number = 0
        self._ready: deque[QueuedItem[T]] = deque()  # may begin: nothing of their keys is before them
        self._behind: dict[Hashable, deque[QueuedItem[T]]] = {}  # busy key → what follows what is ready or begun
        self._begun: dict[Hashable, QueuedItem[T]] = {}  # by place
        self._places: set[Hashable] = set()  # of all items

    def __len__(self) -> int:
        """Returns how many items wait."""
        return len(self._places) - len(self._begun)

    @property
    def begun_count(self) -> int:
        """Returns how many items have begun and not finished."""
        return len(self._begun)

    @property
    def may_begin(self) -> bool:
        """Returns whether `begin_next` returns an item."""
        return bool(self._ready) and len(self._begun) < self.concurrency

    def add(self, place: Hashable, key: Hashable | None, value: T) -> bool:
        """Adds an item. Returns False, and adds nothing, if one with the same place waits or has begun."""
        if place in self._places:
            return False
        self._places.add(place)
        self._number += 1
        self._enqueue(QueuedItem(self._number, place, key, value))
        return True

    def _enqueue(self, item: QueuedItem[T]) -> None:
        if item.key is None:
            self._ready.append(item)
        elif (behind := self._behind.get(item.key)) is not None:
            behind.append(item)
        else:
            self._behind[item.key] = deque()
            self._ready.append(item)

    def begin_next(self) -> QueuedItem[T] | None:
        """Returns the next item whose handling begins now; None if none may begin."""
        if not self.may_begin:
            return None
        item = self._ready.popleft()
        self._begun[item.place] = item
        return item

    def finish(self, place: Hashable) -> None:
        """Fact: the handling of the item at `place` has ended."""
        item = self._begun.pop(place)
        self._places.discard(place)
        if item.key is not None:
            behind = self._behind[item.key]
            if behind:
                self._ready.append(behind.popleft())
            else:
                del self._behind[item.key]

    def count_behind(self, key: Hashable | None) -> int:
        """Returns how many items wait for the end of the one of this key that has begun."""
        return len(self._behind.get(key, ()))

    def waiting(self) -> list[T]:
        """Returns what waits, in the order in which it was added."""
        return [item.value for item in self._waiting()]

    def _waiting(self) -> list[QueuedItem[T]]:
        return sorted([*self._ready, *(item for behind in self._behind.values() for item in behind)])

    def discard(self, unwanted: Callable[[T], bool]) -> list[T]:
        """Removes the waiting items for which `unwanted` returns True; returns them in the order in which they were
        added."""
        gone = list[T]()
        items, self._ready = self._waiting(), deque()
        self._behind = {item.key: deque() for item in self._begun.values() if item.key is not None}
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
        assert set(heads) == set(self._behind), "a key is busy with nothing, or waits for nothing"


# ------------------------------------------------------------------------------------------------------- breaker
# When handlers are not called because what they call fails: a circuit breaker.
#
# | state | a call may begin | to |
# |---|---|---|
# | CLOSED | yes | OPEN, after `failures` calls in a row that failed |
# | OPEN | no | HALF_OPEN, after `pause_s` |
# | HALF_OPEN | `trials` at a time | CLOSED when one of them succeeds, OPEN when one fails |
#
# A call gets a ticket when it begins. One that began before the state changed changes nothing when it ends: a call of
# before the failure says nothing about now.


class BreakerState(enum.Enum):
    """The states of a circuit breaker."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


class BreakerCore:
    """Decides whether calls may begin, from the outcomes of earlier calls."""

    def __init__(self, failures: int, pause_s: float, trials: int) -> None:
        self._failures_max, self._pause_s, self._trials_max = failures, pause_s, trials
        self._is_open = False  # or half open, when `_until` has come
        self._until = 0.0
        self._failed = self._trials = 0
        self._era = 1  # of tickets; ascends with each change of state
        self.opened = 0  # how often

    def state(self, now: float) -> BreakerState:
        if not self._is_open:
            return BreakerState.CLOSED
        return BreakerState.HALF_OPEN if now >= self._until else BreakerState.OPEN

    def delay_s(self, now: float) -> float:
        """Returns the seconds until a call may begin; 0: now; inf: when a trial has ended."""
        if not self._is_open:
            return 0.0
        if now < self._until:
            return self._until - now
        return 0.0 if self._trials < self._trials_max else inf

    def begin(self, now: float) -> int:
        """Returns the ticket of a call that begins now; 0 if none may begin."""
        if self.delay_s(now) > 0:
            return 0
        self._trials += self._is_open
        return self._era

    def end(self, ticket: int, is_failure: bool | None, now: float) -> None:
        """Fact: the call with this ticket has ended; `is_failure` None: without an outcome."""
        if ticket != self._era:
            return
        if self._is_open:
            self._trials -= 1
            if is_failure is not None:
                self._change(is_open=is_failure, now=now)
        elif is_failure is not None:
            self._failed = self._failed + 1 if is_failure else 0
            if self._failed >= self._failures_max:
                self._change(is_open=True, now=now)

    def _change(self, *, is_open: bool, now: float) -> None:
        self._is_open = is_open
        self._until = now + self._pause_s
        self._failed = self._trials = 0
        self._era += 1
        self.opened += is_open

    def check(self) -> None:
        """Raises AssertionError if an invariant is broken."""
        assert 0 <= self._trials <= self._trials_max, "trials are counted wrong"
        assert self._is_open or self._failed < self._failures_max, "it should be open"
