"""The tree that is made again from what bookies hold: its lists, its ensembles, and what is left out and why."""

import random
from collections.abc import Iterable, Sequence
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from magnetar.ledger.metadata_core import is_answered_from_memory
from magnetar.metadata import paths, rebuild_core
from magnetar.metadata.rebuild_core import (
    BookieHoldings,
    HeldLedger,
    HeldRun,
    LedgerHolders,
    LeftOut,
    RebuildPlan,
    plan_rebuild,
    reconstruct_fragments,
)
from magnetar.metadata.records import (
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
    PartitionedRecord,
    PoliciesRecord,
    TopicRecord,
    TransactionsRecord,
    decode_record_of_any_class,
    encode_record,
)
from magnetar.proto.errors import InvalidRequest

INSTANCE = "ab" * 16
NOW_MS = 1_796_000_000_000
TOPIC = "persistent://shop/eu/orders"


# ------------------------------------------------------------------------------------------------------- ensembles
def write_set(ensemble: Sequence[str], entry: int, quorum: int) -> list[str]:
    return [ensemble[(entry + i) % len(ensemble)] for i in range(quorum)]


def runs_of(entries: Iterable[int], stride: int = 1) -> tuple[HeldRun, ...]:
    """As the reader of a directory makes them: runs of each residue, or whole ones."""
    found: dict[int, list[HeldRun]] = {}
    for entry in sorted(entries):
        own = found.setdefault(entry % stride, [])
        if own and own[-1].last + stride == entry:
            own[-1] = HeldRun(own[-1].first, entry, stride)
        else:
            own.append(HeldRun(entry, entry, stride))
    return tuple(run for own in found.values() for run in own)


def ensemble_of(fragments: Sequence[Fragment], entry: int) -> tuple[str, ...]:
    return next(each.bookies for each in reversed(fragments) if each.first_entry <= entry)


class WrittenLedger:
    """A ledger as its writer and repairs leave it: fragments, who holds what, and the labels of that time."""

    def __init__(self, rng: random.Random, pool: int, size: int, quorum: int, ack: int, entries: int) -> None:
        self.size, self.quorum, self.ack = size, quorum, ack
        self.bookies = [f"b{number:02}" for number in range(pool)]
        self.fragments = [Fragment(0, tuple(rng.sample(self.bookies, size)))]
        self.held: dict[str, set[int]] = {}
        self.labels: dict[str, tuple[Fragment, ...]] = {}
        self.acknowledged: set[int] = set()
        for entry in range(entries):
            if rng.random() < 0.1 and pool > size:
                self._change(rng, entry)
            members = write_set(self.fragments[-1].bookies, entry, quorum)
            took = members if rng.random() < 0.8 else rng.sample(members, rng.randint(ack, quorum))
            for bookie in took:
                self._store(bookie, entry)
            self.acknowledged.add(entry)
        if entries and rng.random() < 0.4 and pool > size:
            self._repair(rng, entries)

    def _store(self, bookie: str, entry: int) -> None:
        self.labels.setdefault(bookie, tuple(self.fragments))
        self.held.setdefault(bookie, set()).add(entry)

    def _change(self, rng: random.Random, entry: int) -> None:
        """A bookie is replaced from `entry` on; what it holds stays on it."""
        bookies = list(self.fragments[-1].bookies)
        bookies[rng.randrange(self.size)] = rng.choice([each for each in self.bookies if each not in bookies])
        if self.fragments[-1].first_entry == entry:
            self.fragments.pop()
        self.fragments.append(Fragment(entry, tuple(bookies)))

    def _repair(self, rng: random.Random, entries: int) -> None:
        """A bookie is gone for good: each fragment gets another one in its slot, which has copies of what is left."""
        gone = rng.choice(self.fragments[-1].bookies)
        lost = self.held.pop(gone, set())
        self.labels.pop(gone, None)
        self.bookies.remove(gone)
        repaired: list[Fragment] = []
        for each in self.fragments:
            others = [name for name in self.bookies if name not in each.bookies]
            if gone not in each.bookies or not others:
                repaired.append(each)
                continue
            new = rng.choice(others)
            repaired.append(Fragment(each.first_entry, tuple(new if name == gone else name for name in each.bookies)))
        old, self.fragments = self.fragments, repaired
        for entry in range(entries):
            if entry not in lost or not any(entry in own for own in self.held.values()):
                continue
            slot = ensemble_of(old, entry).index(gone)
            if (new := ensemble_of(repaired, entry)[slot]) != gone:
                self._store(new, entry)


