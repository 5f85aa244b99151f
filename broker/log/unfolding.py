"""The slots of an entry whose messages take long to parse: many of them, or many bytes once unfolded.

Key_Shared has to know the key of each message of a batch. Of most entries that is less than a millisecond, in the event
loop (`StoredEntry.find_slots`). An entry may be 64 KB on the wire and 64 MiB unfolded, or contain half a million
messages: it is unfolded in a thread, into memory that the entry's declared size bounds (proto/compression.py), and its
messages are parsed in slices (turns.py). One entry at a time in a process, so they never take more than 64 MiB
together. Nothing of a subscription overtakes its entry meanwhile (read_ahead.py). Compaction and dead letters take such
an entry apart in a thread (`aside`).

Guarding test: tests/broker/log/test_unfolding.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from mmap import mmap
from typing import ParamSpec, TypeVar
from weakref import WeakKeyDictionary

from ...proto.compression import decompress_mapped
from ...proto.entry import PROPERTIES_LONG, keys_of_items, parse_stored
from ...proto.entry_pb2 import MessageMetadata
from ...proto.errors import CorruptEntry
from ...proto.routing import sticky_slot
from ...runtime.files import Buffer
from ...runtime.network import World
from ..common.token_bucket import Turns

LONG_BYTES = 1 << 20
"""Bytes unfolded in the event loop: less than a millisecond."""
LONG_MESSAGES = 1000
"""Messages parsed in the event loop, a client's batch by default: half a millisecond, and 3 ms when each has another
key.
"""
_MESSAGES_AT_ONCE = 500

P = ParamSpec("P")
R = TypeVar("R")
_ONE_AT_A_TIME: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()


def is_long(metadata: MessageMetadata) -> bool:
    """Whether an entry with this metadata takes long."""
    return (
        metadata.num_messages_in_batch > LONG_MESSAGES
        or metadata.uncompressed_size > LONG_BYTES
        or len(metadata.properties) > PROPERTIES_LONG
    )


async def slots_of(entry: Buffer, world: World) -> tuple[int, ...]:
    """The slots of the keys of a stored batch, that of the first message first; none when it is damaged."""
    async with _turn():
        try:
            head = parse_stored(entry)
            metadata, payload = head.metadata, bytes(entry[head.payload_offset :])
            if not metadata.compression or not metadata.uncompressed_size:
                return await _looked_at(world, payload, metadata.num_messages_in_batch)
            size = metadata.uncompressed_size
            with await _run(world, decompress_mapped, metadata.compression, payload, size) as unfolded:
                return await _looked_at(world, unfolded, metadata.num_messages_in_batch)
        except CorruptEntry:
            return ()  # its consumer reports the damage


async def aside(entry: Buffer, world: World, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Takes the stored entry apart with `work`: in a thread when that is long. One call after the other."""
    try:
        long = is_long(parse_stored(entry).metadata)
    except CorruptEntry:
        long = False
    if not long:
        return work(*args, **kwargs)
    async with _turn():
        return await _run(world, work, *args, **kwargs)


def _turn() -> asyncio.Lock:
    return _ONE_AT_A_TIME.setdefault(asyncio.get_running_loop(), asyncio.Lock())


async def _run(world: World, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Runs `work` in a thread. A cancelled caller waits for the end of that work, so the next turn begins after it."""
    worker = world.workers.start("unfold")
    try:
        return await worker.run(work, *args, **kwargs)
    finally:
        await worker.close()


async def _looked_at(world: World, payload: bytes | mmap, messages: int) -> tuple[int, ...]:
    slots: dict[int, None] = {}
    offset, turns = 0, Turns(world.clock)
    while messages > 0:
        found: dict[bytes, None] = {}
        some = min(messages, _MESSAGES_AT_ONCE)
        offset = keys_of_items(payload, offset, some, found)
        slots.update(dict.fromkeys(map(sticky_slot, found)))
        messages -= some
        if turns.is_over:
            await turns.next()
    return tuple(slots)
