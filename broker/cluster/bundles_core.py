"""Bundles: ranges of a hash over a namespace's topics, so that brokers own some hundreds of bundles and not 100,000
topics.

The hash is CRC32 of the topic's full name (of the partition, where there are partitions). With n bundles, bundle i
holds the hashes i·2³²/n … (i+1)·2³²/n - 1, and is called "0x40000000_0x80000000" by its bounds. The upper bound is
exclusive, except the last one, "0xffffffff" (Pulsar's names). The number of bundles is fixed when the namespace is
made."""

from __future__ import annotations

from functools import lru_cache
from zlib import crc32

from ...proto.names import TopicName

HASHES = 1 << 32
BUNDLES_MAX = 1 << 12


def bundle_name_of_topic(topic: TopicName, bundles: int) -> str:
    """Returns the name of the bundle to which the topic belongs, in a namespace with `bundles` bundles."""
    return bundle_name(bundle_number(topic, bundles), bundles)


def bundle_number(topic: TopicName, bundles: int) -> int:
    return crc32(topic.full.encode()) * bundles // HASHES


@lru_cache(maxsize=BUNDLES_MAX)
def bundle_name(number: int, bundles: int) -> str:
    assert 0 <= number < bundles <= BUNDLES_MAX, "a bundle number is within the namespace's bundles"
    low = -(-number * HASHES // bundles)
    high = -(-(number + 1) * HASHES // bundles)
    return f"0x{low:08x}_0x{min(high, HASHES - 1):08x}"
