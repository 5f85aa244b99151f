"""The calls of Spark's Python processes to the brokers: offsets by the admin client, ranges of messages by
`Client.read_range`.

Each process has one `QueryConnection` per query, which is made when it is first used and never before a fork: Spark
forks its Python workers from a daemon, and a connection does not survive a fork; therefore the process id is a part of
the key. A connection runs its own event loop in the calling thread, only while a call waits; it starts no thread.

**A connection serves one query only**: its key consists of all options and credentials (`SourceOptions.identity`), and
of the present content of the key files. Answers of brokers are not cached, except the list of partitions of a stream's
topics, which is requested again after topicDiscoveryInterval, and when a query is planned. The driver tells each task
exactly what to read: the partition, the topic's incarnation, and the indexes. Guard: tests/spark/test_identity.py."""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections.abc import Coroutine, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

from pyspark.sql.types import StructType

from ..client.admin import TopicOffsets, TopicSchema
from ..client.aio import CryptoKeyReader, StoredEntry
from ..proto.errors import InvalidConfiguration, NotAllowed, NotFound, SubscriptionNotFound, TopicNotFound
from ..proto.names import NamespaceName, TopicName
from ..proto.schema import SchemaInfo
from ..runtime.clock import Clock, SystemClock
from .offsets import AvailableRange, IncarnationByPartition, IndexByPartition, Partition
from .options import SourceOptions, digest_credential_sources
from .shapes import TypedSchema, find_newest_schema, find_reader_schema

T = TypeVar("T")
_LOG = logging.getLogger("magnetar.spark")
WAIT_FOR_TOPIC_S = 1.0

CACHED_CONNECTIONS_MAX = 16
"""Most connections of queries that a Python process keeps: Spark uses a process again for other queries."""

_OF_PROCESS: dict[tuple[int, str], QueryConnection] = {}
"""Process id and identity of a query → its connection; the most recently used connection is last."""


def get_query_connection(options: SourceOptions) -> QueryConnection:
    """Returns the connection of this process for the query with these options. Makes a connection at the first call,
    and a new one if the content of a key or credential file has changed since. Closes connections of other queries that
    read nothing, so that the process keeps at most CACHED_CONNECTIONS_MAX. Raises InvalidConfiguration or
    OperationNotSupported if the credentials are not valid."""
    key, held = (os.getpid(), options.identity), digest_credential_sources(_places(options))
    found = _OF_PROCESS.pop(key, None)
    if found is not None and found.files_version != held:  # a key or a credential of its files is another one now
        if not found.reads:
            found.close()
        found = None
    if found is None:
        for other in [each for each in _OF_PROCESS if each[0] != key[0]]:
            del _OF_PROCESS[other]  # of the process that this one is a fork of, which has the connection
        idle = [each for each in _OF_PROCESS.values() if not each.reads]
        for each in idle[: max(0, len(_OF_PROCESS) + 1 - CACHED_CONNECTIONS_MAX)]:
            each.close()
        found = QueryConnection(options, SystemClock(), held)
    _OF_PROCESS[key] = found
    return found


def _places(options: SourceOptions) -> Iterator[str]:
    yield from options.access.list_credential_sources()
    if options.private_key_file is not None:
        yield f"file:{options.private_key_file}"


class PartitionIncarnation(NamedTuple):
    """One partition, or a topic without partitions, with its incarnation. A topic that is deleted and created again has
    another incarnation."""

    name: str  # full
    incarnation: int = 0  # 0: not known


