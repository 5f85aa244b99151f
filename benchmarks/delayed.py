"""delayed: what delayed messages cost the broker, how soon it serves after a kill, and how late they come.

--messages of them, an entry each, due in one to three hours in no order; then NEAR, due at 10,000 a second.
The value is the resident memory of the whole server (broker, bookie and metadata in one process) when all are stored.
Then it is killed and started again: from its start to the first delivery of a message that became due meanwhile; and
the lateness of those that are due at 10,000 a second, on the clock of this machine, at a client that acknowledges each.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterable
from typing import Any

from .harness import Options, Run, Usage, measured, percentiles, progress, server

TOPIC = "persistent://public/default/delayed"
NEAR = 100_000
RATE = 10_000
PAYLOAD = b"x" * 100
LEAD_S = 20.0
"""From the kill to the first of those that are due at RATE: the restart lies between."""


def delayed(options: Options) -> Run:
    run = Run(0.0)
    messages = options.messages
    with server(options.bookies) as running:
        before = Usage(running.pid).read()["rss_mb"]
        rng = random.Random(options.seed)
        with measured(run, server=running.pid):
            begin = time.perf_counter()
            hour = _now_ms() + 3_600_000
            far = (hour + rng.randrange(7_200_000) for _ in range(messages))
            asyncio.run(_fill(running.url, far))
            fill_s = time.perf_counter() - begin
        progress(f"delayed: {messages:,} messages are there")
        run.value = Usage(running.pid).read()["rss_mb"]
        run.detail = {"messages": messages, "grown_mb": run.value - before, "messages_per_s": messages / fill_s}
        first = _now_ms() + int(LEAD_S * 1000) + NEAR // 5
        asyncio.run(_fill(running.url, (first + number * 1000 // RATE for number in range(NEAR))))
        asyncio.run(_fill(running.url, [_now_ms() + 1000]))
        running.kill()
        time.sleep(1.0)
        begin = time.perf_counter()
        run.detail["start_s"] = running.start()
        first_s, lateness_s = asyncio.run(_receive(running.url, NEAR + 1))
        run.detail["restart_to_first_due_s"] = first_s - begin
        run.latencies_ms = percentiles(lateness_s)
    return run


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _stream(url: str, method: str) -> Any:
    from magnetar.runtime.network import Endpoint, rpc
    from magnetar.runtime.process import real_world

    channel = real_world(1).network.connect(Endpoint.parse(url.removeprefix("magnetar://")))
    return channel, channel.stream(rpc("Broker", method))


def _subscription(permits: int) -> list[Any]:
    from magnetar.proto import wire_pb2 as wire

    asked = wire.Subscribe(topic=TOPIC, subscription="s", durable=True, type=wire.Subscribe.SHARED)
    return [wire.ConsumeRequest(subscribe=asked), wire.ConsumeRequest(permits=permits)]


async def _fill(url: str, times: Iterable[int]) -> None:
    """One entry each, as the SDK makes them. A consumer is there: the index grows as they are stored."""
    from magnetar.proto import wire_pb2 as wire
    from magnetar.proto.entry import encode_entry
    from magnetar.proto.entry_pb2 import MessageMetadata

    consuming = _stream(url, "Consume")
    for request in _subscription(1000):
        consuming[1].send_nowait(request)
    await consuming[1].receive()
    channel, stream = _stream(url, "Produce")
    stream.send_nowait(wire.ProduceRequest(open=wire.OpenProducer(topic=TOPIC, producer_name="p")))
    sent = done = 0
    left = iter(times)
    more = True
    while more or done < sent:
        while more and sent - done < 5000:
            at_ms = next(left, None)
            if at_ms is None:
                more = False
                break
            metadata = MessageMetadata(producer_name="p", sequence_id=sent, publish_time=1, deliver_at_time=at_ms)
            stream.send_nowait(wire.ProduceRequest(publish=encode_entry(metadata, PAYLOAD)))
            sent += 1
        if done < sent:
            for reply in await stream.receive():
                assert reply.WhichOneof("kind") in ("opened", "receipt"), reply
                done += reply.WhichOneof("kind") == "receipt"
    for each, kept in ((stream, channel), (consuming[1], consuming[0])):
        each.cancel()
        await kept.close()


async def _receive(url: str, count: int) -> tuple[float, list[float]]:
    """When the first came, and how late the others did."""
    from magnetar.proto import wire_pb2 as wire
    from magnetar.proto.entry import parse_header

    channel, stream = _stream(url, "Consume")
    for request in _subscription(50_000):
        stream.send_nowait(request)
    first, lateness = 0.0, list[float]()
    while len(lateness) < count:
        acked = []
        for item in await stream.receive():
            if item.WhichOneof("kind") != "delivery":
                continue
            now_ms = time.time_ns() / 1e6
            delivery = item.delivery
            first = first or time.perf_counter()
            lateness.append((now_ms - parse_header(delivery.entry, verify=False).metadata.deliver_at_time) / 1000)
            acked.append(wire.AckedEntry(ledger_id=delivery.ledger_id, entry_id=delivery.entry_id))
        if acked:
            stream.send_nowait(wire.ConsumeRequest(ack=wire.Ack(kind=wire.Ack.INDIVIDUAL, entries=acked)))
            stream.send_nowait(wire.ConsumeRequest(permits=len(acked)))
    stream.cancel()
    await channel.close()
    assert min(lateness) >= 0, "one came early"
    return first, lateness[1:]
