"""The decisions on publishing: which entries and which producers may publish, with their reasons.

`why_refused` decides what is known before an entry is parsed (the rest: broker/topic/producer.py); `ProducerTable` for
the producers (Pulsar PR1):

| access mode | joins | |
|---|---|---|
| SHARED | unless an exclusive producer is connected | |
| EXCLUSIVE | when no producer is connected, else refused at once | |
| WAIT_FOR_EXCLUSIVE | when no producer is connected, else waits its turn, first come first served | |
| EXCLUSIVE_WITH_FENCING | at once; all others are fenced for good | |

Two producers of one name: the later connection of the same producer (`instance`, which counts its connections) replaces
the earlier, because a broker detects a broken connection later than the client; an earlier one that arrives late is
refused, and so is another producer of that name, or one of another role, whatever it says it is, unless it takes the
topic with EXCLUSIVE_WITH_FENCING: then the one that was there is fenced, as after any such taking.

**Epoch** (`judge_epoch`): a topic counts the producers that took it for themselves, in its record, before the taker may
publish. One that returns names the epoch that it had: the topic's is the same, and it continues; or another producer
took the topic meanwhile, and it is fenced for good, also when it lost only its connection, to a broker that died, and
not its registration. The count of a topic begins after when it was made (`next_epoch`), so that an epoch of a deleted
topic is lower than any of one that was made anew under its name: a producer of the old one does not fence who has this.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

import msgspec

from ...proto.states import AccessMode
from ..common.refusals import PublishRefusal

SHARED, EXCLUSIVE = AccessMode.SHARED, AccessMode.EXCLUSIVE
WAIT_FOR_EXCLUSIVE, EXCLUSIVE_WITH_FENCING = AccessMode.WAIT_FOR_EXCLUSIVE, AccessMode.EXCLUSIVE_WITH_FENCING


def why_refused(*, size: int, size_max: int, terminated: bool, owned: bool, fenced: bool) -> PublishRefusal | None:
    """Returns the reason why an entry of `size` bytes is refused before it is parsed, or None if it is accepted."""
    if fenced:
        return PublishRefusal.PRODUCER_FENCED
    if not owned:
        return PublishRefusal.NOT_OWNER
    if terminated:
        return PublishRefusal.TERMINATED
    return PublishRefusal.TOO_LARGE if size > size_max else None


class ProducerRegistration(NamedTuple):
    """A producer in the `ProducerTable` of its topic."""

    id: int
    name: str
    mode: AccessMode
    instance: str
    connection: int = 0
    owner: str | None = None
    """The role of the producer; None: one that may write for each (broker/common/transactions.py
    `transaction_role`)."""

    def may_replace(self, other: ProducerRegistration) -> bool:
        """Returns True if this registration may be a later connection of the same producer as `other`. One that names
        no instance is recognised by its role alone."""
        if self.owner is not None and self.owner != other.owner:
            return False
        return not (other.instance and self.instance) or other.instance == self.instance


class EpochChange(enum.Enum):
    """The effect on the topic's epoch when a producer joins."""

    STAYS = "the producer shares the topic, or is the one that had it"
    GROWS = "the producer takes the topic for itself"
    FENCED = "another producer took the topic for itself since this one had it"


def judge_epoch(mode: AccessMode, had: int, topic: int) -> EpochChange:
    """Returns the effect on the topic's epoch. `had`: the epoch in which a producer that connects again had exclusive
    access; 0 if it never had. `topic`: the topic's epoch."""
    if mode == SHARED:
        return EpochChange.STAYS
    if had == 0:
        return EpochChange.GROWS
    return EpochChange.STAYS if had >= topic else EpochChange.FENCED


def next_epoch(topic: int, created_ms: int) -> int:
    """Returns the epoch of a producer that gets exclusive access to a topic. `topic`: the topic's present epoch;
    `created_ms`: when the topic was created."""
    return max(topic, created_ms) + 1