class QueryConnection:
    """The connection of a Spark query to its topics: lists their partitions, asks which messages are available, and
    reads ranges of messages. Each method waits for the answers of the brokers in the calling thread. Its methods raise
    the errors of the SDK's client, and those of its admin client. `reads`: the number of reads in progress."""

    def __init__(self, options: SourceOptions, clock: Clock, held: str = "") -> None:
        """Makes a connection, which sends nothing yet. `held`: a digest of the content of the query's key and
        credential files (`digest_credential_sources`)."""
        self.files_version = held
        self.reads = 0  # that are under way
        self._options = options
        self._clock = clock
        self._loop = asyncio.new_event_loop()
        settings = {"operation_timeout_seconds": options.poll_timeout_s, **options.client}
        self._client = options.access.client(**settings)
        self._admin = options.access.admin(settings["operation_timeout_seconds"])
        private = options.private_key_file
        self._keys = CryptoKeyReader("", private) if private is not None else None
        self._partitions: dict[Partition, TopicName] = {}
        self._discovered_at = float("-inf")

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self._loop.run_until_complete(coroutine)

    def list_partitions(self, *, anew: bool = False) -> Mapping[Partition, TopicName]:
        """Returns all partitions of the query's topics: partition → its full name. Asks the brokers if `anew` is True,
        at the first call, and after topicDiscoveryInterval; otherwise returns the last answer. Raises TopicNotFound if
        a topic does not exist; with waitForTopic only after pollTimeoutMs."""
        age_s = self._clock.monotonic() - self._discovered_at
        if anew or age_s >= self._options.discovery_interval_s or not self._partitions:
            self._partitions = self._run(self._discover())
            self._discovered_at = self._clock.monotonic()
        return self._partitions

    @property
    def known_partitions(self) -> Mapping[Partition, TopicName]:
        """Returns the partitions that `list_partitions` returned last, without asking a broker; empty before its first
        call."""
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

    def read_available(self, *, anew: bool = False) -> dict[Partition, AvailableRange]:
        """Returns, for each partition, the range of messages that can be read now. First creates the durable
        subscription, if the query has one, so that nothing is trimmed in the meantime. Lists the partitions again if
        `anew` is True, or if the broker reports a known partition as gone or not allowed. Raises TopicNotFound or
        NotAllowed if that remains so."""
        try:
            replies = self._run(self._all_offsets(self.list_partitions(anew=anew)))
        except (TopicNotFound, NotAllowed):
            if anew:
                raise
            replies = self._run(self._all_offsets(self.list_partitions(anew=True)))
        return {p: AvailableRange(r.earliest_index, r.end_index, r.bytes, r.incarnation) for p, r in replies.items()}

    async def _all_offsets(self, partitions: Mapping[Partition, TopicName]) -> dict[Partition, TopicOffsets]:
        subscription = self._options.subscription or ""
        asked = (self._admin.offsets(name.full, subscription=subscription) for name in partitions.values())
        return dict(zip(partitions, await asyncio.gather(*asked), strict=True))

    def find_index_by_time(self, partition: Partition, at_ms: int) -> int:
        """Returns the index of the first message of a partition that a broker stored at `at_ms` (ms since the epoch) or
        later; the end of the partition if there is none. The partition must be in `known_partitions`."""
        name = self._partitions[partition].full
        return self._run(self._admin.offsets(name, publish_times_ms=(at_ms,))).by_time[0]

    def count_aborted(self, part: PartitionIncarnation, first: int, end: int) -> int:
        """Returns how many of the messages `first` … `end - 1` belong to aborted transactions, which readers do not
        get. Raises TopicNotFound if the partition is gone or has another incarnation."""
        asked = self._admin.offsets(part.name, aborted_in=(first, end), incarnation=part.incarnation)
        return self._run(asked).aborted

    def acknowledge_up_to_offset(
        self, index: IndexByPartition, made: IncarnationByPartition, subscription: str
    ) -> None:
        """Acknowledges for `subscription` all messages before the offset `index`, in each partition that still exists.
        `made`: the incarnations of the partitions for which `index` is valid. Logs a warning for a partition that was
        deleted or has another incarnation."""
        known = self.list_partitions()
        moves = {PartitionIncarnation(known[p].full, made.get(p, 0)): at for p, at in index.items() if p in known}
        self._run(self._advance(moves, subscription))

    async def _advance(self, index: Mapping[PartitionIncarnation, int], subscription: str) -> None:
        moves = (self._advance_one(part, subscription, at) for part, at in index.items())
        await asyncio.gather(*moves)

    async def _advance_one(self, part: PartitionIncarnation, subscription: str, index: int) -> None:
        try:
            await self._admin.advance_subscription(part.name, subscription, index, incarnation=part.incarnation)
        except NotFound as error:  # the topic was deleted, and perhaps made anew: the next plan says what is lost
            _LOG.warning("%s: subscription %s is not advanced to %d: %s", part.name, subscription, index, error)

    def acknowledge_before(self, part: PartitionIncarnation, subscription: str, done: int) -> None:
        """Acknowledges for the durable `subscription` all messages of the partition before the index `done`; creates
        the subscription if it does not exist. Raises TopicNotFound if the partition is gone or has another
        incarnation."""
        self._run(self._hold(part, subscription, done))

    async def _hold(self, part: PartitionIncarnation, subscription: str, done: int) -> None:
        name, made = part
        try:
            await self._admin.advance_subscription(name, subscription, done, incarnation=made)
        except SubscriptionNotFound:
            # makes it, at the earliest message
            await self._admin.offsets(name, subscription=subscription, incarnation=made)
            await self._admin.advance_subscription(name, subscription, done, incarnation=made)

    def read_range(self, part: PartitionIncarnation, first: int, end: int) -> Iterator[list[StoredEntry]]:
        """Yields lists of the entries that contain the messages `first` … `end - 1` of a partition, as they arrive. The
        first and the last entry may contain messages outside the range. Raises TopicNotFound if the partition is gone
        or has another incarnation."""
        entries = self._client.read_range(
            part.name, first, end, crypto_key_reader=self._keys, incarnation=part.incarnation
        )

        async def following() -> list[StoredEntry] | None:
            return await anext(entries, None)

        self.reads += 1
        try:
            while (found := self._run(following())) is not None:
                yield found
        finally:
            self.reads -= 1
            self._run(entries.aclose())

    def find_newest_schemas(self) -> dict[str, TypedSchema]:
        """Returns the newest schema of each topic of the query, by topic name. Raises InvalidConfiguration if a topic
        has no schema, or if its schema cannot be represented as columns."""
        names = sorted({topic for topic, _ in self.list_partitions(anew=True)})
        return {name: find_newest_schema(name, self.list_schemas(name)) for name in names}

    def list_schemas(self, topic: str) -> list[TopicSchema]:
        """Returns all versions of a topic's schema that are not deleted."""
        return self._run(self._admin.schemas(topic))

    def find_schema_with_columns(self, topic: str, wanted: StructType) -> TypedSchema:
        """Returns the newest version of a topic's schema that has all the columns `wanted`. Raises InvalidConfiguration
        if no version has all of them."""
        return find_reader_schema(topic, self.list_schemas(topic), wanted)

    def get_schema(self, topic: str, version: int) -> SchemaInfo:
        """Returns the version `version` of a topic's schema, even if it is deleted. Raises SchemaNotFound if the topic
        never had this version."""
        return self._run(self._admin.schema(topic, version)).schema

    def check_incarnation(self, part: PartitionIncarnation) -> None:
        """Raises TopicNotFound if the partition was deleted, or was deleted and created again since its incarnation was
        read."""
        self._run(self._admin.offsets(part.name, incarnation=part.incarnation))

    def close(self) -> None:
        """Closes the connection, which must have no read in progress. The next `get_query_connection` of the query
        makes a new one."""
        _OF_PROCESS.pop(next((key for key, value in _OF_PROCESS.items() if value is self), (0, "")), None)
        self._run(self._client.close())
        self._run(self._admin.close())
        self._loop.close()


def _namespace_of(pattern: str) -> tuple[NamespaceName, re.Pattern[str]]:
    """Parses `[persistent://]tenant/namespace/regex`, or a regex within public/default."""
    rest = pattern.removeprefix("persistent://")
    parts = rest.split("/", 2)
    if len(parts) == 1:
        return NamespaceName("public", "default"), re.compile(rest)
    if len(parts) != 3:
        raise InvalidConfiguration(f"option 'topicsPattern': {pattern!r} is neither a regex nor TENANT/NAMESPACE/REGEX")
    return NamespaceName.parse(f"{parts[0]}/{parts[1]}"), re.compile(parts[2])
