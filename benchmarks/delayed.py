"""delayed: what delayed messages cost the broker, how soon it serves after a kill, and how late they come.

Metadata, one bookie and one broker are processes of their own. --messages messages of 100 bytes, an entry each as the
SDK makes them, due in one to three hours in no order, then NEAR, due at RATE a second. The value is the resident memory
of the broker when the first are stored; `detail` has what it was before, and the bookie's.

Then the broker is killed and, when its session has expired, started again: from the start of the process to the first
delivery of a message that became due meanwhile; and the lateness of those that are due at RATE a second, on the clock
of this machine, at a client that acknowledges each.
"""

from __future__ import annotations

import asyncio
import random
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from itertools import repeat
from pathlib import Path
from typing import Any

from .harness import Options, Run, Usage, measured, percentiles, progress

TOPIC = "persistent://public/default/delayed"
NEAR = 100_000
RATE = 10_000
PAYLOAD = b"x" * 100
LEAD_S = 30.0
"""From the kill to the first of those that are due at RATE: it includes the restart."""
SESSION_S = 2.0
IN_FLIGHT = 10_000
SHOWN = 500_000
"""Messages between two lines of progress."""
ONE_COPY = {f"MAGNETAR_BROKER_{name}": "1" for name in ("ENSEMBLE_SIZE", "WRITE_QUORUM", "ACK_QUORUM")}


def delayed(options: Options) -> Run:
    from magnetar.cli.common.processes import Processes

    run = Run(0.0)
    directory = Path(tempfile.mkdtemp(prefix="magnetar-bench-"))
    try:
        with Processes(directory) as processes:
            listen = ("--listen", "127.0.0.1:0")
            tree = processes.start("metadata", "metadata", *listen, "--data", str(directory / "metadata"))
            where = ("--metadata", tree.address, "--session-timeout", str(SESSION_S))
            bookie = processes.start("bookie", "bookie", *listen, *where, "--data", str(directory / "bookie"))
            bookie.wait_ready()
            broker = processes.start("broker", "broker", *listen, *where, environment=ONE_COPY)
            broker.wait_ready()
            asyncio.run(_measure(run, options, broker, bookie))
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return run


