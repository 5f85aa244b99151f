"""Deduplication: which entries of a producer are in the log already, and for which of them that is not known yet.

Two sequence ids are known of each producer: the highest *persisted* one (its entry is confirmed by the log) and the
highest *pushed* one (its entry was given to the log, outcome open). An entry is judged by both (ledger protocol §3.4,
Pulsar PR9):

| its sequence ids | verdict | the answer to the producer |
|---|---|---|
| all at or below `persisted` | DUPLICATE: it is in the log | a receipt without a position |
| some at or below, some above | OVERLAP: a part is in the log and a part is not | refused: send that part again |
| not above `pushed` | UNKNOWN: an entry with that id is in flight | unknown: keep the message, and send it again |
| all above `pushed`, and a chunk whose predecessor is neither | UNORDERED | refused: send the whole message again |
| all above `pushed` | NEW | its receipt, when it is stored |

Rules
- Only an entry that the log has confirmed makes a later one a DUPLICATE. When a publish fails, the driver disconnects
  the producer. As soon as none of its entries is in flight, `pushed` is set back to `persisted`; not before, because
  an entry in flight may still be stored. The producer then sends again all messages after `persisted`. The log confirms
  the entries up to the failed one and fails all later ones (broker/log/log_queue_core.py). So no entry of that producer
  is confirmed after a failure.
- A snapshot has a position and the persisted ids up to it, never pushed ids (invariant 33). Recovery is a snapshot and
  `on_publish_confirmed` for each later entry of the log: the header of an entry has all that this needs.
- Sequence ids of a producer rise. A producer may leave some out; an entry with a lower id than before is a DUPLICATE.
  Only the latest connection of a producer publishes (`ProducerTable`, below); its join waits for the entries of earlier
  ones in flight.
- **Gaps.** The sequence ids of an aborted transaction are not in the log, though later ids of its producer may be.
  Those ids are *gaps* of the producer: an entry with them is NEW, until a stored entry has them. The gaps of a producer
  take at most SEQUENCE_GAP_BYTES_MAX bytes; the lowest ones are dropped first, and count as persisted then. No entry in
  a transaction may span more than SEQUENCE_SPAN_MAX ids (broker/log/log_queue_core.py), because each id is recorded.
- The chunks of a message (Pulsar PR4) carry one sequence id and are distinguished by their numbers; the id is persisted
  with the last chunk. So a chunk is NEW only if it is the first, or the chunk before it is stored or in flight: the log
  has all of a message whose id is persisted. Chunks with another uuid are another attempt at the message, by a producer
  that began anew. Of OTHER_CHUNKED_MESSAGES_MAX + 1 incomplete messages of a producer the last chunk is known, so that
  their chunks may come in turn; a snapshot stores it of the latest one. A message that is not complete when a higher id
  is stored is never completed: its next chunk is UNORDERED, never a DUPLICATE.
- While deduplication is off, each entry is NEW, and the persisted id is that of the producer's last confirmed entry.
  Turning it on keeps the ids of connected producers; earlier messages may be stored twice.

Bounds: the state of a producer is removed `inactive_s` after it left, or when more than `producers_max` producers are
away; the longest away first. If such a producer returns, messages that it sends again may be stored twice. A producer
that is only known from the snapshot or the log counts as away since the topic was opened. `now` is a monotonic clock.
Guarding tests: tests/broker/topic/test_dedup_core.py, tests/broker/topic/test_dedup.py.

The second half of the decisions: which entries and which producers may publish, with the reasons of a refusal.

`why_publish_refused` decides what is known before an entry is parsed (the rest: broker/topic/producer.py);
`ProducerTable` for the producers (Pulsar PR1):

| access mode | joins | |
|---|---|---|
| SHARED | unless an exclusive producer is connected | |
| EXCLUSIVE | when no producer is connected, else refused at once | |
| WAIT_FOR_EXCLUSIVE | when no producer is connected, else waits its turn, first come first served | |
| EXCLUSIVE_WITH_FENCING | at once; all others are fenced for good | |

Two producers with one name: a later connection of the same producer (same `instance`, higher `connection`) replaces the
earlier one, because a broker detects a broken connection later than the client. It takes the place of the earlier one:
producers that wait do not come before a registered producer that reconnects, and a waiting one keeps its turn. An
earlier connection that arrives late is refused. If a join is refused, the earlier connection keeps its place. A
producer of another instance or another role is refused, too, unless its mode is EXCLUSIVE_WITH_FENCING: then it fences
the other producer as it fences all others.

**Epoch** (`decide_epoch_change`): the topic's record counts how often a producer got exclusive access. The new epoch is
stored before this producer may publish. A producer that reconnects names the epoch that it had. If the topic still has
this epoch, the producer continues; if another producer got exclusive access meanwhile, the reconnecting one is fenced
for good. The first epoch of a topic is later than its creation time (`compute_next_topic_epoch`). So an epoch of a
deleted topic is lower than each epoch of a new topic with the same name, and a producer of the deleted topic is fenced.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

import msgspec
from pyroaring import BitMap64

from ...proto.names import Position
from ...proto.states import AccessMode
from ..common.refusals import PublishRefusal
from ..log.log_queue_core import SEQUENCE_ID_END, SequenceRange

SHARED, EXCLUSIVE = AccessMode.SHARED, AccessMode.EXCLUSIVE
WAIT_FOR_EXCLUSIVE, EXCLUSIVE_WITH_FENCING = AccessMode.WAIT_FOR_EXCLUSIVE, AccessMode.EXCLUSIVE_WITH_FENCING


def why_publish_refused(
    *, size: int, size_max: int, terminated: bool, owned: bool, fenced: bool
) -> PublishRefusal | None:
    """Returns the reason why the topic refuses an entry, as far as that is known before the entry is parsed; None if
    the topic does not refuse it. `size`: the size of the entry in bytes; `size_max`: the largest allowed size;
    `terminated`, `owned`: the state of the topic; `fenced`: True if the producer was closed. If several reasons hold,
    the order is fenced, not owned, terminated, too large."""
    if fenced:
        return PublishRefusal.PRODUCER_FENCED
    if not owned:
        return PublishRefusal.NOT_OWNER
    if terminated:
        return PublishRefusal.TERMINATED
    return PublishRefusal.TOO_LARGE if size > size_max else None


class ProducerRegistration(NamedTuple):
    """A producer as the `ProducerTable` of its topic registers it. `id`: unique in the process; `instance`: identifies
    the client's producer over all its connections, "" if it names none; `connection`: counts these connections."""

    id: int
    name: str
    mode: AccessMode
    instance: str
    connection: int = 0
    owner: str | None = None
    """The role of the producer; None: one that may write for each (broker/common/transactions.py
    `get_required_transaction_role`)."""

    def may_be_later_connection_of(self, other: ProducerRegistration) -> bool:
        """Returns True if this registration may be a later connection of the same producer as the registration `other`:
        both have the same owner, or this one has none; and both name the same instance, or one of them names none. The
        caller compares the producers' names."""
        if self.owner is not None and self.owner != other.owner:
            return False
        return not (other.instance and self.instance) or other.instance == self.instance


