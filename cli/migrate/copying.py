"""Copies topics, partition by partition: the driver between the source and the destination.

    copying = TopicCopier(source, client, admin, wanted, world)
    await copying.prepare(topics, schemas=True)    creates tenants, namespaces, topics and schemas; checks the topics
    await copying.run()                            until all present messages are copied; with `follow` until cancelled

Each partition has a task: it opens an exclusive producer at the destination, reads where the copy continues, and copies
entries. After an error that may pass (a lost connection, a broker that moves a topic) it retries for `patience_s`
without progress; then, and after any other error, all tasks end with that error. They may end at any moment: each copy
names its origin (`Origin`), so the next run continues after the newest.
Guard: tests/cli/migrate/test_migrate.py.

Also in this file, each below its heading: the partition that is copied into (destination); how far a copy is, per
partition and per topic (tally); positions of durable subscriptions, from the REST of the source to the destination
(subscriptions).
"""

from __future__ import annotations

import asyncio
import json
import ssl
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import quote, unquote, urlsplit

from ...client.admin import AdminClient
from ...client.client import Client
from ...client.core.failover import Backoff
from ...client.model.message_id import MessageId
from ...client.produce.entry_writer import PreEncodedEntryWriter, SentEntryDescription
from ...proto.entry import count_declared_messages, parse_header
from ...proto.errors import (
    AlreadyExists,
    Busy,
    InvalidRequest,
    MagnetarError,
    NotAllowed,
    NotFound,
    SubscriptionNotFound,
    TopicNotFound,
    Unauthenticated,
    Unauthorized,
    Unavailable,
)
from ...proto.names import Position, TopicName
from ...proto.schema import SchemaInfo, encode_version
from ...runtime.access import CallerAccess
from ...runtime.network import World
from ...runtime.tasks import run_together
from .source import (
    EndOfTopic,
    MigrationSource,
    Origin,
    PartitionReader,
    SourceBacklog,
    SourceEntry,
    TopicToCopy,
    decode_origin,
    encode_copied_entry,
    hash_topic,
)

# --------------------------------------------------------------------------------------------------- destination
# The partition that is copied into: where a copy continues, and where a position of the source is.
#
# **Nothing is lost and nothing is doubled.** The position in the source is stored in each copied entry (source.py). It
# is read after the producer was opened, when no other one can publish (client/produce/entry_writer.py), and after what
# a killed run left on its way is settled. What had no answer when a connection was lost is never sent again by the same
# producer; the next one reads the newest origin anew. Guard: tests/cli/migrate/test_migrate.py.


MIGRATION_NAME = "magnetar-migrate"
"""The name of the producer, and of the subscription that keeps the copies."""


async def find_newest_origin(client: Client, topic: TopicName, first: int, end: int) -> Origin | None:
    """Returns the origin (the source's entry) of the newest entry between the indexes `first` (inclusive) and `end`
    (exclusive) of the destination topic. Returns None if there is no entry, or if the newest entry is not a copy.
    Raises the errors of `Client.read_range`; CorruptEntry if an entry is damaged."""
    if end <= first:
        return None
    found: Origin | None = None
    async for entries in client.read_range(topic.full, end - 1, end):
        found = decode_origin(entries[-1].data)
    return found


async def scan_newest_origin(client: Client, topic: TopicName, first: int, end: int, number: int) -> Origin | None:
    """Reads the destination topic from the index `first` (inclusive) to `end` (exclusive), and returns the origin (the
    source's entry) of the last copied message; None if no message is a copy. `number`: the source topic as a number
    (`hash_topic`). Raises the errors of `Client.read_range`; CorruptEntry if an entry is damaged.

    Needed for a topic to which other producers have written too, because its last entry may not be a copy."""
    found: Origin | None = None
    async for entries in client.read_range(topic.full, first, end):
        for entry in entries:
            origin = decode_origin(entry.data)
            if origin is not None and origin.topic == number:
                found = origin
    return found


