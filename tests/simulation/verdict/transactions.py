"""The judge of transactions: what coordinators made durable and answered, and what topics hold in the end.

Two halves. `Coordination` watches every coordinator at each event (docs/design/invariants.md).
Ids of half messages are among those of transactions; verdict/halves.py judges the rest of them.

| 61 | no id is given twice |
| 62 | an id has one outcome, over all epochs and answers |
| 63 | COMMITTED is answered after its record is durable |
| 64 | ABORTED is answered of no id whose commit is durable, or is in doubt (65) |
| 66 | what an epoch is told is durable the next epoch has read |
| 98 | a half that is stored has an outcome, or is open in each later epoch |

`TransferHistory.check` judges what is left when everything has ended. Each topic was read from its beginning twice:
what readers of committed data see (`shown`), and all that is in the log (`stored`).

| 68 | nothing of a transaction that is not committed was delivered or is shown |
| 69 | every message of a committed one is shown, and came to the subscription that was there all the time |
| 70 | no message of a transaction is shown twice |
| 74 | no entry of a transaction is in the log of a topic that had not joined it |
| 76 | indexes are dense |
| 79 | a commit acknowledges exactly what was acknowledged in it, an abort gives it back: what comes again at the end |
| 80 | no two committed transactions acknowledge the same message |
| 90 | over all topics a transaction is shown whole, or not at all; no coin is lost or made |
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from magnetar.broker.common.transactions import JoinAnswer, Settlement
from magnetar.broker.transaction.coordinator import RunningCoordinator
from magnetar.broker.transaction.intents_core import IntentResult
from magnetar.broker.transaction.log import CoordinatorLog
from magnetar.broker.transaction.peers import CoordinatorRequest
from magnetar.broker.transaction.records_core import AnyCoordinatorRecord, HalfMessageStored, TransactionsCommitted
from magnetar.broker.transaction.state_core import CoordinatorState
from magnetar.proto.states import TxnId, TxnState
from magnetar.runtime.sim.world import Simulation
from tests.simulation.verdict.history import Id

MINT = "mint"
PLAIN = "plain"


class Watched(CoordinatorRequest):
    """A question whose answer is looked at first."""

    def __init__(self, asked: CoordinatorRequest, look: Callable[[TxnState], None]) -> None:
        self._asked, self._look = asked, look

    def answer(self, result: IntentResult) -> None:
        if isinstance(result, TxnState):
            self._look(result)
        self._asked.answer(result)


class Coordination:
    """Of all coordinators of a simulation."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self.violations: list[str] = []
        self.durable: dict[TxnId, None] = {}
        self.joined: dict[tuple[TxnId, str], None] = {}
        self.take_overs = 0
        self._doubtful: dict[TxnId, None] = {}
        self._appends = 0
        self._refuted: dict[TxnId, int] = {}  # in doubt, and not in the log that the next epoch read: up to that append
        self._aborted: dict[TxnId, None] = {}  # as answered
        self._given: dict[TxnId, None] = {}
        self._stored: dict[TxnId, None] = {}  # halves

    def _violated(self, text: str) -> None:
        self._simulation.add_line(f"VIOLATION {text}")
        self.violations.append(text)

    # ------------------------------------------------------------------ events
    def appending(self, number: int, records: Sequence[AnyCoordinatorRecord]) -> tuple[int, list[TxnId]]:
        """The append's own number, and what is committed when it is durable: transactions, and the halves that these
        publish."""
        found = [record for record in records if isinstance(record, TransactionsCommitted)]
        txns = [TxnId(number, each[0]) for record in found for each in record.txns]
        txns += [TxnId(number, record.half) for record in found if record.half]
        self._doubtful |= dict.fromkeys(txns)
        self._appends += 1
        return self._appends, txns

    def appended(
        self, number: int, append: int, txns: Sequence[TxnId], records: Sequence[AnyCoordinatorRecord]
    ) -> None:
        """The next epoch may commit what the one before could not: a half whose group is asked, what is prepared."""
        self._stored |= {TxnId(number, each.half): None for each in records if isinstance(each, HalfMessageStored)}
        for txn in txns:
            self._doubtful.pop(txn, None)
            if append <= self._refuted.get(txn, 0):
                self._violated(f"66: the commit of {txn} is durable, and the epoch after it did not read it")
            self._committed(txn)

    def _committed(self, txn: TxnId) -> None:
        if txn not in self.durable:
            self.durable[txn] = None
            self._simulation.add_line(f"coordinator: {txn} is committed")
        if txn in self._aborted:
            self._violated(f"64: {txn} is committed, and was answered to be aborted")

    def taken_over(self, number: int, state: CoordinatorState) -> None:
        self.take_overs += 1
        for txn in [each for each in self.durable if each.most == number]:
            if not _is_committed(state, txn.least) and txn.least >= state.forgotten_below:
                self._violated(f"66: coordinator {number} is taken over without the commit of {txn}")
        for half in [each for each in self._stored if each.most == number]:
            if half.least not in state.halves.open and state.halves.find_half_message_outcome(half.least) is None:
                self._violated(f"98: coordinator {number} is taken over without the half {half}, which did not end")
        for txn in [each for each in self._doubtful if each.most == number]:
            del self._doubtful[txn]
            if _is_committed(state, txn.least):
                self._committed(txn)
            else:
                self._refuted[txn] = self._appends

    def given(self, number: int, first: int, count: int) -> None:
        for least in range(first, first + count):
            txn = TxnId(number, least)
            if txn in self._given:
                self._violated(f"61: {txn} is given twice")
            self._given[txn] = None

    def answered(self, txn: TxnId, state: TxnState) -> None:
        if state is TxnState.COMMITTED:
            if txn not in self.durable:
                self._violated(f"63: {txn} is answered to be committed, which is not durable")
        elif state is TxnState.ABORTED:
            self._aborted[txn] = None
            if txn in self.durable:
                self._violated(f"64: {txn} is answered to be aborted, and is committed")
            elif txn in self._doubtful:
                self._violated(f"65: {txn} is answered to be aborted while its commit is in doubt")

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """As long as it lasts."""
        append, append_now, take_over = CoordinatorLog.append, CoordinatorLog.append_nowait, CoordinatorLog.take_over
        state_of, begin = RunningCoordinator._state, RunningCoordinator.begin_transactions
        join, end, status = (
            RunningCoordinator.join_transaction,
            RunningCoordinator.end_transaction,
            RunningCoordinator.get_status,
        )
        join_nowait, ask_end = RunningCoordinator.join_transaction_nowait, RunningCoordinator.end_transaction_nowait

        async def appended(log: CoordinatorLog, records: Sequence[AnyCoordinatorRecord], *args: Any) -> None:
            own, txns = self.appending(log.number, records)
            await append(log, records, *args)
            self.appended(log.number, own, txns, records)

        def appended_now(log: CoordinatorLog, records: Sequence[AnyCoordinatorRecord]) -> asyncio.Future[int] | None:
            future = append_now(log, records)
            if future is not None:
                own, txns = self.appending(log.number, records)
                future.add_done_callback(
                    lambda done: done.cancelled() or done.exception() or self.appended(log.number, own, txns, records)
                )
            return future

        async def taken(log: CoordinatorLog) -> tuple[CoordinatorState, int]:
            found = await take_over(log)
            self.taken_over(log.number, found[0])
            return found

        async def begun(running: RunningCoordinator, *args: Any, **kwargs: Any) -> Any:
            found = await begin(running, *args, **kwargs)
            self.given(running.number, found.first, found.ids)
            return found

        async def joined(running: RunningCoordinator, txn: TxnId, topic: str, *args: Any) -> JoinAnswer:
            found = await join(running, txn, topic, *args)
            self.answered(txn, TxnState.COMMITTED if isinstance(found, Settlement) else found)
            if found in (TxnState.OPEN, TxnState.PREPARED):
                self.joined[txn, topic] = None
            return found

        def joined_now(running: RunningCoordinator, txn: TxnId, topic: str, *args: Any) -> bool:
            found = join_nowait(running, txn, topic, *args)
            if found:
                self.answered(txn, TxnState.OPEN)
                self.joined[txn, topic] = None
            return found

        def end_asked(
            running: RunningCoordinator, to: CoordinatorRequest, txn: TxnId, *args: Any, **kwargs: Any
        ) -> None:
            ask_end(running, Watched(to, lambda state: self.answered(txn, state)), txn, *args, **kwargs)

        async def ended(running: RunningCoordinator, txn: TxnId, *args: Any, **kwargs: Any) -> TxnState:
            found = await end(running, txn, *args, **kwargs)
            self.answered(txn, found)
            return found

        async def asked(running: RunningCoordinator, txn: TxnId, *args: Any) -> TxnState:
            found = await status(running, txn, *args)
            self.answered(txn, found)
            return found

        assert state_of, "every question about a state goes through it"
        with (
            mock.patch.object(CoordinatorLog, "append", appended),
            mock.patch.object(CoordinatorLog, "append_nowait", appended_now),
            mock.patch.object(CoordinatorLog, "take_over", taken),
            mock.patch.object(RunningCoordinator, "begin_transactions", begun),
            mock.patch.object(RunningCoordinator, "join_transaction", joined),
            mock.patch.object(RunningCoordinator, "join_transaction_nowait", joined_now),
            mock.patch.object(RunningCoordinator, "end_transaction_nowait", end_asked),
            mock.patch.object(RunningCoordinator, "end_transaction", ended),
            mock.patch.object(RunningCoordinator, "get_status", asked),
        ):
            yield