class TopicEpochChange(enum.Enum):
    """How the topic's epoch changes when a producer joins. The epoch grows each time a producer gets exclusive
    access."""

    STAYS = "the producer shares the topic, or is the one that had it"
    GROWS = "the producer takes the topic for itself"
    FENCED = "another producer took the topic for itself since this one had it"


def decide_epoch_change(mode: AccessMode, had: int, topic: int) -> TopicEpochChange:
    """Returns how the topic's epoch changes when a producer joins with the access mode `mode`. `had`: the epoch in
    which this producer had exclusive access before it reconnected, 0 if it never had; `topic`: the present epoch of the
    topic."""
    if mode == SHARED:
        return TopicEpochChange.STAYS
    if had == 0:
        return TopicEpochChange.GROWS
    return TopicEpochChange.STAYS if had >= topic else TopicEpochChange.FENCED


def compute_next_topic_epoch(topic: int, created_ms: int) -> int:
    """Returns the new epoch of a topic for a producer that gets exclusive access. `topic`: the present epoch of the
    topic; `created_ms`: when the topic was created (wall clock, ms)."""
    return max(topic, created_ms) + 1


class ProducerJoinDenied(enum.Enum):
    """The reasons why a producer may not join a topic."""

    NAME_TAKEN = "a producer of that name is connected"
    STALE = "a later connection of that producer exists"
    EXCLUSIVE_PRODUCER = "the topic has an exclusive producer"
    HAS_PRODUCERS = "the topic has producers, and exclusive access was asked for"


