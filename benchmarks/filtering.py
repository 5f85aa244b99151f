"""filter: one message of WANTED_EVERY is wanted; the broker filters, or the program drops the rest itself.

Backlogs of messages of --size bytes, with a property of 100 values, are stored first: `uniform`, batches of messages
with equal values (by key); `summarized`, the same with `filter_properties`; `indexed`, `uniform` in a sealed ledger
with a key index; `mixed`, batches in which each value is; `alone`, an entry each. Two subscriptions take
turns on each: one with a filter, which the broker applies, and one whose consumer receives everything and looks at the
property, as a program does without filters. The value is how many times more messages a second the first passes over,
in uniform batches. `detail` has for each kind: messages a second, bytes of entries that the consumer is sent and
processor time of server (broker and bookie) and client, all for each stored message; and `judge_us`, the broker's
judging of a message alone.
"""

from __future__ import annotations

import time
from statistics import median
from typing import Any

from .harness import Options, Run, Usage, measured, server
from .messaging import PENDING, payloads

WANTED_EVERY = 100
WANTED = "\"group\" = '7'"
MESSAGES_MAX = 400_000
ALONE_MESSAGES = 50_000
"""Of entries with one message each, which are slower to publish."""
UNIFORM = ("uniform", "summarized", "indexed")
INDEXED_S = 60
ROUNDS = 3
JUDGED = 20_000
"""Messages that are judged without a server."""


def filter(options: Options) -> Run:
    """How many times faster a filter at the broker passes over a backlog than one in the program."""
    import magnetar

    batched = min(MESSAGES_MAX, options.messages) if not options.rehearses else 2000
    counts = dict.fromkeys((*UNIFORM, "mixed"), batched) | {"alone": min(ALONE_MESSAGES, batched)}
    run, found = Run(0.0), dict[str, list[float]]()
    with server(options.bookies) as running, magnetar.Client(running.url) as client:
        for kind, count in counts.items():
            _publish(client, kind, count, options)
        _index(running.url, f"filter-{UNIFORM[-1]}")
        with measured(run, server=running.pid):
            for _ in range(1 if options.rehearses else ROUNDS):
                for kind, count in counts.items():
                    for by in ("broker", "program"):
                        for name, value in _drain(client, running.url, running.pid, kind, by, count).items():
                            found.setdefault(f"{kind}_{by}_{name}", []).append(value)
    detail = {name: round(median(each), 3) for name, each in found.items()}
    ratios = {kind: detail[f"{kind}_broker_per_s"] / detail[f"{kind}_program_per_s"] for kind in counts}
    run.value = ratios["uniform"]
    run.detail = {
        "messages": counts, "ratio": {kind: round(each, 2) for kind, each in ratios.items()},
        "judge_us": _judge(options), **detail,
    }  # fmt: skip
    return run


def _publish(client: Any, kind: str, count: int, options: Options) -> None:
    from magnetar import BatchingType

    contents = payloads(options.size, options.seed)
    producer = client.create_producer(
        f"filter-{kind}", batching_enabled=kind != "alone", block_if_queue_full=True, max_pending_messages=PENDING,
        batching_type=BatchingType.KeyBased if kind in UNIFORM else BatchingType.Default,
        batching_max_publish_delay_ms=1000 if kind in UNIFORM else 10,
        filter_properties=("group",) if kind == "summarized" else (),
    )  # fmt: skip
    for number in range(count):
        group = str(number % WANTED_EVERY)
        producer.send_async(
            contents[number % len(contents)], None, properties={"group": group}, partition_key=group
        )  # fmt: skip
    producer.flush()
    producer.close()


def _index(url: str, topic: str) -> None:
    """Seals the ledger of a topic, and waits until it has a key index."""
    import magnetar
    from magnetar.proto.policies import Policies

    with magnetar.admin.Admin(url) as admin:
        admin.set_topic_policies(topic, Policies(key_index="keys+properties"))
        admin.unload_topic(topic)
        end = time.monotonic() + INDEXED_S
        while not all(each.key_index for each in admin.topic_internal_stats(topic).ledgers if each.state != "OPEN"):
            if time.monotonic() > end:
                raise TimeoutError(f"{topic} has no key index after {INDEXED_S} s")
            time.sleep(0.2)


def _drain(client: Any, url: str, pid: int, kind: str, by: str, count: int) -> dict[str, float]:
    """Receives what is wanted of a topic from its beginning."""
    import magnetar

    topic, name = f"filter-{kind}", f"s-{time.perf_counter_ns()}"
    usage, own, begin = Usage(pid, tree=True), time.process_time(), time.perf_counter()
    consumer = client.subscribe(
        topic, name, initial_position=magnetar.InitialPosition.Earliest, filter=WANTED if by == "broker" else None
    )
    left = len(range(7, count, WANTED_EVERY))
    while left:
        message = consumer.receive(60_000)
        left -= message.properties()["group"] == "7"
        consumer.acknowledge(message)
    seconds, own, spent = time.perf_counter() - begin, time.process_time() - own, usage.read()
    with magnetar.admin.Admin(url) as admin:
        (stats,) = [each for each in admin.topic_stats(topic).subscriptions if each.name == name]
    consumer.unsubscribe()
    return {
        "per_s": count / seconds, "sent_bytes": sum(each.delivered_bytes for each in stats.consumers) / count,
        "server_us": spent["cpu_s"] / count * 1e6, "client_us": own / count * 1e6,
    }  # fmt: skip


def _judge(options: Options) -> dict[str, float]:
    """Microseconds in which the broker judges a message: of a batch whose heads repeat, of one where each head is its
    own (a property that no two messages share), and of an entry of one message."""
    from magnetar.proto.entry import encode_batch, encode_entry, encode_item_prefix, parse_stored_head
    from magnetar.proto.entry_filter import EntryFilter
    from magnetar.proto.entry_pb2 import KeyValue, MessageMetadata, SingleMessageMetadata
    from magnetar.proto.filters import parse_filter

    payload, size = payloads(options.size, options.seed)[0], 100

    def fill(about: Any, number: int, *, differs: bool = False) -> Any:
        about.properties.append(KeyValue(key="group", value=str(number % WANTED_EVERY)))
        if differs:
            about.properties.append(KeyValue(key="id", value=str(number)))
        return about

    def batch(begin: int, *, differs: bool) -> bytes:
        heads = [
            fill(SingleMessageMetadata(payload_size=len(payload)), number, differs=differs)
            for number in range(begin, begin + size)
        ]
        metadata = MessageMetadata(producer_name="p", sequence_id=1, publish_time=1)
        return bytes(encode_batch(metadata, [encode_item_prefix(head) + payload for head in heads], size))

    entries = {
        "repeated": [batch(number, differs=False) for number in range(0, JUDGED, size)],
        "differing": [batch(number, differs=True) for number in range(0, JUDGED, size)],
        "alone": [
            encode_entry(fill(MessageMetadata(producer_name="p", sequence_id=1, publish_time=1), number), payload)
            for number in range(JUDGED)
        ],
    }
    found: dict[str, float] = {}
    for kind, several in entries.items():
        judge, begin = EntryFilter(parse_filter(WANTED)), time.process_time()
        unwanted = sum(judge.find_unwanted_bits(parse_stored_head(each), each).bit_count() for each in several)
        found[kind] = round((time.process_time() - begin) / JUDGED * 1e6, 3)
        assert unwanted == JUDGED - JUDGED // WANTED_EVERY, f"{kind}: {unwanted}"
    return found