class ProducerJoinDenied(enum.Enum):
    """The reason why a producer may not join."""

    NAME_TAKEN = "a producer of that name is connected"
    STALE = "a later connection of that producer exists"
    EXCLUSIVE_PRODUCER = "the topic has an exclusive producer"
    HAS_PRODUCERS = "the topic has producers, and exclusive access was asked for"


class ProducerJoinResult(msgspec.Struct):
    """The result of `ProducerTable.join`. `registered`: whether the producer is (if not, and not `denied`, it waits);
    `replaced`: the earlier connection of the same producer; `fenced`: the others that may not publish any more."""

    registered: bool = False
    denied: ProducerJoinDenied | None = None
    replaced: list[ProducerRegistration] = []
    fenced: list[ProducerRegistration] = []


class ProducerTable:
    """Decides which producers of one topic are registered, and which wait for exclusive access."""

    __slots__ = ("registered", "waiting")

    def __init__(self) -> None:
        self.registered: dict[int, ProducerRegistration] = {}
        self.waiting: dict[int, ProducerRegistration] = {}

    def join(self, registration: ProducerRegistration) -> ProducerJoinResult:
        """Registers the producer, or has it wait, or denies it, as its access mode says. The result names the producers
        that it displaces."""
        answer = ProducerJoinResult()
        for other in [*self.registered.values(), *self.waiting.values()]:
            if other.name == registration.name:
                if not registration.may_replace(other):
                    if registration.mode == EXCLUSIVE_WITH_FENCING:
                        continue  # it is fenced below, as all others are
                    alone = registration.mode == EXCLUSIVE  # what it asked for decides before its name does
                    answer.denied = ProducerJoinDenied.HAS_PRODUCERS if alone else ProducerJoinDenied.NAME_TAKEN
                    return answer
                if registration.connection < other.connection:
                    answer.denied = ProducerJoinDenied.STALE
                    return answer
                answer.replaced.append(other)
        for other in answer.replaced:
            self._remove(other)
        answer.denied = self._denied(registration)
        if registration.mode == EXCLUSIVE_WITH_FENCING:
            answer.fenced = [*self.registered.values(), *self.waiting.values()]
            self.registered.clear()
            self.waiting.clear()
        if answer.denied is None and self._free(registration):
            self.registered[registration.id] = registration
            answer.registered = True
        elif answer.denied is None:
            self.waiting[registration.id] = registration
        return answer

    def leave(self, producer_id: int) -> list[ProducerRegistration]:
        """Removes a producer. Returns the producers that waited and are registered now."""
        self.registered.pop(producer_id, None)
        self.waiting.pop(producer_id, None)
        if self.registered or not self.waiting:
            return []
        registration = self.waiting.pop(next(iter(self.waiting)))
        self.registered[registration.id] = registration
        return [registration]

    def _remove(self, registration: ProducerRegistration) -> None:
        self.registered.pop(registration.id, None)
        self.waiting.pop(registration.id, None)

    def _denied(self, registration: ProducerRegistration) -> ProducerJoinDenied | None:
        if registration.mode == EXCLUSIVE and (self.registered or self.waiting):
            return ProducerJoinDenied.HAS_PRODUCERS
        exclusive = self.waiting or any(other.mode != SHARED for other in self.registered.values())
        if registration.mode == SHARED and exclusive:
            return ProducerJoinDenied.EXCLUSIVE_PRODUCER
        return None

    def _free(self, registration: ProducerRegistration) -> bool:
        return registration.mode in (SHARED, EXCLUSIVE_WITH_FENCING) or not self.registered

    def check(self) -> None:
        """Checks that an exclusive producer is alone, and that a producer waits only while another is registered."""
        if any(registration.mode != SHARED for registration in self.registered.values()):
            assert len(self.registered) == 1, "an exclusive producer shares the topic"
        assert self.registered or not self.waiting, "a producer waits and none is registered"
