"""Defects of what is passed over unread: summaries of entries and key indexes of ledgers; and of what fires."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from magnetar.broker.log import key_index_core
from magnetar.broker.log.key_index_core import KeyIndex, KeyIndexBuilder
from magnetar.broker.log.key_indexes import KeyIndexes
from magnetar.broker.log.managed_ledger import ManagedLedger
from magnetar.broker.session import schedules
from magnetar.broker.session.schedules import ScheduleRunner
from magnetar.broker.subscription.expiry import MessageExpirer
from magnetar.broker.subscription.filtering import SubscriptionFilter, UnreadRun, UnreadRunsOfLedger
from magnetar.ledger import LedgerWriter
from magnetar.metadata.records import KeyIndexLocation, SchedulesRecord
from magnetar.metadata.store import CheckNodeVersion, get_record
from magnetar.proto import entry_filter, summary
from magnetar.proto.entry_filter import EntryFilter
from magnetar.proto.filters import Compare, FilterNode
from magnetar.proto.names import Position
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

    def find_false(node: FilterNode, evidence: Any) -> Any:
        if isinstance(node, Compare) and node.operator == "=" and isinstance(evidence, summary.EntrySummary):
            return not summary._find_equal(node.left, node.right, evidence)
        return honest(node, evidence)

    put(stack, summary, "_find_false", find_false)


def index_outlives_its_ledger(stack: Stack) -> None:
    """M29b: trimming forgets the key index of a ledger, and leaves it on the bookies."""

    async def remove_ledgers(self: ManagedLedger, gone: list[int]) -> None:
        await self.listed.change_record([each for each in self.listed.record.ledgers if each.ledger_id not in gone])
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


def summary_knows_tombstones(stack: Stack) -> None:
    """M06e: who reads the compacted form does not get tombstones in a batch that its summary excludes."""
    honest = EntryFilter.excludes

    def excludes(self: EntryFilter, metadata: Any) -> bool:
        return honest(EntryFilter(self.filter), metadata)

    put(stack, EntryFilter, "excludes", excludes)


def index_knows_each_chunk(stack: Stack) -> None:
    """M06f: a filter passes over what an index cannot know: encrypted batches, and the publish times of chunks."""
    honest = KeyIndex.find_candidates

    def find(self: KeyIndex, expression: FilterNode, postings: Any, *, hidden: bool = False) -> Any:
        return honest(self, expression, postings)

    put(stack, KeyIndex, "find_candidates", find)


def unread_is_not_stable(stack: Stack) -> None:
    """M06g: what is passed over unread does not end at the last stable position."""
    honest = SubscriptionFilter.ack_excluded_unread_entries

    class Unbounded:
        def __init__(self, shape: Any) -> None:
            self._shape = shape
            self.stable_position = shape.last_confirmed

        def __getattr__(self, name: str) -> Any:
            return getattr(self._shape, name)

    def pass_over(self: SubscriptionFilter, log: Any, position: Position) -> int | None:
        return honest(self, SimpleNamespace(shape=Unbounded(log.shape), is_compacted=log.is_compacted), position)

    put(stack, SubscriptionFilter, "ack_excluded_unread_entries", pass_over)


def run_is_an_entry_too_long(stack: Stack) -> None:
    """M06h: the run of entries that are not read has the first entry of the next block, too."""
    honest = UnreadRunsOfLedger.find_run

    def find(self: UnreadRunsOfLedger, entry_id: int) -> UnreadRun:
        found = honest(self, entry_id)
        return found._replace(last=min(found.last + 1, self._last_entry)) if found.is_excluded else found

    put(stack, UnreadRunsOfLedger, "find_run", find)


def first_property_counts(stack: Stack) -> None:
    """M06i: of a property that a message has twice the filter sees the first one."""
    honest = entry_filter.read_leading_properties

    def read(head: bytes, at: int, names: Mapping[bytes, str], found: dict[str, str]) -> int:
        class First(dict[str, str]):
            def __setitem__(self, name: str, value: str) -> None:
                found.setdefault(name, value)

        return honest(head, at, names, First())

    put(stack, entry_filter, "read_leading_properties", read)


def each_judge_leaves_a_rest(stack: Stack) -> None:
    """M06j: a batch of expired and unwanted messages is shown whole to who acknowledges whole entries."""
    put(stack, MessageExpirer, "_find_unwanted_rest", lambda self, entry, bits: 0)


def deleted_schedule_is_new(stack: Stack) -> None:
    """M06k: a broker that has not seen the end of a schedule begins it anew, as its progress is gone."""

    async def check(self: ScheduleRunner, known: Any) -> CheckNodeVersion:
        path = schedules._path(known.topic)
        found = await get_record(self._broker.metadata, path, SchedulesRecord)
        assert found is not None, "deleting a schedule leaves the record of its topic's"
        return CheckNodeVersion(path, found[1])

    put(stack, ScheduleRunner, "_make_existence_check", check)