SHAPES = [(1, 1, 1), (2, 2, 1), (3, 3, 2), (3, 2, 2), (4, 2, 2), (5, 3, 2), (6, 2, 1), (4, 4, 3)]


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 1 << 40), st.sampled_from(SHAPES), st.integers(0, 4), st.integers(0, 60), st.integers(0, 2))
@example(0, (3, 3, 2), 2, 0, 1)
def test_each_entry_that_is_left_has_its_holders_in_its_write_set(
    seed: int, shape: tuple[int, int, int], spare: int, entries: int, away: int
) -> None:
    rng = random.Random(seed)
    size, quorum, ack = shape
    ledger = WrittenLedger(rng, size + spare, size, quorum, ack, entries)
    missing = set(rng.sample(ledger.bookies, min(away, len(ledger.bookies) - 1)))
    here = {bookie: own for bookie, own in ledger.held.items() if bookie not in missing}
    stride = rng.choice((1, size)) if size > quorum else 1
    holders = LedgerHolders(size, quorum, {bookie: runs_of(own, stride) for bookie, own in here.items()})
    hints = [label for bookie, label in ledger.labels.items() if bookie not in missing]
    known = [bookie for bookie in ledger.bookies if bookie not in missing]
    if len({*known, *(name for hint in hints for each in hint for name in each.bookies)}) < size:
        with pytest.raises(InvalidRequest, match="read all of them"):
            reconstruct_fragments(holders, hints, known)
        return
    found = reconstruct_fragments(holders, hints, known)
    assert found[0].first_entry == 0
    assert all(one.first_entry < other.first_entry for one, other in pairwise(found))
    assert all(len(set(each.bookies)) == size for each in found)
    for entry in range(entries):
        who = {bookie for bookie, own in here.items() if entry in own}
        members = write_set(ensemble_of(found, entry), entry, quorum)
        assert len(who.intersection(members)) >= min(quorum, len(who)), (entry, found)
    lost = sum(not any(entry in own for own in here.values()) for entry in range(holders.last + 1))
    thin = sum(0 < sum(entry in own for own in here.values()) < ack for entry in range(holders.last + 1))
    assert holders.count_thin(ack) == (lost, thin)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 1 << 40), st.sampled_from(SHAPES), st.integers(0, 60))
def test_a_bookie_that_is_away_keeps_the_slot_that_labels_name(
    seed: int, shape: tuple[int, int, int], entries: int
) -> None:
    """So it is asked, and does not answer: that is no vote that an entry does not exist."""
    rng = random.Random(seed)
    size, quorum, _ = shape
    ensemble = tuple(f"b{number}" for number in rng.sample(range(20), size))
    away = set(rng.sample(ensemble, rng.randint(0, size - 1)))
    held = {
        bookie: runs_of(entry for entry in range(entries) if bookie in write_set(ensemble, entry, quorum))
        for bookie in ensemble if bookie not in away
    }  # fmt: skip
    others = [f"other{number}" for number in range(3)]
    holders = LedgerHolders(size, quorum, {bookie: runs for bookie, runs in held.items() if runs})
    found = reconstruct_fragments(holders, [(Fragment(0, ensemble),)], [*held, *others])
    assert found == (Fragment(0, ensemble),)


