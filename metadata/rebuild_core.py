"""The tree of a cluster whose metadata is lost, made again from what its stopped bookies hold.

    holdings  what one bookie has: its cookie, its tombstones, and of each ledger the key, the entries and the label
              (bookie/holdings.py reads them from the directory of a stopped bookie)
    plan      `plan_rebuild(holdings of all bookies)`: the records of the new tree, /cluster last, and what is not in it

**What comes back**: the instance of the cluster, so that no other metadata is taken for this one; the cookies, so that
the bookies start; tenants, namespaces and topics, with policies that delete nothing (KEEP_ALL); the list of ledgers of
each topic, all of them IN_RECOVERY, so that the first broker that opens the topic fences them, finds their ends and
closes them; cursors and outcomes of transactions that are in a ledger, and the ledgers of transaction coordinators; the
counter of ledger ids, far above each id that any bookie has seen. **What does not**: what was in the metadata alone
(policies, permissions, schemas, schedules, a subscription whose small state was in its record), and what is made again
(compacted ledgers, key indexes, buckets of delayed messages, snapshots of deduplication). `LeftOut` says it for each
ledger that is here.

**Order of a topic's ledgers**: by id. A new ledger of a topic always has an id above all in the list
(broker/log/managed_ledger.py). The index of a ledger's first message is in its label; for a ledger of an earlier
version it is that of its lowest entry. Walking back from the newest ledger the indexes fall; where they do not, an
earlier topic of the same name ends.

**A deleted topic or ledger does not come back** when one bookie has its tombstone, or its label marked as deleted: each
pass of the garbage collector marks what was deleted since the pass before. What was deleted after the last pass of all
its bookies does come back: the bookies do not know of the deletion. No record of a deletion is written, so no bookie
deletes what is left out; an operator gives it up later (`magnetar bookies gc --now --force`).

**Ensembles** (`reconstruct_fragments`). Invariant: each entry that a bookie here holds has in its write set as many of
its holders as it had room for, min(write quorum, holders). So a reader finds every entry that is left, recovery asks
who has it, and auto-recovery copies only what misses copies. Slots of which no bookie here holds anything get the
bookie that a label names: one that is away keeps its slot, and does not answer, which is no vote to end a ledger.
Guarded by tests/metadata/test_rebuild_core.py.
"""

from __future__ import annotations

import enum
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import msgspec

from ..proto.errors import InvalidName, InvalidRequest
from ..proto.names import TopicName, parse_number
from ..proto.policies import Policies
from . import paths
from .records import (
    CLUSTER_FORMAT,
    IN_RECOVERY,
    ClusterRecord,
    CookieRecord,
    CoordinatorRecord,
    CounterRecord,
    CursorRecord,
    Fragment,
    LedgerLabel,
    LedgerRecord,
    MetadataRecord,
    NamespaceRecord,
    PartitionedRecord,
    PoliciesRecord,
    TenantRecord,
    TopicLedger,
    TopicRecord,
    TransactionOutcomesLocation,
    TransactionsRecord,
)

FRAGMENTS_MAX = 1000
"""A ledger that would need more fragments gets fewer, in which each entry has at least one of its holders: the record
must fit into a node."""
EXACT_SLOTS_MAX = 8
"""In larger ensembles slots are given out one after the other, to who holds most, without trying all ways."""
IDS_SKIPPED = 1 << 20
"""Ledger ids left free above the largest that a bookie has seen: a bookie that was not read may have later ones."""
COORDINATORS_MIN = 16
"""The number of transaction coordinators, unless the ledger of a higher one is found: the default of
`transaction_coordinators`. Ids name their coordinator, so another number than before does no harm."""
EPOCH_BEGINS_MS = 1_767_225_600_000
"""The start of 2026. An epoch of a rebuilt coordinator is the minutes since: above each epoch that was used, as long as
coordinators are not taken over once a minute for years, and below the largest epoch until 2041."""

KEEP_ALL = Policies(
    retention_minutes=-1, retention_mib=-1, unsubscribed_minutes=-1, unsubscribed_mib=-1, message_ttl_s=0,
    backlog_quota_bytes=0, backlog_quota_s=0, inactive_s=0, subscription_expiration_s=0,
)  # fmt: skip
"""The policies of a rebuilt namespace: by the defaults of a broker, messages that other policies had kept would be
deleted at once. They hold until an operator sets others."""

