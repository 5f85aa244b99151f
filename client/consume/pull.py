"""Pulling messages by index, for programs that keep their own offsets (`PullConsumer`), and where they keep them
(`OffsetStore`).

    async with await client.pull_consumer("flights", offsets=FileOffsetStore("/var/lib/board/offsets")) as pull:
        index = await pull.load_offset()
        while True:
            found = await pull.pull(index, timeout=30)
            for message in found.messages:
                ...
            index = found.next_index
            await pull.store_offset(index)

A pull names the index at which it begins, so a program may go back, or begin anywhere. No subscription is needed, and
the topic keeps nothing for the program. A pull that begins where the last one ended costs nothing but the messages: a
reader (`Reader`) reads the partition ahead, and a pull that begins elsewhere moves the reader. So what is true of a
reader is true here: chunks are put together, payloads decrypted and decoded, messages of open transactions come when
they are committed, and a topic may move or lose its broker meanwhile.

**An offset belongs to one topic.** A topic that is deleted and created again under its name has another *incarnation*.
Stores keep offsets by both, so an offset of the old topic is never used for the new one; a PullConsumer that is open
then raises TopicNotFound. **Ownership.** A store does not say who may pull: two programs that pull one partition with
one store undo each other's offsets. Programs that share partitions take them with `Consumer.assign` on Exclusive, whose
`commit` the broker accepts from the owner alone (client/consume/assignment_core.py). Guards:
tests/client/consume/test_pull.py, tests/client/consume/test_offset_stores.py."""

from __future__ import annotations

import asyncio
import enum
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from ...proto import wire_pb2 as wire
from ...proto.checksum import crc32c
from ...proto.filters import Filter, parse_filter
from ...proto.names import TopicName, check_subscription_name
from ...runtime.files import Files
from ...runtime.network import find_rpc
from ...runtime.tasks import Workers
from ..common.checks import (
    SECONDS_CHECK,
    TEXT_OR_NONE,
    ParameterCheck,
    WrongValue,
    check_parameter,
    make_methods_check,
    make_whole_number_check,
)
from ..common.closing import ClosedAfterAsyncWith, close_all_parts
from ..common.errors import (
    AlreadyClosed,
    CryptoError,
    InvalidConfiguration,
    NoMessageAvailable,
    OperationNotSupported,
    SubscriptionNotFound,
    Timeout,
    TopicNotFound,
    run_translating_errors,
    translate_error,
)
from ..connect.connections import Connections
from ..core.effects import SeekIndex
from ..model.message import CiphertextMessage, Message, read_filter_field
from ..model.message_id import MessageId
from ..model.settings import ConsumerSettings
from .consumer import INDEX_CHECK, PartitionProgress
from .partition_consumer import PartitionConsumer
from .ranges import Reader
from .receiver_queue import fetch_writer_schemas

SCANNED_MESSAGES_MAX = 10_000
"""Most messages that one pull looks at while its filter wants none: then it returns, with the index to go on at."""
MESSAGES_CHECK = make_whole_number_check(1, 1_000_000)
BYTES_CHECK = make_whole_number_check(1)
PULL_TIMEOUT_CHECK = SECONDS_CHECK._replace(
    allowed_text="a number of seconds, 0 or more", fits=lambda value: value == 0 or SECONDS_CHECK.fits(value)
)
PARTITION_CHECK = make_whole_number_check(0, optional=True)
OFFSET_STORE_CHECK = make_methods_check("load", "store")


class PullStatus(enum.Enum):
    """What a pull found. FOUND: messages. NO_NEW: there is no message from the index on. NO_MATCH: there are messages,
    and the filter wants none of those that the pull looked at. OUT_OF_RANGE: the index is before the oldest message
    that is kept, or after the end of the topic."""

    FOUND = "found"
    NO_NEW = "no new messages"
    NO_MATCH = "no message that the filter wants"
    OUT_OF_RANGE = "out of range"


@dataclass(frozen=True, slots=True)
class PullResult:
    """The result of a pull. `messages`: empty unless the status is FOUND. `next_index`: where the next pull goes on;
    after OUT_OF_RANGE the nearest index that may be pulled. `earliest_index`, `end_index`: the topic's range of indexes
    (`end_index` excluded) when the broker reported it last; -1: it has not. The broker reports the range with each
    status but FOUND."""

    status: PullStatus
    messages: tuple[Message, ...]
    next_index: int
    earliest_index: int
    end_index: int