async def find_message_index_after(client: Client, topic: TopicName, first: int, end: int, mark: Position) -> int:
    """Returns the index of the first message in the destination topic that was copied from a position after `mark` of
    the source; `end` if there is none. Searches by bisection between the indexes `first` (inclusive) and `end`
    (exclusive). Raises the errors of `Client.read_range`; CorruptEntry if an entry is damaged."""
    while first < end:
        middle = (first + end) // 2
        entry = None
        async for entries in client.read_range(topic.full, middle, middle + 1):
            entry = entries[0]
        if entry is None:
            return end
        origin = decode_origin(entry.data)
        if origin is not None and origin.position > mark:
            end = min(middle, entry.end_index - count_declared_messages(entry.data))
        else:
            first = entry.end_index
    return end


# --------------------------------------------------------------------------------------------------------- tally
# How far a copy is, per partition and per topic; and rates, from what was stored in the last seconds.
#
# Plain values without a clock: `now` is seconds of any clock that does not go back.


RATE_WINDOW_S = 10.0


class CopyProgress:
    """The progress of the copy of one partition. `entries`, `messages` and `bytes`: what this run has stored.

    `lag`: the number of messages that the source has and the destination lacks, by the last answer of the source; None
    if it is not known yet. Pulsar reports entries instead of messages, so for batches the lag is estimated from the
    size of the batches that were copied."""

    def __init__(self, topic: TopicName) -> None:
        self.topic = topic
        self.entries = self.messages = self.bytes = 0  # stored by this run
        self.stored: Position | None = None  # the newest entry of the source that the destination has
        self.lag: int | None = None
        self.complete = False
        self.note = ""  # why nothing is copied at the moment

    def add(self, position: Position, messages: int, size: int) -> None:
        """Counts an entry that the destination has stored: its position at the source, its number of messages, and its
        size in bytes."""
        self.stored = position
        self.entries += 1
        self.messages += messages
        self.bytes += size
        self.note = ""
        if self.lag is not None:
            self.lag = max(0, self.lag - messages)

    def set_lag(self, count: int, *, entries: bool) -> None:
        """Sets the lag from the backlog `count` that the source reported. `entries`: whether the source counts entries
        instead of messages."""
        self.lag = round(count * self.messages / self.entries) if entries and self.entries else count


class CopyTotals:
    """The progress of several partitions together, computed from their CopyProgress objects at each call."""

    def __init__(self, tallies: Iterable[CopyProgress]) -> None:
        self._tallies = list(tallies)
        self._samples: deque[tuple[float, int]] = deque()

    @property
    def messages(self) -> int:
        return sum(each.messages for each in self._tallies)

    @property
    def bytes(self) -> int:
        return sum(each.bytes for each in self._tallies)

    @property
    def lag(self) -> int | None:
        """Returns the sum of the lags of all partitions, in messages; None if the lag of any partition is not known."""
        known = [each.lag for each in self._tallies if each.lag is not None]
        return sum(known) if len(known) == len(self._tallies) else None

    @property
    def complete(self) -> bool:
        """Returns whether the copies of all partitions have ended."""
        return all(each.complete for each in self._tallies)

    @property
    def why_not_copied(self) -> str:
        """Returns why one of the partitions is not copied at the moment; "" if all are."""
        return next((each.note for each in self._tallies if each.note), "")

    def rate(self, now: float) -> float:
        """Returns how many messages per second were copied in about the last RATE_WINDOW_S seconds, measured between
        the calls of this method; 0 at the first call. `now`: seconds of any clock that does not go back."""
        self._samples.append((now, self.messages))
        while len(self._samples) > 2 and now - self._samples[0][0] > RATE_WINDOW_S:
            self._samples.popleft()
        since, before = self._samples[0]
        return (self.messages - before) / (now - since) if now > since else 0.0

    def remaining_time_s(self, rate: float) -> float | None:
        """Returns the seconds until the lag is zero, at `rate` messages per second; None if the lag is not known, or if
        there is a lag and the rate is 0."""
        lag = self.lag
        if not lag:
            return None if lag is None else 0.0
        return lag / rate if rate > 0 else None


# ------------------------------------------------------------------------------------------------------- copying


