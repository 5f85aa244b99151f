"""The topics of a namespace and each change of them, from the metadata: the content of WatchTopics.

    async for told in TopicWatcher(store, catalog).changes(namespace, after_revision): …

First all of them (`Topics`), unless the caller names the last revision that it got; then what is added and removed, in
the order in which it happened, and `Topics` again when the history is lost. So nothing is missed, across reconnects and
from one broker to the next. Reporting twice is harmless and happens: a change that fell between the revision and the
list, a record that changes, and all after the revision that both watches have seen, which is the one reported.

Partitions are not reported one by one: a partitioned topic is added and removed as one. After a removal the metadata is
read again, because a topic may be made anew with partitions, whose record is elsewhere. Guarding test:
tests/broker/cluster/test_topic_watch.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import NamedTuple

from ...metadata import paths
from ...metadata.store import Changed, MetadataStore, Reset
from ...proto.errors import NotFound
from ...proto.names import NamespaceName, TopicName
from .catalog import Catalog

WAITING_MAX = 1000
"""Changes that wait for a slow listener; then the metadata's watch waits too."""


class Topics(NamedTuple):
    """The existing topics of a namespace, by full name."""

    names: list[str]
    revision: int


class Added(NamedTuple):
    """A topic that was made, by full name."""

    name: str
    revision: int


class Removed(NamedTuple):
    """A topic that was deleted, by full name."""

    name: str
    revision: int


Told = Topics | Added | Removed


class TopicWatcher:
    """Watches the topics of namespaces."""

    def __init__(self, store: MetadataStore, catalog: Catalog) -> None:
        self._store = store
        self._catalog = catalog

    async def changes(
        self, namespace: NamespaceName, after_revision: int = 0, *, tell_missing: bool = True
    ) -> AsyncIterator[Told]:
        """Yields all topics, then each change. NamespaceNotFound (`tell_missing` False: it has no topics so far); the
        metadata's errors, when the caller has to begin anew."""
        revision = after_revision
        if not revision:
            revision = await self._store.revision()
            yield Topics(await self._topics(namespace, tell_missing), revision)
        prefixes = (
            paths.topics(namespace.tenant, namespace.namespace),
            paths.partitioned_topics(namespace.tenant, namespace.namespace),
        )
        seen = dict.fromkeys(prefixes, revision)
        waiting: asyncio.Queue[tuple[str, Changed | Reset] | BaseException] = asyncio.Queue(WAITING_MAX)
        tasks = [asyncio.create_task(self._follow(prefix, revision, waiting)) for prefix in prefixes]
        try:
            while True:
                found = await waiting.get()
                if isinstance(found, BaseException):
                    raise found
                prefix, event = found
                if isinstance(event, Reset):
                    now = await self._store.revision()
                    yield Topics(await self._topics(namespace, tell_missing), min(seen.values()))
                    seen[prefix] = now
                    continue
                seen[prefix] = event.revision
                told = await self._told(namespace, event, min(seen.values()))
                if told is not None:
                    yield told
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _topics(self, namespace: NamespaceName, tell_missing: bool) -> list[str]:
        try:
            return list(await self._catalog.topics(namespace, partitions=False))
        except NotFound:
            if tell_missing:
                raise
            return []

    async def _follow(
        self, prefix: str, revision: int, waiting: asyncio.Queue[tuple[str, Changed | Reset] | BaseException]
    ) -> None:
        try:
            async for event in self._store.watch(prefix, revision):
                await waiting.put((prefix, event))
        except Exception as error:
            await waiting.put(error)

    async def _told(self, namespace: NamespaceName, event: Changed, revision: int) -> Added | Removed | None:
        topic = TopicName.parse(f"persistent://{namespace}/{paths.name(event.path.rsplit('/', 1)[1])}")
        if topic.is_partition:
            return None
        if event.version < 0 and await self._catalog.partitions(topic) is None:
            return Removed(topic.full, revision)
        return Added(topic.full, revision)
