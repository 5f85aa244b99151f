"""The ledgers of a topic, in order (`ManagedLedger`). Each change is first stored in the list in the metadata, and then
applied to shape, reader and cache.

Rules (ledger protocol §3.1, §3.3; invariants 27, 28, 29, 35); the caller makes one change at a time:
- A ledger that is not known to be closed is **recovered** before the list is claimed: its writer is fenced for good,
  and its end is known. The commit of the claim closes the last ledger; then all ledgers of the list are closed.
- The list is **claimed** by compare-and-set against the list that was read. The claim is random, and no other owner has
  it; so no earlier owner can add a ledger.
- A new ledger has an id above all ids in the list. The commit that creates it also adds it to the list. So the list
  never names a ledger that does not exist, and a crash leaves no ledger that the list does not name.
- Ledgers that were closed without entries are removed from the list; the last one stays while it is the only one,
  because it has the next index.
- A ledger is **deleted** only when the stored list does not name it. If that fails, the ledger only takes disk space.
- A ledger **ends** where its metadata says, whichever broker closed it; its end is never guessed.
Bounds: `LEDGERS_PER_TOPIC_MAX` ledgers in a list; while bookies or the metadata are down, one try each
`REROUTE_RETRY_S` until the caller's deadline cancels. TopicFenced at any change means that another broker has claimed
the list; the caller must stop all work. Guarding tests: tests/broker/log/test_topic_log.py.

Skipping lost entries of a topic (`SkipLostRequest`): only an operator does that.

Order: the list is read. Each ledger that is not closed is recovered, or closed without its lost entries
(ledger/recovery.py). For each ledger the bookies are asked which entries every replica is certain to lack. Then one
compare-and-set commits the list, with a new claim, and with the lost ranges (`TopicRecord.lost`). This is the change of
a take-over: it works on a topic that cannot be opened because of its losses, and a broker that has the topic loaded
gets TopicFenced. No ledger is deleted before that commit.

- A ledger that has lost all entries is removed from the list. The last one of the list stays, empty, and is not read.
- In another ledger the lost entries are a *hole*: consumers and readers continue after it.
- Indexes of lost messages are not used again. If their number is not known, `INDEXES_SKIPPED_FOR_LOST` indexes are left
out.
- A ledger without a record counts as lost if its deletion was recorded (ledger/client.py). Otherwise bookies may still
  have its entries, and only `force` counts it as lost.
- An entry that a replica may have which does not answer does not count as lost; with `force` it does.
Bounds: `LOST_RANGES_MAX` ranges in a record. Guarding tests: tests/broker/log/test_skip_lost.py.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

import msgspec

from ...ledger import LedgerClient, LedgerReader, LedgerWriter
from ...ledger import client as deletions
from ...ledger.client import LedgerIdTaken
from ...ledger.metadata_core import UNSYNCED_PROPERTIES
from ...ledger.placement_core import StripingReduction
from ...ledger.recovery import ClosedByAnotherRecoverer, EntryIdRange, LedgerNotInRecovery
from ...metadata import paths
from ...metadata.records import (
    CLOSED,
    CompactedLedgerInfo,
    DamagedRecord,
    LedgerRecord,
    LostRange,
    TopicLedger,
    TopicRecord,
    decode_record,
    encode_record,
)
from ...metadata.store import MetadataStore, NodeUpdate, VersionedValue, update_nodes
from ...proto.errors import (
    DataLost,
    InvalidRequest,
    LedgerFenced,
    LedgerNotFound,
    MagnetarError,
    MessageTooLarge,
    NotAllowed,
    NotEnoughBookies,
    NotOwner,
    OutcomeUnknown,
    TopicNotFound,
    Unavailable,
)
from ...proto.names import Position, TopicName
from ...runtime.network import World
from ..common.config import GetReplicationPolicy, LedgerReplication
from ..common.retry import LogThrottle
from .cache import StoredEntry, TailCache
from .log_shape_core import LedgerSpan, LogShape
from .reader import TopicLogReader

# --------------------------------------------------------------------------------------------------- ledger_list
# The list of a topic's ledgers in the metadata: read by all, changed by the owner alone.
#
# Rule (ledger protocol §3.1, invariants 27 and 35): every change is a compare-and-set against the list that this owner
# wrote or read last, by content. When the node contains anything else, another broker owns the topic: TopicFenced. A
# change of unknown outcome is read again and decided by content (metadata/store.py); when even that fails, the outcome
# stays unknown: the caller must not serve, confirm or delete on the strength of it.
#
# What has to be true of other records when the list changes is a part of the same commit (`together`): a ledger that it
# names from then on is made there, one that it says to be closed is closed there. A crash leaves all of it or nothing.


class TopicFenced(NotOwner):
    """Raised if another broker has taken the topic over: this broker must stop all work on the topic. (On the wire:
    NotOwner.)"""

    unwritten = True
    """Whether the refused change was certainly never written. False: an attempt of unknown outcome came before, and the
    new owner may have found it in the record: a ledger that it names stays."""


def topic_path(topic: TopicName) -> str:
    """Returns the path of the topic's record in the metadata."""
    return paths.topic(topic.tenant, topic.namespace, topic.stored_local)


