"""The ledger of a coordinator with a crash, and with a failure, at each of its writes; what the next owner reads."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest
from msgspec.structs import replace

from magnetar.broker.common.config import LedgerReplication
from magnetar.broker.log.snapshot_ledger import TopicStateLedgers
from magnetar.broker.transaction import log as module
from magnetar.broker.transaction.log import TAKE_OVER_STEPS, CoordinatorFenced, CoordinatorLog
from magnetar.broker.transaction.records_core import NameHolderChanged
from magnetar.broker.transaction.state_core import CoordinatorState
from magnetar.metadata import paths
from magnetar.metadata.records import CoordinatorRecord, TransactionsRecord, decode_record, encode_record
from magnetar.proto.errors import DataLost, LedgerFenced, OutcomeUnknown
from magnetar.proto.names import TopicName
from magnetar.runtime.process import make_system_world
from tests.broker.storage import Storage, Writer
from tests.support.cluster import SMALL

SEEDS = itertools.count()
"""Of the processes: each claim is another one."""
CRASHES = 14
"""More than two appends with a roll have writes."""


async def one_copy() -> LedgerReplication:
    return LedgerReplication(1, 1, 1)


class Owner:
    """In a process of its own; `state` is what it knows to be durable."""

    def __init__(self, storage: Storage) -> None:
        self.session: Any = storage.session()
        ledgers = TopicStateLedgers(self.session, SMALL, one_copy, TopicName.parse("t"), transactions="0")
        self.log = CoordinatorLog(make_system_world(next(SEEDS)), self.session, ledgers, 0, 0.0)
        self.state = CoordinatorState()
        self.epoch = 0

    async def open(self) -> Owner:
        self.state, self.epoch = await self.log.take_over()
        return self

    async def write(self, name: str) -> None:
        record = NameHolderChanged(name, self.state.last_holder + 1)
        await self.log.append([record], self.state)
        self.state.apply(record)


def names(owner: Owner) -> list[str]:
    return [name for (_, name), _ in owner.state.names.items()]


async def test_the_next_owner_reads_what_was_appended_in_a_later_epoch() -> None:
    storage = Storage()
    first = await Owner(storage).open()
    for name in "abc":
        await first.write(name)
    second = await Owner(storage).open()
    assert (names(second), second.epoch) == (["a", "b", "c"], first.epoch + 1)
    assert len(storage.ledgers) == 1, "a take-over writes no ledger"
    await second.write("d")
    assert names(await Owner(storage).open()) == ["a", "b", "c", "d"]
    assert len(storage.ledgers) == 1, "a roll deletes the old one"


async def test_a_former_owner_appends_nothing() -> None:
    storage = Storage()
    first = await Owner(storage).open()
    await first.write("a")
    idle = await Owner(storage).open()
    second = await Owner(storage).open()
    with pytest.raises(LedgerFenced):
        await first.write("b")
    with pytest.raises(CoordinatorFenced):
        await idle.write("b")
    await second.write("c")
    assert names(await Owner(storage).open()) == ["a", "c"]


async def test_two_owners_at_once_have_different_epochs() -> None:
    storage = Storage()
    first, second = Owner(storage), Owner(storage)
    await first.log.read_coordinator_claim()
    await second.log.read_coordinator_claim()
    await first.log.store_coordinator_claim()
    with pytest.raises(CoordinatorFenced):
        await second.log.store_coordinator_claim()
    assert (await second.open()).epoch == first.log.epoch + 1


@pytest.mark.parametrize("lands", [False, True], ids=["the write is lost", "the write lands"])
@pytest.mark.parametrize("at", range(CRASHES))
async def test_a_crash_at_each_write_loses_nothing_that_was_confirmed(at: int, lands: bool) -> None:
    storage = Storage()
    owner = Owner(storage)
    owner.session.crash_at(at, lands=lands)
    confirmed: list[str] = []

    async def work() -> None:
        await owner.open()
        for number in range(4):
            if number == 2:
                owner.log._bytes = module.ROLL_AFTER_BYTES + (1 << 30)  # full: it rolls
            await owner.write(str(number))
            confirmed.append(str(number))

    working = asyncio.ensure_future(work())
    dying = asyncio.ensure_future(owner.session.dead.wait())
    await asyncio.wait([working, dying], return_when=asyncio.FIRST_COMPLETED)
    for _ in range(20):
        await asyncio.sleep(0)
    for each in (working, dying):
        each.cancel()
    await asyncio.gather(working, dying, return_exceptions=True)
    found = names(await Owner(storage).open())
    assert found[: len(confirmed)] == confirmed, "what was confirmed is there"
    assert found == [str(number) for number in range(len(found))], "in its order, without a gap"
    assert len(found) <= len(confirmed) + 1


async def test_an_append_that_fails_goes_on_in_the_next_ledger(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = Storage()
    owner = await Owner(storage).open()
    owner.log._give_up_s = 30.0
    monkeypatch.setattr(module, "APPEND_RETRY_S", 0.0)
    await owner.write("a")
    failing = [OutcomeUnknown("no answer")]
    append = Writer.append

    def fails(self: Writer, *frames: bytes) -> asyncio.Future[int]:
        found = append(self, *frames)  # it is stored, and the answer is lost
        if not failing:
            return found
        lost: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        lost.set_exception(failing.pop())
        return lost

    monkeypatch.setattr(Writer, "append", fails)
    await owner.write("b")
    assert names(await Owner(storage).open()) == ["a", "b"], "once, in the ledger that the record names"


async def test_a_name_of_unknown_outcome_ends_the_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = Storage()
    owner = await Owner(storage).open()
    owner.log._give_up_s = 30.0
    async def lost(*args: object, **kwargs: object) -> None:
        raise OutcomeUnknown("no answer")

    monkeypatch.setattr(module, "update_node", lost)
    with pytest.raises(OutcomeUnknown):
        await owner.write("a")


async def test_a_lost_or_damaged_ledger_is_not_taken_for_an_empty_one() -> None:
    storage = Storage()
    owner = await Owner(storage).open()
    await owner.write("a")
    (ledger,) = storage.ledgers.values()
    ledger.entries[-1] = ledger.entries[-1][:-1] + b"?"
    with pytest.raises(DataLost):
        await Owner(storage).open()
    storage.ledgers.clear()
    with pytest.raises(DataLost):
        await Owner(storage).open()


async def test_a_lost_or_damaged_record_is_not_taken_for_one_that_never_was() -> None:
    """A coordinator that began anew would answer "aborted" of what is committed, and give its ids again."""
    storage = Storage()
    settings = encode_record(TransactionsRecord(coordinators=2), paths.TRANSACTION_SETTINGS)
    await storage.session().put(paths.TRANSACTION_SETTINGS, settings, -1)
    owner = await Owner(storage).open()
    await owner.write("a")
    record = storage.nodes.pop(paths.coordinator(0))
    for _ in range(2):
        with pytest.raises(DataLost, match="record of coordinator 0 is missing"):
            await Owner(storage).open()
    assert paths.coordinator(0) not in storage.nodes, "nothing is claimed"
    for place in (0, 3, len(record.value) - 2):
        bad = bytearray(record.value)
        bad[place] ^= 1
        storage.nodes[paths.coordinator(0)] = replace(record, value=bytes(bad))
        with pytest.raises(DataLost, match="record of coordinator 0 is damaged"):
            await Owner(storage).open()
    storage.nodes[paths.coordinator(0)] = record
    assert names(await Owner(storage).open()) == ["a"], "the copy that has it was restored"
    begun = decode_record(
        storage.nodes[paths.TRANSACTION_SETTINGS].value, TransactionsRecord, paths.TRANSACTION_SETTINGS
    )
    assert begun == TransactionsRecord(coordinators=2, begun=(0,))


async def test_take_over_goes_in_its_order(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = Storage()
    await (await Owner(storage).open()).write("a")
    steps: list[str] = []

    def recorded(step: Any) -> Any:
        async def run(log: CoordinatorLog) -> None:
            steps.append(step.__name__)
            await step(log)

        return run

    monkeypatch.setattr(
        "magnetar.broker.transaction.log.TAKE_OVER_STEPS", tuple(recorded(step) for step in TAKE_OVER_STEPS)
    )
    await Owner(storage).open()
    assert steps == ["read_coordinator_claim", "recover_ledger", "store_coordinator_claim", "finish_take_over"]


async def test_an_owner_that_closes_idle_says_so() -> None:
    storage = Storage()
    owner = await Owner(storage).open()
    await owner.write("a")
    await owner.log.close([NameHolderChanged("b", 9)], owner.state, idle=True)
    path = paths.coordinator(0)
    assert decode_record(storage.nodes[path].value, CoordinatorRecord, path).idle
    assert names(await Owner(storage).open()) == ["a", "b"]
    assert not decode_record(storage.nodes[path].value, CoordinatorRecord, path).idle


@pytest.mark.parametrize("step", ["append", "close"])
async def test_an_owner_whose_close_fails_has_no_writer_left(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, abandoned = await Owner(Storage()).open(), list[Writer]()
    await owner.write("a")
    writer = owner.log._writer

    async def abandon(self: Writer) -> None:
        abandoned.append(self)

    async def fail(self: Writer) -> None:
        raise LedgerFenced("another owner recovers it")

    async def append(self: Writer, *frames: bytes) -> int:
        raise LedgerFenced("another owner recovers it")

    monkeypatch.setattr(Writer, "abandon", abandon)
    if step == "close":
        monkeypatch.setattr(Writer, "close", fail)
    else:
        monkeypatch.setattr(Writer, "_append", append)
    with pytest.raises(LedgerFenced):
        await owner.log.close([NameHolderChanged("b", 9)], owner.state, idle=True)
    assert (owner.log._writer, abandoned) == (None, [writer])
