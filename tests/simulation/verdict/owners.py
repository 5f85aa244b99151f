"""Whose act it was: the judge of owners, in a cluster that is secured (docs/design/invariants.md, 60).

It is told of each begin, end, batch and half that coordinators are asked for, with the role that asks, and of each
abort with its reason, in the moment in which it is decided. What a role began ends

    by that role's own word             CLIENT, and each commit
    by a begin of that role             FENCED: of the same name; SUPERSEDED: a batch of the same sink
    by time, a crash, a failed act      TIMEOUT, LEASE, LOST, FAILED

and by nothing else; no operator is at work here. A sink has a batch when its role asked for that one or a later one.
"""

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from unittest import mock

from magnetar.broker.transaction.coordinator import RunningCoordinator
from magnetar.broker.transaction.intents_core import AbortReason, BeginAnswer, HalfMessageEndVerb, TransactionEndVerb
from magnetar.broker.transaction.peers import CoordinatorRequest
from magnetar.broker.transaction.records_core import Participant, SinkBatchTag
from magnetar.broker.transaction.state_core import TransactionTable
from magnetar.proto.states import TxnId
from tests.simulation.security import OWNER, THIEF

ROLES = (OWNER, THIEF)
"""Of others operators delete topics."""
BY_ITSELF = (AbortReason.TIMEOUT, AbortReason.LEASE, AbortReason.LOST, AbortReason.FAILED)


class Began(NamedTuple):
    role: str
    name: str
    sink: str


class Owners:
    """Of all coordinators of a simulation. `note` gets the story."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note
        self.violations: list[str] = []
        self._began: dict[TxnId, Began] = {}
        self._wanted: dict[tuple[TxnId, str], set[bool]] = {}  # by role: its commit, its abort
        self._holders: dict[tuple[str, str], int] = {}
        self._batches: dict[tuple[str, str], int] = {}  # the highest number that the role asked for

    # ------------------------------------------------------------------ events
    def begun(self, role: str, name: str, tag: SinkBatchTag | None, found: BeginAnswer, number: int) -> None:
        sink = tag.sink_id if tag is not None else ""
        for least in range(found.first, found.first + found.ids) if role in ROLES else ():
            self._began[TxnId(number, least)] = Began(role, name, sink)
        if found.already and tag is not None:
            self._had(role, tag, self._batches.get((role, sink), -1))

    def role_of(self, txn: TxnId) -> str:
        began = self._began.get(txn)
        return began.role if began is not None else ""

    def wanted(self, role: str, txn: TxnId, *, commit: bool) -> None:
        self._wanted.setdefault((txn, role), set()).add(commit)

    def _had(self, role: str, tag: SinkBatchTag, asked: int) -> None:
        if asked < tag.batch:
            self._violated(f"60: {tag.sink_id} of {role} has batch {tag.batch}, and {role} asked for {asked} at most")

    def aborted(self, txn: TxnId, reason: AbortReason) -> None:
        began = self._began.get(txn)
        if began is None or reason in BY_ITSELF:
            return
        its_own = {
            AbortReason.CLIENT: False in self._wanted.get((txn, began.role), ()),
            AbortReason.FENCED: self._holders.get((began.role, began.name), 0) > 1,
            AbortReason.SUPERSEDED: (began.role, began.sink) in self._batches,
        }
        if not its_own.get(reason, False):
            self._violated(f"60: {txn} of {began.role} is aborted ({reason.value}), and {began.role} did not want it")

    def check(self, durable: Collection[TxnId]) -> list[str]:
        """In the end, with all that is committed."""
        for txn in durable:
            began = self._began.get(txn)
            if began is not None and True not in self._wanted.get((txn, began.role), ()):
                self._violated(f"60: {txn} of {began.role} is committed, and {began.role} did not want it")
        return self.violations

    def _violated(self, text: str) -> None:
        self._note(f"VIOLATION {text}")
        self.violations.append(text)

    # ------------------------------------------------------------------ where that is seen
    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """As long as it lasts."""
        begin, commit_batch = RunningCoordinator.begin_transactions, RunningCoordinator.commit_batch
        ask_end, end_half, remember = (
            RunningCoordinator.end_transaction_nowait,
            RunningCoordinator.end_half,
            TransactionTable.record_abort,
        )

        async def begun(running: RunningCoordinator, owner: str, *args: Any, **kwargs: Any) -> BeginAnswer:
            name = kwargs.get("name", "")
            if name and not kwargs.get("holder"):
                self._holders[owner, name] = self._holders.get((owner, name), 0) + 1
            found = await begin(running, owner, *args, **kwargs)
            self.begun(owner, name, kwargs.get("tag"), found, running.number)
            return found

        async def batch(
            running: RunningCoordinator, owner: str, txns: Mapping[TxnId, Sequence[Participant]],
            tag: SinkBatchTag | None = None, **kwargs: Any,
        ) -> bool:  # fmt: skip
            before = self._batches.get((owner, tag.sink_id), -1) if tag is not None else -1
            for txn in txns:
                self.wanted(owner, txn, commit=True)
            if tag is not None:
                self._batches[owner, tag.sink_id] = max(before, tag.batch)
            had = await commit_batch(running, owner, txns, tag, **kwargs)
            if had and tag is not None:
                self._had(owner, tag, before)
            return had

        def end(
            running: RunningCoordinator,
            to: CoordinatorRequest,
            txn: TxnId,
            verb: TransactionEndVerb,
            owner: str,
            *args: Any,
            **kwargs: Any,
        ) -> None:
            if verb is not TransactionEndVerb.PREPARE:
                self.wanted(owner, txn, commit=verb is TransactionEndVerb.COMMIT)
            ask_end(running, to, txn, verb, owner, *args, **kwargs)

        async def half(
            running: RunningCoordinator, txn: TxnId, verb: HalfMessageEndVerb, owner: str, *args: Any
        ) -> Any:
            self.wanted(owner, txn, commit=verb is HalfMessageEndVerb.COMMIT)
            return await end_half(running, txn, verb, owner, *args)

        def remembered(table: TransactionTable, txn: int, reason: AbortReason, owner: str) -> None:
            self.aborted(TxnId(table.number, txn), reason)
            remember(table, txn, reason, owner)

        with (
            mock.patch.object(RunningCoordinator, "begin_transactions", begun),
            mock.patch.object(RunningCoordinator, "commit_batch", batch),
            mock.patch.object(RunningCoordinator, "end_transaction_nowait", end),
            mock.patch.object(RunningCoordinator, "end_half", half),
            mock.patch.object(TransactionTable, "record_abort", remembered),
        ):
            yield