def make_claim_check(topic: TopicName, claim: str) -> NodeUpdate:
    """Returns a change that writes nothing, for a commit of other changes. It lets the commit succeed only while the
    topic has the claim `claim`; otherwise the commit raises TopicFenced; DamagedRecord if the topic's record cannot be
    decoded."""
    path = topic_path(topic)

    def transform(node: VersionedValue | None) -> bytes | None:
        if node is None or decode_record(node.value, TopicRecord, path).claim != claim:
            raise TopicFenced(f"topic {topic} was taken over by another broker", topic=topic)
        return None

    return NodeUpdate(path, transform)


class ManagedLedgerRecord:
    """The record of a topic in the metadata, with the list of its ledgers, as this broker has last read or written it.
    `stored`: its bytes, against which the next change is compared. A method that reads or changes the metadata also
    raises the errors of the metadata."""

    def __init__(self, store: MetadataStore, topic: TopicName) -> None:
        self.store = store
        self.topic = topic
        self._path = topic_path(topic)
        self.stored = b""
        self._unknown = b""  # what a change of unknown outcome wanted to write
        self.record = TopicRecord()

    async def read_record(self) -> TopicRecord:
        """Reads the topic's record from the metadata and returns it. Raises TopicNotFound if there is no record;
        DataLost if it is damaged. Raises the errors of the metadata, too."""
        node = await self.store.get(self._path)
        if node is None:
            raise TopicNotFound(f"topic {self.topic} does not exist", topic=self.topic)
        try:
            self.record, self.stored = decode_record(node.value, TopicRecord, self._path), node.value
        except DamagedRecord as error:
            text = f"the record of topic {self.topic} is damaged: {error}; restore the metadata from a copy"
            raise DataLost(text, topic=self.topic) from error
        return self.record

    async def is_current(self) -> bool:
        """Reads the record from the metadata. Returns True if it is still the one that this broker has last read or
        written. Raises the errors of the metadata."""
        node = await self.store.get(self._path)
        return node is not None and node.value == self.stored

    async def change_record(
        self, ledgers: Sequence[TopicLedger], *, terminated: bool | None = None, together: Sequence[NodeUpdate] = (),
        **fields: object,
    ) -> None:  # fmt: skip
        """Stores the list of ledgers `ledgers` and other `fields` of the topic's record, and makes the changes
        `together` in the same commit. `terminated` None: that field does not change. Raises TopicFenced if another
        broker certainly owns the topic, and any error that a change of `together` raises. After any other error that is
        not definite, the outcome is unknown."""
        before = self.record
        after = msgspec.structs.replace(
            before, ledgers=tuple(ledgers), terminated=before.terminated if terminated is None else terminated, **fields
        )
        value = encode_record(after, self._path)
        ours = {self.stored, self._unknown, value}

        attempts = itertools.count()

        def transform(node: VersionedValue | None) -> bytes | None:
            first = next(attempts) == 0
            if node is None or node.value not in ours:
                fenced = TopicFenced(f"topic {self.topic} was taken over by another broker", topic=self.topic)
                fenced.unwritten = first
                raise fenced
            return value

        self._unknown = value
        await update_nodes(self.store, (*together, NodeUpdate(self._path, transform)))
        self.record, self.stored, self._unknown = after, value, value


# ------------------------------------------------------------------------------------------------ managed_ledger


_LOG = logging.getLogger("magnetar.broker.log")

WAIT_REPORT_INTERVAL_S = 2.0
"""Seconds between two notices to producers whose publishes wait for a ledger: a publish that came since is one of them.
"""
REROUTE_RETRY_S = 0.2
"""Seconds between two tries to end a ledger or to make one: bookies and metadata need a moment to return."""
LEDGERS_PER_TOPIC_MAX = 5_000
"""A list so long (0.8 MB of the 1 MiB that a node holds) gets new ledgers only when one fails: a list that cannot be
written ends the topic. The ledger that is written grows meanwhile, and trimming makes room."""

_HOW = ". Restore what has it; or give up what is lost, with `magnetar topics skip-lost`, and the topic opens again"
NO_REPLICATION_REQUESTED = LedgerReplication(1, 1, 1)
"""The replication that the policy wants, before the first ledger is made."""


MakeClaimUpdates = Callable[[TopicName, TopicRecord, str], Sequence[NodeUpdate]]
"""(topic, its record, the claim) → changes that set the same claim in other records of the topic, for the commit that
claims the topic. A record that is left out is claimed when it is opened."""


