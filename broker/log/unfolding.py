"""Parses entries whose messages take long to parse, because they are many, or have many bytes once decompressed.

Key_Shared needs the key of each message of a batch. For most entries that takes less than a millisecond, in the event
loop (`StoredEntry.compute_key_slots_if_quick`). But an entry may have 64 KB on the wire and 64 MiB decompressed, or
half a million messages. `compute_key_slots` decompresses it in a thread, into memory that the entry's declared size
bounds (proto/compression.py), and parses its messages in slices (`EventLoopSlices`). A process does that for one entry
at a time, so all of them never take more than 64 MiB together. Meanwhile the subscription delivers no later entry
before this one (read_ahead.py). Compaction and dead letters parse such an entry in a thread (`run_in_thread_if_slow`).

Guarding test: tests/broker/log/test_unfolding.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from mmap import mmap
from typing import ParamSpec, TypeVar
from weakref import WeakKeyDictionary

from ...proto.compression import decompress_to_mapping
from ...proto.entry import MANY_PROPERTIES, collect_item_keys, parse_stored_head
from ...proto.entry_pb2 import MessageMetadata
from ...proto.errors import CorruptEntry
from ...proto.names import compute_key_slot
from ...runtime.alarm import EventLoopSlices
from ...runtime.files import Buffer
from ...runtime.network import World

THREAD_UNFOLD_BYTES = 1 << 20
"""Most bytes that are decompressed in the event loop: less than a millisecond."""
THREAD_UNFOLD_MESSAGES = 1000
"""Most messages that are parsed in the event loop, a client's batch by default: half a millisecond, and 3 ms when each
has another key."""
_MESSAGES_AT_ONCE = 500

P = ParamSpec("P")
R = TypeVar("R")
_ONE_AT_A_TIME: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()


def is_entry_slow_to_parse(metadata: MessageMetadata) -> bool:
    """Returns True if an entry with this metadata takes long to parse, because it has many messages, many uncompressed
    bytes, or many properties."""
    return (
        metadata.num_messages_in_batch > THREAD_UNFOLD_MESSAGES
        or metadata.uncompressed_size > THREAD_UNFOLD_BYTES
        or len(metadata.properties) > MANY_PROPERTIES
    )


async def compute_key_slots(entry: Buffer, world: World) -> tuple[int, ...]:
    """Returns the distinct Key_Shared slots of the keys of the messages in a stored batch; the slot of the first
    message is first. Decompresses the batch in a thread, one entry at a time in this event loop. Returns () if the
    batch is damaged."""
    async with _turn():
        try:
            head = parse_stored_head(entry)
            metadata, payload = head.metadata, bytes(entry[head.payload_offset :])
            if not metadata.compression or not metadata.uncompressed_size:
                return await _looked_at(world, payload, metadata.num_messages_in_batch)
            size = metadata.uncompressed_size
            with await _run(world, decompress_to_mapping, metadata.compression, payload, size) as unfolded:
                return await _looked_at(world, unfolded, metadata.num_messages_in_batch)
        except CorruptEntry:
            return ()  # its consumer reports the damage


async def run_in_thread_if_slow(
    entry: Buffer, world: World, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs
) -> R:
    """Calls the function `work(*args, **kwargs)`, which parses the stored entry `entry`, and returns its result. If the
    entry takes long to parse, calls `work` in a thread, one such call at a time. Raises the errors of `work`."""
    try:
        long = is_entry_slow_to_parse(parse_stored_head(entry).metadata)
    except CorruptEntry:
        long = False
    return await run_in_thread(world, work, *args, **kwargs) if long else work(*args, **kwargs)


async def run_in_thread(world: World, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Calls the function `work(*args, **kwargs)`, which parses an entry, in a thread, and returns its result. One such
    call runs at a time in this event loop; others wait. Raises the errors of `work`."""
    async with _turn():
        return await _run(world, work, *args, **kwargs)


def _turn() -> asyncio.Lock:
    """Returns the lock under which one entry at a time is decompressed in this event loop."""
    return _ONE_AT_A_TIME.setdefault(asyncio.get_running_loop(), asyncio.Lock())


async def _run(world: World, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Runs `work` in a thread and returns its result. If the caller is cancelled, still waits until `work` has ended,
    so that no two calls run at once."""
    worker = world.workers.start("unfold")
    try:
        return await worker.run(work, *args, **kwargs)
    finally:
        await worker.close()


async def _looked_at(world: World, payload: bytes | mmap, messages: int) -> tuple[int, ...]:
    slots: dict[int, None] = {}
    offset, turns = 0, EventLoopSlices(world.clock)
    while messages > 0:
        found: dict[bytes, None] = {}
        some = min(messages, _MESSAGES_AT_ONCE)
        offset = collect_item_keys(payload, offset, some, found)
        slots.update(dict.fromkeys(map(compute_key_slot, found)))
        messages -= some
        if turns.is_slice_used_up:
            await turns.begin_slice()
    return tuple(slots)