class PullLimits(NamedTuple):
    """The limits of one pull: the most messages (`messages`), the most bytes of payload (`size_bytes`; but one message
    is always returned), and the longest wait for the first message in seconds (`timeout_s`)."""

    messages: int
    size_bytes: int
    timeout_s: float


# -------------------------------------------------------------------------------------------------------- stores
class OffsetKey(NamedTuple):
    """What an offset belongs to. `topic`: the full name of a partition, or of a topic without partitions.
    `incarnation`: a number of the topic, which is another one after the topic was deleted and created again; 0: it is
    not known."""

    topic: str
    incarnation: int  # another topic of this name has another; 0: not known


class OffsetStore(Protocol):
    """The interface of a store in which a program keeps the index at which it goes on, for each partition. The classes
    below implement it, and a program may bring its own; PullConsumer calls it."""

    async def load(self, key: OffsetKey) -> int | None:
        """Returns the index that was stored last for exactly this key; None if there is none."""
        ...

    async def store(self, key: OffsetKey, index: int) -> None:
        """Stores the index at which the program goes on. Returns when the index is as durable as this store makes it.
        """
        ...


class MemoryOffsetStore:
    """An OffsetStore in memory, for tests. `offsets`: the stored indexes, by key."""

    def __init__(self, offsets: Mapping[OffsetKey, int] | None = None) -> None:
        self.offsets = dict(offsets or {})

    async def load(self, key: OffsetKey) -> int | None:
        """Returns the index that was stored last for this key; None if there is none."""
        return self.offsets.get(key)

    async def store(self, key: OffsetKey, index: int) -> None:
        """Stores the index, in `offsets`."""
        self.offsets[key] = index


class ConnectionsOwner(Protocol):
    """The interface of an object that has the connections of a client: an asyncio Client. SubscriptionOffsetStore uses
    it."""

    @property
    def connections(self) -> Connections: ...


class SubscriptionOffsetStore:
    """An OffsetStore in the brokers: the offset of a partition is the position of a durable subscription, which the
    first `load` creates at the oldest message. So the topic keeps the messages from the offset on. The offset survives
    any crash when `store` returns. It never goes back: storing a lower index changes nothing. Both methods raise
    Timeout or ConnectError if the broker does not answer within `operation_timeout_seconds` of the client."""

    def __init__(self, client: ConnectionsOwner, subscription: str) -> None:
        """Makes the store. `client`: an asyncio Client of the topic's cluster, or `inner()` of a blocking one. Raises
        InvalidName if `subscription` is malformed."""
        check_subscription_name(subscription)
        self._client = client
        self._subscription = subscription

    async def load(self, key: OffsetKey) -> int | None:
        """Returns the position of the subscription, or the index of the oldest message if that is higher. Creates the
        subscription at the oldest message if it does not exist. Never returns None. Raises TopicNotFound if the topic
        of this key was deleted."""
        topic = TopicName.parse(key.topic)
        request = wire.OffsetsRequest(
            topic=topic.full, subscription=self._subscription, incarnation=key.incarnation
        )  # fmt: skip
        reply: wire.OffsetsReply = await self._call(topic, "Offsets", request)
        return max(reply.subscription_index, reply.earliest_index)

    async def store(self, key: OffsetKey, index: int) -> None:
        """Moves the subscription forward to the index, and creates it before if it does not exist. Returns when this
        survives any crash. Raises TopicNotFound if the topic of this key was deleted."""
        topic = TopicName.parse(key.topic)
        request = wire.AdvanceSubscriptionRequest(
            topic=topic.full, subscription=self._subscription, index=index, incarnation=key.incarnation
        )
        try:
            await self._call(topic, "AdvanceSubscription", request)
        except SubscriptionNotFound:  # `load` makes it
            await self.load(key)
            await self._call(topic, "AdvanceSubscription", request)

    async def _call(self, topic: TopicName, method: str, request: Any) -> Any:
        connections = self._client.connections

        async def attempt() -> Any:
            channel = await connections.find_owner_channel(topic)
            return await channel.call(
                find_rpc("Broker", method), request, timeout_s=connections.settings.operation_timeout_s
            )

        return await run_translating_errors(connections.retry(attempt))


OFFSET_FILE_FORMAT = 1


