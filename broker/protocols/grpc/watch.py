"""The WatchTopics stream: translates broker/cluster/topic_watch.py, until the client goes or the metadata's session
ends."""

from __future__ import annotations

import asyncio

from ....proto import wire_pb2 as wire
from ....proto.errors import InvalidRequest, MagnetarError
from ....proto.names import NamespaceName
from ....runtime.network import CallContext, EndOfStream, Stream
from ...cluster.topic_watch import Added, Told
from ...cluster.topic_watch import Topics as TopicsNow
from ...session.topics import Topics

Watches = Stream[wire.WatchTopicsReply, wire.WatchTopicsRequest]


async def serve(topics: Topics, stream: Watches, caller: CallContext) -> None:
    asked = (await stream.receive())[0]
    if not asked.namespace:
        raise InvalidRequest("the first item of a WatchTopics stream names a namespace")
    tasks = (asyncio.create_task(_tell(topics, stream, asked, caller)), asyncio.create_task(_gone(stream)))
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if tasks[0].done():
            await tasks[0]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _tell(topics: Topics, stream: Watches, asked: wire.WatchTopicsRequest, caller: CallContext) -> None:
    name = NamespaceName.parse(asked.namespace)
    async for told in topics.watch(name, asked.after_revision, caller.principal):
        await stream.send(_reply(told))


async def _gone(stream: Watches) -> None:
    try:
        while True:
            await stream.receive()
    except (EndOfStream, MagnetarError):
        return


def _reply(told: Told) -> wire.WatchTopicsReply:
    if isinstance(told, TopicsNow):
        return wire.WatchTopicsReply(topics=wire.Names(names=told.names), revision=told.revision)
    if isinstance(told, Added):
        return wire.WatchTopicsReply(added=told.name, revision=told.revision)
    return wire.WatchTopicsReply(removed=told.name, revision=told.revision)