# ------------------------------------------------------------------------------------------------------ holdings


class HeldRun(NamedTuple):
    """A run of entries that a bookie holds: `first`, `first + stride`, … up to `last`."""

    first: int
    last: int
    stride: int = 1


class HeldLedger(msgspec.Struct, frozen=True, kw_only=True):
    """What a bookie has of a ledger. `key`: the master key, empty if it is lost. `runs`: the entries that it holds.
    `label`: None if it has none. `first_index`: the index of the first message in the lowest of these entries; -1: not
    known."""

    ledger_id: int
    key: bytes
    runs: tuple[HeldRun, ...] = ()
    label: LedgerLabel | None = None
    first_index: int = -1


class BookieHoldings(msgspec.Struct, frozen=True, kw_only=True):
    """What one stopped bookie has. `bookie`: its uuid; `instance`: the id of its cluster; `place`: the name of its data
    directory, `starts`: its completed starts, `journal` and `offset`: a position up to which its journal is synced;
    `seen_ledger`: the largest ledger id that it ever saw given out. `damages`: what could not be read, as texts."""

    bookie: str
    instance: str
    place: str
    starts: int
    journal: int = 0
    offset: int = 0
    seen_ledger: int = -1
    ledgers: tuple[HeldLedger, ...] = ()
    tombstones: tuple[tuple[int, int], ...] = ()
    damages: tuple[str, ...] = ()


# --------------------------------------------------------------------------------------------------------- plans


class LeftOut(enum.Enum):
    """Why a ledger that a bookie holds is in no record of the new tree. Its data stays on the bookies."""

    DELETED = "it was deleted: a bookie has noted that"
    NO_LABEL = "no bookie has its label: not one that was read has met it since labels are written"
    NO_KEY = "its key is lost, or bookies have different ones"
    BAD_NAME = "its label names no topic"
    EMPTY = "it has no entry"
    EARLIER_TOPIC = "it belongs to an earlier topic of that name"
    REPLACED = "a later ledger has the later state"
    MADE_AGAIN = "what is in it is made again: a compacted topic, an index, delayed messages, snapshots"
    NO_INDEX = "the index of its first message is not known: its first entries are lost"


class ThinLedger(NamedTuple):
    """A ledger of which bookies hold too few copies: `missing` entries before the last one are held by none of them,
    and `thin` entries by fewer than an ack quorum. Entries that were never acknowledged are among them, at the end."""

    ledger_id: int
    topic: str
    missing: int
    thin: int


class RebuildPlan(msgspec.Struct, kw_only=True):
    """The new tree and what is to be said of it. `records`: path and record of each node, /cluster last. `silent`: the
    bookies that ledgers need and that were not read, with the number of these ledgers."""

    instance: str
    records: list[tuple[str, MetadataRecord]]
    topics: dict[str, int] = {}  # full name → its ledgers
    cursors: int = 0
    left_out: dict[int, LeftOut] = {}
    thin: list[ThinLedger] = []
    silent: dict[str, int] = {}
    next_ledger: int = 0


# ----------------------------------------------------------------------------------------------------- ensembles


class _Residues:
    """The entries that a bookie holds, for each residue modulo the ensemble size: sorted runs of quotients."""

    def __init__(self, runs: Iterable[HeldRun], modulus: int) -> None:
        found: list[list[tuple[int, int]]] = [[] for _ in range(modulus)]
        for first, last, stride in runs:
            assert stride in (1, modulus), "a run has each entry, or those of one residue"
            for residue in range(modulus) if stride == 1 else (first % modulus,):
                low, high = (first - residue + modulus - 1) // modulus, (last - residue) // modulus
                if low <= high:
                    found[residue].append((low, high))
        self.runs = [_merge(each) for each in found]
        self._lows = [[low for low, _ in each] for each in self.runs]
        self._sums = [_sums(each) for each in self.runs]

    def count_below(self, residue: int, quotient: int) -> int:
        """Returns how many entries of the residue with a smaller quotient are held."""
        at = bisect_right(self._lows[residue], quotient - 1)
        if not at:
            return 0
        _, high = self.runs[residue][at - 1]
        return self._sums[residue][at] - max(0, high - quotient + 1)

    def has(self, residue: int, quotient: int) -> bool:
        """Returns whether the entry is held."""
        at = bisect_right(self._lows[residue], quotient)
        return at > 0 and self.runs[residue][at - 1][1] >= quotient


