"""Begins: ids are given in blocks, to roles within their bounds, and to names of which one holder counts.

A block begins after a gap of random length, so that an id that was given does not tell another one.
An id that is not used within `lease_s` is void. A begin of a name without a holder takes the name: a record, and what
earlier holders have open is aborted when it is decided, and again when it is durable. Names and sinks are of a role
(core/owned.py). A name without a begin for `name_idle_s`, and a sink without a begin or a batch for `sink_idle_s`, is
forgotten; the numbers of holders go on, so none is given twice. How long each was idle is noted at a hand-over, and
NOTES times in that time, so a take-over counts on from there.
Guards: tests/broker/transaction/core/test_names_and_sinks.py.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

from ....proto.errors import BackPressure, InvalidRequest, MagnetarError, NotOwner, Unavailable
from ....proto.transactions import COUNTER_BITS
from .batches import Batches
from .intents import NAME_MAX, Begin, Begun, Limits, Reason
from .live import COUNTER_MAX, EPOCH_MAX
from .owned import Key
from .records import FORGOTTEN, AnyRecord, Named, Owned, SinkBatch, SinkKept, Unnamed
from .state import State

BLOCK_MAX = 1_000
"""Most ids of one Begin."""
BLOCKS = 64
"""Divisor of the room that is left, which one Begin takes at most: those who take ids and do not use them leave some
for the others."""
NOTES = 24
"""Notes of how long a name or a sink was idle, in the time after which it is forgotten."""


class Begins(Batches):
    """The part of a coordinator that decides begins."""

    def __init__(
        self, number: int, epoch: int, state: State, limits: Limits, now: float, gap: Callable[[], int]
    ) -> None:
        super().__init__(number, epoch, state, limits)
        self._gap = gap
        self._used_names = {key: now - each.idle_s for key, each in state.names.items()}
        self._used_sinks = {key: now - each.idle_s for key, each in state.sinks.items()}
        self._holders = state.holders
        self._idle_looked_at = self._idle_noted_at = now

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
        if tag is not None and self._has_batch(intent, tag, now):
            self._answer(intent, Begun(0, 0, 0.0, already=True))
            return
        count = self._room(intent)
        if intent.name and not intent.holder:
            self._take_name(intent, now)
            return
        self._check_holder(intent.owner, intent.name, intent.holder)
        self._give_ids(intent, count, intent.holder, now)

    def _room(self, intent: Begin) -> int:
        limits, used = self.limits, len(self._live) + len(self._unused)
        room = limits.open_max - used
        if intent.owner and limits.open_per_role_max:
            room = min(room, limits.open_per_role_max - self._per_owner.get(intent.owner, 0))
        if room <= 0:
            raise BackPressure(f"coordinator {self.number} has {used} open transactions: wait for some to end")
        return min(max(1, intent.count), BLOCK_MAX, max(1, room // BLOCKS))

    def _take_name(self, intent: Begin, now: float) -> None:
        owner, limits = intent.owner, self.limits
        if not self.state.names.has_room(owner, intent.name, limits.names_max, limits.names_per_role_max):
            raise BackPressure(f"coordinator {self.number} knows as many names as it may, of all roles or of this one")
        self._holders += 1
        for txn in list(self._of_name.get((owner, intent.name), ())):
            self._void(txn, Reason.FENCED, now)
        self._decide(Named(intent.name, self._holders, owner=owner), intent)

    def _named(self, record: Named, intent: Begin, now: float) -> None:
        for txn in list(self._of_name.get((record.owner, record.name), ())):
            self._void(txn, Reason.FENCED, now)  # what an earlier begin was given in the meantime, or was in doubt
        try:
            self._give_ids(intent, self._room(intent), record.holder, now)
        except MagnetarError as error:
            self._answer(intent, error)

    def _give_ids(self, intent: Begin, count: int, holder: int, now: float) -> None:
        first = self._take_ids(count)
        if intent.name:
            self._used_names[self.state.names.key(intent.owner, intent.name)] = now
        timeout_s = intent.timeout_s or self.limits.timeout_s
        owned = Owned(intent.owner, timeout_s, intent.name, holder, intent.tag, intent.address)
        self._lease(range(first, first + count), owned, now)
        self._answer(intent, Begun(first, count, self.limits.lease_s, holder))

    def _take_ids(self, count: int) -> int:
        """The first of so many ids in a row. Unavailable, NotOwner: there are none in this epoch."""
        first = self._next + self._gap()
        if first + count - 1 > (self.epoch << COUNTER_BITS) + COUNTER_MAX:
            if self.epoch == EPOCH_MAX:
                raise Unavailable(f"coordinator {self.number} has no ids any more; use another one")
            self._give_up("the ids of its epoch are used up")
            raise NotOwner(f"coordinator {self.number} takes a new epoch; try again")
        self._next = first + count
        return first

    # ------------------------------------------------------------------ what is idle
    def _look_at_idle(self, now: float) -> None:
        """Forgets what was idle for too long, and notes how long the rest was."""
        limits, shortest = self.limits, min(self.limits.name_idle_s, self.limits.sink_idle_s)
        if now - self._idle_looked_at <= shortest / 1000:
            return
        self._idle_looked_at = now
        taken = {
            (each.record.owner, each.record.name)
            for each in (*self._gathered, *self._writing) if isinstance(each.record, Named)
        }  # fmt: skip
        names = [
            key for key, _ in self.state.names.items()
            if now - self._used_names.get(key, now) >= limits.name_idle_s and key not in self._of_name
            and key not in taken
        ]  # fmt: skip
        sinks = [
            sink for key, sink in self.state.sinks.items()
            if now - self._used_sinks.get(key, now) >= limits.sink_idle_s and key not in self._of_sink
            and key not in self._sinks_in_doubt
        ]  # fmt: skip
        if names:
            self._decide(Unnamed([name for _, name in names], [owner for owner, _ in names]), None)
        for sink in sinks:
            self._decide(SinkKept(SinkBatch(sink.sink_id, sink.query_id, FORGOTTEN, sink.owner)), None)
        for key in names:
            self._used_names.pop(key, None)
        for sink in sinks:
            self._used_sinks.pop((sink.owner, sink.sink_id), None)
        if now - self._idle_noted_at >= shortest / NOTES:
            self._idle_noted_at = now
            changing = {*taken, *self._sinks_in_doubt, *names, *((each.owner, each.sink_id) for each in sinks)}
            for note in list(self._idle_notes(now, changing)):
                self._decide(note, None)

    def _idle_notes(self, now: float, changing: Collection[Key] = ()) -> Iterator[AnyRecord]:
        """Yields new records of the names and sinks whose idle time in the record is wrong by a NOTES-th of the limit
        or more."""
        limits = self.limits
        for (owner, name), each in self.state.names.items():
            idle_s = now - self._used_names.get((owner, name), now)
            if (owner, name) not in changing and abs(idle_s - each.idle_s) >= limits.name_idle_s / NOTES:
                yield Named(name, each.holder, idle_s, owner)
        for key, sink in self.state.sinks.items():
            idle_s = now - self._used_sinks.get(key, now)
            if key not in changing and abs(idle_s - sink.idle_s) >= limits.sink_idle_s / NOTES:
                yield SinkKept(SinkBatch(sink.sink_id, sink.query_id, sink.batch, sink.owner, idle_s))