class ProducerJoinResult(msgspec.Struct):
    """The result of `ProducerTable.join`. `registered`: True if the producer may publish now; `denied`: why the
    producer may not join. A producer that is neither registered nor denied waits. `replaced`: the earlier connection of
    the same producer, which loses its registration; `fenced`: other producers that lose their registration, and may not
    publish any more."""

    registered: bool = False
    denied: ProducerJoinDenied | None = None
    replaced: list[ProducerRegistration] = []
    fenced: list[ProducerRegistration] = []


class ProducerTable:
    """Decides, for one topic, which producers may publish now, and which producers wait for exclusive access."""

    __slots__ = ("registered", "waiting")

    def __init__(self) -> None:
        self.registered: dict[int, ProducerRegistration] = {}
        self.waiting: dict[int, ProducerRegistration] = {}

    def join(self, registration: ProducerRegistration) -> ProducerJoinResult:
        """Registers the producer, lets it wait, or denies it, as its access mode demands. The result names the
        producers that lose their registration. A join that is denied changes nothing."""
        earlier, denied = self._find_earlier_connection(registration)
        others = [each for each in self.registered.values() if each is not earlier]
        waiting = [each for each in self.waiting.values() if each is not earlier]
        keeps_place = earlier is not None and earlier.id in self.registered
        denied = denied or self._denied(registration, others, () if keeps_place else waiting)
        if denied is not None:
            return ProducerJoinResult(denied=denied)
        answer = ProducerJoinResult(replaced=[] if earlier is None else [earlier])
        if registration.mode == EXCLUSIVE_WITH_FENCING:
            answer.fenced, others, waiting = [*others, *waiting], [], []
        answer.registered = registration.mode == SHARED or not others
        if answer.registered:
            others.append(registration)
        elif earlier is not None and not keeps_place:
            waiting = [registration if each is earlier else each for each in self.waiting.values()]
        else:
            waiting.append(registration)
        self.registered = {each.id: each for each in others}
        self.waiting = {each.id: each for each in waiting}
        return answer

    def leave(self, producer_id: int) -> list[ProducerRegistration]:
        """Removes a producer; does nothing if it is not in the table. Returns the waiting producer that is registered
        in its place, as a list of at most one."""
        self.registered.pop(producer_id, None)
        self.waiting.pop(producer_id, None)
        if self.registered or not self.waiting:
            return []
        registration = self.waiting.pop(next(iter(self.waiting)))
        self.registered[registration.id] = registration
        return [registration]

    def _find_earlier_connection(
        self, registration: ProducerRegistration
    ) -> tuple[ProducerRegistration | None, ProducerJoinDenied | None]:
        """Returns the producer that `registration` replaces, None if there is none; and why the producer may not join,
        as far as another producer of its name decides that."""
        for other in [*self.registered.values(), *self.waiting.values()]:
            if other.name != registration.name:
                continue
            if registration.may_be_later_connection_of(other):
                return other, ProducerJoinDenied.STALE if registration.connection < other.connection else None
            if registration.mode == EXCLUSIVE_WITH_FENCING:
                return None, None  # `join` fences it, as all others
            alone = registration.mode == EXCLUSIVE  # what it asked for decides before its name does
            return None, ProducerJoinDenied.HAS_PRODUCERS if alone else ProducerJoinDenied.NAME_TAKEN
        return None, None

    def _denied(
        self,
        registration: ProducerRegistration,
        others: Collection[ProducerRegistration],
        waiting: Collection[ProducerRegistration],
    ) -> ProducerJoinDenied | None:
        """Returns why the producer may not join, as far as the access modes decide that. `others`: the other registered
        producers; `waiting`: the waiting producers that come before it."""
        if registration.mode == EXCLUSIVE and (others or waiting):
            return ProducerJoinDenied.HAS_PRODUCERS
        if registration.mode == SHARED and (waiting or any(other.mode != SHARED for other in others)):
            return ProducerJoinDenied.EXCLUSIVE_PRODUCER
        return None

    def check(self) -> None:
        """Raises AssertionError unless an exclusive producer is alone, a producer waits only while another one is
        registered, and no two producers have one name."""
        if any(registration.mode != SHARED for registration in self.registered.values()):
            assert len(self.registered) == 1, "an exclusive producer shares the topic"
        assert self.registered or not self.waiting, "a producer waits and none is registered"
        names = [each.name for each in (*self.registered.values(), *self.waiting.values())]
        assert len(names) == len(set(names)), "two producers have one name"