def _merge(runs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for low, high in sorted(runs):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = merged[-1][0], max(merged[-1][1], high)
        else:
            merged.append((low, high))
    return merged


def _sums(runs: list[tuple[int, int]]) -> list[int]:
    sums = [0]
    for low, high in runs:
        sums.append(sums[-1] + high - low + 1)
    return sums


class LedgerHolders:
    """Which bookies hold which entries of a ledger, with its ensemble size and write quorum. Entries of one residue
    modulo `modulus` have the same write set: the ensemble size of a striped ledger, else 1."""

    def __init__(self, ensemble_size: int, write_quorum: int, held: Mapping[str, Iterable[HeldRun]]) -> None:
        self.size, self.quorum = ensemble_size, write_quorum
        self.modulus = ensemble_size if ensemble_size > write_quorum else 1
        self.held = {bookie: _Residues(runs, self.modulus) for bookie, runs in sorted(held.items())}
        self.last = max((high * self.modulus + residue for each in self.held.values()
                         for residue, runs in enumerate(each.runs) for _, high in runs[-1:]), default=-1)  # fmt: skip

    def slots_of_residue(self, residue: int) -> list[int]:
        """Returns the write set of the entries of this residue."""
        return [(residue + i) % self.size for i in range(self.quorum)]

    def count(self, bookie: str, slot: int, first: int, end: int) -> int:
        """Returns how many entries of `first … end - 1` whose write set has the slot the bookie holds."""
        held, found = self.held[bookie], 0
        for residue in range(self.modulus):
            if self.modulus == 1 or (slot - residue) % self.size < self.quorum:
                low, high = self._quotients(residue, first, end)
                found += held.count_below(residue, high) - held.count_below(residue, low)
        return found

    def _quotients(self, residue: int, first: int, end: int) -> tuple[int, int]:
        """Returns the quotients (first, end) of the entries of the residue among `first … end - 1`."""
        up = self.modulus - 1 - residue
        return (first + up) // self.modulus, (end + up) // self.modulus

    def walk(self, residue: int, first: int, end: int) -> Iterator[tuple[int, int, frozenset[str]]]:
        """Yields (lowest entry, number of entries, holders) of each run of entries of the residue among
        `first … end - 1` that the same bookies hold, in ascending order."""
        low, high = self._quotients(residue, first, end)
        cuts = {low, high}
        for each in self.held.values():
            runs = each.runs[residue]
            for at in range(max(0, bisect_right(runs, (low, low)) - 1), len(runs)):
                begin, last = runs[at]
                if begin >= high:
                    break
                cuts.update(cut for cut in (begin, last + 1) if low < cut < high)
        for begin, stop in pairwise(sorted(cuts)):
            holders = frozenset(bookie for bookie, each in self.held.items() if each.has(residue, begin))
            yield begin * self.modulus + residue, stop - begin, holders

    def find_uncovered(self, ensemble: Sequence[str], first: int, end: int, copies: int) -> int | None:
        """Returns the lowest entry of `first … end - 1` of which the ensemble has fewer holders in the write set than
        there are, and fewer than `copies`; None if there is none."""
        found: list[int] = []
        for residue in range(self.modulus):
            members = {ensemble[slot] for slot in self.slots_of_residue(residue)}
            for entry, _, holders in self.walk(residue, first, end):
                if len(members & holders) < min(copies, len(holders)):
                    found.append(entry)
                    break
        return min(found, default=None)

    def count_thin(self, ack_quorum: int) -> tuple[int, int]:
        """Returns (entries up to the last one that no bookie holds, those that fewer than `ack_quorum` hold)."""
        missing = thin = 0
        for residue in range(self.modulus):
            for _, entries, holders in self.walk(residue, 0, self.last + 1):
                missing += entries if not holders else 0
                thin += entries if 0 < len(holders) < ack_quorum else 0
        return missing, thin


def reconstruct_fragments(
    holders: LedgerHolders, hints: Sequence[Sequence[Fragment]], known: Collection[str]
) -> tuple[Fragment, ...]:
    """Returns the fragments of a ledger: for each range of entries the ensemble that stores it. `hints`: the fragments
    that labels name; `known`: all bookies, of which free slots get some. The module's docstring has the invariant.
    Raises InvalidRequest if there are fewer bookies than the ensemble has slots."""
    everyone = sorted({*known, *holders.held, *(name for hint in hints for each in hint for name in each.bookies)})
    if len(everyone) < holders.size:
        raise InvalidRequest(f"an ensemble of {holders.size} bookies, and {len(everyone)} are known: read all of them")
    cuts = sorted({0, *(each.first_entry for hint in hints for each in hint)})
    end = max(holders.last, cuts[-1]) + 1
    found: list[Fragment] = []
    for copies in (holders.quorum, 1):
        found = []
        for first, stop in pairwise([*cuts, end]):
            for fragment in _cover(holders, hints, everyone, first, stop, copies):
                if not found or found[-1].bookies != fragment.bookies:
                    found.append(fragment)
        if len(found) <= FRAGMENTS_MAX:
            break
    return tuple(found)


def _cover(
    holders: LedgerHolders, hints: Sequence[Sequence[Fragment]], everyone: Sequence[str], first: int, end: int,
    copies: int,
) -> list[Fragment]:  # fmt: skip
    """Returns fragments for the entries `first … end - 1` that keep the invariant with `copies` copies."""
    ensemble = _choose(holders, hints, everyone, first, end)
    gap = holders.find_uncovered(ensemble, first, end, copies)
    if gap is None:
        return [Fragment(first, ensemble)]
    # who holds one entry is chosen for it, so parts of one entry are covered and this ends
    cut = gap if gap > first else (first + end) // 2
    return [
        *_cover(holders, hints, everyone, first, cut, copies), *_cover(holders, hints, everyone, cut, end, copies)
    ]  # fmt: skip


def _choose(
    holders: LedgerHolders, hints: Sequence[Sequence[Fragment]], everyone: Sequence[str], first: int, end: int
) -> tuple[str, ...]:
    """Returns the ensemble whose bookies hold most of the entries `first … end - 1`, each in its slot. Among equals
    those that labels name there."""
    named = defaultdict[tuple[str, int], int](int)
    for hint in hints:
        at = bisect_right([each.first_entry for each in hint], first) - 1
        for slot, bookie in enumerate(hint[at].bookies[: holders.size]) if at >= 0 else ():
            named[bookie, slot] += 1
    scale = len(hints) * holders.size + 1  # one held entry outweighs all names
    useful = sorted({*holders.held, *(bookie for bookie, _ in named)})
    worth = {
        (bookie, slot): named.get((bookie, slot), 0)
        + (scale * holders.count(bookie, slot, first, end) if bookie in holders.held else 0)
        for bookie in useful
        for slot in range(holders.size)
    }
    given = (_assign_best if holders.size <= EXACT_SLOTS_MAX else _assign_greedily)(useful, holders.size, worth)
    free = iter([bookie for bookie in everyone if bookie not in given.values()])
    return tuple(given[slot] if slot in given else next(free) for slot in range(holders.size))


def _assign_best(bookies: Sequence[str], size: int, worth: Mapping[tuple[str, int], int]) -> dict[int, str]:
    """Returns the assignment of bookies to slots with the largest sum of worths, over all ways; a slot may stay
    free."""
    best: dict[int, tuple[int, dict[int, str]]] = {0: (0, {})}  # set of slots as bits → (sum, who has them)
    for bookie in bookies:
        for taken, (total, given) in list(best.items()):
            for slot in range(size):
                value = worth[bookie, slot]
                key = taken | 1 << slot
                if value and key != taken and total + value > best.get(key, (0, {}))[0]:
                    best[key] = total + value, {**given, slot: bookie}
    return max(best.values(), key=lambda each: each[0])[1]


def _assign_greedily(bookies: Sequence[str], size: int, worth: Mapping[tuple[str, int], int]) -> dict[int, str]:
    given: dict[int, str] = {}
    ordered = sorted(((worth[bookie, slot], bookie, slot) for bookie in bookies for slot in range(size)), reverse=True)
    for value, bookie, slot in ordered:
        if value and slot not in given and bookie not in given.values():
            given[slot] = bookie
    return given


# ------------------------------------------------------------------------------------------------------ the tree


class _Ledger(msgspec.Struct):
    """A ledger as all bookies together have it."""

    ledger_id: int
    label: LedgerLabel
    keys: set[bytes]
    held: dict[str, tuple[HeldRun, ...]]
    hints: list[tuple[Fragment, ...]]
    first_index: int

    @property
    def is_empty(self) -> bool:
        return not any(self.held.values())


def plan_rebuild(holdings: Sequence[BookieHoldings], *, now_ms: int) -> RebuildPlan:
    """Decides the new tree from what all bookies hold. `now_ms`: the time of day, in ms since the epoch. Raises
    InvalidRequest if no bookie was read, if one was read twice, or if they are of different clusters."""
    _check_bookies(holdings)
    return _Rebuild(holdings, now_ms).run()


def _check_bookies(holdings: Sequence[BookieHoldings]) -> None:
    if not holdings:
        raise InvalidRequest("no bookie was read: name the directories of all bookies")
    for each, other in pairwise(sorted(holdings, key=lambda each: each.bookie)):
        if each.bookie == other.bookie:
            raise InvalidRequest(f"bookie {each.bookie} was read twice, at {each.place} and at {other.place}")
    instances = {each.instance: each for each in holdings}
    if len(instances) > 1:
        shown = "; ".join(f"{each.bookie} at {each.place} is of cluster {each.instance}" for each in instances.values())
        raise InvalidRequest(f"the bookies are of different clusters: {shown}")


class _Rebuild:
    def __init__(self, holdings: Sequence[BookieHoldings], now_ms: int) -> None:
        self.holdings = sorted(holdings, key=lambda each: each.bookie)
        self.now_ms = now_ms
        self.plan = RebuildPlan(instance=holdings[0].instance, records=[])
        self.known = [each.bookie for each in self.holdings]

    def run(self) -> RebuildPlan:
        plan, topics = self.plan, defaultdict[TopicName, list[_Ledger]](list)
        states = defaultdict[tuple[str, str, str], list[_Ledger]](list)  # (kind, topic, name) → its ledgers
        for ledger in self._merged():
            kind, name = _kind_of(ledger.label.properties)
            try:
                topic = TopicName.parse(ledger.label.properties.get("topic", ""))
            except InvalidName:
                plan.left_out[ledger.ledger_id] = LeftOut.BAD_NAME
                continue
            if kind == "topic":
                topics[topic].append(ledger)
            elif kind == "made again":
                plan.left_out[ledger.ledger_id] = LeftOut.MADE_AGAIN
            else:
                states[kind, "" if kind == "coordinator" else topic.full, name].append(ledger)
                if kind == "cursor":  # its topic is there, although it has no ledger now
                    topics[topic].extend(())
        latest = {place: self._latest(ledgers) for place, ledgers in states.items()}
        coordinators = {int(name): each for (kind, _, name), each in latest.items() if kind == "coordinator" and each}
        outcomes = {topic: each for (kind, topic, _), each in latest.items() if kind == "outcomes" and each}
        for topic, ledgers in sorted(topics.items()):
            self._topic(topic, ledgers, outcomes.get(topic.full), with_transactions=bool(coordinators))
        self._cursors(latest, topics)
        self._coordinators(coordinators)
        self._names(topics)
        self._bookies()
        return plan

    def _put(self, path: str, record: MetadataRecord) -> None:
        self.plan.records.append((path, record))

    # ------------------------------------------------------------------------------------ ledgers
    def _merged(self) -> Iterator[_Ledger]:
        """Yields the ledgers that may be in the tree, in ascending order of ids. Counts the others as left out."""
        by_id = defaultdict[int, list[tuple[str, HeldLedger]]](list)
        for bookie in self.holdings:
            for held in bookie.ledgers:
                by_id[held.ledger_id].append((bookie.bookie, held))
        tombstones = _merge([interval for bookie in self.holdings for interval in bookie.tombstones])
        firsts = [first for first, _ in tombstones]
        for ledger_id, copies in sorted(by_id.items()):
            at = bisect_right(firsts, ledger_id) - 1
            labels = [held.label for _, held in copies if held.label is not None]
            keys = {held.key for _, held in copies if held.key}
            if (at >= 0 and ledger_id <= tombstones[at][1]) or any(label.deleted for label in labels):
                self.plan.left_out[ledger_id] = LeftOut.DELETED
            elif not labels:
                self.plan.left_out[ledger_id] = LeftOut.NO_LABEL
            elif len(keys) != 1:
                self.plan.left_out[ledger_id] = LeftOut.NO_KEY
            else:
                yield _Ledger(
                    ledger_id, max(labels, key=lambda label: "index" in label.properties), keys,
                    {bookie: held.runs for bookie, held in copies if held.runs},
                    [label.fragments for label in labels if label.fragments], _first_index(copies, labels),
                )  # fmt: skip

    def _latest(self, ledgers: Sequence[_Ledger]) -> _Ledger | None:
        """Returns the newest ledger of a state that has entries. The others are left out."""
        kept: _Ledger | None = None
        for ledger in sorted(ledgers, key=lambda each: (each.label.created_ms, each.ledger_id)):
            if ledger.is_empty:
                self.plan.left_out[ledger.ledger_id] = LeftOut.EMPTY
                continue
            if kept is not None:
                self.plan.left_out[kept.ledger_id] = LeftOut.REPLACED
            kept = ledger
        return kept

    def _put_ledger(self, ledger: _Ledger) -> int:
        """Adds the record of a ledger to the tree, IN_RECOVERY. Returns the id of the ledger."""
        label = ledger.label
        holders = LedgerHolders(label.ensemble_size, label.write_quorum, ledger.held)
        fragments = reconstruct_fragments(holders, ledger.hints, self.known)
        for bookie in {name for each in fragments for name in each.bookies}.difference(self.known):
            self.plan.silent[bookie] = self.plan.silent.get(bookie, 0) + 1
        missing, thin = holders.count_thin(label.ack_quorum)
        if missing or thin:
            topic = label.properties.get("topic", "")
            self.plan.thin.append(ThinLedger(ledger.ledger_id, topic, missing, thin))
        (key,) = ledger.keys
        record = LedgerRecord(
            ledger_id=ledger.ledger_id, state=IN_RECOVERY, ensemble_size=label.ensemble_size,
            write_quorum=label.write_quorum, ack_quorum=label.ack_quorum, key=key, token="rebuilt", fragments=fragments,
            created_ms=label.created_ms, properties=label.properties,
        )  # fmt: skip
        self._put(paths.ledger(ledger.ledger_id), record)
        return ledger.ledger_id

    # ------------------------------------------------------------------------------------ topics
    def _topic(
        self, topic: TopicName, ledgers: Sequence[_Ledger], outcomes: _Ledger | None, *, with_transactions: bool
    ) -> None:
        rows: list[TopicLedger] = []
        for ledger in self._listed(ledgers):
            self._put_ledger(ledger)
            rows.append(TopicLedger(
                ledger_id=ledger.ledger_id, first_index=ledger.first_index, created_ms=ledger.label.created_ms
            ))  # fmt: skip
        transactions: TransactionOutcomesLocation | None = None
        if outcomes is not None or with_transactions:
            # without a ledger of outcomes the whole log is read for transactions, and their coordinators are asked
            ledger_id = -1 if outcomes is None else self._put_ledger(outcomes)
            transactions = TransactionOutcomesLocation(mark_ledger=-1, mark_entry=-1, ledger_id=ledger_id)
        record = TopicRecord(ledgers=tuple(rows), created_ms=self.now_ms, transactions=transactions)
        self._put(paths.topic(topic.tenant, topic.namespace, topic.stored_local), record)
        self.plan.topics[topic.full] = len(rows)

    def _listed(self, ledgers: Sequence[_Ledger]) -> list[_Ledger]:
        """Returns the ledgers of a topic's list, in its order. The others are left out. An empty ledger is listed if it
        is the newest: it has the next index."""
        listed: list[_Ledger] = []
        below: int | None = None  # the first index of the ledger after this one
        ended = False
        for ledger in reversed(ledgers):
            reason: LeftOut | None = None
            if ended or (below is not None and not ledger.is_empty and 0 <= below <= ledger.first_index):
                reason, ended = LeftOut.EARLIER_TOPIC, True
            elif ledger.first_index < 0:
                reason = LeftOut.EMPTY if ledger.is_empty else LeftOut.NO_INDEX
            elif ledger.is_empty and listed:
                reason = LeftOut.EMPTY
            if reason is not None:
                self.plan.left_out[ledger.ledger_id] = reason
                continue
            listed.append(ledger)
            below = ledger.first_index
        return listed[::-1]

    def _cursors(
        self, latest: Mapping[tuple[str, str, str], _Ledger | None], topics: Mapping[TopicName, object]
    ) -> None:
        for (kind, full, name), ledger in sorted(latest.items(), key=lambda each: each[0]):
            if ledger is None or kind == "coordinator":
                continue
            topic = TopicName.parse(full)
            if kind == "outcomes" and topic not in topics:
                self.plan.left_out[ledger.ledger_id] = LeftOut.EARLIER_TOPIC
            elif kind == "cursor":
                record = CursorRecord(ledger_id=self._put_ledger(ledger), created_ms=ledger.label.created_ms)
                self._put(paths.cursor(topic.tenant, topic.namespace, topic.stored_local, name), record)
                self.plan.cursors += 1

    def _coordinators(self, found: Mapping[int, _Ledger]) -> None:
        if not found:
            return
        count = max(COORDINATORS_MIN, max(found) + 1)
        epoch = max(1, (self.now_ms - EPOCH_BEGINS_MS) // 60_000)
        for number in range(count):
            ledger_id = self._put_ledger(found[number]) if number in found else -1
            self._put(paths.coordinator(number), CoordinatorRecord(epoch=epoch, ledger_id=ledger_id))
        self._put(paths.TRANSACTION_SETTINGS, TransactionsRecord(coordinators=count, begun=tuple(sorted(found))))

    def _names(self, topics: Iterable[TopicName]) -> None:
        """Adds tenants, namespaces and partitioned topics, and the partitions of which no bookie has anything."""
        partitions: dict[TopicName, int] = {}
        names = set(topics)
        for topic in names:
            if topic.is_partition:
                partitions[topic.base] = max(partitions.get(topic.base, 0), topic.partition + 1)
        for base, count in sorted(partitions.items()):
            path = paths.partitioned_topic(base.tenant, base.namespace, base.local)
            self._put(path, PartitionedRecord(partitions=count, created_ms=self.now_ms))
            for part in map(base.with_partition, range(count)):
                if part not in names:
                    place = paths.topic(part.tenant, part.namespace, part.stored_local)
                    self._put(place, TopicRecord(created_ms=self.now_ms))
        for namespace in sorted({topic.namespace_name for topic in names}):
            self._put(paths.namespace(namespace.tenant, namespace.namespace), NamespaceRecord())
            policies = paths.namespace_policies(namespace.tenant, namespace.namespace)
            self._put(policies, PoliciesRecord(policies=KEEP_ALL))
        for tenant in sorted({topic.tenant for topic in names}):
            self._put(paths.tenant(tenant), TenantRecord())

    # ------------------------------------------------------------------------------------ the cluster
    def _bookies(self) -> None:
        """Adds the cookies, the counter of ids, and the cluster, last."""
        highest = -1
        for each in self.holdings:
            highest = max(
                highest, each.seen_ledger, max((last for _, last in each.tombstones), default=-1),
                max((held.ledger_id for held in each.ledgers), default=-1),
            )  # fmt: skip
            cookie = CookieRecord(
                bookie=each.bookie, instance=each.instance, directories=(each.place,), starts=each.starts,
                journal=each.journal, offset=each.offset, rebuilt=True,
            )  # fmt: skip
            self._put(paths.cookie(each.bookie), cookie)
        self.plan.next_ledger = highest + 1 + IDS_SKIPPED
        self._put(paths.LEDGER_IDS, CounterRecord(next=self.plan.next_ledger))
        self._put(paths.CLUSTER, ClusterRecord(instance=self.plan.instance, format=CLUSTER_FORMAT))


def _first_index(copies: Sequence[tuple[str, HeldLedger]], labels: Sequence[LedgerLabel]) -> int:
    """Returns the index of a ledger's first message, as its creator labelled it; else that of the lowest entry that a
    bookie could read; -1 if it is not known."""
    for label in labels:
        index = parse_number(label.properties.get("index", ""))
        if index is not None:
            return index
    lowest = [(min(run.first for run in held.runs), held.first_index) for _, held in copies if held.runs]
    return min((each for each in lowest if each[1] >= 0), default=(-1, -1))[1]


def _kind_of(properties: Mapping[str, str]) -> tuple[str, str]:
    """Returns (kind of a ledger's owner, its name) from the ledger's properties."""
    transactions = properties.get("transactions", "")
    number = parse_number(transactions)
    if number is not None:
        return "coordinator", str(number)
    if transactions:
        return "outcomes", ""
    if cursor := properties.get("cursor", ""):
        return "cursor", cursor
    return ("topic", "") if properties.keys() <= {"topic", "index", "durability"} else ("made again", "")