def test_a_striped_ledger_without_labels_of_its_fragments_gets_its_slots_by_what_is_held() -> None:
    ensemble = ("e", "a", "d", "b", "c")
    held = {
        bookie: runs_of((entry for entry in range(1000) if bookie in write_set(ensemble, entry, 3)), 5)
        for bookie in ensemble
    }  # fmt: skip
    assert all(len(runs) == 3 for runs in held.values()), "one run for each residue, however long the ledger is"
    assert reconstruct_fragments(LedgerHolders(5, 3, held), [], ()) == (Fragment(0, ensemble),)


def test_copies_beyond_the_write_quorum_add_no_fragment_and_holes_are_covered_by_who_has_them() -> None:
    whole = {"a": (HeldRun(0, 99),), "b": (HeldRun(0, 99),), "c": (HeldRun(0, 99),), "old": (HeldRun(0, 49),)}
    hints = [(Fragment(0, ("a", "b", "old")),), (Fragment(0, ("a", "b", "c")),)]
    assert reconstruct_fragments(LedgerHolders(3, 3, whole), hints, ()) == (Fragment(0, ("a", "b", "c")),)
    holes = {**whole, "c": (HeldRun(0, 9), HeldRun(20, 99))}
    assert reconstruct_fragments(LedgerHolders(3, 3, holes), hints, ()) == (
        Fragment(0, ("a", "b", "c")), Fragment(10, ("a", "b", "old")), Fragment(50, ("a", "b", "c")),
    )  # fmt: skip


def test_a_ledger_of_too_many_fragments_has_one_holder_of_each_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rebuild_core, "FRAGMENTS_MAX", 10)
    held = {"a": (HeldRun(0, 99),), "b": runs_of(range(0, 100, 2)), "c": runs_of(range(1, 100, 2))}
    assert reconstruct_fragments(LedgerHolders(2, 2, held), [], ()) == (Fragment(0, ("a", "b")),)


# ------------------------------------------------------------------------------------------------------------ trees
def label(ledger: int, *bookies: str, deleted: bool = False, **properties: str) -> LedgerLabel:
    return LedgerLabel(
        ledger_id=ledger, ensemble_size=3, write_quorum=3, ack_quorum=2, created_ms=1000 + ledger,
        fragments=(Fragment(0, bookies or ("a", "b", "c")),), properties=properties, deleted=deleted,
    )  # fmt: skip


def held(ledger: int, last: int = 9, *, first_index: int = -1, key: bytes = b"", unlabelled: bool = False,
         deleted: bool = False, **properties: str) -> HeldLedger:  # fmt: skip
    return HeldLedger(
        ledger_id=ledger, key=key or b"%020d" % ledger, runs=(HeldRun(0, last),) if last >= 0 else (),
        label=None if unlabelled else label(ledger, deleted=deleted, **properties), first_index=first_index,
    )  # fmt: skip


def of_topic(ledger: int, index: int, last: int = 9, topic: str = TOPIC) -> HeldLedger:
    return held(ledger, last, topic=topic, index=str(index))


def bookie(name: str, *ledgers: HeldLedger, tombstones: Sequence[tuple[int, int]] = (), seen: int = -1,
           instance: str = INSTANCE) -> BookieHoldings:  # fmt: skip
    return BookieHoldings(
        bookie=name, instance=instance, place=f"host-{name}:/data", starts=3, journal=5, offset=4096,
        seen_ledger=seen, ledgers=ledgers, tombstones=tuple(tombstones),
    )  # fmt: skip


def three(*ledgers: HeldLedger) -> list[BookieHoldings]:
    return [bookie(name, *ledgers) for name in "abc"]


