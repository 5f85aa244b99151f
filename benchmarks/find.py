"""find: how long a search for one key takes in a topic of --gib GiB whose ledgers have a key index.

Messages of --size bytes, each with a key of its own, are published in batches; the topic is unloaded, so that its last
ledger is sealed, and the broker builds the indexes. `value` is the median of the searches for single keys at random
places, in seconds, each to its end: the whole topic is covered. In the detail: the slowest, a search for a key that is
not there, what a search reads, how long the broker built, bytes of an index for a message, and how long the same search
reads without the policy, up to the first of its bounds (64 MiB), with what share of the topic that is.
"""

from __future__ import annotations

import random
import statistics
import time
from typing import Any

from msgspec import structs

from .harness import Options, Run, measured, percentiles, progress, server

TOPIC = "persistent://public/default/bench"
SEARCHES = 40
BUILD_S_MAX = 3600


def find(options: Options) -> Run:
    """Seconds of a search for one key."""
    from magnetar.client.admin import Admin
    from magnetar.proto.policies import Policies

    gib = float(options.extra.get("gib", 1))
    size = 1 << 26 if options.rehearses else int(gib * (1 << 30))
    messages = size // options.size
    with server(options.bookies) as running, Admin(running.url) as admin:
        kept = Policies(unsubscribed_minutes=-1, unsubscribed_mib=-1)
        admin.create_topic(TOPIC)
        admin.set_topic_policies(TOPIC, kept)
        published_s = _publish(running.url, messages, options)
        admin.set_topic_policies(TOPIC, structs.replace(kept, key_index="keys"))
        run = Run(0.0)
        with measured(run, server=running.pid):
            built_s = _wait_built(admin)
        rng, samples, reads = random.Random(options.seed), list[float](), list[int]()
        for each in [*(rng.randrange(messages) for _ in range(SEARCHES)), -1]:
            begin = time.perf_counter()
            found = admin.find_messages(TOPIC, key=f"order-{each}")
            samples.append(time.perf_counter() - begin)
            reads.append(found.bytes)
            assert {one.key for one in found.messages} == ({f"order-{each}"} if each >= 0 else set()), (each, found)
            assert not found.before_index, found.why
            assert not found.unindexed_ledgers
        ledgers = admin.topic_internal_stats(TOPIC).ledgers
        admin.set_topic_policies(TOPIC, structs.replace(kept, key_index="off"))
        unindexed_s, looked_at = _search_unindexed(admin)
        run.value, run.latencies_ms = statistics.median(samples[:-1]), percentiles(samples[:-1])
        run.detail = {
            "gib": round(sum(each.bytes for each in ledgers) / (1 << 30), 2), "messages": messages,
            "ledgers": len(ledgers), "slowest_s": round(max(samples), 3), "missing_key_s": round(samples[-1], 3),
            "read_mib": round(statistics.median(reads) / (1 << 20), 2), "missing_key_read_mib": round(
                reads[-1] / (1 << 20), 2
            ), "published_s": round(published_s, 1), "built_s": round(built_s, 1),
            "unindexed_s": round(unindexed_s, 3), "unindexed_share": round(looked_at / messages, 4),
        }  # fmt: skip
        return run


def _publish(url: str, messages: int, options: Options) -> float:
    import magnetar

    rng = random.Random(options.seed)
    payloads = [rng.randbytes(options.size) for _ in range(64)]
    begin = time.perf_counter()
    with magnetar.Client(url) as client:
        producer = client.create_producer(
            TOPIC, batching_enabled=True, block_if_queue_full=True, max_pending_messages=20_000, send_timeout_millis=0
        )
        for number in range(messages):
            producer.send_async(payloads[number & 63], None, partition_key=f"order-{number}")
            if number % 1_000_000 == 0:
                progress(f"{number:,} of {messages:,} messages published")
        producer.flush()
    return time.perf_counter() - begin


def _wait_built(admin: Any) -> float:
    begin = time.perf_counter()
    admin.unload_topic(TOPIC)
    while True:
        stats = admin.topic_stats(TOPIC)
        if stats.key_index == "keys" and not stats.unindexed_ledgers:
            return time.perf_counter() - begin
        assert time.perf_counter() - begin < BUILD_S_MAX, "the broker builds its indexes"
        time.sleep(0.2)


def _search_unindexed(admin: Any) -> tuple[float, int]:
    """Seconds of a search without an index up to its first bound, and the messages that it looked at."""
    while admin.topic_stats(TOPIC).key_index != "off":
        time.sleep(0.05)
    begin = time.perf_counter()
    found = admin.find_messages(TOPIC, key="order--1")
    return time.perf_counter() - begin, found.looked_at
