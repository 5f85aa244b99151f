"""The Read stream: translates for the RangeReader of broker/session/backlogs.py. Requests are answered one after the
other: the entries of the range, then `done` with the first index that they do not cover."""

from __future__ import annotations

from contextlib import aclosing

from ...proto import wire_pb2 as wire
from ...proto.errors import MagnetarError, to_wire
from ...runtime.network import CallContext, EndOfStream, Pieces, Stream
from ..common.token_bucket import EventLoopSlices
from ..node.topic_manager import TopicManager
from ..session.backlogs import IndexRange, RangeReader
from .translate import encode_read_reply

Reads = Stream[wire.ReadReply | Pieces, wire.ReadRequest]


async def serve_read(broker: TopicManager, stream: Reads, caller: CallContext) -> None:
    while True:
        try:
            items = await stream.receive()
        except EndOfStream:
            return
        turns = EventLoopSlices(broker.world.clock)
        for request in items:
            await _answer(broker, stream, request, caller, turns)
            if turns.is_slice_used_up:
                await turns.begin_slice()


async def _answer(
    broker: TopicManager, stream: Reads, request: wire.ReadRequest, caller: CallContext, turns: EventLoopSlices
) -> None:
    wanted = IndexRange(request.topic, request.first_index, request.end_index, request.bytes_max, request.incarnation)
    reader, error = RangeReader(broker, wanted, caller), None
    try:
        async with aclosing(reader.read_entries(turns)) as entries:
            async for entry in entries:
                await stream.send(encode_read_reply(request.request_id, entry))
    except MagnetarError as failure:
        error = to_wire(failure)
    done = wire.ReadDone(next_index=reader.next_index, error=error)
    await stream.send(wire.ReadReply(request_id=request.request_id, done=done))
