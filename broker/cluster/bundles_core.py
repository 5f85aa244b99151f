"""Bundles: a namespace's topics by ranges of a hash, so that brokers own some hundreds of things and not 100,000.

A broker that is asked for a bundle without an owner takes it; in a group of brokers (`share_group`) the one that
`among` names takes it, so that clients which know one of them use them all.

The hash is CRC32 of the topic's full name (of the partition, where there are partitions). With n bundles, bundle i
holds the hashes i·2³²/n … (i+1)·2³²/n - 1, and is called "0x40000000_0x80000000" by its bounds, the upper one exclusive
but for the last, which is "0xffffffff" (Pulsar's names). The number of bundles is fixed when the namespace is made.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache
from zlib import crc32

from ...proto.names import TopicName

HASHES = 1 << 32
BUNDLES_MAX = 1 << 12


def bundle_of(topic: TopicName, bundles: int) -> str:
    """The name of the bundle that the topic is in."""
    return bundle_name(bundle_number(topic, bundles), bundles)


def bundle_number(topic: TopicName, bundles: int) -> int:
    return crc32(topic.full.encode()) * bundles // HASHES


def among(brokers: Collection[str], folder: str, number: int) -> str:
    """The broker that takes bundle `number` of a folder (a namespace): those that follow each other go to different
    brokers, and so does the first bundle of different folders. Brokers that know the same names find the same one.
    """
    ordered = sorted(brokers)
    return ordered[(crc32(folder.encode()) + number) % len(ordered)]


@lru_cache(maxsize=BUNDLES_MAX)
def bundle_name(number: int, bundles: int) -> str:
    assert 0 <= number < bundles <= BUNDLES_MAX, "a bundle number is within the namespace's bundles"
    low = -(-number * HASHES // bundles)
    high = -(-(number + 1) * HASHES // bundles)
    return f"0x{low:08x}_0x{min(high, HASHES - 1):08x}"