def plan(holdings: Sequence[BookieHoldings]) -> RebuildPlan:
    """Checks what holds for each tree."""
    made = plan_rebuild(holdings, now_ms=NOW_MS)
    nodes = tree(made)
    assert len(nodes) == len(made.records), "no path twice"
    assert made.records[-1][0] == paths.CLUSTER
    named: list[int] = []
    for path, record in made.records:
        assert decode_record_of_any_class(encode_record(record, path), path) == record
        match record:
            case TopicRecord(ledgers=rows, transactions=outcomes):
                named += [row.ledger_id for row in rows] + ([outcomes.ledger_id] if outcomes else [])
                assert all(
                    one.ledger_id < other.ledger_id and one.first_index < other.first_index
                    for one, other in pairwise(rows)
                )
            case CursorRecord(ledger_id=ledger) | CoordinatorRecord(ledger_id=ledger):
                named.append(ledger)
            case _:
                pass
    named = [each for each in named if each >= 0]
    ledgers = [record for record in nodes.values() if isinstance(record, LedgerRecord)]
    assert sorted(named) == sorted(each.ledger_id for each in ledgers), "each ledger has one owner, or it is swept"
    assert {each.state for each in ledgers} <= {IN_RECOVERY}
    everything = {each.ledger_id for one in holdings for each in one.ledgers}
    assert everything == {*named, *made.left_out}, "what is not in the tree has its reason"
    assert not set(named) & made.left_out.keys()
    counter = nodes[paths.LEDGER_IDS]
    assert isinstance(counter, CounterRecord)
    assert counter.next > max([*everything, *(one.seen_ledger for one in holdings)], default=-1)
    return made


def tree(made: RebuildPlan) -> dict[str, MetadataRecord]:
    return dict(made.records)


def test_a_topic_has_its_ledgers_in_order_with_their_indexes_and_keys() -> None:
    made = plan(three(of_topic(7, 500), of_topic(3, 0, 499), of_topic(12, 510, -1)))
    nodes = tree(made)
    record = nodes[paths.topic("shop", "eu", "orders")]
    assert isinstance(record, TopicRecord)
    assert [(row.ledger_id, row.first_index, row.entries) for row in record.ledgers] == [
        (3, 0, -1), (7, 500, -1), (12, 510, -1),
    ]  # fmt: skip
    ledger = nodes[paths.ledger(3)]
    assert isinstance(ledger, LedgerRecord)
    assert (ledger.key, ledger.ack_quorum) == (b"%020d" % 3, 2)
    assert ledger.fragments == (Fragment(0, ("a", "b", "c")),)
    assert {paths.tenant("shop"), paths.namespace("shop", "eu")} <= nodes.keys()
    kept = nodes[paths.namespace_policies("shop", "eu")]
    assert isinstance(kept, PoliciesRecord)
    assert kept.policies == rebuild_core.KEEP_ALL, "by the defaults what was retained would be deleted"
    assert nodes[paths.CLUSTER] == ClusterRecord(instance=INSTANCE, format=2)
    assert nodes[paths.cookie("a")] == CookieRecord(
        bookie="a", instance=INSTANCE, directories=("host-a:/data",), starts=3, journal=5, offset=4096, rebuilt=True
    )
    assert made.topics == {TOPIC: 3}
    assert not made.left_out
    assert not made.thin
    assert not made.silent


def test_a_ledger_that_was_answered_from_memory_is_in_the_list_of_its_topic() -> None:
    made = plan(three(held(3, topic=TOPIC, index="0", durability="memory")))
    assert made.topics == {TOPIC: 1}
    ledger = tree(made)[paths.ledger(3)]
    assert isinstance(ledger, LedgerRecord)
    assert is_answered_from_memory(ledger)


def test_partitions_are_one_topic_also_those_of_which_no_bookie_has_anything() -> None:
    parts = [of_topic(number, 0, topic=f"{TOPIC}-partition-{number}") for number in (1, 3)]
    nodes = tree(plan(three(*parts)))
    assert nodes[paths.partitioned_topic("shop", "eu", "orders")] == PartitionedRecord(
        partitions=4, created_ms=NOW_MS
    )
    rows = [nodes[paths.topic("shop", "eu", f"orders-partition-{number}")] for number in range(4)]
    assert [len(row.ledgers) for row in rows if isinstance(row, TopicRecord)] == [0, 1, 0, 1]


