"""Delayed delivery of one subscription: the driver of core/delays.py, and its buckets on bookies.
    delayed = DelayedDelivery(…);  delayed.start(wake)  loads what an earlier owner had sealed
    delayed.delay_until(position, at_ms)                an entry that was just stored has a delivery time in the future
    delayed.release_due_entries(dispatcher)             before each run of the pump: makes due entries deliverable;
                                                        stores, loads and deletes buckets
    delayed.set_release_timer(dispatcher)               after each run of the pump: one timer
    delayed.close()
Order (a crash between two steps costs a ledger that no record names, or reading from the log; never a message)
    SEAL    write      every segment and the directory, to a new ledger, which is closed
            name       in the subscription's record, by compare-and-set on its claim (cursors.py)
            let_go     the entries leave memory
    DROP    unname     the same way; as long as its outcome is unknown, nothing is deleted
            delete     the ledger
- Until the directories of all named buckets are read, nothing new is delivered (`is_ready`): else all their entries
  would be read from the log. A bucket that does not answer within BUCKET_LOST_AFTER_S is left out, a damaged one is
  dropped with an alarm; their entries are then read from the log.
- One timer per subscription. It never fires early; `delayed_tick_ms` after the last time at the earliest, and at
  DUE_CHECK_INTERVAL_S_MAX at the latest, because the wall clock may jump.
- Only types with individual acknowledgement delay (Pulsar A12); on other types entries are delivered at once.
- Consumers that leave change nothing here: held entries stay held, and are not read again when consumers return.
- At most DUE_ENTRIES_WAITING_MAX due entries wait in the dispatcher to be read; more stay held until there is room.
- While buckets cannot be written, memory use grows; far past the budget nothing more is read, and stats and log report
  it (`Blocked.DELAYS`). Nothing is dropped.
Guarding tests: tests/broker/subscription/test_delays.py.

A bucket of delayed entries on bookies: a closed ledger of segments, and a directory as its last entry.

    entry = magic "MD" | version u8 | kind u8 | number u32 | count u32 | crc32c u32 | body
                                                        the checksum covers the 12 bytes before it and the body

    kind 1  segment     `number` counts from 0, as the ledger's entries do; the body is `count` keys of 20 bytes, which
                        ascend: delivery time (ms since the epoch) u64 | ledger u64 | entry u32
    kind 2  directory   `number` is that of the segments before it; a row for each of them:
                        first time u64 | last time u64 | keys u32 | size u32 | places
    places = ( ledger i64 | size u32 | entries as a portable roaring bitmap )*

Big-endian. Every position in the places of a segment is one of its keys, and each key is in the places. The bucket
counts when the subscription's record names its ledger, which happens after all of it is stored: so nothing here is ever
torn, and what does not parse or match its checksum is damage (DamagedDelayBucket).

Example: the entry 7:3, due at 1000 ms, in a bucket of its own:

    4d44 01 01 00000000 00000001 <crc32c>  00000000000003e8 0000000000000007 00000003
    4d44 01 02 00000001 00000001 <crc32c>  00000000000003e8 00000000000003e8 00000001 0000001e
                                           0000000000000007 00000012 <18 bytes: a bitmap of 3>

Guarding tests: tests/broker/subscription/test_delays_format.py.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import TypeVar

from ...ledger import LedgerClient, LedgerReader
from ...metadata.records import DelayBucket
from ...proto.applied import AppliedPolicies
from ...proto.checksum import crc32c
from ...proto.errors import DataLost, LedgerNotFound, MagnetarError, SubscriptionNotFound, Unavailable
from ...proto.names import Position
from ...proto.versions import DELAYS, check_format
from ...runtime.network import World
from ...runtime.tasks import Tasks, run_together
from ..common.config import BrokerConfig, GetReplicationPolicy
from ..common.retry import retry_until_done
from ..log.managed_ledger import TopicFenced
from ..log.snapshot_ledger import TopicStateLedgers
from .core.delay_buckets import (
    DELAY_KEY_BYTES,
    ENTRIES_PER_SEGMENT_MAX,
    DelaySegment,
    ReadDelaySegments,
    UnstoredDelayBucket,
    decode_entries_by_ledger,
)
from .core.delays import DelayIndex
from .core.dispatch import TIME_AFTER_ALL_MS, Dispatcher
from .cursors import DurableCursor

BUCKET_MAGIC = b"MD"
SEGMENT_KIND, DIRECTORY_KIND = 1, 2

_HEAD = struct.Struct(">2sBBII")
_CRC = struct.Struct(">I")
_ROW = struct.Struct(">QQII")
ENTRY_HEAD_BYTES = _HEAD.size + _CRC.size


class DamagedDelayBucket(ValueError):
    """Raised if an entry of a stored bucket of delayed entries is damaged."""


def encode_bucket(draft: UnstoredDelayBucket) -> list[bytes]:
    """Returns the ledger entries that store the bucket `draft`, in the order in which the caller must append them."""
    entries = [
        _entry(SEGMENT_KIND, number, len(body) // DELAY_KEY_BYTES, body) for number, body in enumerate(draft.bodies)
    ]
    rows = b"".join(_ROW.pack(*each[:3], len(each.places)) + each.places for each in draft.segments)
    return [*entries, _entry(DIRECTORY_KIND, len(entries), len(entries), rows)]


def _entry(kind: int, number: int, count: int, body: bytes) -> bytes:
    head = _HEAD.pack(BUCKET_MAGIC, DELAYS.version, kind, number, count)
    return b"".join((head, _CRC.pack(crc32c(head + body)), body))


def decode_segment(entry: bytes, number: int) -> bytes:
    """Returns the encoded keys of the segment `number`, DELAY_KEY_BYTES bytes each. Raises DamagedDelayBucket if the
    entry is damaged, or contains another segment; NewerFormat if a later version of Magnetar wrote it."""
    count, body = _decode(entry, SEGMENT_KIND, number)
    if not 0 < count <= ENTRIES_PER_SEGMENT_MAX or len(body) != count * DELAY_KEY_BYTES:
        raise DamagedDelayBucket(f"a segment of {count} keys has {len(body)} bytes")
    return body


def decode_directory(entry: bytes, number: int) -> list[DelaySegment]:
    """Returns the segments that the directory of a bucket lists. `number`: the entry id of the directory, which is the
    last entry of the ledger. Raises DamagedDelayBucket if the entry is damaged; NewerFormat if a later version of
    Magnetar wrote it."""
    count, body = _decode(entry, DIRECTORY_KIND, number)
    segments: list[DelaySegment] = []
    offset = 0
    while offset < len(body):
        if offset + _ROW.size > len(body):
            raise DamagedDelayBucket("a directory ends inside a row")
        first_ms, last_ms, keys, size = _ROW.unpack_from(body, offset)
        offset += _ROW.size
        segment = DelaySegment(first_ms, last_ms, keys, body[offset : offset + size])
        offset += size
        try:
            places = sum(len(entries) for _, entries in decode_entries_by_ledger(segment.places))
        except (ValueError, MemoryError, IndexError) as error:
            raise DamagedDelayBucket(f"places do not parse: {error}") from error
        if places != keys or offset > len(body) or first_ms > last_ms:
            raise DamagedDelayBucket(f"a row of {keys} keys has {places} places")
        segments.append(segment)
    if len(segments) != count or count != number:
        raise DamagedDelayBucket(f"a directory of {count} rows at entry {number} has {len(segments)}")
    return segments


def _decode(entry: bytes, kind: int, number: int) -> tuple[int, bytes]:
    if len(entry) < ENTRY_HEAD_BYTES:
        raise DamagedDelayBucket(f"{len(entry)} bytes are too few for an entry of a bucket")
    magic, version, found, place, count = _HEAD.unpack_from(entry)
    body = entry[ENTRY_HEAD_BYTES:]
    if magic != BUCKET_MAGIC:
        raise DamagedDelayBucket("not an entry of a bucket")
    if crc32c(entry[: _HEAD.size] + body) != _CRC.unpack_from(entry, _HEAD.size)[0]:
        raise DamagedDelayBucket("checksum does not match")
    check_format(DELAYS, version, "a ledger of delayed messages")
    if found != kind or place != number:
        raise DamagedDelayBucket(f"entry {place} of kind {found} where {number} of kind {kind} belongs")
    return count, body


_LOG = logging.getLogger("magnetar.broker.subscription.delays")

SEAL_STEPS = ("write", "name", "let_go")
DROP_STEPS = ("unname", "delete")

T = TypeVar("T")

BUCKET_RETRY_S = 0.5
BUCKET_LOST_AFTER_S = 10.0
"""Seconds after which a bucket that does not answer is left out: the log has everything."""
BUCKET_READS_AT_ONCE = 16
DUE_CHECK_INTERVAL_S_MAX = 1.0
DUE_ENTRIES_WAITING_MAX = 10_000
CLOSE_ENTRIES_MIN = 1000
"""Fewest unsealed entries that are sealed when the topic closes in order; fewer are read again by the next owner."""


def _not_started() -> None: ...


class _BucketWork:
    """What a subscription needs while it has buckets: the readers of their ledgers, and the tasks that write and delete
    buckets."""

    __slots__ = ("drops", "readers", "tasks", "to_drop")

    def __init__(self) -> None:
        self.readers: dict[int, LedgerReader] = {}
        self.to_drop: list[int] = []
        self.tasks = Tasks()
        self.drops = Tasks()  # they go on after `stop`: a ledger that no record names is to be deleted


class DelayedDelivery:
    """Holds back the delayed entries of one subscription until their time. Sets the timer for the next due entry, and
    stores, loads and deletes buckets of delayed entries. `on_fenced`: a function that is called when a bucket cannot be
    stored or deleted for good, mostly because another broker owns the topic."""

    __slots__ = (
        "_closed", "_config", "_dropping", "_ledger_client", "_looked_ms", "_loop", "_on_fenced",
        "_places", "_replication", "_sealing", "_timer", "_timer_ms", "_topic", "_used", "_wake", "_world", "applied",
        "core", "is_ready",
    )  # fmt: skip

    def __init__(
        self, world: World, ledgers: LedgerClient, config: BrokerConfig, store: DurableCursor, core: DelayIndex, *,
        applied: AppliedPolicies, replication: GetReplicationPolicy, on_fenced: Callable[[MagnetarError], None],
    ) -> None:  # fmt: skip
        self.core = core
        self.is_ready = not store.delay_buckets
        self._wake: Callable[[], None] = _not_started  # makes the subscription pump
        self._world = world
        self._ledger_client, self._replication = ledgers, replication
        self._config = config
        self._places = store
        self._topic = store.topic
        self.applied = applied  # `Subscription.apply` changes it
        self._on_fenced = on_fenced
        self._used: _BucketWork | None = None
        self._sealing: asyncio.Task[None] | None = None
        self._dropping = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_ms = 0
        self._looked_ms = 0  # when something was due last, or there was no room for it
        self._closed = False
        self._loop = asyncio.get_running_loop()

    @property
    def _stored(self) -> _BucketWork:
        """Returns the readers and tasks for buckets. Creates them on the first use, because most subscriptions store no
        delayed message."""
        if self._used is None:
            self._used = _BucketWork()
        return self._used

    @property
    def _bucket_ledgers(self) -> TopicStateLedgers:
        return TopicStateLedgers(
            self._ledger_client, self._config, self._replication, self._topic, delays=self._places.subscription
        )  # fmt: skip

    @property
    def now_ms(self) -> int:
        """The wall clock, in ms since the epoch."""
        return self._world.clock.wall_ms()

    @property
    def is_enabled(self) -> bool:
        """True if the topic's policy allows to delay messages."""
        return self.applied.delayed_delivery

    # ------------------------------------------------------------------ in
    def start(self, wake: Callable[[], None]) -> None:
        """Begins to load the buckets of delayed entries that earlier owners of the topic stored, and returns.
        `is_ready` is False until they are loaded. `wake`: a function that runs the delivery of the subscription in the
        next turn."""
        self._wake = wake
        if not self.is_ready:
            self._spawn(self._find())

    def delay_until(self, position: Position, at_ms: int) -> None:
        """Holds an entry back until `at_ms` (ms since the epoch). The entry must be new: no consumer has got it yet.
        Does nothing if that time has come, the policy forbids delays, or the index of delayed entries is full. Starts
        to store a bucket if enough entries are in none."""
        if at_ms > self.now_ms and self.is_enabled and not self.core.is_full:
            self.core.add_entry(position, at_ms)
            if self.core.must_make_bucket:
                self._seal()

    def release_due_entries(self, dispatcher: Dispatcher) -> int:
        """Makes the due entries deliverable, as far as no more than DUE_ENTRIES_WAITING_MAX then wait to be read. Also
        starts to store, load and delete buckets where that is due. Called before the pump assigns entries, if the
        subscription type delays messages. Returns the time (ms since the epoch) up to which entries are due;
        TIME_AFTER_ALL_MS if the policy of the topic forbids delays, so that all entries are due."""
        core, now_ms = self.core, self._world.clock.wall_ms()
        if core.count or core.has_unused_ledgers:
            self._release_due(dispatcher, now_ms)
        return now_ms if self.applied.delayed_delivery else TIME_AFTER_ALL_MS

    def _release_due(self, dispatcher: Dispatcher, now_ms: int) -> None:
        core = self.core
        if self._closed:
            return
        if core.count and not self.is_enabled and not core.has_released_all:
            core.release_all_entries()
        if dispatcher.members:
            room = DUE_ENTRIES_WAITING_MAX - dispatcher.policy.waiting_entries_to_read
            due = core.take_due(now_ms, room) if room > 0 else []
            if due:
                dispatcher.add_due_entries(due)
            if due or room <= 0:
                self._looked_ms = now_ms
            for load in core.take_segment_reads(now_ms):
                self._spawn(self._load(load))
        if core.must_make_bucket:
            self._seal()
        self._drop(core.take_unused_ledgers())

    def set_release_timer(self, dispatcher: Dispatcher) -> None:
        """Sets the timer that wakes the delivery when the next entry is due, after at most DUE_CHECK_INTERVAL_S_MAX
        seconds, unless another event wakes it earlier. Called after each run of the pump."""
        if not self.core.count or self._closed or not dispatcher.members or not dispatcher.delaying:
            return
        if not self.is_ready:
            return  # `_find` wakes when it has all
        next_ms, applied, now_ms = self.core.next_due_ms, self.applied, self.now_ms
        if next_ms is None:
            return
        next_ms = max(next_ms, self._looked_ms + applied.delayed_tick_ms)
        if self._looked_ms > now_ms:
            self._looked_ms = 0  # the clock went back
        if self._timer is not None:
            if self._timer_ms <= next_ms:
                return
            self._timer.cancel()
        self._timer_ms = next_ms
        self._timer = self._loop.call_later(min(max(0, next_ms - now_ms) / 1000, DUE_CHECK_INTERVAL_S_MAX), self._ring)

    def _ring(self) -> None:
        self._timer = None
        self._wake()

    def _spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        return self._stored.tasks.spawn(self._guarded(work), "delayed messages")

    async def _guarded(self, work: Coroutine[None, None, None]) -> None:
        try:
            await work
        except SubscriptionNotFound:
            self._closed = True
        except MagnetarError as error:  # fenced, or an error that does not pass by itself
            if not self._closed:
                self._closed = True
                self._on_fenced(error)

    # ------------------------------------------------------------------ sealing
    def _seal(self) -> None:
        if self._sealing is None and not self._closed:
            draft = self.core.seal_bucket(self.now_ms)
            if draft is not None:
                self._sealing = self._spawn(self._store(draft))

    async def _store(self, draft: UnstoredDelayBucket) -> None:
        """Stores the bucket `draft`, in the order of `SEAL_STEPS`. Retries until that succeeds."""
        try:
            ledger_id = await self._try(
                "sealed", lambda: self._bucket_ledgers.create_closed_ledger(encode_bucket(draft))
            )
            bucket = DelayBucket(
                ledger_id=ledger_id, entries=sum(each.keys for each in draft.segments),
                last_ms=draft.segments[-1].last_ms,
            )  # fmt: skip
            try:
                await self._try("named", lambda: self._places.store_delay_bucket_changes((bucket,), frozenset()))
            except (TopicFenced, SubscriptionNotFound) as error:
                if getattr(error, "unwritten", True):
                    await self._bucket_ledgers.delete_ledgers(ledger_id)
                raise
            self.core.on_bucket_stored(ledger_id)
        except MagnetarError:
            self.core.on_bucket_store_failed()
            raise
        finally:
            self._sealing = None
        self._wake()

    async def _try(self, what: str, work: Callable[[], Coroutine[None, None, T]]) -> T:
        """Returns the result of the async function `work`. Retries until it succeeds, or until the subscription is
        deleted or has another owner. `what`: a name of the work for the log."""
        return await retry_until_done(
            work, self._world.clock, _LOG, f"{self._who}: delayed messages are not {what} yet", pause_s=BUCKET_RETRY_S,
            ends=lambda error: self._closed or isinstance(error, TopicFenced | SubscriptionNotFound),
        )  # fmt: skip

    @property
    def _who(self) -> str:
        return f"{self._topic}/{self._places.subscription}"

    # ------------------------------------------------------------------ dropping
    def _drop(self, ledgers: list[int]) -> None:
        if ledgers:
            self._stored.to_drop += ledgers
        if self._used is not None and self._used.to_drop and not self._dropping and not self._closed:
            self._dropping = True
            self._used.drops.spawn(self._guarded(self._drop_all()), "drop of delayed messages")

    async def _drop_all(self) -> None:
        """Deletes the buckets that are no longer needed, in the order of `DROP_STEPS`."""
        try:
            while self._stored.to_drop:
                going, self._stored.to_drop = self._stored.to_drop, []
                await self._try("unnamed", partial(self._places.store_delay_bucket_changes, (), frozenset(going)))
                for ledger_id in going:
                    self._stored.readers.pop(ledger_id, None)
                    await self._bucket_ledgers.delete_ledgers(ledger_id)
        finally:
            self._dropping = False

    # ------------------------------------------------------------------ loading
    async def _find(self) -> None:
        """Reads the directories of the buckets that earlier owners of the topic stored. The subscription delivers
        nothing until that is done."""
        now_ms, reads = self.now_ms, asyncio.Semaphore(BUCKET_READS_AT_ONCE)

        async def one(bucket: DelayBucket) -> None:
            if bucket.last_ms <= now_ms:
                self._stored.to_drop.append(bucket.ledger_id)  # all of it is due: the log has it
                return
            async with reads:
                try:
                    segments = await self._patiently(lambda: self._directory(bucket.ledger_id))
                except (DataLost, LedgerNotFound, DamagedDelayBucket) as error:
                    self._alarm(bucket.ledger_id, error)
                    self._stored.to_drop.append(bucket.ledger_id)
                except MagnetarError as error:
                    self._alarm(bucket.ledger_id, error)
                else:
                    self.core.add_stored_bucket(bucket.ledger_id, segments, now_ms)

        await run_together([one(bucket) for bucket in self._places.delay_buckets], "directory of delayed messages")
        self.is_ready = True
        self._drop(self.core.take_unused_ledgers())
        self._wake()

    async def _directory(self, ledger_id: int) -> list[DelaySegment]:
        reader = await self._reader(ledger_id)
        (entry,) = await reader.read(reader.last_entry, reader.last_entry)
        return decode_directory(bytes(entry.payload), reader.last_entry)

    async def _reader(self, ledger_id: int) -> LedgerReader:
        reader = self._stored.readers.get(ledger_id)
        if reader is None:
            reader = self._stored.readers[ledger_id] = await self._bucket_ledgers.open(ledger_id)
        if reader.last_entry < 1:
            raise DamagedDelayBucket(f"a bucket of {reader.last_entry + 1} entries")
        return reader

    async def _load(self, load: ReadDelaySegments) -> None:
        try:
            body = await self._patiently(lambda: self._segments(load))
        except (MagnetarError, DamagedDelayBucket) as error:
            self._alarm(load.ledger_id, error)
            self.core.mark_bucket_lost(load.ledger_id)
        else:
            self.core.finish_segment_read(load, body)
        self._wake()

    async def _segments(self, load: ReadDelaySegments) -> bytes:
        reader, bodies = await self._reader(load.ledger_id), list[bytes]()
        while len(bodies) <= load.last - load.first:
            for entry in await reader.read(load.first + len(bodies), load.last):
                bodies.append(decode_segment(bytes(entry.payload), entry.entry_id))
        return b"".join(bodies)

    async def _patiently(self, work: Callable[[], Coroutine[None, None, T]]) -> T:
        """Returns the result of the async function `work`. Retries for BUCKET_LOST_AFTER_S seconds; then raises
        Unavailable. Raises errors of damage and loss at once."""
        clock = self._world.clock
        end = clock.monotonic() + BUCKET_LOST_AFTER_S
        while True:
            try:
                async with asyncio.timeout(end - clock.monotonic()):
                    return await work()
            except TimeoutError as error:
                raise Unavailable(f"no answer within {BUCKET_LOST_AFTER_S} s") from error
            except MagnetarError as error:
                if isinstance(error, DataLost | LedgerNotFound) or clock.monotonic() + BUCKET_RETRY_S >= end:
                    raise
            await asyncio.sleep(BUCKET_RETRY_S)

    def _alarm(self, ledger_id: int, error: Exception) -> None:
        _LOG.error("%s: bucket ledger %d of delayed messages cannot be used, they are read from the log: %s",
                   self._who, ledger_id, error)  # fmt: skip

    # ------------------------------------------------------------------ ending
    def stop(self) -> None:
        """Cancels the timer of delayed entries and all tasks, except the tasks that delete ledgers. Nothing is
        stored."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._used is not None:
            self._used.tasks.cancel()

    async def close(self) -> None:
        """Stores a last bucket with the held entries that are in no bucket yet, if there are at least CLOSE_ENTRIES_MIN
        of them. Then stops, and waits for deletions of buckets that have begun. Waits at most `close_timeout_s` seconds
        for each of the two. The next owner of the topic finds entries that are in no bucket by reading the log."""
        if not self._closed and self.is_ready:
            try:
                async with asyncio.timeout(self._config.close_timeout_s):
                    while self._sealing is not None:  # the pump may begin the next one
                        await self._sealing
                    # closed: another broker has the topic
                    draft = None if self._closed else self.core.seal_bucket(self.now_ms, least=CLOSE_ENTRIES_MIN)
                    if draft is not None:
                        await self._spawn(self._store(draft))
            except TimeoutError:
                _LOG.warning("%s: the last delayed messages are not sealed: they are read again", self._who)
        self.stop()
        if (used := self._used) is None:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(self._config.close_timeout_s):
                await used.drops.drain()
        used.drops.cancel()
        await used.drops.drain()
        await used.tasks.drain()
