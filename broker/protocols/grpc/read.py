"""The Read stream: entries of index ranges, for readers that keep their own offsets.

Requests are answered one after the other, in order: the entries that hold any message of the range, then `done` with
the first index that they do not cover. The broker stops at about `bytes_max` (READ_BYTES_MAX if that is 0), at the end
of the range or at the end of the topic, whichever is first; it never waits for messages.
"""

from __future__ import annotations

from ....proto import wire_pb2 as wire
from ....proto.errors import InvalidRequest, MagnetarError, to_wire
from ....proto.names import TopicName
from ....runtime.network import EndOfStream, Stream
from ...common.turns import Turns
from ...node.topic_manager import OwnedTopics
from ...topic.topic import Topic
from .delivery import read_item

Reads = Stream[wire.ReadReply | bytes, wire.ReadRequest]

READ_BYTES_MAX = 16 << 20


async def serve(broker: OwnedTopics, stream: Reads) -> None:
    while True:
        try:
            items = await stream.receive()
        except EndOfStream:
            return
        turns = Turns()
        for request in items:
            await _answer(broker, stream, request, turns)
            if turns.over:
                await turns.next()


async def _answer(broker: OwnedTopics, stream: Reads, request: wire.ReadRequest, turns: Turns) -> None:
    next_index, error = request.first_index, None
    try:
        topic = await broker.topic(TopicName.parse(request.topic), create=False)
        if request.end_index < request.first_index or request.first_index < 0:
            raise InvalidRequest(f"{request.first_index} to {request.end_index} is no range of indexes")
        next_index = await _send_range(topic, stream, request, broker.config.read_bytes, turns)
    except MagnetarError as failure:
        error = to_wire(failure)
    done = wire.ReadDone(next_index=next_index, error=error)
    await stream.send(wire.ReadReply(request_id=request.request_id, done=done))


async def _send_range(
    topic: Topic, stream: Reads, request: wire.ReadRequest, chunk_bytes: int, turns: Turns
) -> int:
    """The first index that was not sent."""
    log = topic.log
    end = min(request.end_index, log.shape.end_index)
    if request.first_index >= end:
        return request.first_index
    place = await log.reader.locate(request.first_index)
    position, next_index = place.position, max(request.first_index, place.first_index)
    left = request.bytes_max or READ_BYTES_MAX
    while next_index < end and left > 0 and log.shape.readable(position):
        entries = log.reader.cached(position, 1000, min(left, chunk_bytes))
        if not entries:
            entries = await log.reader.read(position, min(left, chunk_bytes))
        for entry in entries:
            if entry.first_index >= end or left <= 0:
                next_index = max(next_index, min(end, entry.first_index))  # nothing in front of it is kept
                break
            await stream.send(read_item(request.request_id, entry))
            topic.traffic.went(entry.count, entry.size)
            left -= entry.size
            next_index = entry.index + 1
            position = log.shape.after(entry.position)
            if turns.over:
                await turns.next()
        position = log.shape.seat(position)
    if left > 0:
        next_index = max(next_index, end)  # nothing of the rest is kept
    return min(next_index, request.end_index)
