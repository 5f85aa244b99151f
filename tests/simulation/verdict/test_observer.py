"""What the eye over the cluster sees, and what only looks like it (observer.py)."""

import msgspec

from magnetar.metadata.records import CLOSED, OPEN, Fragment, LedgerRecord
from magnetar.runtime.sim.world import Simulation
from tests.simulation.verdict.journals import Synced
from tests.simulation.verdict.observer import Observer

RECORD = LedgerRecord(
    ledger_id=7, state=CLOSED, ensemble_size=3, write_quorum=2, ack_quorum=2, key=b"k" * 20, token="t",
    fragments=(Fragment(0, ("a", "b", "c")), Fragment(3, ("a", "b", "d"))), last_entry=5,
)  # fmt: skip


def an_observer(entries: dict[str, list[int]]) -> Observer:
    """`entries`: what each bookie has synced."""
    observer = Observer(Simulation(1))
    for bookie, held in entries.items():
        observer.node_of[bookie] = f"node-{bookie}"
        observer.synced[f"node-{bookie}"] = Synced(adds={(7, entry): 0 for entry in held})
    return observer


def replaced(record: LedgerRecord, first: int, old: str, new: str) -> LedgerRecord:
    fragments = [
        Fragment(each.first_entry, tuple(new if name == old else name for name in each.bookies))
        if each.first_entry == first else each for each in record.fragments
    ]  # fmt: skip
    return msgspec.structs.replace(record, fragments=tuple(fragments))


def seen(observer: Observer, before: LedgerRecord, after: LedgerRecord) -> list[str]:
    observer._replaced(before, after)
    return [each.partition(":")[0] for each in observer.violations]


def test_51_who_is_named_by_re_replication_has_synced_what_it_is_to_hold() -> None:
    after = replaced(RECORD, 0, "a", "e")  # slot 0 of 3, write quorum 2: entries 0 and 2
    assert seen(an_observer({"e": [0, 2]}), RECORD, after) == []
    assert seen(an_observer({"e": [0, 1]}), RECORD, after) == ["51"]
    assert seen(an_observer({}), RECORD, after) == ["51"], "nobody has seen its disk"


def test_51_the_last_fragment_of_an_open_ledger_is_its_writers() -> None:
    before = msgspec.structs.replace(RECORD, state=OPEN, last_entry=-1)
    assert seen(an_observer({"e": []}), before, replaced(before, 3, "d", "e")) == []
    assert seen(an_observer({"e": []}), before, replaced(before, 0, "c", "e")) == ["51"]


def test_8_an_append_whose_caller_went_away_is_answered_to_nobody() -> None:
    def confirmed(*entries: int, unheard: int) -> list[str]:
        observer = an_observer({})
        for _ in range(unheard):
            observer.unheard(7, b"x")
        for entry in entries:
            observer.confirmed(7, entry, b"x")
        return [each.partition(":")[0] for each in observer.violations]

    assert confirmed(0, 2, unheard=1) == []
    assert confirmed(0, 2, unheard=0) == ["8"]
    assert confirmed(0, 3, unheard=1) == ["8"]
    assert confirmed(0, 2, 4, unheard=1) == ["8"]
    assert confirmed(0, 0, unheard=1) == ["8"]
