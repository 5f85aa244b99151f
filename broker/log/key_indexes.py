"""The key indexes of a topic: one for each sealed ledger, built in the background, and deleted with its ledger.

    indexes.run_due_work(applied)                    builds what is missing, one ledger at a time (the topic's upkeep)
    search = await indexes.open_index(ledger)   None: the ledger has none, and is read (find, filters)
    blocks = await search.find_candidates(expression)

broker/log/key_index_core.py says what an index contains. The policy `key_index` says whether ledgers get one. While it
is `off`, no index is read or built, and existing indexes stay until their ledgers are deleted. `INDEX_BUILD_STEPS` of
one index:

    create    creates a ledger for the index (broker/log/snapshot_ledger.py)
    copy      reads and describes the entries of the sealed ledger; stores the pages of the index
    close     closes the ledger of the index
    name      adds the index to `TopicRecord.key_indexes`, by compare-and-set, if the list still has the sealed ledger

Rules
- **No index or a whole one.** A search reads only an index that the record names; its ledger is closed. A crash before
  `name` leaves a ledger that no record names (broker/cluster/orphans.py). The next owner of the topic builds anew.
- **The ledger's id identifies an index**, in the record and in the index. Ids are never used again, so a new topic with
  the name of a deleted one has none of its indexes.
- **An index is deleted with its ledger**: the record drops both in one commit (trimming), or with the topic. An index
  whose ledger left the list in another way (`topics skip-lost`) is removed by the next `run_due_work`.
- **If an index cannot be read**, the search reads the ledger itself; a lost or damaged index is built again.
- Bounds: an index for the newest INDEXES_MAX ledgers of a topic, one build at a time in a broker, one MiB of entries
  and POSTINGS_PER_SEGMENT_MAX in memory. Other tasks get the event loop after each 2 ms.

Guarding tests: tests/broker/log/test_key_indexes.py.
"""

from __future__ import annotations

import asyncio
import logging
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping

from pyroaring import BitMap

from ...ledger import LedgerClient, LedgerReader, LedgerWriter
from ...metadata.records import KeyIndexLocation, TopicRecord
from ...proto.applied import AppliedPolicies
from ...proto.errors import DataLost, LedgerNotFound, MagnetarError
from ...proto.filters import FilterNode
from ...proto.names import Position, TopicName
from ...runtime.alarm import EventLoopSlices
from ...runtime.network import World
from ...runtime.tasks import Tasks
from ..common.config import BrokerConfig, GetReplicationPolicy
from .key_index_core import (
    BLOCK_BYTES_MIN,
    DamagedKeyIndex,
    KeyIndex,
    KeyIndexBuilder,
    decode_directory,
    decode_page,
    describe_entry,
)
from .log import Log
from .log_shape_core import LedgerSpan, TrimLimit
from .managed_ledger import TopicFenced
from .snapshot_ledger import TopicStateLedgers, append_and_wait
from .unfolding import run_in_thread_if_slow

_LOG = logging.getLogger("magnetar.broker.log")

INDEX_BUILD_STEPS = ("create", "copy", "close", "name")
"""The order in which an index is built."""
INDEXES_MAX = 2000
"""Indexes of a topic: 40 KB of its record. With ledgers of 2 GiB they are of its newest 4 TiB."""
INDEX_APPEND_BYTES = 1 << 20
"""Bytes of an index that are on their way to bookies at a time."""
INDEX_OFF, INDEX_KEYS, INDEX_PROPERTIES = "off", "keys", "keys+properties"


class _SwitchedOff(Exception):
    """Raised inside a build if the policy has been switched off."""