SEQUENCE_GAP_BYTES_MAX = 4096
"""Most bytes of the gaps of one producer, as a bitmap: about a thousand aborted stretches between others, or one of any
length."""


class DedupVerdict(enum.Enum):
    """The verdict on a published entry: whether the log contains its sequence ids already."""

    NEW = "it is not in the log and not on its way"
    DUPLICATE = "it is in the log"
    UNKNOWN = "it is on its way into the log, with an outcome that is not known yet"
    OVERLAP = "a part of it is in the log and a part is not"
    UNORDERED = "it is a chunk, and the one before it is not in the log and not on its way"


OTHER_CHUNKED_MESSAGES_MAX = 7
"""Most incomplete chunked messages of a producer that are remembered beside the latest one."""


class ProducerSequenceProgress(NamedTuple):
    """How far one producer has come: it has sent all sequence ids up to `number`; and of the latest incomplete chunked
    message `uuid`, if there is one, the chunks up to number `chunk`. `others`: (uuid, chunk) of earlier incomplete
    ones, which no snapshot stores."""

    number: int = -1
    uuid: str = ""
    chunk: int = -1
    others: tuple[tuple[str, int], ...] = ()

    def extended_by(self, numbers: SequenceRange) -> ProducerSequenceProgress:
        """Returns the progress of the producer after it has also sent an entry with these sequence ids."""
        if not numbers.uuid:
            return self._replace(number=max(self.number, numbers.last))
        incomplete = ((self.uuid, self.chunk), *self.others) if self.uuid else ()
        rest = tuple(each for each in incomplete if each[0] != numbers.uuid)
        if numbers.chunk < numbers.chunks - 1:
            return ProducerSequenceProgress(self.number, numbers.uuid, numbers.chunk, rest[:OTHER_CHUNKED_MESSAGES_MAX])
        latest = rest[0] if rest else ("", -1)
        return ProducerSequenceProgress(max(self.number, numbers.last), *latest, rest[1:])

    def last_chunk_of(self, uuid: str) -> int:
        """Returns the number of the last chunk that was sent of the chunked message `uuid`; -1 if the message is
        complete, or not known."""
        if not uuid or uuid == self.uuid:
            return self.chunk if uuid else -1
        return next((chunk for other, chunk in self.others if other == uuid), -1)

    def includes(self, numbers: SequenceRange) -> bool:
        """Returns True if the producer has already sent an entry with these sequence ids."""
        if numbers.uuid and (chunk := self.last_chunk_of(numbers.uuid)) >= 0:
            return numbers.chunk <= chunk
        return numbers.last <= self.number

    def is_followed_by(self, numbers: SequenceRange) -> bool:
        """Returns False if the entry is a chunk and the chunk before it was not sent."""
        return not numbers.uuid or self.last_chunk_of(numbers.uuid) == numbers.chunk - 1


class DedupSnapshot(NamedTuple):
    """The stored state of deduplication. `persisted`: the progress of each producer after all entries up to `position`;
    later entries are not included. `gaps`: by producer, the sequence ids below its progress that are not in the log
    (see `DedupCore`)."""

    position: Position
    persisted: dict[str, ProducerSequenceProgress]
    gaps: Mapping[str, BitMap64] = {}


NO_PROGRESS = ProducerSequenceProgress()


class _Pushed:
    """The entries in flight of one producer. An object exists while the producer is connected, or has entries in
    flight."""

    __slots__ = ("again", "entries", "progress")

    def __init__(self) -> None:
        self.progress = NO_PROGRESS
        self.entries = 0  # on their way; 0: the rest means nothing
        self.again: list[SequenceRange] | None = None  # of them, those of gaps


_NONE_SENT: Mapping[str, BitMap64] = {}


