"""Defects of what is passed over unread: summaries of entries and key indexes of ledgers."""

from __future__ import annotations

from typing import Any

from magnetar.broker.log import key_index_core
from magnetar.broker.log.key_index_core import KeyIndexBuilder
from magnetar.broker.log.key_indexes import KeyIndexes
from magnetar.broker.log.managed_ledger import ManagedLedger
from magnetar.ledger import LedgerWriter
from magnetar.metadata.records import KeyIndexLocation
from magnetar.proto import summary
from magnetar.proto.filters import Compare, Node
from tests.mutants.ledgers import Stack, put


def damaged_index_is_believed(stack: Stack) -> None:
    """M06b: a page of a key index is read as it is, whatever its checksum says."""
    put(stack, key_index_core, "_decode", lambda entry, kind, where: bytes(entry[key_index_core._HEAD.size :]))


def unparsed_entry_has_nothing(stack: Stack) -> None:
    """M06c: an entry that does not parse is indexed as one without messages."""
    put(stack, key_index_core, "_UNREADABLE", key_index_core._UNREADABLE._replace(flags=0))


def hash_proves_a_value(stack: Stack) -> None:
    """M06d: a value whose hash is in a summary is the only one there: what is not equal to it is passed over."""
    honest = summary._find_false

    def find_false(node: Node, evidence: Any) -> Any:
        if isinstance(node, Compare) and node.operator == "=" and isinstance(evidence, summary.EntrySummary):
            return not summary._find_equal(node.left, node.right, evidence)
        return honest(node, evidence)

    put(stack, summary, "_find_false", find_false)


def index_outlives_its_ledger(stack: Stack) -> None:
    """M29b: trimming forgets the key index of a ledger, and leaves it on the bookies."""

    async def remove_ledgers(self: ManagedLedger, gone: list[int]) -> None:
        await self.listed.change([each for each in self.listed.record.ledgers if each.ledger_id not in gone])
        self._discard_ledgers(gone)
        await self.delete_ledgers(gone)

    put(stack, ManagedLedger, "remove_ledgers", remove_ledgers)


def index_is_named_when_it_begins(stack: Stack) -> None:
    """M29c: the topic's record names a key index before it is whole."""
    honest = KeyIndexes._copy

    async def copy(
        self: KeyIndexes, span: Any, reader: Any, builder: KeyIndexBuilder, writer: LedgerWriter, turns: Any
    ) -> None:
        await self._name(KeyIndexLocation(span.ledger_id, writer.ledger_id, builder.with_properties))
        await honest(self, span, reader, builder, writer, turns)

    put(stack, KeyIndexes, "_copy", copy)
