"""Hashes of keys: the partition that a producer picks, and the slot that Key_Shared assigns.

    key_hash(key)        Murmur3 x86 32-bit, seed 0, of the key's UTF-8 bytes, masked with 0x7fffffff
    partition_of(key, n) key_hash(key) % n
    sticky_slot(key)     key_hash(key) % 65536, 1 in place of 0; of the ordering key if there is one, else of the key

The numbers are Pulsar's: a topic that clients of both write to keeps the order of each key, and a consumer that asks
for the slots of a key (Sticky) gets it. Pulsar's broker also takes modulo 65536 there, and where it halves ranges;
only on its ring, whose owners no client can foresee, it takes modulo 65535.
"""

from __future__ import annotations

import mmh3

STICKY_SLOTS = 65535
"""The last slot; the first one is 1."""


def key_hash(key: str | bytes) -> int:
    """Returns the hash of a key. Raises UnicodeEncodeError if the key has a lone surrogate, which would crash mmh3."""
    return mmh3.hash(key.encode() if isinstance(key, str) else key, 0, False) & 0x7FFFFFFF


def partition_of(key: str | bytes, partitions: int) -> int:
    assert partitions > 0, "a key needs at least one partition"
    return key_hash(key) % partitions


def sticky_slot(key: str | bytes) -> int:
    """Returns the slot of a key, 1 … 65535. Raises UnicodeEncodeError like `key_hash`."""
    return mmh3.hash(key.encode() if isinstance(key, str) else key, 0, False) & STICKY_SLOTS or 1
