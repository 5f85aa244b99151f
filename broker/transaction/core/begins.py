"""Begins: ids are given in blocks, to roles within their bounds, and to names of which one holder counts.

An id that is not used within `lease_s` is void. A begin of a name without a holder takes the name: a record, and what
earlier holders have open is aborted when it is decided, and again when it is durable. A name without a begin for
`name_idle_s` is forgotten; the numbers of holders go on, so none is given twice.
Guards: tests/broker/transaction/core/test_names_and_sinks.py.
"""

from __future__ import annotations

from ....proto.errors import BackPressure, InvalidRequest, MagnetarError, NotOwner, Unavailable
from ....proto.transactions import COUNTER_BITS
from .batches import Batches
from .intents import Begin, Begun, Limits, Reason
from .live import COUNTER_MAX, EPOCH_MAX
from .records import Named, Owned, Unnamed
from .state import State

BLOCK_MAX = 1_000
"""Ids of one Begin."""
NAME_MAX = 512


class Begins(Batches):
    def __init__(self, number: int, epoch: int, state: State, limits: Limits, now: float) -> None:
        super().__init__(number, epoch, state, limits)
        self._used_names = dict.fromkeys(state.names, now)
        self._holders = state.holders
        self._names_looked_at = now

    def _begin(self, intent: Begin, now: float) -> None:
        limits = self.limits
        if not 0 <= intent.timeout_s <= limits.timeout_s_max:
            raise InvalidRequest(
                f"a transaction may stay open for {limits.timeout_s_max:g} s, not {intent.timeout_s:g}; prepare it"
            )
        tag = intent.tag
        texts = (intent.name, *((tag.sink_id, tag.query_id, tag.run) if tag is not None else ()))
        if max(map(len, texts)) > NAME_MAX:
            raise InvalidRequest(f"names of owners and sinks have at most {NAME_MAX} characters")
        if tag is not None and self._has_batch(intent, tag, adopt=intent.adopt):
            self._answer(intent, Begun(0, 0, 0.0, already=True))
            return
        count = self._room(intent)
        if intent.name and not intent.holder:
            self._take_name(intent, now)
            return
        self._check_holder(intent.name, intent.holder)
        self._give_ids(intent, count, intent.holder, now)

    def _room(self, intent: Begin) -> int:
        limits, used = self.limits, len(self._live) + len(self._unused)
        room = limits.open_max - used
        if intent.owner and limits.open_per_role_max:
            room = min(room, limits.open_per_role_max - self._per_owner.get(intent.owner, 0))
        if room <= 0:
            raise BackPressure(f"coordinator {self.number} has {used} open transactions: wait for some to end")
        return min(max(1, intent.count), BLOCK_MAX, room)

    def _take_name(self, intent: Begin, now: float) -> None:
        if intent.name not in self.state.names and len(self.state.names) >= self.limits.names_max:
            raise BackPressure(f"coordinator {self.number} knows {len(self.state.names)} names of owners already")
        self._holders += 1
        for txn in list(self._of_name.get(intent.name, ())):
            self._void(txn, Reason.FENCED, now)
        self._decide(Named(intent.name, self._holders), intent)

    def _named(self, record: Named, intent: Begin, now: float) -> None:
        for txn in list(self._of_name.get(record.name, ())):
            self._void(txn, Reason.FENCED, now)  # what an earlier begin was given in the meantime, or was in doubt
        try:
            self._give_ids(intent, self._room(intent), record.holder, now)
        except MagnetarError as error:
            self._answer(intent, error)

    def _give_ids(self, intent: Begin, count: int, holder: int, now: float) -> None:
        if self._next + count - 1 > (self.epoch << COUNTER_BITS) + COUNTER_MAX:
            if self.epoch == EPOCH_MAX:
                raise Unavailable(f"coordinator {self.number} has no ids any more; use another one")
            self._give_up("the ids of its epoch are used up")
            raise NotOwner(f"coordinator {self.number} takes a new epoch; try again")
        first, self._next = self._next, self._next + count
        if intent.name:
            self._used_names[intent.name] = now
        timeout_s = intent.timeout_s or self.limits.timeout_s
        owned = Owned(intent.owner, timeout_s, intent.name, holder, intent.tag, intent.address)
        self._lease(range(first, first + count), owned, now)
        self._answer(intent, Begun(first, count, self.limits.lease_s, holder))

    def _forget_names(self, now: float) -> None:
        idle = [
            name for name, each in self.state.names.items()
            if now - self._used_names.get(name, now) + each.idle_s >= self.limits.name_idle_s
            and name not in self._of_name
        ]  # fmt: skip
        taken = {each.record.name for each in (*self._gathered, *self._writing) if isinstance(each.record, Named)}
        idle = [name for name in idle if name not in taken]
        if idle:
            self._decide(Unnamed(idle), None)
            for name in idle:
                self._used_names.pop(name, None)