class FileOffsetStore:
    """An OffsetStore in a local file, which one process at a time may have open: it is locked until `close`, or the end
    of the process. The file is JSON with a checksum. `store` replaces the whole file: it writes and syncs a temporary
    file, renames it, and syncs the folder. So after a crash the file has the offsets from before a `store` or from
    after it."""

    def __init__(self, path: str, *, files: Files | None = None, workers: Workers | None = None) -> None:
        """Opens the file, which need not exist; its folder must. Raises InvalidConfiguration if the file is damaged, or
        another process has it open, or `path` is no path; OSError if it cannot be read. `files` and `workers` are for
        tests."""
        check_parameter("path", ParameterCheck("the path of a file", (str,), bool), path)
        if files is None or workers is None:
            from ...runtime.disk import SystemFiles
            from ...runtime.tasks import SystemWorkers

            files, workers = files or SystemFiles(), workers or SystemWorkers()
        self._files = files
        self._path = path
        try:
            self._lock = files.lock(f"{path}.lock")
        except BlockingIOError as error:
            text = f"the offsets in {path} are another process's: each has a file of its own"
            raise InvalidConfiguration(text) from error
        try:
            self._offsets = decode_offsets(self._read(), path)
        except BaseException:
            self._lock.close()
            raise
        self._workers = workers
        self._storing = asyncio.Lock()

    def _read(self) -> bytes:
        if not self._files.exists(self._path):
            return b""
        file = self._files.open(self._path, write=False)
        try:
            return file.pread(file.size(), 0)
        finally:
            file.close()

    async def load(self, key: OffsetKey) -> int | None:
        """Returns the index that was stored last for this key; None if there is none."""
        return self._offsets.get(key)

    async def store(self, key: OffsetKey, index: int) -> None:
        """Replaces the file, and returns when the index survives a crash of the machine. Removes the offsets of former
        topics of the same name. Raises OSError if the file cannot be written; the earlier offset is kept then."""
        async with self._storing:
            offsets = {each: at for each, at in self._offsets.items() if each.topic != key.topic} | {key: index}
            worker = self._workers.start("magnetar-offsets")
            try:
                await worker.run(self._replace, encode_offsets(offsets))
            finally:
                await worker.close()  # also when it was cancelled: the next one writes the same temporary file
            self._offsets = offsets

    def _replace(self, data: bytes) -> None:
        temporary = f"{self._path}.tmp"
        file = self._files.open(temporary, create=True)
        try:
            file.truncate(0)
            done = 0
            while done < len(data):
                done += file.pwrite([data[done:]], done)
            file.fdatasync()
        finally:
            file.close()
        self._files.rename(temporary, self._path)
        self._files.sync_directory(self._path.rpartition("/")[0] or ("/" if self._path.startswith("/") else "."))

    def close(self) -> None:
        """Unlocks the file, so that another process may open it. Do not call `store` afterwards."""
        self._lock.close()


def encode_offsets(offsets: Mapping[OffsetKey, int]) -> bytes:
    """Returns the content of a file with these offsets."""
    rows = [[key.topic, key.incarnation, index] for key, index in sorted(offsets.items())]
    body = json.dumps(rows, separators=(",", ":"))
    return json.dumps(
        {"format": OFFSET_FILE_FORMAT, "crc32c": crc32c(body.encode()), "offsets": rows}, indent=1
    ).encode()


def decode_offsets(data: bytes, path: str) -> dict[OffsetKey, int]:
    """Returns the offsets in the content `data` of a file; an empty dict if the file is empty. Raises
    InvalidConfiguration if the content is damaged, or has a format of a later release. `path`: for the text of the
    error."""
    if not data:
        return {}
    try:
        found = json.loads(data)
        form, rows = found["format"], found["offsets"]
        whole = found["crc32c"] == crc32c(json.dumps(rows, separators=(",", ":")).encode())
        if whole and form == OFFSET_FILE_FORMAT:
            return {OffsetKey(topic, incarnation): index for topic, incarnation, index in rows}
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidConfiguration(f"{path} is damaged, and no file of offsets: {error!r}") from error
    what = f"has format {form}, which this Magnetar does not read" if whole else "is damaged: its checksum is another"
    raise InvalidConfiguration(f"{path} {what}")