PARTITIONS_AT_ONCE = 32
"""Partitions at a time, of a copy that ends; a copy that follows needs all of them."""
ASK_EVERY_S = 1.0
SETTLE_S = 0.05
SOURCE_PROPERTY = "magnetar-migrate.from"
"""Property of the subscription that keeps the copy: the source's addresses."""


@dataclass(frozen=True)
class CopyOptions:
    """The options of `magnetar migrate` that concern the copying. `patience_s`: for how many seconds without progress a
    partition is retried."""

    follow: bool = False
    append: bool = False  # copy also to partitions with messages that are not of this copy, after these
    same_source: bool = False  # the URL of the source is another one than in the last run, of the same cluster
    patience_s: float = 30.0


@dataclass(frozen=True)
class DestinationState:
    """The part of one partition that exists at the destination already."""

    messages: int
    newest: Origin | None  # None: there is no copied entry, or a foreign one is the newest


class SchemaVersionCopier:
    """Copies the schemas of one topic (its methods raise the errors of the source and of the destination), and finds
    for each version at the source the version at the destination."""

    def __init__(self, source: MigrationSource, admin: AdminClient, topic: TopicName) -> None:
        self._source = source
        self._admin = admin
        self._topic = topic
        self._known: dict[bytes, bytes] = {}

    async def copy_all(self) -> int:
        """Copies all versions of the schema that the source has. Returns the number of copied versions. Raises
        IncompatibleSchema or NotAllowed if the destination refuses a version."""
        newest = await self._source.read_schema(self._topic)
        if newest is None:
            return 0
        for number in range(int.from_bytes(newest[1]) + 1):
            await self.find_destination_version(encode_version(number))
        return len([each for each in self._known.values() if each])

    async def find_destination_version(self, version: bytes) -> bytes:
        """Returns the version at the destination for the source's `version`, after copying the schema if necessary.
        Returns b"" if the source has deleted this version. Raises IncompatibleSchema or NotAllowed if the destination
        refuses the schema."""
        found = self._known.get(version)
        if found is None:
            schema = await self._source.read_schema(self._topic, version)
            try:
                found = b"" if schema is None else await self._put(schema[0])
            except NotAllowed as error:
                text = f"the destination refuses schema {int.from_bytes(version)} of {self._topic}: {error.message}"
                ways = "'magnetar schemas compatibility' and --no-schemas are two ways on"
                raise type(error)(f"{text}; {ways}") from None
            self._known[version] = found
        return found

    async def _put(self, schema: SchemaInfo) -> bytes:
        return encode_version(await self._admin.put_schema(self._topic.full, schema))


