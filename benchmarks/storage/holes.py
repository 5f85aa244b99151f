"""holes: five million alternating acknowledgements, what they cost the broker, and what is left after a restart.

Ten million messages in batches of a thousand are received by one consumer, which then acknowledges every second one.
The value is the CPU of the whole server (broker, bookie and metadata in one process) until the last of them is durable.
Then it is killed and started again: the first delivery, and whether anything that was acknowledged comes again.
`single_*` in the detail: the same number of messages that are an entry each, through the broker's cursor alone, in the
sets that the SDK sends (ten million entries take too long to produce). `patterns` in the detail: what holes take in
memory, by their pattern, before and after they are compressed.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from ..harness import Options, Run, Usage, measured, progress, server

if TYPE_CHECKING:
    from magnetar.broker.log.log_shape_core import LogShape

TOPIC = "holes"
BATCH = 1000
ACKS = 5_000_000
GROUP = 1000
LEDGER_ENTRIES = 50_000


def holes(options: Options) -> Run:
    import magnetar

    run = Run(0.0)
    acks = int(options.extra.get("acks", ACKS // 200 if options.rehearses else ACKS))
    with server(options.bookies) as running:
        with magnetar.Client(running.url) as client:
            client.subscribe(TOPIC, "s").close()
        asyncio.run(_fill(running.url, 2 * acks))
        progress(f"holes: {2 * acks:,} messages are there")
        with magnetar.Client(running.url) as client:
            consumer = client.subscribe(TOPIC, "s", receiver_queue_size=20_000)
            entries = _receive(consumer, 2 * acks)
            before = Usage(running.pid).read()["rss_mb"]
            with measured(run, server=running.pid):
                begin = time.perf_counter()
                for ledger_id, entry_id in entries:
                    consumer.acknowledge(
                        [magnetar.MessageId(-1, ledger_id, entry_id, index, BATCH) for index in range(0, BATCH, 2)]
                    )
                consumer.close()
                seconds = time.perf_counter() - begin
            grown = Usage(running.pid).read()["rss_mb"] - before
        run.value = run.processes["server"]["cpu_s"]
        run.detail = {"acks": acks, "seconds": seconds, "memory_mb": grown, **single(acks), "patterns": patterns()}
        running.kill()
        run.detail |= _restarted(running, acks)
    return run


async def _fill(url: str, messages: int) -> None:
    """Batches as the SDK makes them, without a call per message."""
    from magnetar.proto import wire_pb2 as wire
    from magnetar.proto.entry import encode_batch, encode_plain_items
    from magnetar.proto.entry_pb2 import MessageMetadata
    from magnetar.proto.states import ENTRY_COST_BYTES
    from magnetar.runtime.network import Endpoint, find_rpc
    from magnetar.runtime.process import make_system_world

    channel = make_system_world(1).network.connect(Endpoint.parse(url.removeprefix("magnetar://")))
    stream = channel.stream(find_rpc("Broker", "Connect"))
    opening = wire.OpenProducer(topic=f"persistent://public/default/{TOPIC}", producer_name="p")
    stream.send_nowait(wire.ClientFrame(id=1, open_producer=opening))
    items = encode_plain_items([b"%08d" % index for index in range(BATCH)])
    sent = done = credit = 0
    while done < messages:
        while sent < messages and sent - done < 100 * BATCH and credit > 0:
            metadata = MessageMetadata(producer_name="p", sequence_id=sent, publish_time=int(time.time() * 1000))
            entry = encode_batch(metadata, items, BATCH)
            stream.send_nowait(wire.ClientFrame(id=1, publish=entry))
            sent += BATCH
            credit -= len(entry) + ENTRY_COST_BYTES
        for reply in await stream.receive():
            assert reply.WhichOneof("kind") in ("producer_opened", "receipt", "credit"), reply
            done += BATCH * (reply.WhichOneof("kind") == "receipt")
            credit += reply.producer_opened.credit + reply.credit
    stream.cancel()
    await channel.close()
    await asyncio.sleep(0.2)  # the loop ends with this call, and gRPC still has a word for it


def _receive(consumer: Any, messages: int) -> list[tuple[int, int]]:
    """All of them; the entries they are in."""
    found: dict[tuple[int, int], None] = {}
    for _ in range(messages):
        message = consumer.receive(60_000)
        found[message.entry.position] = None
    return list(found)


def _restarted(running: Any, acks: int) -> dict[str, Any]:
    import magnetar

    begin = time.perf_counter()
    start_s = running.start()
    with magnetar.Client(running.url) as client:
        at = time.perf_counter()
        consumer = client.subscribe(TOPIC, "s", receiver_queue_size=20_000)
        again = int(consumer.receive(60_000).message_id().batch_index() % 2 == 0)
        first_s, restart_s = time.perf_counter() - at, time.perf_counter() - begin
        for _ in range(acks - 1):
            again += consumer.receive(60_000).message_id().batch_index() % 2 == 0
    return {
        "start_s": start_s, "first_delivery_s": first_s, "restart_to_first_delivery_s": restart_s,
        "acknowledged_that_came_again": again,
    }  # fmt: skip


def single(acks: int) -> dict[str, float]:
    """Whole entries: parse, cursor, and the whole state as it is stored."""
    from pyroaring import BitMap

    from magnetar.broker.subscription.core.cursor import Cursor
    from magnetar.broker.subscription.core.cursor_state import CursorState
    from magnetar.broker.subscription.core.positions import CursorWritePlanner

    shape = _shape_of(2 * acks // LEDGER_ENTRIES)
    requests = [
        (number, BitMap(range(first + 1, min(first + 2 * GROUP, LEDGER_ENTRIES), 2)).serialize())
        for number in range(2 * acks // LEDGER_ENTRIES)
        for first in range(0, LEDGER_ENTRIES, 2 * GROUP)
    ]
    cursor, log = Cursor(shape, CursorState(shape.start_position)), CursorWritePlanner()
    begin = time.process_time()
    for count, (ledger_id, entries) in enumerate(requests):
        cursor.ack_entries_of_ledger(ledger_id, BitMap.deserialize(entries))
        if count % 1000 == 0:
            log.on_write_confirmed(log.plan_write(cursor, count + 1))
    write = log.plan_write(cursor, len(requests) + 1)
    seconds = time.process_time() - begin
    assert cursor.hole_entry_count == acks
    stored = sum(row.size_bytes for row in write.rows.values())
    return {
        "single_cpu_s": seconds, "single_memory_mb": cursor.memory_bytes / 1e6, "single_stored_mb": stored / 1e6,
    }  # fmt: skip


def patterns() -> dict[str, dict[str, float]]:
    """What the holes of twenty ledgers take in memory, acknowledged one by one: bytes a hole as they are then, and
    compressed, which is done before anything is held up (`Cursor.exceeds_memory`). `left`: compressed, for each entry
    between the holes that is not acknowledged. The budget is 64 MiB: so many of them are possible."""
    import random

    from magnetar.broker.subscription.core.cursor import Cursor
    from magnetar.broker.subscription.core.cursor_state import CursorState
    from magnetar.proto.names import Position

    rng, ledgers, found = random.Random(1), 20, dict[str, dict[str, float]]()
    shape = _shape_of(ledgers)
    for name, holes in (
        ("alternating", range(1, LEDGER_ENTRIES, 2)),
        ("a half by chance", sorted(rng.sample(range(1, LEDGER_ENTRIES), LEDGER_ENTRIES // 2))),
        ("1 of 16", range(1, LEDGER_ENTRIES, 16)),
        ("1 of 1000", range(1, LEDGER_ENTRIES, 1000)),
        ("1 of each ledger", (1,)),
        ("all but 1 of 10", [each for each in range(LEDGER_ENTRIES) if each % 10]),
        ("all but 1 of 1000", [each for each in range(LEDGER_ENTRIES) if each % 1000]),
        ("all but 1 of each ledger", range(1, LEDGER_ENTRIES)),
    ):
        cursor = Cursor(shape, CursorState(shape.start_position))
        for number in range(ledgers):
            for entry in holes:
                cursor.ack(Position(number, entry))
        loose, count = cursor.memory_bytes, cursor.hole_entry_count
        cursor.exceeds_memory(0)
        left = ledgers * LEDGER_ENTRIES - count
        found[name] = {
            "loose": loose / count, "compressed": cursor.memory_bytes / count, "left": cursor.memory_bytes / left,
            "holes_in_64_mib_m": count * (64 << 20) / cursor.memory_bytes / 1e6,
        }  # fmt: skip
    return found


def _shape_of(ledgers: int) -> LogShape:
    from magnetar.broker.log.log_shape_core import LedgerSpan, LogShape

    shape = LogShape()
    for number in range(ledgers):
        first = number * LEDGER_ENTRIES
        shape.add(LedgerSpan(number, first, LEDGER_ENTRIES - 1, first + LEDGER_ENTRIES))
    return shape