# ------------------------------------------------------------------------------------------------- one partition
class _Pulling:
    """The state of one pull: what it has found, and where it is."""

    __slots__ = ("found", "limits", "looked_at", "next_index", "size", "wanted")

    def __init__(self, from_index: int, limits: PullLimits, wanted: Filter | None) -> None:
        self.found: list[Message] = []
        self.next_index = from_index
        self.looked_at = self.size = 0
        self.limits = limits
        self.wanted = wanted

    def has_room_for(self, message: Message) -> bool:
        """Returns whether the message may be added: the first one always."""
        return not self.found or self.size + len(message.payload) <= self.limits.size_bytes

    @property
    def is_full(self) -> bool:
        return len(self.found) >= self.limits.messages or self.looked_at >= SCANNED_MESSAGES_MAX + len(self.found)

    def take(self, message: Message) -> None:
        """Fact: the message was taken from the queue. Adds it to the result if the filter wants it."""
        self.looked_at += 1
        self.next_index = max(self.next_index, message.index() + 1)
        wanted = self.wanted
        if wanted is None or wanted.matches(message.properties(), lambda name: read_filter_field(message, name)):
            self.found.append(message)
            self.size += len(message.payload)

    @property
    def status(self) -> PullStatus:
        if self.found:
            return PullStatus.FOUND
        return PullStatus.NO_MATCH if self.looked_at else PullStatus.NO_NEW


class PartitionPuller:
    """Pulls from one partition, through `reader`. Pulls that are called at the same time run one after the other."""

    def __init__(self, reader: Reader, connections: Connections, settings: ConsumerSettings) -> None:
        self.reader = reader
        self._now = connections.world.clock.monotonic
        self._settings = settings
        self._at: int | None = None  # where the reader goes on; None: it must be moved
        self._made_anew = False
        self._earliest = self._end = -1  # as the broker said last
        self._turn = asyncio.Lock()
        reader.on_anew = self._on_anew

    @property
    def _partition(self) -> PartitionConsumer:
        (only,) = self.reader.partitions
        return only

    @property
    def key(self) -> OffsetKey:
        """Returns the key under which an offset of this partition is stored. Raises TopicNotFound if the topic was
        deleted and created again since this puller was opened."""
        if self._made_anew:
            raise TopicNotFound(
                f"the topic {self.reader.topic()} was deleted and made anew: its offsets are another topic's. "
                "Open the pull consumer anew"
            )
        return OffsetKey(self.reader.topic(), self._partition.incarnation)

    def _on_anew(self, _: PartitionConsumer) -> None:
        self._made_anew = True

    async def fetch_progress(self) -> PartitionProgress:
        """Asks the broker for the range of the partition, and returns it. Raises the errors of a PullConsumer."""
        found = await run_translating_errors(self._partition.requests.progress())
        self._earliest, self._end = found.earliest_index, found.end_index
        return PartitionProgress(
            found.earliest_index, found.position, found.end_index, found.note, found.incarnation
        )  # fmt: skip

    async def pull(self, from_index: int, limits: PullLimits, wanted: Filter | None) -> PullResult:
        """Returns the messages from `from_index` on, within `limits`, that the filter `wanted` wants (None: all); see
        `PullConsumer.pull`, whose errors it raises. If the call is cancelled or raises, the next pull reads the same
        messages again."""
        async with self._turn:
            at, self._at = self._at, None  # a pull that is interrupted has lost what it took: it is read again
            self.key  # noqa: B018 - raises if the topic is another one
            if at != from_index:
                if (outside := await self._find_outside(from_index)) is not None:
                    return outside
                await self._partition.requests.seek(SeekIndex(from_index))
            pulling = _Pulling(from_index, limits, wanted)
            if await self._take_messages(pulling) and not pulling.looked_at:
                return (await self._find_outside(from_index)) or self._result(pulling)
            self.key  # noqa: B018
            if self._settings.schema.by_writer and pulling.found:
                await fetch_writer_schemas(self.reader.inbox, *pulling.found)
            self._at = pulling.next_index
            return self._result(pulling)

    async def _find_outside(self, index: int) -> PullResult | None:
        """Asks the broker for the range of the topic. Returns OUT_OF_RANGE if the index is not in it."""
        found = await self.fetch_progress()
        if (found.earliest <= index or self._settings.is_read_compacted) and index <= found.end:
            return None
        nearest = found.earliest if index < found.earliest else found.end
        return PullResult(PullStatus.OUT_OF_RANGE, (), nearest, found.earliest, found.end)

    def _result(self, pulling: _Pulling) -> PullResult:
        end = max(self._end, pulling.next_index) if self._end >= 0 else -1
        return PullResult(pulling.status, tuple(pulling.found), pulling.next_index, self._earliest, end)

    async def _take_messages(self, pulling: _Pulling) -> bool:
        """Takes messages up to the limits of the pull. Returns True if it has stopped because the next messages are not
        kept any more."""
        inbox, deadline = self.reader.inbox, self._now() + pulling.limits.timeout_s
        while not pulling.is_full:
            message = inbox.peek()
            if message is None:
                if pulling.found or not await self._wait_until(deadline):
                    return False
                continue
            if message.index() > pulling.next_index and await self._is_gone(pulling.next_index):
                return True
            if not pulling.has_room_for(message):
                return False
            if isinstance(message, CiphertextMessage):
                raise CryptoError(f"{message!r} is not decrypted, and is not pulled past")
            taken = inbox.take_nowait()
            if taken is not None:  # else a reconnect has emptied the queue
                pulling.take(self.reader.on_taken(taken))
        return False

    async def _is_gone(self, index: int) -> bool:
        """Asks the broker whether the message with this index was deleted. What a compaction removed was not."""
        return not self._settings.is_read_compacted and (await self.fetch_progress()).earliest > index

    async def _wait_until(self, deadline: float) -> bool:
        """Waits until a message waits in the client. Returns False if the broker has none, and none arrives until the
        deadline."""
        try:
            await self.reader.wait_available()
            return True
        except NoMessageAvailable as empty:
            (self._end,) = empty.end_indexes.values()
        left = deadline - self._now()
        if left <= 0:
            return False
        try:
            await self.reader.inbox.wait_message(left)
        except Timeout:
            self.reader.inbox.raise_if_ended()
            return False
        return True