class TopicCopier:
    """Copies topics with their messages from a source cluster to a destination cluster: first `prepare`, then `run`.
    `tallies` has the progress of each partition. Its methods raise the errors of `source`, `client` and `admin`;
    CorruptEntry if an entry of the destination is damaged."""

    def __init__(
        self, source: MigrationSource, client: Client, admin: AdminClient, wanted: CopyOptions, world: World
    ) -> None:
        self.tallies: list[CopyProgress] = []
        self.topics: list[TopicToCopy] = []
        self._source = source
        self._client = client
        self._admin = admin
        self._wanted = wanted
        self._world = world
        self._schemas: dict[TopicName, SchemaVersionCopier] = {}

    # ------------------------------------------------------------------------------ before
    async def find_destination_state(self, topic: TopicName) -> DestinationState | None:
        """Returns which part of the partition exists at the destination already; None if the topic does not exist
        there."""
        try:
            offsets = await self._admin.offsets(topic.full)
        except NotFound:
            return None
        first, end = offsets.earliest_index, offsets.end_index
        newest = await find_newest_origin(self._client, topic, first, end)
        return DestinationState(
            end - first, newest if newest is not None and newest.topic == hash_topic(topic.full) else None
        )

    async def prepare(self, topics: Sequence[TopicToCopy], *, schemas: bool) -> None:
        """Creates the topics, and with `schemas` the schemas, at the destination, and a subscription that retains the
        copies. Raises AlreadyExists if a topic there has messages that this copy did not write, another number of
        partitions, or copies from another source; NotAllowed if deduplication is on, or if a schema is refused."""
        self.topics = list(topics)
        for topic in topics:
            await self._make(topic)
            for part in topic.parts:
                await self._check(part)
            if schemas:
                versions = self._schemas[topic.name] = SchemaVersionCopier(self._source, self._admin, topic.name)
                await versions.copy_all()
        self.tallies = [CopyProgress(part) for topic in topics for part in topic.parts]

    async def _make(self, topic: TopicToCopy) -> None:
        name = topic.name
        with suppress(AlreadyExists):
            await self._admin.create_tenant(name.tenant)
        with suppress(AlreadyExists):
            await self._admin.create_namespace(f"{name.tenant}/{name.namespace}")
        try:
            await self._admin.create_topic(name.full, partitions=topic.partitions)
        except AlreadyExists:
            there = await self._admin.partitions(name.full)
            if there and there < topic.partitions:
                await self._admin.update_topic(name.full, partitions=topic.partitions)
            elif there != topic.partitions:
                text = f"{name} has {there} partitions at the destination and {topic.partitions} at the source"
                raise AlreadyExists(f"{text}: delete it there, or copy by hand", topic=name.full) from None

    async def _check(self, part: TopicName) -> None:
        if (await self._admin.topic_policies(part.base.full, applied=True)).deduplication:
            text = f"deduplication is on for {part.base} at the destination, and copies keep their producers' names"
            raise NotAllowed(f"{text}: switch it off for the time of the copy", topic=part.full)
        place = await self.find_destination_state(part)
        assert place is not None, "it was made"
        if place.messages and place.newest is None and not self._wanted.append:
            text = f"{part} has {place.messages} messages at the destination whose newest is not copied from there"
            raise AlreadyExists(f"{text}; --append puts the copies after them", topic=part.full)
        await self._retain_copies(part)

    async def _retain_copies(self, part: TopicName) -> None:
        """Creates a subscription that retains the copies until consumers have subscriptions; its properties name the
        source."""
        here = ",".join(map(str, self._source.endpoints))
        try:
            known = (await self._admin.subscription_properties(part.full, MIGRATION_NAME)).get(SOURCE_PROPERTY, here)
        except SubscriptionNotFound:
            await self._admin.create_subscription(
                part.full, MIGRATION_NAME, MessageId.earliest, {SOURCE_PROPERTY: here}
            )
            return
        if known != here and not self._wanted.same_source:
            text = f"{part} was copied from {known} before, and {here} may be another cluster"
            raise AlreadyExists(f"{text}; --same-source says that it is the same one", topic=part.full)
        if known != here:
            await self._admin.set_subscription_properties(part.full, MIGRATION_NAME, {SOURCE_PROPERTY: here})

    # ------------------------------------------------------------------------------ the copy
    async def run(self) -> None:
        """Copies all partitions, at most PARTITIONS_AT_ONCE at the same time, until the entries that exist now are
        copied. With the option `follow`, copies all at the same time, until the topics are terminated or the call is
        cancelled. Raises the first error of a partition that does not pass within `patience_s` seconds; then all
        copying has ended."""
        room = asyncio.Semaphore(len(self.tallies) if self._wanted.follow else PARTITIONS_AT_ONCE)

        async def one(tally: CopyProgress) -> None:
            async with room:
                await self._partition(tally)

        await run_together([one(tally) for tally in self.tallies], "migrate")

    async def _partition(self, tally: CopyProgress) -> None:
        now = self._world.clock.monotonic
        progress = now(), 0
        backoff = Backoff(self._world.rng)
        while True:
            try:
                await self._attempt(tally)
                return
            except MagnetarError as error:
                if tally.entries != progress[1]:
                    progress = now(), tally.entries
                    backoff.reset()
                may_pass = error.retryable or isinstance(error, Busy)
                if not may_pass or now() - progress[0] > self._wanted.patience_s:
                    raise
                tally.note = error.message
            await asyncio.sleep(backoff.next_delay_s())

    async def _attempt(self, tally: CopyProgress) -> None:
        topic = tally.topic

        def stored(entry: SentEntryDescription) -> None:
            tally.add(entry.position, entry.messages, entry.size)

        writer = PreEncodedEntryWriter(self._client.connections, topic, MIGRATION_NAME, stored)
        try:
            await writer.open()
            newest = await self._newest(topic)
            tally.stored = newest.position if newest is not None else None
            reader = await self._source.open_reader(topic, tally.stored)
            try:
                await self._move(tally, reader, writer)
                await writer.drain()
            finally:
                await reader.close()
            tally.complete, tally.lag = True, tally.lag if self._wanted.follow else 0
        finally:
            with suppress(MagnetarError, TimeoutError):
                async with asyncio.timeout(self._wanted.patience_s):
                    await writer.close()

    async def _newest(self, topic: TopicName) -> Origin | None:
        """Returns the newest origin. The writer must be open, so that only its own entries in flight can still be
        added."""
        stats = await self._admin.topic_internal_stats(topic.full)
        while stats.pending_adds:
            await asyncio.sleep(SETTLE_S)
            stats = await self._admin.topic_internal_stats(topic.full)
        offsets = await self._admin.offsets(topic.full)
        first, end, number = offsets.earliest_index, offsets.end_index, hash_topic(topic.full)
        newest = await find_newest_origin(self._client, topic, first, end)
        if newest is not None and newest.topic == number:
            return newest
        return await scan_newest_origin(self._client, topic, first, end, number)

    async def _move(self, tally: CopyProgress, reader: PartitionReader, writer: PreEncodedEntryWriter) -> None:
        """Copies until the newest entry at the time of the call is sent; with `follow` until the topic
        is terminated."""
        after, now = tally.stored, self._world.clock.monotonic
        tally.set_lag(await reader.measure_backlog(), entries=self._source.is_backlog_in_entries)
        last = None if self._wanted.follow else await reader.newest_position()
        if last is not None and (last.entry_id < 0 or (after is not None and last <= after)):
            return
        number, schemas = hash_topic(tally.topic.full), self._schemas.get(tally.topic.base)
        reader.grant_permits()
        asked = now()
        while True:
            event = await reader.next_event(ASK_EVERY_S)
            match event:
                case SourceEntry(position, data):
                    header = parse_header(data)
                    reader.renew_permits(header.num_messages)
                    version = None
                    if header.metadata.HasField("schema_version"):
                        version = (
                            b""
                            if schemas is None
                            else await schemas.find_destination_version(header.metadata.schema_version)
                        )
                    entry = encode_copied_entry(data, header, Origin(number, position), version)
                    after = position
                    await writer.send(
                        entry, SentEntryDescription(header.sequence_id, position, header.num_messages, len(data))
                    )
                    if last is not None and position >= last:
                        return
                case SourceBacklog(left):
                    tally.set_lag(left, entries=self._source.is_backlog_in_entries)
                    if left == 0 and last is not None and after == tally.stored:
                        return  # what the source calls its newest entry is not for readers
                case EndOfTopic():
                    return
                case None:
                    writer.check()
            if now() - asked >= ASK_EVERY_S:
                asked = now()
                if tally.stored is not None:
                    reader.acknowledge(tally.stored)
                reader.request_backlog()