@pytest.mark.parametrize("noted", ["tombstone", "mark"])
def test_a_deleted_ledger_stays_out_if_one_bookie_knows_of_it_and_comes_back_if_none_does(noted: str) -> None:
    kept, gone = of_topic(4, 100), of_topic(2, 0)
    marked = held(2, topic=TOPIC, index="0", deleted=True)
    one = bookie("a", kept, tombstones=[(2, 2)]) if noted == "tombstone" else bookie("a", kept, marked)
    made = plan([one, bookie("b", kept, gone), bookie("c", kept, gone)])
    assert made.left_out == {2: LeftOut.DELETED}
    assert made.topics == {TOPIC: 1}
    assert plan(three(kept, gone)).topics == {TOPIC: 2}, "no bookie has noted it"
    whole = plan([bookie("a", tombstones=[(2, 4)]), bookie("b", kept, gone), bookie("c", kept, gone)])
    assert whole.topics == {}, "a deleted topic stays out"


def test_what_an_earlier_topic_of_the_name_left_is_not_in_the_new_one() -> None:
    made = plan(three(of_topic(1, 0), of_topic(2, 10), of_topic(5, 0), of_topic(8, 10)))
    assert made.left_out == {1: LeftOut.EARLIER_TOPIC, 2: LeftOut.EARLIER_TOPIC}
    assert made.topics == {TOPIC: 2}
    empty = plan(three(of_topic(1, 0), of_topic(5, 0, -1)))
    assert empty.left_out == {1: LeftOut.EARLIER_TOPIC}


def test_trimmed_heads_and_gaps_stay_as_they_are_and_empty_ledgers_go() -> None:
    made = plan(three(of_topic(5, 700), of_topic(6, 710, -1), of_topic(9, 710), of_topic(20, 900)))
    assert made.topics == {TOPIC: 3}
    assert made.left_out == {6: LeftOut.EMPTY}


def test_ledgers_of_an_earlier_version_get_the_index_of_their_lowest_entry() -> None:
    old = [held(1, topic=TOPIC, first_index=0), held(4, topic=TOPIC, first_index=10), held(6, topic=TOPIC)]
    made = plan(three(*old))
    record = tree(made)[paths.topic("shop", "eu", "orders")]
    assert isinstance(record, TopicRecord)
    assert [row.first_index for row in record.ledgers] == [0, 10]
    assert made.left_out == {6: LeftOut.NO_INDEX}


def test_cursors_outcomes_and_coordinators_come_from_the_newest_ledger_that_has_entries() -> None:
    made = plan(three(
        of_topic(1, 0), held(2, topic=TOPIC, cursor="billing"), held(3, topic=TOPIC, cursor="billing"),
        held(4, -1, topic=TOPIC, cursor="billing"), held(5, topic=TOPIC, cursor="a/b"),
        held(6, topic=TOPIC, transactions="outcomes"), held(7, topic="persistent://pulsar/system/x", transactions="20"),
        held(8, topic=TOPIC, compacted="true"), held(9, topic=TOPIC, dedup="snapshots"),
        held(10, topic="persistent://shop/eu/idle", cursor="s"),
    ))  # fmt: skip
    nodes = tree(made)
    assert nodes[paths.cursor("shop", "eu", "orders", "billing")] == CursorRecord(ledger_id=3, created_ms=1003)
    assert nodes[paths.cursor("shop", "eu", "orders", "a/b")] == CursorRecord(ledger_id=5, created_ms=1005)
    assert nodes[paths.topic("shop", "eu", "idle")] == TopicRecord(
        created_ms=NOW_MS, transactions=nodes[paths.topic("shop", "eu", "idle")].transactions  # type: ignore[attr-defined]
    )
    record = nodes[paths.topic("shop", "eu", "orders")]
    assert isinstance(record, TopicRecord)
    assert record.transactions is not None
    assert record.transactions.ledger_id == 6
    assert nodes[paths.TRANSACTION_SETTINGS] == TransactionsRecord(coordinators=21, begun=(20,))
    coordinator = nodes[paths.coordinator(20)]
    assert isinstance(coordinator, CoordinatorRecord)
    assert coordinator.ledger_id == 7
    assert 100_000 < coordinator.epoch < 1 << 22
    assert made.cursors == 3
    assert made.left_out == {
        2: LeftOut.REPLACED, 4: LeftOut.EMPTY, 8: LeftOut.MADE_AGAIN, 9: LeftOut.MADE_AGAIN,
    }  # fmt: skip


