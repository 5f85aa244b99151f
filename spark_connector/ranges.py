"""Calls to the brokers from Spark's Python processes: offsets by the admin client, ranges by `Client.read_range`.

One `Topics` per process and set of options, made at its first use and never before a fork (Spark forks its Python
workers from a daemon; a connection does not survive that, hence the pid in the key). It runs its own event loop in
the calling thread, only while a call waits: it starts no thread.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Coroutine, Iterator, Mapping
from typing import Any, TypeVar

from pyspark.sql.types import StructType

from ..client.admin import AdminClient, TopicOffsets
from ..client.aio import Client, CryptoKeyReader, StoredEntry
from ..proto.errors import InvalidConfiguration, SubscriptionNotFound, TopicNotFound
from ..proto.names import NamespaceName, TopicName
from ..proto.schema import SchemaInfo
from ..runtime.clock import Clock, SystemClock
from .offsets import Available, Index, Partition
from .options import SourceOptions
from .typed.registry import Typed, newest, reader

T = TypeVar("T")
WAIT_FOR_TOPIC_S = 1.0

_OF_PROCESS: dict[tuple[int, int], Topics] = {}


def topics(options: SourceOptions) -> Topics:
    """This process' connection for these options."""
    key = (os.getpid(), hash((options.service_url, options.topics, options.pattern, options.subscription)))
    if key not in _OF_PROCESS:
        _OF_PROCESS[key] = Topics(options, SystemClock())
    return _OF_PROCESS[key]