def _is_committed(state: CoordinatorState, least: int) -> bool:
    return state.is_committed(least) or state.halves.find_half_message_outcome(least) is TxnState.COMMITTED


# ---------------------------------------------------------------------------------- what clients did and saw
@dataclass(slots=True)
class Transfer:
    """One transaction of the load. `outcome`: True committed, False aborted, None nobody told."""

    label: str
    txn: TxnId | None = None
    outcome: bool | None = None
    sent: dict[str, str] = field(default_factory=dict)  # value → topic
    acknowledged: list[tuple[str, Id]] = field(default_factory=list)  # topic, message


@dataclass(slots=True)
class Seen:
    value: str
    id: Id
    index: int

    @property
    def label(self) -> str:
        return label_of(self.value)

    @property
    def coin(self) -> str:
        return self.value.partition(":")[0]


def label_of(value: str) -> str:
    return value.rpartition(":")[2]


@dataclass(slots=True)
class TransferHistory:
    topics: list[str]
    coins: int
    transfers: dict[str, Transfer] = field(default_factory=dict)
    plain: dict[str, str] = field(default_factory=dict)  # value → topic, of those with a receipt
    delivered: dict[str, dict[str, None]] = field(default_factory=dict)  # topic → values at its standing subscription
    shown: dict[str, list[Seen]] = field(default_factory=dict)
    stored: dict[str, list[Seen]] = field(default_factory=dict)
    again: dict[str, dict[Id, str]] = field(default_factory=dict)  # topic → what the bank's subscription still has
    violations: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        for topic in self.topics:
            self.delivered[topic], self.again[topic] = {}, {}

    def begin(self, label: str) -> Transfer:
        found = self.transfers[label] = Transfer(label)
        return found

    def deliver(self, topic: str, value: str, coordination: Coordination, who: str) -> None:
        """68, in the moment of a delivery to a consumer of committed data."""
        transfer = self.transfers.get(label_of(value))
        if transfer is not None and transfer.txn not in coordination.durable:
            self.violations.append(f"68: {who} got {value} of {transfer.txn}, which is not committed")

    def committed(self) -> list[Transfer]:
        return [each for each in self.transfers.values() if each.outcome]

    def expected(self, topic: str) -> dict[Id, str]:
        """Coins of the topic that no committed transaction has acknowledged."""
        spent = {where for each in self.committed() for where in each.acknowledged}
        return {
            each.id: each.value for each in self.shown[topic]
            if each.label != PLAIN and (topic, each.id) not in spent
        }  # fmt: skip

    def check(self, coordination: Coordination) -> list[str]:
        found = [*coordination.violations, *self.violations]
        for transfer in self.transfers.values():
            found += self._outcome(transfer, coordination)
        for topic in self.topics:
            found += self._log(topic, coordination)
            found += self._bank(topic)
        found += self._spent_once()
        left = sorted(value.partition(":")[0] for topic in self.topics for value in self.expected(topic).values())
        if left != sorted(f"c{number}" for number in range(self.coins)):
            found.append(f"90: there were {self.coins} coins, and these are left: {left}")
        return found

    def _outcome(self, transfer: Transfer, coordination: Coordination) -> list[str]:
        name = f"{transfer.label} {transfer.txn}"
        if transfer.txn is None:
            return []
        durable = transfer.txn in coordination.durable
        found = []
        if transfer.outcome is not None and durable is not transfer.outcome and (durable or transfer.sent):
            told = "committed" if transfer.outcome else "aborted"
            found.append(f"62: {name} was told to be {told}, and its commit is {'' if durable else 'not '}durable")
        shown = {each.value for topic in self.topics for each in self.shown[topic] if each.label == transfer.label}
        missing = [value for value in transfer.sent if value not in shown]
        if durable and missing:
            number = "90" if shown else "69"
            found.append(f"{number}: {name} is committed, and {missing[:3]} of {len(transfer.sent)} are not shown")
        if not durable and shown:
            found.append(f"68: {name} is not committed, and {sorted(shown)[:3]} are shown")
        if durable:
            lacking = [v for v, topic in transfer.sent.items() if v not in self.delivered[topic]]
            if lacking:
                found.append(f"69: {name} is committed, and {lacking[:3]} never came")
        return found

    def _log(self, topic: str, coordination: Coordination) -> list[str]:
        found = []
        for values in (self.shown[topic], self.stored[topic]):
            ids = [each.id for each in values]
            if ids != sorted(set(ids)):
                found.append(f"40: {topic} is read out of order")
        first: dict[str, Id] = {}
        found += [
            f"70: {each.value} is shown at {first[each.value]} and at {each.id} of {topic}"
            for each in self.shown[topic]
            if each.label != PLAIN and first.setdefault(each.value, each.id) != each.id
        ]
        for at, each in enumerate(self.stored[topic]):
            if each.index != self.stored[topic][0].index + at:
                found.append(f"76: {each.value} at {each.id} of {topic} is not {at} after the first: {each.index}")
                break
        for each in self.stored[topic]:
            transfer = self.transfers.get(each.label)
            if transfer is None or transfer.txn is None:
                continue
            if transfer.sent.get(each.value) != topic:
                found.append(f"phantom: {each.value} is in {topic}, where it was not sent to")
            if (transfer.txn, topic) not in coordination.joined:
                found.append(f"74: {each.value} of {transfer.txn} is in {topic}, which has not joined")
        for value, where in self.plain.items():
            if where == topic and value not in self.delivered[topic]:
                found.append(f"lost: {value} never came from {topic}")
        return found

    def _bank(self, topic: str) -> list[str]:
        expected, again = self.expected(topic), self.again[topic]
        found = []
        lost = [f"{value} {id_}" for id_, value in expected.items() if id_ not in again]
        if lost:
            found.append(f"79: {lost[:3]} of {topic} are acknowledged by no committed transaction, and do not come")
        wrong = [f"{value} {id_}" for id_, value in again.items() if id_ not in expected and label_of(value) != PLAIN]
        if wrong:
            found.append(f"79: {wrong[:3]} of {topic} come, and a committed transaction acknowledged them")
        return found

    def _spent_once(self) -> list[str]:
        found, by = [], dict[tuple[str, Id], str]()
        for transfer in self.committed():
            for where in transfer.acknowledged:
                other = by.setdefault(where, transfer.label)
                if other != transfer.label:
                    found.append(f"80: {where} is acknowledged by {other} and by {transfer.label}, both committed")
        return found