class KeyIndexSearch:
    """Searches the key index of one sealed ledger. `read_bytes`: the bytes of the index that were read so far."""

    def __init__(self, index: KeyIndex, reader: LedgerReader, read_bytes: int) -> None:
        self.index = index
        self.read_bytes = read_bytes
        self._reader = reader

    async def find_candidates(self, expression: FilterNode, *, hidden: bool = False) -> BitMap:
        """Returns the numbers of the blocks in which the expression may be TRUE for a message; `hidden` as in
        `KeyIndex.find_candidates`. Reads a page of each segment for each text that the expression asks for. Raises
        DamagedKeyIndex if the index is damaged; NewerFormat if a later version of Magnetar wrote it; DataLost or
        LedgerNotFound if its ledger is lost; Unavailable if bookies do not answer."""
        postings, of_page = dict[int, BitMap](), dict[int, list[int]]()
        for value in sorted(self.index.list_hashes(expression)):
            postings[value] = BitMap()
            for page in self.index.list_pages_of_hash(value):
                of_page.setdefault(page, []).append(value)
        for page, values in of_page.items():
            (entry,) = await self._reader.read(page, page)
            self.read_bytes += len(entry.payload)
            for value, blocks in decode_page(entry.payload, values).items():
                postings[value] |= blocks
        return self.index.find_candidates(expression, postings, hidden=hidden)


