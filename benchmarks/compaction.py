"""compact: how fast a topic is compacted, and what it costs in memory. The broker's compactor over a log in memory.

`value` is messages per second through both passes; `peak_mib` is what Python allocated beyond the log itself.
"""

from __future__ import annotations

import random
import time
import tracemalloc

from magnetar.broker.log.compaction_core import SurvivingMessageSearch, compact_entry, parse_entry
from magnetar.proto.entry import encode_batch, encode_broker_part, encode_item_prefix
from magnetar.proto.entry_pb2 import MessageMetadata, SingleMessageMetadata

from .harness import Options, Run

BATCH = 100
KEYS_MAX = (256 << 20) // 200
"""The broker's default: `compaction_memory_bytes` over 200 bytes a key."""


def _log(options: Options, messages: int, keys: int) -> list[tuple[int, int, bytes]]:
    rng, entries = random.Random(options.seed), list[tuple[int, int, bytes]]()
    payload = rng.randbytes(options.size)
    for first in range(0, messages, BATCH):
        metadata = MessageMetadata(producer_name="bench", sequence_id=first, publish_time=1)
        parts: list[bytes] = []
        for _ in range(BATCH):
            of = SingleMessageMetadata(payload_size=len(payload), partition_key=f"key-{rng.randrange(keys)}")
            parts += (encode_item_prefix(of), payload)
        entry = encode_broker_part(first + BATCH - 1, 1) + encode_batch(metadata, parts, BATCH)
        entries.append((first, BATCH, entry))
    return entries


def _compact(entries: list[tuple[int, int, bytes]]) -> tuple[float, int]:
    begin = time.perf_counter()
    survey = SurvivingMessageSearch(KEYS_MAX, salt=b"bench")
    while not survey.is_done:
        for first, count, entry in entries:
            survey.add_entry(first, count, parse_entry(entry))
        survey.finish_reading_round()
    for first, count, entry in entries:
        compact_entry(entry, first, count, survey.survivors)
    return time.perf_counter() - begin, len(survey.survivors)


def compact(options: Options) -> Run:
    messages = min(options.messages, 200_000) // BATCH * BATCH
    entries = _log(options, messages, keys=messages // 10)
    seconds, survivors = _compact(entries)
    tracemalloc.start()
    _compact(entries)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    detail = {"messages": messages, "survivors": survivors, "peak_mib": round(peak / (1 << 20), 1)}
    return Run(messages / seconds, detail=detail)