def test_what_has_no_label_no_key_or_no_name_is_left_out_with_its_reason() -> None:
    ledgers = [held(1, unlabelled=True, topic=TOPIC), held(2, topic="persistent://one"), of_topic(3, 0)]
    other = held(3, key=b"x" * 20, topic=TOPIC, index="0")
    made = plan([bookie("a", *ledgers), bookie("b", *ledgers), bookie("c", other)])
    assert made.left_out == {1: LeftOut.NO_LABEL, 2: LeftOut.BAD_NAME, 3: LeftOut.NO_KEY}


def test_a_label_at_one_bookie_is_enough_and_a_lost_key_is_taken_from_another() -> None:
    bare = HeldLedger(ledger_id=1, key=b"", runs=(HeldRun(0, 9),))
    made = plan([bookie("a", bare), bookie("b", of_topic(1, 0)), bookie("c", bare)])
    assert made.topics == {TOPIC: 1}


def test_bookies_that_were_not_read_and_missing_copies_are_told() -> None:
    made = plan([bookie("a", of_topic(1, 0)), bookie("b", of_topic(1, 0, 4))])
    assert made.silent == {"c": 1}
    assert [(each.ledger_id, each.missing, each.thin) for each in made.thin] == [(1, 0, 5)]
    record = tree(made)[paths.ledger(1)]
    assert isinstance(record, LedgerRecord)
    assert record.fragments == (Fragment(0, ("a", "b", "c")),)


def test_bookies_of_different_clusters_or_one_bookie_twice_or_none_are_refused() -> None:
    one = bookie("a", of_topic(1, 0))
    for holdings, text in (
        ([one, bookie("b", instance="cd" * 16)], "different clusters"), ([one, one], "read twice"), ([], "no bookie"),
    ):  # fmt: skip
        with pytest.raises(InvalidRequest, match=text):
            plan_rebuild(holdings, now_ms=NOW_MS)


def test_ids_go_on_above_each_that_a_bookie_has_seen() -> None:
    gap = rebuild_core.IDS_SKIPPED + 1  # a bookie that is away may have seen later ones
    assert plan([bookie("a", of_topic(1, 0)), bookie("b", tombstones=[(40, 60)]), bookie("c")]).next_ledger == 60 + gap
    assert plan([bookie("a", of_topic(1, 0), seen=99), bookie("b"), bookie("c")]).next_ledger == 99 + gap


LEDGERS = st.lists(
    st.builds(
        lambda ledger, index, last, name, state, where, deleted: (ledger, index, last, name, state, where, deleted),
        st.integers(0, 30), st.integers(0, 50), st.integers(-1, 5), st.sampled_from("xyz"),
        st.sampled_from(["topic", "cursor", "transactions", "dedup"]), st.sets(st.sampled_from("abcd"), min_size=1),
        st.booleans(),
    ),
    max_size=25, unique_by=lambda each: each[0],
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(LEDGERS)
def test_whatever_bookies_hold_each_ledger_is_in_the_tree_once_or_left_out(
    ledgers: list[tuple[int, int, int, str, str, set[str], bool]]
) -> None:
    own: dict[str, list[HeldLedger]] = {name: [] for name in "abcd"}
    for ledger, index, last, name, state, where, deleted in ledgers:
        properties = {"topic": f"persistent://t/n/{name}"}
        properties |= {"index": str(index)} if state == "topic" else {state: "3"}
        for each in where:
            own[each].append(held(ledger, last, deleted=deleted and each == "a", **properties))
    plan([bookie(name, *found) for name, found in own.items()])