class KeyIndexes:
    """The key indexes of one topic. A StatefulTopicPart (broker/topic/dedup.py). `applied`: a function that returns the
    policies in force now; `turn`: a semaphore with which a broker builds one index at a time; `building`: the ledger
    whose index is being built, -1 if there is none; `built`: how many were built since the topic was loaded."""

    __slots__ = (
        "_applied", "_config", "_ledgers", "_log", "_replication", "_task", "_tasks", "_turn", "_unusable", "_world",
        "building", "built", "topic",
    )  # fmt: skip

    def __init__(
        self, world: World, ledgers: LedgerClient, config: BrokerConfig, topic: TopicName, log: Log, *,
        replication: GetReplicationPolicy, applied: Callable[[], AppliedPolicies],
        turn: asyncio.Semaphore | None = None,
    ) -> None:  # fmt: skip
        self.topic = topic
        self.building = -1  # the ledger whose index is being built; -1: none
        self.built = 0  # since the topic was loaded
        self._world, self._ledgers, self._config, self._log = world, ledgers, config, log
        self._replication, self._applied = replication, applied
        self._turn = turn or asyncio.Semaphore(1)
        self._task: asyncio.Task[None] | None = None
        self._tasks: Tasks | None = None  # None, as those below: most topics have no index
        self._unusable: dict[int, str] | None = None  # ledger → why it gets no index, or index ledger that is unusable

    # ------------------------------------------------------------------ facts
    @property
    def is_on(self) -> bool:
        """Returns True if the topic's policies ask for key indexes."""
        return self._applied().key_index != INDEX_OFF

    def describe_index(self, ledger_id: int) -> str:
        """Returns what the index of a ledger covers, as a value of the policy: "keys" or "keys+properties"; "" if the
        ledger has no index."""
        found = self._find(ledger_id)
        return "" if found is None else INDEX_PROPERTIES if found.with_properties else INDEX_KEYS

    def count_unindexed_ledgers(self) -> int:
        """Returns the number of sealed ledgers without the index for which the policy asks; 0 if the policy is off."""
        return len(self._list_unindexed_spans()) if self.is_on else 0

    def _list_unindexed_spans(self) -> list[LedgerSpan]:
        found = {each.ledger_id: each for each in self._log.record.key_indexes}
        sealed = (span for span in self._log.shape.spans if not span.open and span.last_entry >= 0)
        return [span for span in sealed if not self._is_enough(found.get(span.ledger_id))]

    def _is_enough(self, found: KeyIndexLocation | None) -> bool:
        if found is None or (self._unusable and found.index_ledger_id in self._unusable):
            return False
        return found.with_properties or self._applied().key_index != INDEX_PROPERTIES

    def _find(self, ledger_id: int) -> KeyIndexLocation | None:
        indexes = self._log.record.key_indexes  # by ledger: `_name` sorts them
        at = bisect_left(indexes, ledger_id, key=lambda each: each.ledger_id)
        return indexes[at] if at < len(indexes) and indexes[at].ledger_id == ledger_id else None

    # ------------------------------------------------------------------ reading
    async def open_index(self, ledger_id: int) -> KeyIndexSearch | None:
        """Opens the index of a sealed ledger, and returns a search in it. Returns None if the ledger has none, if the
        index cannot be read (`on_index_unusable` is called then), or if the policy is off: then the caller has to read
        the ledger."""
        found = self._find(ledger_id)
        if found is None or not self.is_on:
            return None
        try:
            reader = await self._ledgers.open(found.index_ledger_id)
            (last,) = await reader.read(reader.last_entry, reader.last_entry)
            return KeyIndexSearch(decode_directory(last.payload, ledger_id), reader, len(last.payload))
        except (MagnetarError, DamagedKeyIndex) as error:
            self.on_index_unusable(ledger_id, error)
            return None

    def on_index_unusable(self, ledger_id: int, error: Exception) -> None:
        """Called when an index could not be read: logs the error. If the index is lost or damaged, a later
        `run_due_work` builds a new one."""
        _LOG.warning("%s: the key index of ledger %d cannot be used: %s", self.topic, ledger_id, error)
        found = self._find(ledger_id)
        if found is not None and isinstance(error, DataLost | LedgerNotFound | DamagedKeyIndex):
            self._note_unusable(found.index_ledger_id, str(error))

    def _note_unusable(self, ledger_id: int, why: str) -> None:
        if self._unusable is None:
            self._unusable = {}
        self._unusable[ledger_id] = why

    # ------------------------------------------------------------------ life (StatefulTopicPart)
    async def open(self, applied: AppliedPolicies) -> None:
        """Does nothing: indexes are read when they are asked for."""

    def run_due_work(self, applied: AppliedPolicies) -> None:
        """Starts a task that builds the missing indexes, one after the other, and removes those whose ledgers are gone.
        Does nothing if the task is running, if no index is missing or left over, or if the topic is not persistent."""
        if self._task is None and self.topic.persistent and (self._has_left_over() or self._find_next() is not None):
            if self._tasks is None:
                self._tasks = Tasks()
            self._task = self._tasks.spawn(self._run(), f"key indexes of {self.topic}")

    @property
    def is_building(self) -> bool:
        """Returns True while a task builds or removes indexes."""
        return self._task is not None

    def trim_limit(self, applied: AppliedPolicies) -> TrimLimit | None:
        """Returns None, because an index needs no ledger to be kept."""
        return None

    def stop(self) -> None:
        """Cancels the build in progress, because the topic ends at this broker. The next owner of the topic builds that
        index."""
        if self._task is not None:
            self._task.cancel()

    async def close(self) -> None:
        if self._tasks is not None:
            self._tasks.cancel()
            await self._tasks.drain()

    async def wait_built(self) -> None:
        """Waits until the task that builds indexes, if it runs, has ended."""
        if self._task is not None:
            await asyncio.wait([self._task])

    def list_own_ledgers(self) -> list[int]:
        """Returns the ids of the indexes' ledgers, which must be deleted with the topic. Returns [] if there are none.
        """
        return [each.index_ledger_id for each in self._log.record.key_indexes]

    # ------------------------------------------------------------------ building
    def _find_next(self) -> LedgerSpan | None:
        """Returns the newest sealed ledger that needs an index; None if there is none, or the policy is off."""
        if not self.is_on:
            return None
        left_out, newest = self._unusable or {}, self._log.shape.spans[-INDEXES_MAX:]
        oldest_id = newest[0].ledger_id if newest else 0
        return next((
            span for span in reversed(self._list_unindexed_spans())
            if span.ledger_id >= oldest_id and span.ledger_id not in left_out
        ), None)  # fmt: skip

    def _has_left_over(self) -> bool:
        record = self._log.record
        if not record.key_indexes:
            return False
        listed = {each.ledger_id for each in record.ledgers}
        return any(each.ledger_id not in listed for each in record.key_indexes)

    async def _run(self) -> None:
        span: LedgerSpan | None = None
        try:
            if self._has_left_over():
                await self._name(None)
            while self._find_next() is not None:
                async with self._turn:
                    span = self._find_next()  # the list may have changed while it waited
                    if span is not None:
                        self.building = span.ledger_id
                        await self._build(span)
                        self.built += 1
        except _SwitchedOff:
            _LOG.info("%s: key indexes were switched off while one was built", self.topic)
        except MagnetarError as error:
            which = "" if span is None else f" of ledger {span.ledger_id}"
            _LOG.warning("%s: the key index%s is not built: %s", self.topic, which, error)
            if span is not None and not error.retryable:
                self._note_unusable(span.ledger_id, str(error))
        except Exception:  # a fault of ours: the topic goes on without
            _LOG.exception("%s: a key index is not built", self.topic)
            if span is not None:
                self._note_unusable(span.ledger_id, "it cannot be built")
        finally:
            self.building = -1
            self._task = None

    async def _build(self, span: LedgerSpan) -> None:
        ledgers = TopicStateLedgers(self._ledgers, self._config, self._replication, self.topic, key_index="true")
        reader = await self._ledgers.open(span.ledger_id)
        writer = await ledgers.create_ledger()
        try:
            builder = KeyIndexBuilder(
                span.ledger_id,
                span.first_index,
                span.size,
                with_properties=self._applied().key_index == INDEX_PROPERTIES,
            )
            turns = EventLoopSlices(self._world.clock)
            await self._copy(span, reader, builder, writer, turns)
            await _store(writer, builder.finish(), turns)
            await writer.close()
        except BaseException as error:
            await ledgers.abandon_ledger(writer, unnamed=isinstance(error, MagnetarError | _SwitchedOff))
            raise
        location = KeyIndexLocation(span.ledger_id, writer.ledger_id, builder.with_properties)
        try:
            if await self._name(location):
                _LOG.debug("%s: ledger %d has a key index, ledger %d", self.topic, span.ledger_id, writer.ledger_id)
            else:
                self._note_unusable(span.ledger_id, "its ledger is gone")
                await ledgers.delete_ledgers(writer.ledger_id)
        except TopicFenced as error:
            if error.unwritten:
                await ledgers.delete_ledgers(writer.ledger_id)
            raise

    async def _copy(
        self,
        span: LedgerSpan,
        reader: LedgerReader,
        builder: KeyIndexBuilder,
        writer: LedgerWriter,
        turns: EventLoopSlices,
    ) -> None:
        """Reads the sealed ledger, and stores the pages of its index as far as they are complete."""
        position = Position(span.ledger_id, 0)
        while (position := self._log.shape.next_unskipped_position(position))[0] == span.ledger_id and (
            position[1] <= span.last_entry
        ):
            for each in await reader.read(position[1], span.last_entry, BLOCK_BYTES_MIN):
                if not self.is_on:
                    raise _SwitchedOff
                entry = await run_in_thread_if_slow(
                    each.payload, self._world, describe_entry, each.payload, with_properties=builder.with_properties
                )
                builder.add(each.entry_id, len(each.payload), entry)
                position = Position(span.ledger_id, each.entry_id + 1)
                if turns.is_slice_used_up:
                    await turns.begin_slice()
            if builder.is_segment_full:
                await _store(writer, builder.take_segment(), turns)

    async def _name(self, new: KeyIndexLocation | None) -> bool:
        """Stores in the topic's record which indexes there are, with `new`, and without those whose ledgers left the
        list; then deletes what the record no longer names. Returns whether it names `new`: not if its ledger is
        gone."""
        before, after = list[KeyIndexLocation](), list[KeyIndexLocation]()

        def decide(record: TopicRecord) -> Mapping[str, object]:
            listed = {each.ledger_id for each in record.ledgers}
            found = {each.ledger_id: each for each in record.key_indexes}
            before[:] = record.key_indexes
            if new is not None:
                found[new.ledger_id] = new
            kept = sorted(ledger_id for ledger_id in found if ledger_id in listed)
            after[:] = [found[ledger_id] for ledger_id in kept[-INDEXES_MAX:]]
            return {"key_indexes": tuple(after)}

        await self._log.commit_fields(decide=decide)
        gone = [each.index_ledger_id for each in before if each not in after]
        ledgers = TopicStateLedgers(self._ledgers, self._config, self._replication, self.topic, key_index="true")
        await ledgers.delete_ledgers(*gone)
        for each in gone:
            if self._unusable is not None:
                self._unusable.pop(each, None)
        return new is None or new in after


async def _store(writer: LedgerWriter, entries: Iterable[bytes], turns: EventLoopSlices) -> None:
    """Appends entries to the ledger of an index, and waits until all are stored."""
    some, size = list[bytes](), 0
    for entry in entries:
        some.append(entry)
        size += len(entry)
        if size >= INDEX_APPEND_BYTES:
            await append_and_wait(writer, some)
            some, size = [], 0
        if turns.is_slice_used_up:
            await turns.begin_slice()
    await append_and_wait(writer, some)
