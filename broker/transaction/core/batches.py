"""Batches of sinks: the transactions of a batch commit together, and each batch of a sink once.

A sink is written by one query, in batches whose numbers grow. The record that commits the transactions of a batch names
it, so a batch that a query repeats after a crash is known. A sink is of a role: what another role commits under that id
is another sink (core/owned.py). A sink that was not used for `sink_idle_s` is forgotten (core/begins.py). Whatever else
was begun for that batch or an earlier one, or for another query, is aborted. While a batch of a sink is in doubt,
what is asked about the sink waits.
Guards: tests/broker/transaction/core/test_names_and_sinks.py.
"""

from __future__ import annotations

from ....proto.errors import BackPressure, InvalidRequest, SinkFenced, TransactionEnded
from ....proto.transactions import TxnState
from .ends import RECORD_BYTES_MAX, Ends
from .halves import Waits
from .intents import NAME_MAX, Begin, CommitBatch, Intent, Limits, Reason
from .live import Live, Phase, state_of
from .owned import Key
from .records import SinkBatch, Tag, committed
from .state import State


class Batches(Ends):
    """The part of a coordinator that decides batches of sinks."""

    def __init__(self, number: int, epoch: int, state: State, limits: Limits) -> None:
        super().__init__(number, epoch, state, limits)
        self._sinks_in_doubt: dict[Key, list[Intent]] = {}
        self._used_sinks: dict[Key, float] = {}

    def _has_batch(self, intent: Begin | CommitBatch, tag: Tag, now: float) -> bool:
        """Whether the sink has the batch already. InvalidRequest, SinkFenced, BackPressure; Waits while a batch of it
        is in doubt."""
        owner, limits = intent.owner, self.limits
        if tag.batch < 0:
            raise InvalidRequest(f"the batches of a sink have numbers from 0, and not {tag.batch}")
        waiting = self._sinks_in_doubt.get((owner, tag.sink_id))
        if waiting is not None:
            waiting.append(intent)
            raise Waits
        sinks = self.state.sinks
        if not sinks.has_room(owner, tag.sink_id, limits.sinks_max, limits.sinks_per_role_max):
            raise BackPressure(f"coordinator {self.number} knows as many sinks as it may, of all roles or of this one")
        stored = sinks.find(owner, tag.sink_id)
        if stored is None:
            return False
        self._used_sinks[sinks.key(owner, tag.sink_id)] = now
        if stored.query_id != tag.query_id:
            if not intent.adopt:
                raise SinkFenced(
                    f"sink {tag.sink_id!r} is written by query {stored.query_id!r}, not {tag.query_id!r}: "
                    "use another sinkId, or onNewCheckpoint=adopt"
                )
            return False
        return tag.batch <= stored.batch

    def _commit_batch(self, intent: CommitBatch, now: float) -> None:
        sink = None
        if intent.sink_id:
            tag = Tag(intent.sink_id, intent.query_id, intent.batch)
            if max(len(tag.sink_id), len(tag.query_id)) > NAME_MAX:
                raise InvalidRequest(f"names of sinks and queries have at most {NAME_MAX} characters")
            if self._has_batch(intent, tag, now):
                self._answer(intent, True)
                return
            sink = SinkBatch(intent.sink_id, intent.query_id, intent.batch, intent.owner)
        found = {txn: self._certain(txn, intent, now, intent.owner) for txn in intent.txns}
        done = [txn for txn, each in found.items() if state_of(each) is TxnState.COMMITTED]
        if done and sink is None and len(done) == len(found):
            self._answer(intent, False)
            return
        if done:
            raise TransactionEnded(f"{self._id(done[0])} is committed already, without the others")
        live = [each for each in found.values() if isinstance(each, Live)]
        for txn in found:
            if txn not in self._live:
                raise self._why_aborted(txn)
        self._check_batch(intent, live)
        shares = {each.txn: self._participants(each, intent.txns[each.txn], now) for each in live}
        if sum(len(each) for each in shares.values()) * 40 > RECORD_BYTES_MAX:
            raise InvalidRequest(f"a batch of {len(shares)} transactions has too many participants for one record")
        for each in live:
            each.phase = Phase.COMMITTING
            each.participants = {share.topic: share for share in shares[each.txn]}
        if sink is not None:
            self._sinks_in_doubt[sink.owner, sink.sink_id] = []
        self._decide(committed(shares, sink, owner=intent.owner), intent)

    def _check_batch(self, intent: CommitBatch, live: list[Live]) -> None:
        for each in live:
            tag = each.owned.tag
            wanted = (intent.sink_id, intent.query_id, intent.batch) if intent.sink_id else None
            if (tag and (tag.sink_id, tag.query_id, tag.batch)) != wanted:
                raise InvalidRequest(f"{self._id(each.txn)} was begun for another batch, or for none")
            self._check_holder(each.owned.owner, each.owned.name, each.owned.holder)

    def _batch_ended(self, sink: SinkBatch, now: float) -> None:
        """Aborts what else was begun for the batch, or for a query that the sink was taken from."""
        key = sink.owner, sink.sink_id
        self._used_sinks[key] = now
        for txn in list(self._of_sink.get(key, ())):
            owned = self._unused[txn].owned if txn in self._unused else self._live[txn].owned
            assert owned.tag is not None, "it is of a sink"
            if owned.tag.query_id != sink.query_id or owned.tag.batch <= sink.batch:
                self._void(txn, Reason.SUPERSEDED, now)
        self._again(self._sinks_in_doubt.pop(key), now)
