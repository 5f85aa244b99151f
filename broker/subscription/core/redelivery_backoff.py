"""Entries that were given back and are not to be delivered yet, or never: the back-off ladder, and dead letters.
    verdict = policy.verdict(times, now_ms)      # Replay after a wait | DEAD
    held.hold(position, until_ms)                # until_ms None: it becomes a dead letter
    held.due(now_ms)                             # these may be delivered again
A message is delivered 1 + max_redeliver_count times. The cursor keeps the count and the time and stores them, so that
a restart continues from them (`restore`). What is held is neither outstanding nor waiting for redelivery: the
dispatcher skips it. Guarding tests: tests/broker/subscription/core/test_redelivery_backoff.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress

import msgspec
from sortedcontainers import SortedSet

from ....proto.applied import Applied
from ....proto.digits import whole
from ....proto.names import Position, TopicName
from ...common.refusals import SubscribeRefusal
from .cursor_state import Count

MAX_COUNT, TOPIC, LADDER = "dead-letter.max-redeliver-count", "dead-letter.topic", "dead-letter.backoff-s"
"""Properties of a subscription that set its own policy, over that of its topic and namespace."""
PROPERTIES_BYTES_MAX = 4 << 10
"""Characters of all properties of a subscription: its record contains them, and is written with each roll of its
ledger.
"""


SUFFIX = "-DLQ"
"""Suffix of the dead-letter topic of a subscription, if none is named."""


class DeadLetterPolicy(msgspec.Struct, frozen=True):
    """The rules for an entry that was given back: when it is delivered again, and when it becomes a dead letter."""

    max_redeliver_count: int  # 0: none
    topic: str
    backoff_s: tuple[float, ...]

    def __bool__(self) -> bool:
        return self.max_redeliver_count > 0

    def is_dead(self, times: int) -> bool:
        """Whether an entry that was given back so often was delivered as often as it may be."""
        return times > self.max_redeliver_count

    def wait_ms(self, times: int) -> int:
        """Returns the wait (ms) before the redelivery of an entry that was given back so often; the last step of the
        ladder repeats."""
        if not self.backoff_s:
            return 0
        return int(1000 * self.backoff_s[min(times, len(self.backoff_s)) - 1])

    def at(self, topic: TopicName, subscription: str) -> DeadLetterPolicy:
        """The policy in force there: a topic of dead letters makes none of its own, or each would circulate for ever.
        """
        if not self:
            return self
        its_own = not self.topic and topic.base.local.endswith(SUFFIX)
        return NO_LETTERS if its_own or self.letter_topic(topic, subscription).base == topic.base else self

    def letter_topic(self, topic: TopicName, subscription: str) -> TopicName:
        return TopicName.parse(self.topic or f"{topic.base.full}-{subscription}{SUFFIX}")


NO_LETTERS = DeadLetterPolicy(0, "", ())


def policy_of(applied: Applied, properties: Mapping[str, str]) -> DeadLetterPolicy:
    """Returns the policy: subscription > topic > namespace > broker. A property that does not parse counts as unset."""
    count, ladder = applied.dead_letter_max_redeliver_count, applied.dead_letter_backoff_s
    own_count, own_ladder = properties.get(MAX_COUNT, ""), properties.get(LADDER, "")
    if (own := whole(own_count)) is not None:
        count = own
    if own_ladder:
        with suppress(ValueError):
            ladder = tuple(max(0.0, float(step)) for step in own_ladder.split(","))
    return DeadLetterPolicy(count, properties.get(TOPIC, applied.dead_letter_topic), ladder)


_NONE: SortedSet[tuple[int, Position]] = SortedSet()
"""The empty dictionary. One for all subscriptions, because it costs 2 KB: never add to it."""


class BackoffQueue:
    """The entries of a subscription that wait for a time, or for the dead letters."""

    __slots__ = ("_due", "until")

    def __init__(self) -> None:
        self.until: dict[Position, int | None] = {}
        self._due: SortedSet[tuple[int, Position]] = _NONE

    def __contains__(self, position: object) -> bool:
        return position in self.until

    def __len__(self) -> int:
        return len(self.until)

    def __iter__(self) -> Iterator[Position]:
        return iter(self.until)

    def restore(self, counts: Mapping[Position, Count], policy: DeadLetterPolicy, now_ms: int) -> list[Position]:
        """Continues after a restart; returns the dead letters.

        `until_ms` is of the clock of the broker that held it, which may be hours ahead: no wait is longer than the
        policy's
        own.
        """
        dead = []
        for position, count in counts.items():
            if policy and policy.is_dead(count.redeliveries):
                self.hold(position, None)
                dead.append(position)
            elif count.until_ms > now_ms:
                self.hold(position, min(count.until_ms, now_ms + policy.wait_ms(count.redeliveries)))
        return dead

    def hold(self, position: Position, until_ms: int | None) -> None:
        self.drop(position)
        self.until[position] = until_ms
        if until_ms is not None:
            if self._due is _NONE:
                self._due = SortedSet()
            self._due.add((until_ms, position))

    def drop(self, position: Position) -> None:
        until_ms = self.until.pop(position, None)
        if until_ms is not None:
            self._due.discard((until_ms, position))

    def drop_all(self, positions: Iterable[Position]) -> None:
        for position in positions:
            self.drop(position)

    def due(self, now_ms: int) -> list[Position]:
        """The entries whose wait is over; they are held no longer."""
        found: list[Position] = []
        while self._due and self._due[0][0] <= now_ms:
            position = self._due.pop(0)[1]
            del self.until[position]
            found.append(position)
        return found

    def drop_timed(self) -> None:
        """Drops the entries that wait for a time: they are held no longer."""
        for _, position in self._due:
            del self.until[position]
        self._due.clear()

    @property
    def next_ms(self) -> int | None:
        return int(self._due[0][0]) if self._due else None

    def clear(self) -> None:
        self.until.clear()
        self._due.clear()

    def check(self) -> None:
        timed = {(until_ms, position) for position, until_ms in self.until.items() if until_ms is not None}
        assert timed == set(self._due), "what has a time is in its order"


def check_properties(properties: Mapping[str, str]) -> None:
    """Raises InvalidRequest for more than PROPERTIES_BYTES_MAX, or a policy of its own that does not parse."""
    size = sum(len(key) + len(value) for key, value in properties.items())
    if size > PROPERTIES_BYTES_MAX:
        raise SubscribeRefusal.PROPERTIES.error(f"properties of {size} characters are more than {PROPERTIES_BYTES_MAX}")
    count, ladder = properties.get(MAX_COUNT, "0"), properties.get(LADDER, "0")
    if whole(count) is None:
        raise SubscribeRefusal.PROPERTIES.error(f"{MAX_COUNT} is a whole number, not {count[:40]!r}")
    try:
        steps = [float(step) for step in ladder.split(",")]
    except ValueError as error:
        raise SubscribeRefusal.PROPERTIES.error(f"{LADDER} is seconds with commas between, not {ladder!r}") from error
    if not all(0 <= step <= 1e9 for step in steps):
        raise SubscribeRefusal.PROPERTIES.error(f"{LADDER}: a step is 0 s or more, not {ladder!r}")
    if TOPIC in properties:
        TopicName.parse(properties[TOPIC])
