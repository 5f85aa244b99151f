"""The topics that are copied: those that are named, and those of a pattern, as they are at the source.

`orders`, `tenant/namespace/orders` and `persistent://…` name one; `*`, `?` and `[…]` in its last part make a pattern of
the topics of its namespace. A partitioned topic is one topic. Topics of Pulsar's own (`__…`) match no pattern.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from ...proto.errors import InvalidRequest, TopicNotFound
from ...proto.names import TopicName
from .source import Source

_MAGIC = frozenset("*?[")


class CopiedTopic(NamedTuple):
    """A topic that is copied."""

    name: TopicName
    partitions: int  # 0: it is not partitioned

    @property
    def parts(self) -> list[TopicName]:
        return [self.name.with_partition(i) for i in range(self.partitions)] or [self.name]


async def find_topics(source: Source, asked: Sequence[str]) -> list[CopiedTopic]:
    """Returns the topics that are asked for, each once, by name. InvalidName; InvalidRequest: it cannot be copied;
    TopicNotFound."""
    names: dict[TopicName, None] = {}
    listed: dict[str, list[TopicName]] = {}
    for text in asked:
        topic = _parse(text)
        namespace = f"{topic.tenant}/{topic.namespace}"
        if namespace not in listed:
            listed[namespace] = [TopicName.parse(each) for each in await source.topics(namespace)]
        found = _matching(topic, listed[namespace])
        if not found and (_is_pattern(topic) or not await _partitions(source, topic)):
            what = "no topic matches" if _is_pattern(topic) else "there is no topic"
            raise TopicNotFound(f"at the source {what} {topic}, and none is created there", topic=topic.full)
        names.update(dict.fromkeys(found or [topic]))
    return [CopiedTopic(name, await source.partitions(name)) for name in sorted(names, key=str)]


async def _partitions(source: Source, topic: TopicName) -> int:
    """Returns the number of partitions; 0 also where Magnetar is the source and has no such topic; Pulsar says 0."""
    try:
        return await source.partitions(topic)
    except TopicNotFound:
        return 0


def _parse(text: str) -> TopicName:
    topic = TopicName.parse(text)
    if not topic.persistent:
        raise InvalidRequest(f"{topic} is not stored: there is nothing to copy")
    if topic.is_partition:
        raise InvalidRequest(f"{topic} is a partition: name {topic.base}, whose partitions are copied together")
    return topic


def _is_pattern(topic: TopicName) -> bool:
    return not _MAGIC.isdisjoint(topic.local)


def _matching(asked: TopicName, listed: Iterable[TopicName]) -> list[TopicName]:
    bases = dict.fromkeys(each.base for each in listed)
    if not _is_pattern(asked):
        return [asked] if asked in bases else []
    return [each for each in bases if not each.local.startswith("__") and fnmatchcase(each.local, asked.local)]