def make_no_extra_claims(topic: TopicName, record: TopicRecord, claim: str) -> Sequence[NodeUpdate]:
    """Returns (). The default of `claims`: the new owner of the topic claims nothing besides the list of ledgers."""
    return ()


class ManagedLedger:
    """The ledgers of a topic, as its owner keeps them. A take-over calls `read_ledger_list`, `recover_ledgers` and
    `claim_ledger_list`, in this order. Each new ledger is made by `make_next_ledger_record`, `add_ledger` and
    `apply_added_ledger`, also in this order.

    Before that, `end_ledger` ends the ledger that is being written; `make_closed_ledger_row` returns its row for the
    list, and `close_last_ledger_in_shape` closes it in the shape.
    """

    def __init__(
        self, world: World, metadata: MetadataStore, ledgers: LedgerClient, cache: TailCache, topic: TopicName, *,
        replication: GetReplicationPolicy, shrink: StripingReduction, claims: MakeClaimUpdates = make_no_extra_claims,
    ) -> None:  # fmt: skip
        self.shape = LogShape()
        self.reader = TopicLogReader(ledgers, self.shape, cache)
        self.recovered_ledgers = 0
        self.on_ledger_delayed: Callable[[MagnetarError], None] = lambda error: None
        self.waits_for = ""  # why the last try to make a ledger failed; empty: it did not
        self.wanted_replication = NO_REPLICATION_REQUESTED
        """Replication of the policy, when the ledger that is written was made."""
        self._topic = topic
        self._world = world
        self._ledgers = ledgers
        self._cache = cache
        self._replication = replication
        self._shrink = shrink
        self._claims = claims
        self.listed = ManagedLedgerRecord(metadata, topic)
        """The topic's record with the list of ledgers, as it was read or stored last."""
        self._end: NodeUpdate | None = None  # of the last ledger, to be committed with the claim

    @property
    def has_room(self) -> bool:
        """Returns True if another ledger may be added to the list: it has fewer than LEDGERS_PER_TOPIC_MAX."""
        return len(self.listed.record.ledgers) < LEDGERS_PER_TOPIC_MAX

    # ------------------------------------------------------------------ taking over
    async def read_ledger_list(self) -> None:
        """Step of a take-over: reads the topic's record with the list of ledgers. Raises the errors of
        `ManagedLedgerRecord.read_record`."""
        await self.listed.read_record()

    async def recover_ledgers(self) -> list[TopicLedger]:
        """Step of a take-over: fences and recovers each ledger that is not known to be closed, the last one first.
        Returns the rows of all ledgers. After this call the last entry of the last ledger is known, but the list does
        not say yet that this ledger is closed; `claim_ledger_list` stores that. Raises DataLost if a ledger is lost;
        TopicFenced if another broker has changed the list; Unavailable or NotEnoughBookies if too few bookies answer;
        and the other errors of `LedgerClient.recover`."""
        closed, self._end = list(self.listed.record.ledgers), None
        for number in reversed(range(len(closed))):
            if closed[number].entries < 0:
                closed[number] = await self._recover(closed[number], joined=number == len(closed) - 1)
        return closed

    async def claim_ledger_list(self, closed: list[TopicLedger]) -> None:
        """Step of a take-over: stores the recovered list `closed` with a new claim of this owner. The same commit
        closes the last ledger, and makes the changes that `claims` returns, for other records of the topic. Then adds
        the ledgers to the shape, and deletes those that the list no longer names. Raises TopicFenced if another broker
        was faster, and the errors of `recover_ledgers`."""
        claim = self._world.rng.randbytes(16).hex()
        claims = self._claims(self._topic, self.listed.record, claim)
        while True:
            kept = _without_empty(closed) or closed[-1:]
            gone = [*(each.ledger_id for each in closed if each not in kept), *self.listed.record.pending_deletion]
            ends = () if self._end is None else (self._end,)
            try:
                await self.listed.change_record(kept, claim=claim, pending_deletion=(), together=(*ends, *claims))
                break
            except ClosedByAnotherRecoverer as error:
                _LOG.info("%s: %s", self._topic, error)
                closed = await self.recover_ledgers()  # it is closed now
            except MessageTooLarge:
                if not claims:
                    raise
                claims = ()  # each is claimed when it is opened
        self._end = None
        for each in kept:
            self.shape.add(LedgerSpan(
                each.ledger_id, each.first_index, each.entries - 1, each.end_index, each.size,
                closed_ms=each.closed_ms,
            ))  # fmt: skip
        holes: dict[int, list[tuple[int, int]]] = {}
        for lost in self.listed.record.lost:
            holes.setdefault(lost.ledger_id, []).append((lost.first_entry, lost.last_entry))
        self.shape.set_skipped_lost_ranges(holes, max((lost.end_index for lost in self.listed.record.lost), default=0))
        self.shape.check()
        await self.delete_ledgers(gone)

    async def _recover(self, known: TopicLedger, *, joined: bool) -> TopicLedger:
        try:
            if joined:
                reader, self._end = await self._ledgers.recover_without_close(known.ledger_id)
            else:
                reader = await self._ledgers.recover(known.ledger_id)
        except LedgerNotFound as error:
            text = f"ledger {known.ledger_id} of topic {self._topic} is in its list and does not exist"
            if not await self.listed.is_current():
                raise TopicFenced(f"topic {self._topic} has another owner, or just had", topic=self._topic) from error
            raise DataLost(text + _HOW, topic=self._topic, ledger=known.ledger_id) from error
        except (Unavailable, NotEnoughBookies) as error:
            if not await self._ledgers.make_lost_entries_search(
                await self._ledgers.read_record(known.ledger_id)
            ).is_unrecoverable():
                raise
            text = f"ledger {known.ledger_id}, the last of topic {self._topic}, was on bookies that were forgotten"
            raise DataLost(text + _HOW, topic=self._topic, ledger=known.ledger_id) from error
        self.recovered_ledgers += 1
        end_index = known.first_index
        if reader.last_entry >= 0:
            (last,) = await reader.read(reader.last_entry, reader.last_entry)
            end_index = StoredEntry.parse(Position(known.ledger_id, last.entry_id), last.payload).index + 1
        return _closed(known, reader.last_entry, reader.record.length, end_index, self._world.clock.wall_ms())

    # ------------------------------------------------------------------ the next ledger
    async def make_next_ledger_record(self) -> LedgerRecord:
        """Returns the record of a new ledger, without storing it. The id of the ledger is larger than all ids in the
        list. Raises NotEnoughBookies if no ledger can be created now, and the errors of the metadata."""
        above = self.shape.spans[-1].ledger_id if self.shape.spans else -1
        above = max([above, *(lost.ledger_id for lost in self.listed.record.lost)])  # a mark may still be there
        wanted = await self._replication()
        if wanted.unsynced:  # then each bookie has each entry (ledger/handle.py)
            wanted = msgspec.structs.replace(wanted, ensemble_size=wanted.write_quorum)
        self.wanted_replication = wanted
        properties = {"topic": self._topic.full, **(UNSYNCED_PROPERTIES if wanted.unsynced else {})}
        return await self._ledgers.draft_record(
            ensemble_size=wanted.ensemble_size, write_quorum=wanted.write_quorum, ack_quorum=wanted.ack_quorum,
            properties=properties, shrink=self._shrink, above=above, groups=wanted.groups,
        )  # fmt: skip

    async def add_ledger_with_retries(
        self, draft: LedgerRecord | None, *, end_index: int, created_ms: int, ended: TopicLedger | None
    ) -> tuple[LedgerWriter, list[int]]:
        """Adds a ledger as `add_ledger` does. Retries until that succeeds, or until the deadline of the caller cancels
        it. Calls `on_ledger_delayed` with the reason every WAIT_REPORT_INTERVAL_S seconds. `draft`: the record of the
        ledger; None: a new record. The other arguments are those of `add_ledger`. Raises TopicFenced if another broker
        owns the topic, and any other error that retrying cannot help.

        After an attempt whose outcome is unknown, the next attempt uses the same record, so that it finds its own
        ledger in the list.
        """
        throttle, told_s = LogThrottle(self._world.clock), -WAIT_REPORT_INTERVAL_S
        self.waits_for = ""
        while True:
            try:
                draft = draft if draft is not None else await self.make_next_ledger_record()
                return await self.add_ledger(draft, end_index=end_index, created_ms=created_ms, ended=ended)
            except LedgerIdTaken as error:
                draft = None  # certainly not committed
                _LOG.warning("%s: %s", self._topic, error)
                continue
            except MagnetarError as error:
                if not error.retryable or isinstance(error, TopicFenced):
                    raise
                self.waits_for, now_s = error.message, self._world.clock.monotonic()
                if now_s - told_s >= WAIT_REPORT_INTERVAL_S:
                    self.on_ledger_delayed(error)
                    told_s = now_s
                if throttle.should_log(error):
                    _LOG.warning("%s: no new ledger yet: %s", self._topic, error)
            await asyncio.sleep(REROUTE_RETRY_S)

    async def add_ledger(
        self, draft: LedgerRecord, *, end_index: int, created_ms: int, ended: TopicLedger | None = None
    ) -> tuple[LedgerWriter, list[int]]:
        """Creates the ledger with the record `draft`, and in the same commit appends it to the list. `end_index`: the
        index of its first message; `created_ms`: the present time (ms since the epoch); `ended`: the closed row of the
        last ledger; None if all ledgers in the list are closed already.

        Returns the writer of the new ledger, and the ids of the ledgers that were closed without entries: the list does
        not name them any more, and `apply_added_ledger` deletes them. Raises LedgerIdTaken if a ledger with this id
        exists (nothing is stored then); TopicFenced if another broker owns the topic; and the other errors of
        `ManagedLedgerRecord.change_record`.
        """
        closed = list(self.listed.record.ledgers) if ended is None else [*self.listed.record.ledgers[:-1], ended]
        new = TopicLedger(ledger_id=draft.ledger_id, first_index=end_index, created_ms=created_ms)
        # bookies keep these: by them the list is made again if all metadata is lost (metadata/rebuild_core.py)
        draft = msgspec.structs.replace(draft, properties=draft.properties | {"index": str(end_index)})
        await self.listed.change_record(
            [*_without_empty(closed), new], together=(self._ledgers.make_creation_update(draft),)
        )
        return self._ledgers.make_writer(draft), [ledger.ledger_id for ledger in closed if ledger.entries == 0]

    async def apply_added_ledger(self, writer: LedgerWriter, end_index: int, empty: list[int]) -> None:
        """Called after `add_ledger`: adds the new ledger of `writer` to the shape, with `end_index` as the index of its
        first message, and removes and deletes the ledgers `empty`."""
        self._discard_ledgers(empty)
        self.shape.add(LedgerSpan(writer.ledger_id, end_index, open=True))
        self.reader.add_writer(writer)
        await self.delete_ledgers(empty)

    # ------------------------------------------------------------------ the end of a ledger
    async def end_ledger(self, writer: LedgerWriter, owned: Callable[[], bool]) -> tuple[int, int]:
        """Closes the ledger of `writer`. If another process has fenced it, or if the outcome is unknown, recovers it
        instead. Returns the id of its last entry and its size in bytes. Retries while bookies do not answer. Raises
        TopicFenced if this broker no longer owns the topic (`owned` returns False), or its ledger was removed; and an
        error that retrying cannot help."""
        throttle = LogThrottle(self._world.clock)
        while True:
            try:
                return await writer.close()
            except (LedgerFenced, OutcomeUnknown) as error:
                if not owned():
                    raise TopicFenced(f"topic {self._topic} is not this broker's any more") from error
                if throttle.should_log(error):
                    _LOG.warning("%s: ledger %d did not end: %s; recovering it", self._topic, writer.ledger_id, error)
            try:
                reader = await self._ledgers.recover(writer.ledger_id)
                return reader.last_entry, reader.record.length
            except LedgerNotFound as error:
                raise TopicFenced(f"topic {self._topic}: its ledger {writer.ledger_id} was removed") from error
            except MagnetarError as error:
                if not error.retryable:
                    raise
                if throttle.should_log(error):
                    _LOG.warning("%s: ledger %d is not recovered yet: %s", self._topic, writer.ledger_id, error)
            await asyncio.sleep(REROUTE_RETRY_S)

    def make_closed_ledger_row(self, ledger_id: int, last_entry: int, end_index: int) -> TopicLedger:
        """Returns the row for the list of ledgers which says that the last ledger is closed at the entry `last_entry`;
        `end_index` is the index after its last message."""
        last, size = self.listed.record.ledgers[-1], self.shape.tail_span.size
        assert last.ledger_id == ledger_id, "a ledger ends before the next one is listed"
        return _closed(last, last_entry, size, end_index, self._world.clock.wall_ms())

    async def is_still_owned(self) -> bool:
        """Returns True if the stored list is the one that this owner wrote last. A broker that takes the topic over
        changes the list. Raises the errors of the metadata."""
        return await self.listed.is_current()

    def close_last_ledger_in_shape(self, ended: TopicLedger) -> None:
        """Closes the last ledger in the shape. `ended`: the closed row of that ledger."""
        self.shape.close_last_ledger_span(
            ended.ledger_id, ended.entries - 1, ended.end_index, ended.size, ended.closed_ms
        )
        self.reader.discard(ended.ledger_id)

    async def commit_closed_last_ledger(self, ended: TopicLedger, *, terminated: bool | None) -> None:
        """Stores in the list that the last ledger is closed (its row is `ended`), without adding a new ledger; with
        `terminated` True, also that the topic is terminated (None: that does not change). Raises the errors of
        `ManagedLedgerRecord.change_record`."""
        await self.listed.change_record([*self.listed.record.ledgers[:-1], ended], terminated=terminated)

    async def terminate(self) -> None:
        """Stores in the topic's record that the topic is terminated. The last ledger must be closed. Raises the errors
        of `ManagedLedgerRecord.change_record`."""
        await self.listed.change_record(self.listed.record.ledgers, terminated=True)

    async def commit_fields(self, together: Sequence[NodeUpdate] = (), **fields: object) -> None:
        """Stores new values of `fields` in the topic's record, and makes the changes `together` of other metadata nodes
        in the same commit: all of them or none. Raises the errors of `ManagedLedgerRecord.change_record`."""
        await self.listed.change_record(self.listed.record.ledgers, terminated=None, together=together, **fields)

    # ------------------------------------------------------------------ removing
    async def remove_ledgers(self, gone: list[int]) -> None:
        """Removes the ledgers `gone` from the list, and in the same commit their key indexes; then deletes both.
        Deletes nothing unless it is certain that the list was changed. Raises the errors of
        `ManagedLedgerRecord.change_record`."""
        record = self.listed.record
        kept = tuple(each for each in record.key_indexes if each.ledger_id not in gone)
        indexes = [each.index_ledger_id for each in record.key_indexes if each.ledger_id in gone]
        await self.listed.change_record(
            [each for each in record.ledgers if each.ledger_id not in gone], key_indexes=kept
        )
        self._discard_ledgers(gone)
        await self.delete_ledgers([*gone, *indexes])

    def _discard_ledgers(self, ledger_ids: list[int]) -> None:
        for ledger_id in ledger_ids:
            if self.shape.find_span_of_ledger(ledger_id) is not None:
                self.shape.remove(ledger_id)
            self.reader.discard(ledger_id)
            self._cache.discard(ledger_id)

    async def delete_ledgers(self, ledger_ids: list[int]) -> None:
        """Deletes ledgers that the stored list does not name. If that fails, only logs the error: the ledger takes disk
        space, and has no other effect."""
        for ledger_id in ledger_ids:
            try:
                await self._ledgers.delete(ledger_id)
            except MagnetarError as error:
                _LOG.warning("%s: ledger %d is not deleted, no record names it: %s", self._topic, ledger_id, error)


