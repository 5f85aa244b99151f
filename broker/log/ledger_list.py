"""The list of a topic's ledgers in the metadata: read by all, changed by the owner alone.

Rule (ledger protocol §3.1, invariants 27 and 35): every change is a compare-and-set against the list that this owner
wrote or read last, by content. When the node contains anything else, another broker owns the topic: TopicFenced. A
change of unknown outcome is read again and decided by content (metadata/update.py); when even that fails, the outcome
stays unknown: the caller must not serve, confirm or delete on the strength of it.

What has to be true of other records when the list changes is a part of the same commit (`together`): a ledger that it
names from then on is made there, one that it says to be closed is closed there. A crash leaves all of it or nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import msgspec

from ...metadata import paths
from ...metadata.records import DamagedRecord, TopicLedger, TopicRecord, decode, encode
from ...metadata.store import MetadataStore, Versioned
from ...metadata.update import Change, update_together
from ...proto.errors import DataLost, NotOwner, TopicNotFound
from ...proto.names import TopicName


class TopicFenced(NotOwner):
    """Another broker has taken the topic over; this one stops all work on it. (On the wire: NotOwner.)"""

    unwritten = True
    """Whether the refused change was certainly never written. False: an attempt of unknown outcome came before, and the
    new owner may have found it in the record: a ledger that it names stays."""


def path_of(topic: TopicName) -> str:
    return paths.topic(topic.tenant, topic.namespace, topic.stored_local)


def still_claimed(topic: TopicName, claim: str) -> Change:
    """Changes nothing: what is committed with it is of the owner with that claim. Its transform raises TopicFenced."""
    path = path_of(topic)

    def transform(node: Versioned | None) -> bytes | None:
        if node is None or decode(node.value, TopicRecord, path).claim != claim:
            raise TopicFenced(f"topic {topic} was taken over by another broker", topic=topic)
        return None

    return Change(path, transform)


class ManagedLedgerRecord:
    """The record of a topic's ledgers in the metadata, as it was read or written last."""

    def __init__(self, store: MetadataStore, topic: TopicName) -> None:
        self.store = store
        self.topic = topic
        self._path = path_of(topic)
        self.stored = b""
        self._unknown = b""  # what a change of unknown outcome wanted to write
        self.record = TopicRecord()

    async def read(self) -> TopicRecord:
        node = await self.store.get(self._path)
        if node is None:
            raise TopicNotFound(f"topic {self.topic} does not exist", topic=self.topic)
        try:
            self.record, self.stored = decode(node.value, TopicRecord, self._path), node.value
        except DamagedRecord as error:
            text = f"the record of topic {self.topic} is damaged: {error}; restore the metadata from a copy"
            raise DataLost(text, topic=self.topic) from error
        return self.record

    async def is_current(self) -> bool:
        """Whether the node still contains what was read or written last."""
        node = await self.store.get(self._path)
        return node is not None and node.value == self.stored

    async def change(
        self, ledgers: Sequence[TopicLedger], *, terminated: bool | None = None, together: Sequence[Change] = (),
        **fields: object,
    ) -> None:  # fmt: skip
        """Writes the list, and other `fields` of the record, and `together` other records in the same commit.
        TopicFenced: definitely another broker's; what a change of another record raises; other errors: unknown.
        """
        before = self.record
        after = msgspec.structs.replace(
            before, ledgers=tuple(ledgers), terminated=before.terminated if terminated is None else terminated, **fields
        )
        value = encode(after, self._path)
        ours = {self.stored, self._unknown, value}

        attempts = itertools.count()

        def transform(node: Versioned | None) -> bytes | None:
            first = next(attempts) == 0
            if node is None or node.value not in ours:
                fenced = TopicFenced(f"topic {self.topic} was taken over by another broker", topic=self.topic)
                fenced.unwritten = first
                raise fenced
            return value

        self._unknown = value
        await update_together(self.store, (*together, Change(self._path, transform)))
        self.record, self.stored, self._unknown = after, value, value