def judge_sequence_range(
    persisted: ProducerSequenceProgress, pushed: ProducerSequenceProgress | None, numbers: SequenceRange
) -> DedupVerdict:
    """Returns the verdict on an entry with the sequence ids `numbers`. `persisted`: how far its producer has come by
    stored entries; `pushed`: how far by entries in flight, None if no entry is in flight."""
    if persisted.includes(numbers):
        return DedupVerdict.DUPLICATE
    if numbers.first <= persisted.number:
        return DedupVerdict.UNORDERED if numbers.uuid else DedupVerdict.OVERLAP
    if pushed is not None and (pushed.includes(numbers) or numbers.first <= pushed.number):
        return DedupVerdict.UNKNOWN
    return DedupVerdict.NEW


class DedupCore:
    """Decides, for one topic, which published entries are duplicates. A *gap* is a range of sequence ids below a
    producer's highest stored id that are not in the log, because a transaction with them was aborted. `forgotten`: how
    many producers' states `expire_producers` has removed."""

    __slots__ = (
        "_away", "_connected", "_gaps", "_opened", "_persisted", "_pushed", "enabled", "forgotten", "position",
    )  # fmt: skip

    def __init__(self, snapshot: DedupSnapshot | None = None, *, now: float) -> None:
        self.enabled = snapshot is not None
        self.position = snapshot.position if snapshot is not None else Position(-1, -1)
        self.forgotten = 0
        self._opened = now
        self._persisted: dict[str, ProducerSequenceProgress] = dict(snapshot.persisted) if snapshot is not None else {}
        self._gaps = {name: gaps.copy() for name, gaps in snapshot.gaps.items()} if snapshot is not None else {}
        self._pushed: dict[str, _Pushed] = {}
        self._connected: dict[str, int] = {}  # producer name → its connections
        self._away: dict[str, float] = dict.fromkeys([*self._persisted, *self._gaps], now)  # since when, longest first

    # ------------------------------------------------------------------ entries
    def judge_duplicate(self, name: str, numbers: SequenceRange) -> DedupVerdict:
        """Returns the verdict on an entry of the producer `name`. After NEW the entry counts as in flight: the caller
        must pass the entry to the log, or call `on_publish_failed`."""
        pushed, again = self._pushed.get(name), False
        if self.enabled:
            persisted = self._persisted.get(name, NO_PROGRESS)
            known = judge_sequence_range(
                persisted, pushed.progress if pushed is not None and pushed.entries else None, numbers
            )
            if known is not DedupVerdict.NEW:
                if not (self._gaps and self._in_gap(name, numbers)):
                    return known
                known, again = self._judge_gap(persisted, pushed, numbers), True
                if known is not DedupVerdict.NEW:
                    return known
            sent = pushed.progress if pushed is not None and pushed.entries else persisted
            if not sent.is_followed_by(numbers):
                return DedupVerdict.UNORDERED
        if pushed is None:
            pushed = self._pushed[name] = _Pushed()
        if not pushed.entries:
            pushed.progress, pushed.again = self._persisted.get(name, NO_PROGRESS), None
        if self.enabled or numbers.uuid:
            pushed.progress = pushed.progress.extended_by(numbers)
        else:  # off, ids may go back: the last entry counts
            pushed.progress = ProducerSequenceProgress(numbers.last)
        pushed.entries += 1
        if again:
            pushed.again = [*(pushed.again or ()), numbers]
        return DedupVerdict.NEW

    def _in_gap(self, name: str, numbers: SequenceRange) -> bool:
        """Returns True if the sequence ids of the entry, as far as they are not above the producer's highest stored id,
        are all in gaps, so that none of them is in the log."""
        gaps, last = self._gaps.get(name), self.last_sequence_id(name)
        end = min(numbers.last, last, SEQUENCE_ID_END - 1)  # what is above was never stored
        if gaps is None or numbers.first > end:
            return False
        return int(gaps.range_cardinality(numbers.first, end + 1)) == end + 1 - numbers.first

    @staticmethod
    def _judge_gap(persisted: ProducerSequenceProgress, pushed: _Pushed | None, numbers: SequenceRange) -> DedupVerdict:
        if pushed is not None and not pushed.entries:
            pushed = None
        flying = pushed.again or () if pushed is not None else ()
        if any(each.first <= numbers.last and numbers.first <= each.last and each.chunk >= numbers.chunk
               for each in flying):  # fmt: skip
            return DedupVerdict.UNKNOWN
        beside = pushed.progress if pushed is not None and numbers.last > persisted.number else None
        return judge_sequence_range(persisted._replace(number=numbers.first - 1), beside, numbers)

    def on_publish_confirmed(self, name: str, numbers: SequenceRange, position: Position) -> None:
        """Called when an entry of the producer `name` was stored at `position`, or is found there during a replay of
        the log. Must be called in log order. During normal publishing the entry had the verdict NEW."""
        assert position > self.position, "the log is taken in its order"
        self.position = position
        before, pushed = self._persisted.get(name, NO_PROGRESS), self._pushed.get(name)
        progress = pushed.progress if pushed is not None else NO_PROGRESS
        known = progress.number == numbers.last and not progress.uuid and not numbers.uuid
        if known and (not self.enabled or before.number <= progress.number):
            self._persisted[name] = progress
        elif self.enabled or numbers.uuid:
            self._persisted[name] = before.extended_by(numbers)
        else:
            self._persisted[name] = ProducerSequenceProgress(numbers.last)
        if self._gaps and name in self._gaps and not (numbers.uuid and numbers.chunk < numbers.chunks - 1):
            self._filled(name, numbers)
        if name in self._connected:
            if pushed is not None:
                pushed.entries -= 1
            return
        self._away.setdefault(name, self._opened)
        if pushed is not None:
            self._settle(name, pushed)

    def _settle(self, name: str, pushed: _Pushed) -> None:
        pushed.entries -= 1
        if not pushed.entries and name not in self._connected:
            del self._pushed[name]

    def on_publish_failed(self, name: str) -> None:
        """Called when an entry with the verdict NEW failed: it is not in the log, or it is not known whether it is. The
        caller must disconnect the producer, so that none of its later entries is stored before this entry is sent
        again."""
        self._settle(name, self._pushed[name])

    def _filled(self, name: str, numbers: SequenceRange) -> None:
        """Removes the sequence ids of a stored entry from the producer's gaps. Removes them as one range, without a
        bitmap, because the header of an entry may declare any number of ids."""
        gaps = self._gaps[name]
        gaps.remove_range(numbers.first, min(numbers.last + 1, SEQUENCE_ID_END))
        if not gaps:
            del self._gaps[name]

    def _fill(self, name: str, numbers: BitMap64) -> None:
        """Removes the sequence ids `numbers`, which are in the log, from the producer's gaps."""
        gaps = self._gaps[name]
        gaps -= numbers
        if not gaps:
            del self._gaps[name]

    # ------------------------------------------------------------------ entries of transactions
    def judge_by_stored_entries(self, name: str, numbers: SequenceRange) -> DedupVerdict:
        """Returns the verdict on an entry, judged by stored entries only. Unlike `judge_duplicate`, does not count the
        entry as in flight."""
        if not self.enabled:
            return DedupVerdict.NEW
        persisted, pushed = self._persisted.get(name, NO_PROGRESS), self._pushed.get(name)
        known = judge_sequence_range(persisted, None, numbers)
        if known is DedupVerdict.NEW or not (self._gaps and self._in_gap(name, numbers)):
            return known
        return self._judge_gap(persisted, pushed, numbers)

    def on_uncommitted_entry_stored(self, position: Position) -> None:
        """Called when an entry of a transaction was stored at `position`. Must be called in log order. The sequence ids
        of the entry do not count before the transaction is committed (transactions_core.py)."""
        assert position > self.position, "the log is taken in its order"
        self.position = position

    def add_aborted_sequence_gaps(self, numbers: Mapping[str, BitMap64]) -> None:
        """Adds the sequence ids `numbers` (by producer) of an aborted transaction to the gaps of their producers,
        because the log does not contain them. If a producer's gaps exceed SEQUENCE_GAP_BYTES_MAX bytes, drops its
        lowest ones. Does nothing while deduplication is off."""
        for name, sent in numbers.items() if self.enabled else ():
            if not sent:
                continue
            gaps = self._gaps[name] = (self._gaps[name] | sent) if name in self._gaps else sent.copy()
            gaps.run_optimize()
            while len(gaps.serialize()) > SEQUENCE_GAP_BYTES_MAX:
                gaps.remove_range(0, gaps[len(gaps) // 2])
            if name not in self._connected:
                self._away.setdefault(name, self._opened)

    def on_transaction_committed(
        self, numbers: Mapping[str, ProducerSequenceProgress], sent: Mapping[str, BitMap64] = _NONE_SENT
    ) -> None:
        """Called when a transaction was committed. `numbers`: the progress that each producer has made by the
        transaction, which counts from now on; `sent`: the sequence ids that the transaction stored, by producer, which
        are no longer gaps."""
        for name in self._gaps.keys() & sent.keys():
            self._fill(name, sent[name])
        for name, progress in numbers.items():
            before = self._persisted.get(name, NO_PROGRESS)
            if progress.number > before.number:
                self._persisted[name] = before._replace(number=progress.number)
                if name not in self._connected:
                    self._away.setdefault(name, self._opened)

    # ------------------------------------------------------------------ producers
    def on_producer_joined(self, name: str) -> None:
        """Called when a connection of the producer joins the topic. The producer's state is kept until all its
        connections have left."""
        self._connected[name] = self._connected.get(name, 0) + 1
        self._away.pop(name, None)

    def on_producer_left(self, name: str, now: float) -> None:
        """Called when a connection of the producer leaves, once for each call of `on_producer_joined`. After the last
        one the producer counts as away since `now` (monotonic seconds)."""
        connections = self._connected[name] - 1
        if connections:
            self._connected[name] = connections
            return
        del self._connected[name]
        self._away.pop(name, None)
        if self.is_idle(name):
            self._pushed.pop(name, None)
        if name in self._persisted or name in self._pushed or name in self._gaps:
            self._away[name] = now

    def expire_producers(self, now: float, *, inactive_s: float, producers_max: int) -> None:
        """Removes the state of producers that left at least `inactive_s` seconds ago. While more than `producers_max`
        producers are away, also removes the state of the producers that left first. Keeps a producer with entries in
        flight. `now`: monotonic seconds."""
        for name, since in list(self._away.items()):
            if name in self._pushed:
                continue
            if now - since < inactive_s and len(self._away) <= producers_max:
                break
            del self._away[name]
            self._gaps.pop(name, None)
            if self._persisted.pop(name, None) is not None:
                self.forgotten += 1

    def last_sequence_id(self, name: str) -> int:
        """Returns the highest stored sequence id of the producer; -1 if none is known."""
        return self._persisted.get(name, NO_PROGRESS).number

    def is_idle(self, name: str) -> bool:
        """Returns True if no entry of the producer is in flight."""
        pushed = self._pushed.get(name)
        return pushed is None or not pushed.entries

    # ------------------------------------------------------------------ on, off, snapshots
    def enable(self) -> None:
        """Turns deduplication on, from the next entry on. Removes the state of producers that are not connected: while
        deduplication was off, such a producer may have begun again with lower sequence ids."""
        if not self.enabled:
            self.enabled = True
            self._gaps.clear()
            known: Iterable[str] = [name for name in self._persisted if name not in self._connected]
            for name in known:
                del self._persisted[name]
                self._away.pop(name, None)

    def disable(self) -> None:
        """Turns deduplication off: from the next entry on, the verdict is always NEW. Keeps the known sequence ids."""
        self.enabled = False

    def snapshot(self) -> DedupSnapshot:
        """Returns a copy of the present state without the entries in flight, as `DedupSnapshot`."""
        return DedupSnapshot(
            self.position, dict(self._persisted), {name: gaps.copy() for name, gaps in self._gaps.items()}
        )

    def check(self) -> None:
        """Raises AssertionError unless these invariants hold: no producer's progress by entries in flight is below its
        progress by stored entries; no connected producer is listed as away; all other known producers are listed as
        away."""
        for name, pushed in self._pushed.items():
            assert pushed.entries > 0 or name in self._connected, "what is pushed has entries on their way"
            if self.enabled and pushed.entries:
                assert pushed.progress.number >= self.last_sequence_id(name), (
                    "what is pushed is below what is persisted"
                )
        assert not self._connected.keys() & self._away.keys(), "a producer is connected and away"
        known = self._persisted.keys() | self._gaps.keys()
        assert known <= self._connected.keys() | self._away.keys(), "a producer is never forgotten"
        assert all(self._gaps.values()), "no gaps of a producer are kept"