def _without_empty(closed: list[TopicLedger]) -> list[TopicLedger]:
    return [ledger for ledger in closed if ledger.entries != 0]


def _closed(ledger: TopicLedger, last_entry: int, size: int, end_index: int, now_ms: int) -> TopicLedger:
    return TopicLedger(
        ledger_id=ledger.ledger_id, first_index=ledger.first_index, entries=last_entry + 1, size=size,
        end_index=end_index, created_ms=ledger.created_ms, closed_ms=now_ms,
    )  # fmt: skip


INDEXES_SKIPPED_FOR_LOST = 1 << 32
"""Indexes left free after a ledger whose number of messages is not known: more than a ledger has."""
LOST_RANGES_MAX = 1000
"""Ranges in a topic's record, about 100 KB; those of ledgers that are gone are dropped first, the oldest first."""


class _InspectedLedger(NamedTuple):
    """The result of inspecting one ledger of the list: its new row, its lost entries, and whether it has lost all of
    its entries (`gone`)."""

    row: TopicLedger
    holes: list[LostRange]
    gone: bool = False  # nothing of it is left


class SkipLostRequest:
    """A request of an operator to skip the lost entries of a topic, so that readers continue after them. `only`: the id
    of the one ledger to inspect; -1: all ledgers. `force`: an entry also counts as lost if no bookie that answers has
    it, although one that does not answer may have it."""

    def __init__(
        self, ledgers: LedgerClient, listed: ManagedLedgerRecord, world: World, *, only: int, force: bool,
        open_compacted: Callable[[CompactedLedgerInfo], Awaitable[object]],
    ) -> None:
        """`open_compacted`: opens a compacted ledger, or raises an error if that is not possible."""
        self._open_compacted = open_compacted
        self._list, self._ledgers, self._world = listed, ledgers, world
        self._only, self._force = only, force
        self._topic = listed.topic
        self._silent: set[str] = set()
        self._doubts = 0  # entries that no bookie gave, and that are not certainly lost

    async def run(self) -> list[LostRange]:
        """Finds the lost entries, and stores that they are skipped. Returns the ranges of skipped entries; none if no
        entry is lost. Raises InvalidRequest if the topic has no ledger `only`, or would have more than LOST_RANGES_MAX
        lost ranges; TopicNotFound if it does not exist; DataLost if its record is damaged; NotAllowed if it is not
        certain that unreadable entries are lost. The caller should try again after TopicFenced (the topic has changed
        meanwhile), and after Unavailable, OutcomeUnknown or LedgerNotInRecovery (a ledger could not be closed). Raises
        the errors of the metadata."""
        before = await self._list.read_record()
        compacted = before.compacted
        named = {each.ledger_id for each in before.ledgers}
        if compacted is not None:
            named.add(compacted.ledger_id)
        if self._only >= 0 and self._only not in named:
            raise InvalidRequest(f"topic {self._topic} has no ledger {self._only}", topic=self._topic)
        looked = [
            await self._inspect(each) if self._only in (-1, each.ledger_id) else _InspectedLedger(each, [])
            for each in before.ledgers
        ]
        found = [hole for each in looked for hole in each.holes]
        given_up = [] if compacted is None else await self._find_lost_compacted(compacted)
        if not found and not given_up:
            if self._doubts:
                silent = ", ".join(sorted(self._silent))
                raise NotAllowed(
                    f"topic {self._topic}: {self._doubts} entries cannot be read, and {silent} may have them: nothing "
                    "was passed over. What is gone for good has to be forgotten first (`magnetar bookies forget`)",
                    topic=self._topic,
                )
            return []
        rows = [each.row for each in looked if not each.gone] or [looked[-1].row]
        await self._list.change_record(
            rows, claim=self._world.rng.randbytes(16).hex(), lost=_bounded([*before.lost, *found], rows),
            compacted=None if given_up else compacted,
        )
        for each in [*found, *given_up]:
            _LOG.error("%s: passed over on purpose, for all: %s", self._topic, describe_lost_range(each))
        kept = {each.ledger_id for each in rows}
        gone = [each.row.ledger_id for each in looked if each.gone and each.row.ledger_id not in kept]
        await self._delete([*gone, *(each.ledger_id for each in given_up)])
        return [*found, *given_up]

    async def _find_lost_compacted(self, compacted: CompactedLedgerInfo) -> list[LostRange]:
        """If the compacted ledger cannot be opened any more, returns it as one lost range; else returns no range. The
        lost range has no message indexes: the ledger's messages have the indexes of the log."""
        if self._only not in (-1, compacted.ledger_id):
            return []
        forced = False
        try:
            await self._open_compacted(compacted)
            return []
        except LedgerNotFound:
            forced = not await deletions.find_deleted_ledgers(self._list.store, [compacted.ledger_id])
        except DataLost:
            pass
        except MagnetarError as error:
            _LOG.warning("%s: compacted ledger %d: %s", self._topic, compacted.ledger_id, error)
            forced = True
        if forced and not self._force:
            self._doubts += max(1, compacted.entries)
            self._silent.add(f"the bookies of compacted ledger {compacted.ledger_id}")
            return []
        return [LostRange(
            ledger_id=compacted.ledger_id, last_entry=max(0, compacted.entries - 1), forced=forced,
            skipped_ms=self._world.clock.wall_ms(),
        )]  # fmt: skip

    async def _delete(self, ledgers: Sequence[int]) -> None:
        try:
            await self._ledgers.delete(*ledgers)
        except MagnetarError as error:
            _LOG.warning("%s: ledgers %s are not deleted, no list names them: %s", self._topic, ledgers, error)

    # ------------------------------------------------------------------ one ledger
    async def _inspect(self, row: TopicLedger) -> _InspectedLedger:
        if row.entries == 0:
            return _InspectedLedger(row, [])
        try:
            record, cut = await self._closed(row)
        except LedgerNotFound:
            return await self._without_record(row)
        lost = self._ledgers.make_lost_entries_search(record, force=self._force)
        found = await lost.find_lost_entries()
        if found.unknown:
            self._doubts += sum(last - first + 1 for first, last in found.unknown)
            self._silent.update(found.silent)
        forced = bool(lost.forced)
        reader = self._ledgers.make_reader(record)
        before = set(self._list.record.lost)
        known = {(each.first_entry, each.last_entry) for each in before if each.ledger_id == row.ledger_id}
        runs = [run for run in found.lost if run not in known]
        last = record.last_entry
        if row.entries < 0:
            end = await self._end_index(reader, row, found.lost)
            row = msgspec.structs.replace(
                row, entries=last + 1, size=record.length, end_index=end, closed_ms=self._world.clock.wall_ms()
            )
            cut = cut or (bool(found.lost) and found.lost[-1][1] == last)
        tail: list[LostRange] = []
        if cut:  # to an end that is not known
            begins = last + 1
            if found.lost and found.lost[-1][1] == last:
                begins = found.lost[-1][0]
                runs = runs[:-1]
            tail = [self._range(row, (begins, -1), row.end_index, row.end_index + INDEXES_SKIPPED_FOR_LOST, forced)]
        whole = found.lost == [(0, last)] or last < 0
        if whole and (runs or tail):
            hole = tail[0] if tail else self._range(row, (0, last), row.first_index, row.end_index, forced)
            return _InspectedLedger(_emptied(row, hole.end_index), [hole], gone=True)
        holes = [
            self._range(row, run, await self._index_of(reader, row, run[0], -1),
                        await self._index_of(reader, row, run[1], 1), forced)
            for run in runs
        ]  # fmt: skip
        return _InspectedLedger(row, [*holes, *tail])

    async def _closed(self, row: TopicLedger) -> tuple[LedgerRecord, bool]:
        """Returns the record of the ledger after closing it, and True if it had to be closed without some entries that
        no bookie has. Raises LedgerNotFound if the record is missing, NotAllowed if a bookie that does not answer may
        have more entries. Raises OutcomeUnknown or LedgerNotInRecovery if the operator should try again."""
        record = await self._ledgers.read_record(row.ledger_id)
        if record.state == CLOSED:
            return record, False
        try:
            return (await self._ledgers.recover(row.ledger_id)).record, False
        except OutcomeUnknown:
            raise
        except (Unavailable, NotEnoughBookies) as error:
            _LOG.warning("%s: ledger %d cannot be recovered: %s", self._topic, row.ledger_id, error)
        lost = self._ledgers.make_lost_entries_search(await self._ledgers.read_record(row.ledger_id), force=self._force)
        try:
            return await lost.close_unrecoverable_ledger(), True
        except LedgerNotInRecovery:
            raise
        except Unavailable as error:
            raise NotAllowed(error.message, topic=self._topic, ledger=row.ledger_id) from error

    async def _without_record(self, row: TopicLedger) -> _InspectedLedger:
        forced = row.ledger_id not in await deletions.find_deleted_ledgers(self._list.store, [row.ledger_id])
        if forced and not self._force:
            self._doubts += max(1, row.entries)
            self._silent.add(f"the bookies of ledger {row.ledger_id}, whose record is missing,")
            return _InspectedLedger(row, [])
        if row.entries < 0:
            hole = self._range(row, (0, -1), row.first_index, row.first_index + INDEXES_SKIPPED_FOR_LOST, forced)
        else:
            hole = self._range(row, (0, row.entries - 1), row.first_index, row.end_index, forced)
        return _InspectedLedger(_emptied(row, hole.end_index), [hole], gone=True)

    def _range(self, row: TopicLedger, run: EntryIdRange, first_index: int, end_index: int, forced: bool) -> LostRange:
        return LostRange(
            ledger_id=row.ledger_id, first_entry=run[0], last_entry=run[1], first_index=first_index,
            end_index=end_index, skipped_ms=self._world.clock.wall_ms(), forced=forced,
        )  # fmt: skip

    # ------------------------------------------------------------------ indexes
    async def _entry(self, reader: LedgerReader, row: TopicLedger, entry: int) -> StoredEntry:
        (found,) = await reader.read(entry, entry)
        return StoredEntry.parse(Position(row.ledger_id, entry), found.payload)

    async def _end_index(self, reader: LedgerReader, row: TopicLedger, lost: Sequence[EntryIdRange]) -> int:
        """Returns the index after the last message in the last entry of the ledger that still exists."""
        last = reader.record.last_entry
        if lost and lost[-1][1] == last:
            last = lost[-1][0] - 1
        return (await self._entry(reader, row, last)).index + 1 if last >= 0 else row.first_index

    async def _index_of(self, reader: LedgerReader, row: TopicLedger, entry: int, step: int) -> int:
        """Returns the message index at one end of a range of lost entries. `step` -1: the index after the last message
        before the range; 1: the index of the first message after the range."""
        beside = entry + step
        if beside < 0:
            return row.first_index
        if beside >= row.entries:
            return row.end_index
        try:
            found = await self._entry(reader, row, beside)
        except (DataLost, Unavailable):  # no bookie knows of that one: the edge of the ledger is certain
            return row.first_index if step < 0 else row.end_index
        return found.index + 1 if step < 0 else found.first_index


