"""The other brokers and bookies: their registries, read on demand."""

from __future__ import annotations

from typing import TypeVar

from ...metadata import paths
from ...metadata.records import BookieRecord, BrokerRecord, Record
from ...metadata.store import MetadataStore
from ...metadata.unreadable import readable

R = TypeVar("R", bound=Record)


async def brokers(store: MetadataStore) -> list[BrokerRecord]:
    return await _all(store, paths.BROKERS, BrokerRecord)


async def bookies(store: MetadataStore) -> list[BookieRecord]:
    return await _all(store, paths.BOOKIES, BookieRecord)


async def _all(store: MetadataStore, prefix: str, cls: type[R]) -> list[R]:
    """Returns all records under the prefix, without those that are deleted during the read or cannot be parsed."""
    found = [await readable(store, f"{prefix}/{segment}", cls) for segment in await store.children(prefix)]
    return [each[0] for each in found if each is not None]
