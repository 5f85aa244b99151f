"""Debounce of a consumer: of the messages with one key in one window of time only the newest is delivered.

    ready, superseded = debounce.add(messages, now)    # to deliver to the application; to acknowledge
    ready = debounce.take_due(now)                     # at `next_due`
    copies = debounce.take_copies()                    # neither: later copies of these messages are held
    held = debounce.clear()                            # the broker delivers them again

The rule is a function of the log alone: a message is superseded if a later message of its partition has its key and
falls into the same window, by the broker's time of publication. The windows of a key follow each other without a gap,
`window_s` long. Where they begin depends on the key, so that not all keys are delivered at one moment. A key that
changes all the time is delivered once in each window.

A message is held until its window is over. That is when a message was received that was published after the end of the
window; or when the rest of the window has passed since the message was received, and nothing was received for
END_OF_TOPIC_IDLE_S. So no clocks are compared. In three cases a message is delivered although its window goes on: a
redelivery, a receiver queue that is full of held messages, and a key that moves to another consumer. So the application
may get one message too many, and never one too few.

After a crash the held messages come again, because they are not acknowledged. A superseded message is acknowledged only
after a newer message of its key was received, which is held, or with the application, until it is acknowledged itself.
A held message keeps its permits, so the receiver queue bounds the memory, however many keys there are. A message
without a key is never held. Guarding tests: tests/client/core/test_debounce.py."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from math import inf
from typing import Generic, NamedTuple, TypeVar

from ...proto.names import STICKY_SLOTS, compute_key_slot
from .redelivery import MessagePlace

END_OF_TOPIC_IDLE_S = 0.5
"""Seconds without a message after which the last ones of a topic are not waited for any longer."""

T = TypeVar("T")


class KeyedMessage(NamedTuple, Generic[T]):
    """A received message for Debounce: its place in the log (`place`), its key (None: it has none), and the time at
    which the broker stored its entry (`published_ms`: ms since the epoch; 0: not known, which counts as no key)."""

    message: T
    place: MessagePlace
    key: str | None
    published_ms: int


class _Held(NamedTuple, Generic[T]):
    given: KeyedMessage[T]
    end_ms: int  # of its window
    due: float  # monotonic seconds


class Debounce(Generic[T]):
    """Holds the messages of one partition until their windows are over, and of each key only the newest. `superseded`:
    how many messages a newer one has replaced. Times are seconds of a monotonic clock."""

    def __init__(self, window_s: float) -> None:
        self.superseded = 0  # messages
        self._window_ms = max(1, round(window_s * 1000))
        self._idle_s = min(window_s, END_OF_TOPIC_IDLE_S)
        self._copies: list[T] = []
        self._held: dict[str, _Held[T]] = {}
        self._ends: list[tuple[int, int, str]] = []  # a heap: end of the window, number, key
        self._numbers = 0
        self._published_ms = 0  # of the latest message
        self._received_at = -inf

    def find_window_end_ms(self, key: str, published_ms: int) -> int:
        """Returns the end (exclusive) of the window into which a message of this key falls, in ms since the epoch.
        `published_ms`: when the message was published, in ms since the epoch."""
        offset = compute_key_slot(key) * self._window_ms // (STICKY_SLOTS + 1)
        return ((published_ms + offset) // self._window_ms + 1) * self._window_ms - offset

    def add(self, messages: Iterable[KeyedMessage[T]], now: float) -> tuple[list[T], list[T]]:
        """Adds messages that were received at the time `now`. Returns two lists: the messages that may be delivered
        now, and those that are superseded, which the caller acknowledges. The others are held."""
        ready: list[T] = []
        gone: list[T] = []
        for each in messages:
            self._published_ms = max(self._published_ms, each.published_ms)
            self._take_ended(ready)
            if each.key is None or not each.published_ms:
                ready.append(each.message)
            else:
                self._add(each, each.key, now, ready, gone)
        self._received_at = now
        self.superseded += len(gone)
        return ready, gone

    def _add(self, new: KeyedMessage[T], key: str, now: float, ready: list[T], gone: list[T]) -> None:
        end_ms, held = self.find_window_end_ms(key, new.published_ms), self._held.get(key)
        if held is not None and held.given.place == new.place:  # another message of its batch was given back
            self._copies.append(held.given.message)
            self._held[key] = held._replace(given=new)
            return
        if held is not None and held.end_ms == end_ms:
            older, newer = sorted((held.given, new), key=lambda each: each.place)
            gone.append(older.message)
            self._held[key] = held._replace(given=newer)
            return
        if end_ms <= self._published_ms or (held is not None and new.place < held.given.place):
            ready.append(new.message)  # its window is over
            return
        if held is not None:
            ready.append(held.given.message)
        self._held[key] = _Held(new, end_ms, now + (end_ms - new.published_ms) / 1000)
        self._numbers += 1
        heappush(self._ends, (end_ms, self._numbers, key))

    def take_copies(self) -> list[T]:
        """Removes and returns the messages of which a later copy was received while they were held. The copies are held
        in their place, so the returned messages are neither delivered nor acknowledged."""
        copies, self._copies = self._copies, []
        return copies

    def _take_ended(self, ready: list[T]) -> None:
        """Moves the messages to `ready` whose windows are over, because a later message was published after them."""
        while self._ends and self._ends[0][0] <= self._published_ms:
            self._take_first(ready)

    def _take_first(self, ready: list[T]) -> None:
        end_ms, _, key = heappop(self._ends)
        held = self._held.get(key)
        if held is not None and held.end_ms == end_ms:
            del self._held[key]
            ready.append(held.given.message)

    def take_due(self, now: float) -> list[T]:
        """Removes and returns the held messages whose windows are over at the time `now`."""
        ready: list[T] = []
        while (due := self.next_due) is not None and due <= now:
            self._take_first(ready)
        return ready

    @property
    def next_due(self) -> float | None:
        """Returns the time (monotonic seconds) at which `take_due` must be called; None if nothing is held."""
        while self._ends:
            end_ms, _, key = self._ends[0]
            held = self._held.get(key)
            if held is not None and held.end_ms == end_ms:
                return max(held.due, self._received_at + self._idle_s)
            heappop(self._ends)
        return None

    @property
    def held_messages(self) -> Sequence[T]:
        """Returns the held messages, at most one of each key."""
        return [each.given.message for each in self._held.values()]

    def clear(self) -> Sequence[T]:
        """Removes and returns all held messages, because the broker delivers them again."""
        held = self.held_messages
        self._held.clear()
        self._ends.clear()
        self._published_ms = 0
        return held

    def check(self) -> None:
        """Raises AssertionError if an invariant is broken."""
        listed = {(key, end_ms) for end_ms, _, key in self._ends}
        for key, held in self._held.items():
            assert (key, held.end_ms) in listed, "a held message has no time"
            assert held.end_ms > self._published_ms, "a message is held after its window"
            assert held.given.published_ms < held.end_ms, "a message is held in a window that is not its own"