def _emptied(row: TopicLedger, end_index: int) -> TopicLedger:
    """Returns the row of a ledger that has lost all of its entries: without entries, and with `end_index` as its first
    and its end index."""
    return msgspec.structs.replace(row, entries=0, size=0, first_index=end_index, end_index=end_index)


def _bounded(lost: Sequence[LostRange], rows: Sequence[TopicLedger]) -> tuple[LostRange, ...]:
    """Returns the lost ranges that are stored, at most LOST_RANGES_MAX: leaves out ranges of removed ledgers if
    necessary. Raises InvalidRequest if there are too many ranges in ledgers that still exist."""
    listed, least = {each.ledger_id for each in rows}, max((each.end_index for each in lost), default=0)
    gone = [each for each in lost if each.ledger_id not in listed and each.end_index != least]
    drop = set(gone[: max(0, len(lost) - LOST_RANGES_MAX)])
    kept = tuple(each for each in lost if each not in drop)
    if len(kept) > LOST_RANGES_MAX:
        raise InvalidRequest(
            f"{len(kept)} ranges are lost, and a topic notes up to {LOST_RANGES_MAX}: pass over one ledger"
        )
    return kept


def describe_lost_range(lost: LostRange) -> str:
    """Returns a text that describes the range of lost entries to users."""
    if lost.last_entry < 0:
        return f"ledger {lost.ledger_id} from entry {lost.first_entry} on, from index {lost.first_index} on"
    return (
        f"entries {lost.first_entry} to {lost.last_entry} of ledger {lost.ledger_id}, "
        f"indexes {lost.first_index} to {lost.end_index - 1}"
    )