# ------------------------------------------------------------------------------------------------- subscriptions
# Positions of durable subscriptions, from the REST of the source to the destination.
#
# At the destination a subscription begins at the message that was copied from after the source's mark-delete position.
# What consumers acknowledged out of order after that position comes again. One that exists is moved forward only. The
# destination is asked by bisection for the place, so all that was acknowledged must be copied before.


ANSWER_BYTES_MAX = 64 << 20


class _SameOrigin(urllib.request.HTTPRedirectHandler):
    """Follows an HTTP redirect to another path, and refuses one to another address, which would be sent the token."""

    def redirect_request(
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        if urlsplit(newurl)[:2] != urlsplit(req.full_url)[:2]:
            raise Unavailable(
                f"the source redirects to {'://'.join(urlsplit(newurl)[:2])}, which is not asked, as it would get the "
                "token: give that address as --admin-url, or one that serves every topic"
            )
        return super().redirect_request(req, fp, code, msg, headers, newurl)


class SourceSubscription(NamedTuple):
    """A durable subscription of a topic at the source cluster: its name, its mark-delete position and its
    properties."""

    name: str
    mark: Position  # all up to there is acknowledged
    properties: dict[str, str]


class SourceRestClient:
    """A client for the HTTP service (administration) of the source cluster. `url` is http://HOST:8080 or
    https://HOST:8443."""

    def __init__(self, url: str, access: CallerAccess, timeout_s: float) -> None:
        """Makes a client; connects later. `timeout_s`: seconds for each request. Raises InvalidRequest if the URL is
        not one of http or https."""
        if not url.startswith(("http://", "https://")):
            raise InvalidRequest(f"--admin-url {url!r} begins with http:// or https://")
        self._url = url.rstrip("/")
        self._access = access
        self._timeout_s = timeout_s

    async def list_subscriptions(self, topic: TopicName) -> list[SourceSubscription]:
        """Returns the durable subscriptions of one partition. Raises Unavailable if the source does not answer,
        TopicNotFound, Unauthenticated or Unauthorized."""
        stats = await asyncio.to_thread(self._get, topic, "stats")
        cursors = (await asyncio.to_thread(self._get, topic, "internalStats"))["cursors"]
        marks = {unquote(name): each["markDeletePosition"] for name, each in cursors.items()}
        return [
            SourceSubscription(name, _position(marks[name]), dict(each.get("subscriptionProperties") or {}))
            for name, each in sorted(stats["subscriptions"].items())
            if each.get("isDurable", each.get("durable", True)) and name in marks and name != MIGRATION_NAME
        ]

    def _get(self, topic: TopicName, what: str) -> Any:
        name = f"{topic.tenant}/{topic.namespace}/{quote(topic.stored_local, safe='')}"
        asked = urllib.request.Request(f"{self._url}/admin/v2/persistent/{name}/{what}")
        if self._access.authorization is not None and (value := self._access.authorization()):
            asked.add_header("Authorization", value)
        handlers: list[urllib.request.BaseHandler] = [_SameOrigin()]
        if self._url.startswith("https://"):
            trust = ssl.create_default_context(cafile=(self._access.tls.ca if self._access.tls else "") or None)
            handlers.append(urllib.request.HTTPSHandler(context=trust))
        try:
            with urllib.request.build_opener(*handlers).open(asked, timeout=self._timeout_s) as answer:
                return json.loads(answer.read(ANSWER_BYTES_MAX))
        except urllib.error.HTTPError as error:
            kind = {401: Unauthenticated, 403: Unauthorized, 404: TopicNotFound}.get(error.code, Unavailable)
            raise kind(f"the source's {what} of {topic}: HTTP {error.code} from {self._url}") from error
        except (OSError, ValueError) as error:
            raise Unavailable(f"the source's HTTP service at {self._url} cannot be asked: {error}") from error


def _position(text: str) -> Position:
    ledger_id, _, entry_id = text.partition(":")
    return Position(int(ledger_id), int(entry_id))


async def copy_subscriptions(
    source: SourceRestClient, client: Client, admin: AdminClient, topic: TopicName
) -> list[dict[str, object]]:
    """Copies the durable subscriptions of one partition, with their mark-delete positions. All messages up to these
    positions must have been copied before. Returns one record for each subscription: `topic`, `subscription`, and
    `backlog` (messages). Raises the errors of `SourceRestClient.list_subscriptions` and of the destination."""
    found: list[dict[str, object]] = []
    for each in await source.list_subscriptions(topic):
        offsets = await admin.offsets(topic.full)
        index = await find_message_index_after(client, topic, offsets.earliest_index, offsets.end_index, each.mark)
        with suppress(AlreadyExists):
            await admin.create_subscription(topic.full, each.name, MessageId.earliest, each.properties)
        await admin.advance_subscription(topic.full, each.name, index)
        found.append({"topic": topic.full, "subscription": each.name, "backlog": offsets.end_index - index})
    return found
