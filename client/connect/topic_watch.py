"""Watches the topics of a namespace whose names match a pattern: a broker reports each change (`TopicPatternWatch`).
Also watches the partition counts of topics, which are asked for at an interval (`PartitionsWatcher`).

    watch = TopicPatternWatch(connections, pattern)
    topics = await watch.open()             the topics that match now
    watch.follow(changed)                   from now on `changed(added, removed)` is awaited for each change, in order
    await watch.close()

When its stream breaks, the watch continues at any broker, after the last revision that it received, so that no change
is missed. `changed` returns the topics that it could not subscribe to. It gets them again every SUBSCRIBE_RETRY_S
seconds, until it accepts them or they are deleted.

Non-persistent topics have no records in the metadata: every `discovery_s` seconds the brokers are asked which
non-persistent topics they have in memory. Such a topic does not end while a consumer uses it, so it is never reported
as removed."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from ...proto import wire_pb2 as wire
from ...proto.errors import ConnectionLost, MagnetarError
from ...proto.names import NamespaceName, TopicName
from ...runtime.network import EndOfStream, Stream, find_rpc
from ...runtime.tasks import Tasks
from ..common.checks import WrongTopic, WrongTopicType, shorten_value
from ..core.effects import FINAL_ERRORS
from ..model.settings import RegexSubscriptionMode
from .connections import Connections

_LOG = logging.getLogger("magnetar.client")
SUBSCRIBE_RETRY_S = 5.0
DISCOVERY_S_MIN = 0.1

OnTopicsChanged = Callable[[list[TopicName], list[TopicName]], Awaitable[list[TopicName]]]


class TopicPattern:
    """A pattern `[DOMAIN://TENANT/NAMESPACE/]REGEX`: matches the topics of one namespace whose whole local name matches
    the expression. `mode` chooses persistent or non-persistent topics, or both; the domain in the text is ignored, as
    in Pulsar. Raises InvalidTopicName if the text is no such pattern."""

    def __init__(
        self, pattern: re.Pattern[str], mode: RegexSubscriptionMode = RegexSubscriptionMode.PersistentOnly
    ) -> None:
        self.persistent = mode is not RegexSubscriptionMode.NonPersistentOnly
        self.non_persistent = mode is not RegexSubscriptionMode.PersistentOnly
        if not isinstance(pattern.pattern, str):
            raise WrongTopicType(f"a pattern of topics is text, not {shorten_value(pattern.pattern)}")
        self.text = pattern.pattern
        parts = self.text.removeprefix("non-").removeprefix("persistent://").split("/", 2)
        tenant, namespace, local = parts if len(parts) == 3 else ("public", "default", parts[-1])
        try:
            self.namespace = NamespaceName.parse(f"{tenant}/{namespace}")
            self._local = re.compile(local, pattern.flags)
        except (MagnetarError, re.error) as error:
            raise WrongTopic(f"{shorten_value(self.text)} is not TENANT/NAMESPACE/REGEX: {error}") from error

    def matches(self, topic: TopicName) -> bool:
        """Returns whether the topic is of a domain that `mode` chooses, and its local name matches. Does not compare
        the namespace."""
        asked = self.persistent if topic.persistent else self.non_persistent
        return asked and self._local.fullmatch(topic.local) is not None


class TopicPatternWatch:
    """Reports the topics that match one pattern: first all of them, then each topic that is created or deleted.
    `discovery_s`: seconds between two looks for non-persistent topics, at least DISCOVERY_S_MIN. See the head of the
    module."""

    def __init__(self, connections: Connections, pattern: TopicPattern, discovery_s: float = 60.0) -> None:
        self._connections = connections
        self._discovery_s = max(DISCOVERY_S_MIN, discovery_s)
        self._offering = asyncio.Lock()
        self._pattern = pattern
        self._changed: OnTopicsChanged | None = None
        self._rest: list[Any] = []
        self._known: dict[TopicName, None] = {}
        self._waiting: dict[TopicName, None] = {}  # that could not be taken up
        self._revision = 0
        self._stream: Stream[Any, Any] | None = None
        self._tasks = Tasks()

    async def open(self) -> list[TopicName]:
        """Asks a broker for the topics that match now, and returns them. Changes after that are kept for `follow`.
        Raises NamespaceNotFound and other errors of the broker, and those of `Connections.retry`."""
        first = await self._connections.retry(self._connect)
        self._revision = first.revision
        self._known = dict.fromkeys(self._wanted(first.topics.names))
        if self._pattern.non_persistent:
            self._known.update(dict.fromkeys(await self._in_memory()))
        return list(self._known)

    @property
    def title(self) -> str:
        return self._pattern.text

    def follow(self, changed: OnTopicsChanged) -> None:
        """Awaits `changed(added, removed)` for each change of the matching topics from now on, in tasks of its own,
        until `stop` or `close`. The topics that `open` returned are not reported as added."""
        self._changed = changed
        self._tasks.spawn(self._run(), f"topics {self._pattern.text}")
        if self._pattern.non_persistent:
            self._tasks.spawn(self._discover(), f"non-persistent topics {self._pattern.text}")

    def _wanted(self, names: Iterable[str]) -> list[TopicName]:
        return [topic for topic in map(TopicName.parse, names) if self._pattern.matches(topic)]

    async def _in_memory(self) -> list[TopicName]:
        """Returns the matching non-persistent topics of all brokers."""
        request = wire.ListTopicsRequest(namespace=str(self._pattern.namespace))
        reply = await self._connections.ask("ListTopics", request, service="Admin")
        return [topic for topic in self._wanted(reply.names) if not topic.persistent]

    async def _discover(self) -> None:
        while True:
            await asyncio.sleep(self._discovery_s)
            try:
                await self._offer([topic for topic in await self._in_memory() if topic not in self._known], [])
            except MagnetarError as error:
                _LOG.info("%s: non-persistent topics are looked for again: %s", self._pattern.text, error)
            except Exception:
                _LOG.exception("%s: non-persistent topics were not followed", self._pattern.text)

    async def _connect(self) -> Any:
        """Opens the stream and returns the first reply. When the stream resumes after a revision there may be no reply
        for a long time; then this does not wait for one."""
        stream: Stream[Any, Any] = (await self._connections.next_broker_channel()).stream(
            find_rpc("Broker", "WatchTopics")
        )
        stream.send_nowait(
            wire.WatchTopicsRequest(namespace=str(self._pattern.namespace), after_revision=self._revision)
        )
        self._stream = stream
        if self._revision:
            return None
        try:
            async with asyncio.timeout(self._connections.settings.connection_timeout_s):
                replies: list[Any] = list(await stream.receive())
        except (EndOfStream, TimeoutError) as error:
            stream.cancel()
            raise ConnectionLost("the broker did not tell its topics") from error
        except BaseException:
            stream.cancel()
            raise
        self._rest = replies[1:]
        return replies[0]

    async def _run(self) -> None:
        backoff = self._connections.backoff()
        replies, self._rest = self._rest, []
        while True:
            try:
                if self._stream is None:
                    await self._connect()
                for reply in replies:
                    await self._on_reply(reply)
                replies = await self._receive()
                backoff.reset()
                continue
            except MagnetarError as error:
                _LOG.info("%s: topics are watched again: %s", self._pattern.text, error)
                if isinstance(error, FINAL_ERRORS):
                    self._revision = 0
            except Exception:
                _LOG.exception("%s: a change of topics was not followed", self._pattern.text)
            self._disconnect()
            replies = []
            await asyncio.sleep(backoff.next_delay_s())

    async def _receive(self) -> list[Any]:
        assert self._stream is not None, "it was just connected"
        try:
            async with asyncio.timeout(SUBSCRIBE_RETRY_S if self._waiting else None):
                return list(await self._stream.receive())
        except TimeoutError:
            await self._offer([], [])
            return []
        except EndOfStream as error:
            raise ConnectionLost("the broker ended the watch") from error

    async def _on_reply(self, reply: Any) -> None:
        kind = reply.WhichOneof("kind")
        if kind == "topics":
            now = dict.fromkeys(self._wanted(reply.topics.names))
            added = [topic for topic in now if topic not in self._known]
            await self._offer(added, [topic for topic in self._known if topic.persistent and topic not in now])
        elif kind == "added":
            await self._offer([topic for topic in self._wanted([reply.added]) if topic not in self._known], [])
        elif kind == "removed":
            await self._offer([], [topic for topic in self._wanted([reply.removed]) if topic in self._known])
        self._revision = max(self._revision, reply.revision)

    async def _offer(self, added: list[TopicName], removed: list[TopicName]) -> None:
        async with self._offering:
            await self._offer_now(added, removed)

    async def _offer_now(self, added: list[TopicName], removed: list[TopicName]) -> None:
        for topic in removed:
            self._known.pop(topic, None)
            self._waiting.pop(topic, None)
        offered = [*self._waiting, *added]
        self._known.update(dict.fromkeys(added))
        if (offered or removed) and self._changed is not None:
            self._waiting = dict.fromkeys(await self._changed(offered, removed))

    def on_topic_found_deleted(self, topic: TopicName) -> None:
        """Fact: a consumer found its topic deleted. If the broker reports a topic of that name later, it counts as a
        new topic."""
        self._known.pop(topic, None)

    def _disconnect(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.cancel()

    def stop(self) -> None:
        """Ends the watch at once, without waiting for its tasks."""
        self._tasks.cancel()
        self._disconnect()

    async def close(self) -> None:
        """Ends the watch, and waits until its tasks have ended."""
        self.stop()
        await self._tasks.close()


# -------------------------------------------------------------------------------------------- partitions_watcher
# Partitions that are added to a topic later: found within DISCOVER_EVERY_S, Pulsar's figure.
#
# A topic grows and never shrinks. Without an answer, or when a new partition cannot be opened yet, the next round looks
# again: nothing that is open suffers from it.


DISCOVER_EVERY_S = 60.0


class PartitionsWatcher:
    """Finds partitions that are added to topics, from its making until `stop` or `close`: asks for the numbers every
    DISCOVER_EVERY_S seconds. `counts`: the known number of partitions per topic. When a topic has more, the watcher
    awaits `grow(topic, partitions)` with the new number; if that raises, it tries again in the next round."""

    def __init__(
        self, connections: Connections, counts: dict[TopicName, int], grow: Callable[[TopicName, int], Awaitable[None]]
    ) -> None:
        self._connections = connections
        self._counts = {topic: count for topic, count in counts.items() if count}
        self._grow = grow
        self._tasks = Tasks()
        self._start()

    def _start(self) -> None:
        if self._counts and not len(self._tasks):
            self._tasks.spawn(self._run(), "partitions")

    def watch(self, topic: TopicName, partitions: int) -> None:
        """Watches the number of partitions of `topic`, too. `partitions`: the number of its partitions now; 0: the
        topic is not partitioned, and is not watched."""
        if partitions:
            self._counts[topic] = partitions
            self._start()

    def remove(self, topic: TopicName) -> None:
        """Ends the watch of `topic`; does nothing if it is not watched."""
        self._counts.pop(topic, None)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(DISCOVER_EVERY_S)
            for topic, known in list(self._counts.items()):
                try:
                    found = await self._connections.fetch_partition_count(topic, create=False)
                    if found > known:
                        await self._grow(topic, found)
                        self._counts[topic] = found
                        _LOG.info("%s: %d partitions, %d of them new", topic, found, found - known)
                except MagnetarError as error:
                    _LOG.info("%s: its partitions are looked at again later: %s", topic, error)
                except Exception:
                    _LOG.exception("%s: its partitions are looked at again later", topic)

    def stop(self) -> None:
        """Ends the watch at once, without waiting for its task."""
        self._tasks.cancel()

    async def close(self) -> None:
        """Ends the watch, and waits until its task has ended."""
        self.stop()
        await self._tasks.close()
