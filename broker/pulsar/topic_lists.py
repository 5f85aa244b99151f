"""Watchers of the topics of a namespace that match a pattern, for the pattern subscriptions of Pulsar's Java client.

    WATCH_TOPIC_LIST → WATCH_TOPIC_LIST_SUCCESS: all that match (none when the client's hash is that of them),
                       WATCH_TOPIC_UPDATE for each change, until WATCH_TOPIC_LIST_CLOSE or the end of the connection

Names are those of GET_TOPICS_OF_NAMESPACE: persistent topics that the caller may look up, of a partitioned topic each
partition. The pattern is matched by RE2 against `tenant/namespace/topic` without the number of a partition, in time
linear in the name, whatever the pattern is; without that library the flag `supports_topic_watchers` is not set, and
the client asks for all names each minute. If the metadata does not answer, the watcher starts again and sends the
difference. Bounds: `WATCHERS_MAX` of a connection, `PATTERN_MAX` characters, `RE2_BYTES` of memory for each.
Guarding tests: tests/broker/pulsar/test_topic_lists.py.
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from ...proto import pulsar_pb2 as pulsar
from ...proto.errors import InvalidRequest, MagnetarError, NotAllowed, NotFound, Unavailable
from ...proto.names import NamespaceName, TopicName
from ...runtime.tasks import Tasks
from ..cluster.policy_cache import Told, TopicList, TopicRemoved
from ..common.token_bucket import EventLoopSlices
from ..session.topics import TopicQueries
from .errors import ensure_magnetar_error
from .frames import encode_frame
from .lookup import topics_hash

if TYPE_CHECKING:
    from .connection import PulsarConnection

WATCHERS_MAX = 100
PATTERN_MAX = 1_000
RE2_BYTES = 1 << 20
AGAIN_S = 1.0
"""Seconds until a watcher starts again after the metadata did not answer."""

_LOG = logging.getLogger("magnetar.broker.pulsar")


def supports_patterns() -> bool:
    return importlib.util.find_spec("re2") is not None


class TopicWatchers:
    """The topic watchers of one connection, by the ids that the client assigns."""

    def __init__(self, connection: PulsarConnection) -> None:
        self._connection = connection
        self._tasks = Tasks()
        self._watchers: dict[int, asyncio.Task[None]] = {}

    def start_watch(self, asked: pulsar.CommandWatchTopicList) -> None:
        if asked.watcher_id in self._watchers:
            self._connection.send_error(asked.request_id, Unavailable("there is a watcher of this id"))
            return
        try:
            if len(self._watchers) >= WATCHERS_MAX:
                raise NotAllowed(f"a connection carries {WATCHERS_MAX} watchers, and no more")
            watcher = _Watcher(self._connection, asked)
        except MagnetarError as error:
            self._connection.send_error(asked.request_id, error)
            return
        task = self._watchers[asked.watcher_id] = self._tasks.spawn(self._run(watcher, asked), "pulsar-topic-watcher")
        task.add_done_callback(lambda _: self._remove_watcher(asked.watcher_id, task))

    async def _run(self, watcher: _Watcher, asked: pulsar.CommandWatchTopicList) -> None:
        try:
            await watcher.run()
        except Exception as error:
            why = ensure_magnetar_error(error)
            if not watcher.answered:
                self._connection.send_error(asked.request_id, why)
            else:
                _LOG.warning("the topics of %s are watched no more for a client: %s", asked.namespace, why)

    def _remove_watcher(self, watcher_id: int, task: asyncio.Task[None]) -> None:
        if self._watchers.get(watcher_id) is task:
            del self._watchers[watcher_id]

    def stop_watch(self, asked: pulsar.CommandWatchTopicListClose) -> None:
        task = self._watchers.pop(asked.watcher_id, None)
        if task is not None:
            task.cancel()
        self._connection.send_success(asked.request_id)

    async def close(self) -> None:
        await self._tasks.close()


class _Watcher:
    def __init__(self, connection: PulsarConnection, asked: pulsar.CommandWatchTopicList) -> None:
        """Makes a watcher. Raises InvalidName, InvalidRequest, NotAllowed."""
        self._connection = connection
        self._asked = asked
        self._namespace = NamespaceName.parse(asked.namespace)
        self._matches = compile_pattern(asked.topics_pattern)
        self._known: set[str] = set()
        self.answered = False

    async def run(self) -> None:
        """Answers with the list of topics, then sends changes of the list until cancelled. Raises NamespaceNotFound,
        Unauthorized, Unavailable if the first list cannot be read."""
        while True:
            try:
                await self._follow()
            except NotFound:
                if not self.answered:
                    raise
                self._send_changes(self._known)  # the namespace was deleted
            except MagnetarError as error:
                if not self.answered or not error.retryable:
                    raise
                _LOG.info("the topics of %s are not watched for a moment: %s", self._namespace, error)
            await asyncio.sleep(AGAIN_S)

    async def _follow(self) -> None:
        principal = self._connection.caller.principal
        async for told in TopicQueries(self._connection.broker).watch_topics(self._namespace, 0, principal):
            await self._on_change(told)

    async def _on_change(self, told: Told) -> None:
        if isinstance(told, TopicList):
            now = await self._names_of(told.names)
            gone = self._known - now
        else:
            gone = {name for name in self._known if TopicName.parse(name).base.full == told.name}
            now = set() if isinstance(told, TopicRemoved) else await self._names_of((told.name,))
            gone -= now
        if self.answered:
            self._send_changes(gone, now)
        else:
            self._known = now
            self._answer()

    async def _names_of(self, topics: Iterable[str]) -> set[str]:
        """Returns the full names of the topics that match; for a partitioned topic those of its partitions."""
        found, catalog = set[str](), self._connection.broker.catalog
        turns = EventLoopSlices(self._connection.broker.world.clock)
        for each in topics:
            if self._matches(each):
                topic = TopicName.parse(each)
                count = await catalog.count_partitions(topic)
                found.update([topic.with_partition(i).full for i in range(count)] if count else [topic.full])
            if turns.is_slice_used_up:
                await turns.begin_slice()
        return found

    def _answer(self) -> None:
        self.answered = True
        names = sorted(self._known)
        hash_ = topics_hash(names)
        self._connection.send(encode_frame(watch_topic_list_success=pulsar.CommandWatchTopicListSuccess(
            request_id=self._asked.request_id, watcher_id=self._asked.watcher_id,
            topic=names if self._asked.topics_hash != hash_ else (), topics_hash=hash_,
        )))  # fmt: skip

    def _send_changes(self, gone: Iterable[str], now: Iterable[str] = ()) -> None:
        new, gone = sorted(set(now) - self._known), sorted(gone)
        if not new and not gone:
            return
        self._known = self._known.difference(gone).union(new)
        self._connection.send(encode_frame(watch_topic_update=pulsar.CommandWatchTopicUpdate(
            watcher_id=self._asked.watcher_id, new_topics=new, deleted_topics=gone,
            topics_hash=topics_hash(sorted(self._known)),
        )))  # fmt: skip


def compile_pattern(text: str) -> Callable[[str], bool]:
    """Returns a function that returns whether the full name of a topic matches the pattern. Raises InvalidRequest if
    the pattern is invalid, NotAllowed if RE2 is not installed."""
    if len(text) > PATTERN_MAX:
        raise InvalidRequest(f"a pattern of {len(text)} characters is longer than {PATTERN_MAX}")
    try:
        import re2
    except ImportError as error:
        raise NotAllowed("patterns are not matched here: google-re2 is not installed") from error
    options = re2.Options()
    options.max_mem, options.log_errors = RE2_BYTES, False
    try:
        compiled: Any = re2.compile(_without_domain(text), options)
    except re2.error as error:
        raise InvalidRequest(f"{text!r:.100} is no pattern: {error.args[0]!r:.100}") from error
    return lambda name: compiled.fullmatch(_without_domain(name)) is not None


def _without_domain(text: str) -> str:
    return text.partition("://")[2] or text