# ------------------------------------------------------------------------------------------------------ consumer
class PullConsumer(ClosedAfterAsyncWith):
    """Pulls messages of a topic by index, without a subscription, for asyncio; see `Client.pull_consumer`. `partition`:
    the number of a partition, needed if the topic has partitions.

    Errors: AlreadyClosed after `close`; InvalidConfiguration for a wrong parameter, or a `partition` that the topic
    does not have; TopicNotFound if the topic was deleted, or created again since this object was opened; CryptoError
    for a message that cannot be decrypted; ChecksumError for a damaged one; Timeout or ConnectError if brokers do not
    answer within `operation_timeout_seconds`. A pull does not skip such a message by itself: pull from the next
    index."""

    def __init__(
        self, connections: Connections, topic: TopicName, settings: ConsumerSettings, offsets: OffsetStore | None,
        name: str,
    ) -> None:  # fmt: skip
        self._connections = connections
        self._topic = topic
        self._settings = settings
        self._offsets = offsets
        self._name = name
        self._pullers: dict[int, PartitionPuller] = {}
        self._opening = asyncio.Lock()
        self._closed = False

    @classmethod
    async def open(
        cls, connections: Connections, topic: TopicName, settings: ConsumerSettings, offsets: OffsetStore | None, *,
        name: str,
    ) -> PullConsumer:  # fmt: skip
        """Returns a PullConsumer; the reader of a topic without partitions is open then, those of partitions open at
        their first pull. `offsets`: the store of the program; None: none. Raises OperationNotSupported for a topic that
        is not persistent, InvalidConfiguration if `offsets` lacks a method of an OffsetStore, and the errors of
        `Reader.open`."""
        check_parameter("offsets", OFFSET_STORE_CHECK, offsets)
        if not topic.persistent:
            raise OperationNotSupported(f"{topic} keeps nothing: its messages have no index to pull from")
        pull = cls(connections, topic, settings, offsets, name)
        if not await pull.list_partitions():
            await pull._puller(None)
        return pull

    def topic(self) -> str:
        """Returns the full name of the topic."""
        return self._topic.full

    def is_connected(self) -> bool:
        """Returns whether the readers of all partitions that were pulled from are connected to their brokers."""
        return all(each.reader.is_connected() for each in self._pullers.values())

    @property
    def is_over(self) -> bool:
        """Returns whether this object is closed."""
        return self._closed

    async def list_partitions(self) -> list[int]:
        """Asks a broker, and returns the numbers of the topic's partitions; an empty list if the topic is not
        partitioned. Raises TopicNotFound if the topic does not exist and may not be created; Timeout or ConnectError if
        no broker answers."""
        return list(range(await run_translating_errors(self._connections.fetch_partition_count(self._topic))))

    async def pull(
        self, from_index: int, max_messages: int = 100, max_bytes: int = 1 << 20, timeout: float = 0,
        filter: str | None = None, *, partition: int | None = None,
    ) -> PullResult:  # fmt: skip
        """Returns messages from `from_index` on, in order: those that are there, at most `max_messages`, and
        `max_bytes` of payload; a single message may be larger. Waits up to `timeout` seconds for the first message; 0:
        returns what the broker has now. The result has the status FOUND, NO_NEW, NO_MATCH or OUT_OF_RANGE.

        `filter`: an expression of docs/features.md over properties. Messages that it does not want are left out, and
        `next_index` is after them. A pull returns after it has looked at 10,000 unwanted messages. `partition`: needed
        for a partitioned topic; see `list_partitions`. A cancelled pull may be repeated. Raises InvalidConfiguration
        for a wrong parameter or filter, CryptoError or ChecksumError for a message that cannot be read, and the other
        errors that the class lists."""
        check_parameter("from_index", INDEX_CHECK, from_index)
        check_parameter("max_messages", MESSAGES_CHECK, max_messages)
        check_parameter("max_bytes", BYTES_CHECK, max_bytes)
        check_parameter("timeout", PULL_TIMEOUT_CHECK, timeout)
        check_parameter("filter", TEXT_OR_NONE, filter)
        wanted = _parse(filter) if filter is not None else None
        puller = await self._puller(partition)
        return await run_translating_errors(
            puller.pull(from_index, PullLimits(max_messages, max_bytes, timeout), wanted)
        )

    async def load_offset(self, *, partition: int | None = None) -> int:
        """Returns the index that was stored last for this partition; if there is none, the index of the oldest message.
        Raises InvalidConfiguration if the consumer was opened without `offsets`; the errors of the store; and those
        that the class lists, such as TopicNotFound if the topic was deleted and created again."""
        puller = await self._puller(partition)
        found = await self._store.load(puller.key)
        if found is None:
            found = (await puller.fetch_progress()).earliest
        return found

    async def store_offset(self, index: int, *, partition: int | None = None) -> None:
        """Stores the index at which this program goes on; returns when the store has it. Raises InvalidConfiguration if
        the consumer was opened without `offsets`; the errors of the store; and those that the class lists, such as
        TopicNotFound if the topic was deleted and created again."""
        check_parameter("index", INDEX_CHECK, index)
        await self._store.store((await self._puller(partition)).key, index)

    async def progress(self, *, partition: int | None = None) -> PartitionProgress:
        """Asks the broker for the range of a partition, and returns it: `earliest` and `end` are the range; the other
        fields mean nothing to a pull consumer. Raises the errors that the class lists, such as InvalidConfiguration for
        a partition that the topic does not have."""
        return await (await self._puller(partition)).fetch_progress()

    @property
    def _store(self) -> OffsetStore:
        if self._offsets is None:
            raise InvalidConfiguration("this pull consumer was opened without a store of offsets: give it `offsets`")
        return self._offsets

    async def _puller(self, partition: int | None) -> PartitionPuller:
        check_parameter("partition", PARTITION_CHECK, partition)
        number = -1 if partition is None else partition
        async with self._opening:
            if self._closed:
                raise AlreadyClosed("the pull consumer is closed")
            if number not in self._pullers:
                await self._check_partition(partition)
                topic = self._topic if partition is None else self._topic.with_partition(partition)
                reader = await Reader.open(
                    self._connections, topic, MessageId.latest, self._settings, name=self._name, inclusive=False
                )
                self._pullers[number] = PartitionPuller(reader, self._connections, self._settings)
            return self._pullers[number]

    async def _check_partition(self, partition: int | None) -> None:
        count = len(await self.list_partitions())
        if partition is None and count:
            raise WrongValue(f"{self._topic} has {count} partitions: name one by `partition`")
        if partition is not None and partition >= count:
            raise WrongValue(f"{self._topic} has no partition {partition}; it has {count}")

    def abort(self) -> None:
        """Ends this object and its readers at once, without informing the brokers."""
        self._closed = True
        for each in self._pullers.values():
            each.reader.abort()

    async def close(self) -> None:
        """Closes the readers of all partitions, and waits until they are closed; errors of brokers are logged, not
        raised. The store of offsets stays open: it belongs to the program. May be called again."""
        self._closed = True
        await close_all_parts([each.reader for each in self._pullers.values()])


def _parse(text: str) -> Filter:
    try:
        return parse_filter(text)
    except Exception as error:
        raise translate_error(error) from error