class Topics:
    """The topics of a query: their partitions, the messages stored, and ranges of them."""

    def __init__(self, options: SourceOptions, clock: Clock) -> None:
        self._options = options
        self._clock = clock
        self._loop = asyncio.new_event_loop()
        settings = {"operation_timeout_seconds": options.poll_timeout_s, **options.client}
        self._client = Client(options.service_url, stats_interval_in_seconds=0, **settings)
        self._admin = AdminClient(options.service_url, timeout_s=settings["operation_timeout_seconds"])
        private = options.private_key_file
        self._keys = CryptoKeyReader("", private) if private is not None else None
        self._partitions: dict[Partition, TopicName] = {}
        self._discovered_at = float("-inf")
        self._readers: dict[tuple[str, str], Typed] = {}  # by topic and columns
        self._schemas: dict[tuple[str, int], SchemaInfo] = {}

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self._loop.run_until_complete(coroutine)

    def partitions(self) -> Mapping[Partition, TopicName]:
        """All partitions of the query's topics; listed again after topicDiscoveryInterval."""
        if self._clock.monotonic() - self._discovered_at >= self._options.discovery_interval_s or not self._partitions:
            self._partitions = self._run(self._discover())
            self._discovered_at = self._clock.monotonic()
        return self._partitions

    async def _discover(self) -> dict[Partition, TopicName]:
        found: dict[Partition, TopicName] = {}
        for topic in await self._matching():
            for partition in await self._existing(topic):
                found[str(topic), max(partition.partition, 0)] = partition
        return found

    async def _matching(self) -> list[TopicName]:
        pattern = self._options.pattern
        if pattern is None:
            return list(self._options.topics)
        namespace, local = _namespace_of(pattern)
        names = map(TopicName.parse, await self._admin.topics(str(namespace)))
        return sorted({name.base for name in names if name.persistent and local.fullmatch(name.local)})

    async def _existing(self, topic: TopicName) -> list[TopicName]:
        deadline = self._clock.monotonic() + self._options.poll_timeout_s
        while True:
            try:
                return await self._parts(topic)
            except TopicNotFound as error:
                if not self._options.wait_for_topic or self._clock.monotonic() > deadline:
                    raise TopicNotFound(
                        f"{error.message}. Create it, or set waitForTopic=true to wait for it"
                    ) from error
            await asyncio.sleep(WAIT_FOR_TOPIC_S)

    async def _parts(self, topic: TopicName) -> list[TopicName]:
        return [TopicName.parse(part) for part in await self._admin.parts(topic.full)]

    def available(self) -> dict[Partition, Available]:
        """What each partition has now. First makes the durable subscription, if any, before data are trimmed."""
        replies = self._run(self._all_offsets(self.partitions(), ()))
        return {p: Available(r.earliest_index, r.end_index, r.bytes) for p, r in replies.items()}

    async def _all_offsets(
        self, partitions: Mapping[Partition, TopicName], times_ms: tuple[int, ...]
    ) -> dict[Partition, TopicOffsets]:
        subscription = self._options.subscription or ""
        replies = await asyncio.gather(
            *(
                self._admin.offsets(name.full, publish_times_ms=times_ms, subscription=subscription)
                for name in partitions.values()
            )
        )
        return dict(zip(partitions, replies, strict=True))

    def index_by_time(self, partition: Partition, at_ms: int) -> int:
        """First message published at or after `at_ms`; the end of the partition when there is none."""
        name = self.partitions()[partition].full
        return self._run(self._admin.offsets(name, publish_times_ms=(at_ms,))).by_time[0]

    def aborted(self, partition: Partition, first: int, end: int) -> int:
        """How many of the messages `first` … `end - 1` are of aborted transactions: no reader is shown them."""
        name = self.name(partition).full
        return self._run(self._admin.offsets(name, aborted_in=(first, end))).aborted

    def advance(self, index: Index, subscription: str) -> None:
        """Acknowledges everything before `index` in each partition."""
        known = self.partitions()
        self._run(self._advance({known[p]: at for p, at in index.items() if p in known}, subscription))

    async def _advance(self, index: Mapping[TopicName, int], subscription: str) -> None:
        moves = (self._admin.advance_subscription(name.full, subscription, at) for name, at in index.items())
        await asyncio.gather(*moves)

    def hold(self, partition: Partition, subscription: str, done: int) -> None:
        """Acknowledges everything before `done` for a durable subscription, which is made when it does not exist."""
        self._run(self._hold(self.name(partition).full, subscription, done))

    async def _hold(self, name: str, subscription: str, done: int) -> None:
        try:
            await self._admin.advance_subscription(name, subscription, done)
        except SubscriptionNotFound:
            await self._admin.offsets(name, subscription=subscription)  # makes it, at the earliest message
            await self._admin.advance_subscription(name, subscription, done)

    def read(self, partition: Partition, first: int, end: int) -> Iterator[list[StoredEntry]]:
        """Entries of a range, as they arrive."""
        keys = self._keys
        entries = self._client.read_range(self.name(partition).full, first, end, crypto_key_reader=keys)

        async def following() -> list[StoredEntry] | None:
            return await anext(entries, None)

        try:
            while (found := self._run(following())) is not None:
                yield found
        finally:
            self._run(entries.aclose())

    def newest_schemas(self) -> dict[str, Typed]:
        """Of each topic. InvalidConfiguration."""
        names = sorted({topic for topic, _ in self.partitions()})
        return {name: newest(name, self._run(self._admin.schemas(name))) for name in names}

    def reader(self, topic: str, wanted: StructType) -> Typed:
        """The newest schema of a topic with these columns. InvalidConfiguration."""
        key = topic, wanted.json()
        if key not in self._readers:
            self._readers[key] = reader(topic, self._run(self._admin.schemas(topic)), wanted)
        return self._readers[key]

    def schema(self, topic: str, version: int) -> SchemaInfo:
        """That version of a topic's schema. SchemaNotFound."""
        if (topic, version) not in self._schemas:
            self._schemas[topic, version] = self._run(self._admin.schema(topic, version)).schema
        return self._schemas[topic, version]

    def name(self, partition: Partition) -> TopicName:
        """The full name of a partition: with its suffix, or without for a topic that has no partitions."""
        if partition not in self._partitions:
            found = self._run(self._parts(TopicName.parse(partition[0])))
            self._partitions |= {(partition[0], max(name.partition, 0)): name for name in found}
        return self._partitions[partition]

    def close(self) -> None:
        _OF_PROCESS.pop(next((key for key, value in _OF_PROCESS.items() if value is self), (0, 0)), None)
        self._run(self._client.close())
        self._run(self._admin.close())
        self._loop.close()


def _namespace_of(pattern: str) -> tuple[NamespaceName, re.Pattern[str]]:
    """`[persistent://]tenant/namespace/regex`, or a regex within public/default."""
    rest = pattern.removeprefix("persistent://")
    parts = rest.split("/", 2)
    if len(parts) == 1:
        return NamespaceName("public", "default"), re.compile(rest)
    if len(parts) != 3:
        raise InvalidConfiguration(f"option 'topicsPattern': {pattern!r} is neither a regex nor TENANT/NAMESPACE/REGEX")
    return NamespaceName.parse(f"{parts[0]}/{parts[1]}"), re.compile(parts[2])