async def _measure(run: Run, options: Options, broker: Any, bookie: Any) -> None:
    """In one event loop: gRPC's threads outlive a loop that ends, and complain."""
    messages, rng = options.messages, random.Random(options.seed)
    await _fill(broker, [])
    before = Usage(broker.pid).read()["rss_mb"]
    with measured(run, server=broker.pid, bookie=bookie.pid):
        begin = time.perf_counter()
        hour = _now_ms() + 3_600_000
        await _fill(broker, (hour + rng.randrange(7_200_000) for _ in range(messages)))
        fill_s = time.perf_counter() - begin
    run.value = Usage(broker.pid).read()["rss_mb"]
    run.detail = {
        "messages": messages, "before_mb": before, "bookie_mb": Usage(bookie.pid).read()["rss_mb"],
        "messages_per_s": messages / fill_s,
    }  # fmt: skip
    first = _now_ms() + int(LEAD_S * 1000) + NEAR // 5
    await _fill(broker, (first + number * 1000 // RATE for number in range(NEAR)))
    await _fill(broker, [_now_ms() + 1000])
    broker.kill()
    await asyncio.sleep(SESSION_S + 1)
    begin = time.perf_counter()
    broker.start()
    await asyncio.to_thread(broker.wait_ready)
    run.detail["start_s"] = time.perf_counter() - begin
    first_s, lateness_s = await _receive(broker, NEAR + 1)
    run.detail["restart_to_first_due_s"] = first_s - begin
    run.detail["restarted_mb"] = Usage(broker.pid).read()["rss_mb"]
    run.latencies_ms = percentiles(lateness_s)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _stream(broker: Any) -> Any:
    from magnetar.runtime.network import Endpoint, find_rpc
    from magnetar.runtime.process import make_system_world

    channel = make_system_world(1).network.connect(Endpoint.parse(broker.address))
    return channel, channel.stream(find_rpc("Broker", "Connect"))


def _subscription(permits: int) -> list[Any]:
    from magnetar.proto import wire_pb2 as wire

    asked = wire.Subscribe(topic=TOPIC, subscription="s", durable=True, type=wire.Subscribe.SHARED)
    return [wire.ClientFrame(id=1, subscribe=asked), wire.ClientFrame(id=1, permits=permits)]


async def _fill(broker: Any, times: Iterable[int]) -> None:
    """One entry each, as the SDK makes them. A consumer is there: the index grows as they are stored."""
    from magnetar.proto import wire_pb2 as wire
    from magnetar.proto.entry import encode_entry
    from magnetar.proto.entry_pb2 import MessageMetadata

    consuming = _stream(broker)
    for request in _subscription(1000):
        consuming[1].send_nowait(request)
    await consuming[1].receive()
    channel, stream = _stream(broker)
    stream.send_nowait(wire.ClientFrame(id=1, open_producer=wire.OpenProducer(topic=TOPIC, producer_name="p")))
    await stream.receive()
    metadata = MessageMetadata(producer_name="p", publish_time=1)
    begin, sent, done = time.perf_counter(), 0, 0
    for at_ms in times:
        metadata.sequence_id, metadata.deliver_at_time = sent, at_ms
        stream.send_nowait(wire.ClientFrame(id=1, publish=encode_entry(metadata, PAYLOAD)))
        sent += 1
        while sent - done >= IN_FLIGHT:
            done += _receipts(await stream.receive())
        if sent % SHOWN == 0:
            rate, used = sent / (time.perf_counter() - begin), Usage(broker.pid).read()
            progress(f"delayed: {sent:,} messages, {rate:,.0f}/s, broker {used['rss_mb']} MB")
    while done < sent:
        done += _receipts(await stream.receive())
    for each, kept in ((stream, channel), (consuming[1], consuming[0])):
        await each.close()
        await kept.close()


def _receipts(replies: Iterable[Any]) -> int:
    kinds = [reply.WhichOneof("kind") for reply in replies]
    assert set(kinds) <= {"receipt", "credit"}, kinds
    return kinds.count("receipt")


async def _receive(broker: Any, count: int) -> tuple[float, list[float]]:
    """When the first came, and how late the others did."""
    from magnetar.proto import wire_pb2 as wire
    from magnetar.proto.entry import parse_header

    channel, stream = _stream(broker)
    for request in _subscription(50_000):
        stream.send_nowait(request)
    first, lateness = 0.0, list[float]()
    while len(lateness) < count:
        replies = await stream.receive()
        acked, now_ms = [], time.time_ns() / 1e6
        for ledger_id, entry_id, entry in _entries(replies):
            first = first or time.perf_counter()
            lateness.append((now_ms - parse_header(entry, verify=False).metadata.deliver_at_time) / 1000)
            acked.append(wire.AckedEntry(ledger_id=ledger_id, entry_id=entry_id))
        if acked:
            stream.send_nowait(wire.ClientFrame(id=1, ack=wire.Ack(kind=wire.Ack.INDIVIDUAL, entries=acked)))
            stream.send_nowait(wire.ClientFrame(id=1, permits=len(acked)))
    await stream.close()
    await channel.close()
    assert min(lateness) >= 0, "one came early"
    return first, lateness[1:]


def _entries(replies: Iterable[Any]) -> Iterator[tuple[int, int, bytes]]:
    """What is delivered, alone or together: ledger, entry, bytes."""
    for reply in replies:
        if reply.WhichOneof("kind") == "delivery":
            yield reply.delivery.ledger_id, reply.delivery.entry_id, reply.delivery.entry
        elif reply.WhichOneof("kind") == "deliveries":
            many = reply.deliveries
            yield from zip(repeat(many.ledger_id), many.entry_ids, many.entries, strict=False)
