"""Half messages of one coordinator: stored there, and published only when their group commits them. A part of
`TransactionCoordinatorCore`.

    halves.receive(PrepareHalf | EndHalf | ChangeHalf | WatchHalves, now)               intents
    halves.remove_member(member) | on_published(…) | on_not_published(…) | tick(now)    facts
    halves.on_record_durable(record) | remove_half_message(half, how, now)              facts, from the coordinator

    STORING ─stored→ WAITING ⇄ ASKED ─commit→ PUBLISHING ─published→ COMMITTING ─durable→ committed
                      │   ↑      └─rollback→ ROLLING_BACK ─durable→ rolled back
                      ↓   └─revive─┐
             too old, unknown too often, or not publishable → PARKING → PARKED

Rules (docs/transactions.md, Half messages)
- **One decision.** A half message is committed by the commit record of the transaction that publishes it
  (`TransactionsCommitted.half`). So its messages become visible once, and exactly if it is committed. A crash before
  that record leaves an aborted transaction and an undecided half message. The first decision moves it out of the phases
  in which it may be decided.
- **Doubt.** In a phase of `DECIDING_PHASES` no intent about the half message is answered: intents wait in
  `waiting_intents`.
- **Roles.** A role that did not prepare a half message gets the answer for an id that was never given, whatever its
  state is. One role may use only a share of the bytes and of the members (`ROLE_SHARE_DIVISOR`).
- **Check-back.** `check_after_s` seconds after a half message was stored, one member of its group and role is asked;
  each time another one, if there is one. The pause between two checks is `pause_s`, and doubles up to `pause_s_max`.
  If the asked member disconnects, the next one is asked at once; after the second time with a pause, so that a check
  which crashes its process does not crash all members. While no member is connected, no check is sent or counted.
- **Parked, never dropped.** A half message is parked after `unknown_max` answers of UNKNOWN, at the age `open_s`, or if
  publishing fails with an error that retrying cannot change. Then only an operator commits, rolls back or revives it.
  Only answers of UNKNOWN count; a check that failed or was not answered does not.
- **Durable** are the messages, the group, the count of UNKNOWN, the age, and whether it is parked. A late or repeated
  UNKNOWN counts once, because each check has a number.
- **Time** is monotonic; in a new epoch the age continues from the last HalfMessageAgeRecorded, and is never too large.

Guards: tests/broker/transaction/test_halves.py, tests/broker/transaction/test_halves_walk.py.
"""

from __future__ import annotations

import enum
import heapq
from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, assert_never

import msgspec
from pyroaring import BitMap64

from ...proto.errors import (
    BackPressure,
    HalfParked,
    InvalidRequest,
    MagnetarError,
    NotFound,
    NotOwner,
    TransactionAborted,
    TransactionEnded,
    TransactionForgotten,
    Unavailable,
)
from ...proto.states import HALF_BYTES_MAX, HALF_MESSAGES_MAX, TxnState
from .intents_core import (
    NAME_CHARACTERS_MAX,
    AnswerRequest,
    AskAboutHalfMessage,
    ChangeHalf,
    CoordinatorIntent,
    EndHalf,
    HalfMessageChangeVerb,
    HalfMessageEndVerb,
    HalfMessageIntent,
    HalfMessageLimits,
    HalfMessagePhase,
    HalfMessageRow,
    IntentResult,
    PrepareHalf,
    PublishHalfMessage,
    WarnOfParkedHalfMessage,
    WatchHalves,
)
from .records_core import (
    HalfMessageAgeRecorded,
    HalfMessageOutcomesDiscarded,
    HalfMessageRecord,
    HalfMessageRolledBack,
    HalfMessageStored,
    Participant,
)
from .state_core import StoredHalfMessages, half_message_size_bytes

if TYPE_CHECKING:
    from .coordinator_core import TransactionCoordinatorCore

REASON_CHARACTERS_MAX = 300
CHECKS_PER_MEMBER_MAX = 16
"""Most checks that one member has to answer at a time."""
CHECKING_MEMBERS_MAX = 10_000
ROLE_SHARE_DIVISOR = 4
"""One role may have this fraction (1 / ROLE_SHARE_DIVISOR) of the bytes and of the members."""
PUBLISH_TIMEOUT_S = 30.0
"""Timeout of a transaction that publishes a half: readers of its topics wait no longer."""
PUBLISH_RETRY_S = 60.0
"""Seconds for which publishing is retried before the commit is answered with the error."""
CHECK_PAUSE_S_MAX = 5.0
DISCARD_GROUPS_PER_PERIOD = 8
"""Outcomes are discarded in groups: this many groups per `retention_s`."""
AGE_RECORDS_PER_PERIOD = 24
"""How often per `open_s` the age of a half is recorded: a take-over may lose that part of its age."""


class UndecidedHalfPhase(enum.Enum):
    """The phases of a half message that has no outcome yet."""

    STORING = "storing"
    WAITING = "waiting"
    ASKED = "asked"
    PUBLISHING = "publishing"
    COMMITTING = "committing"
    ROLLING_BACK = "rolling back"
    PARKING = "parking"
    PARKED = "parked"
    REVIVING = "reviving"


UNDECIDED_PHASES = (UndecidedHalfPhase.WAITING, UndecidedHalfPhase.ASKED, UndecidedHalfPhase.PARKED)
DECIDING_PHASES = tuple(each for each in UndecidedHalfPhase if each not in UNDECIDED_PHASES)
_SHOWN = {
    UndecidedHalfPhase.WAITING: HalfMessagePhase.WAITING,
    UndecidedHalfPhase.ASKED: HalfMessagePhase.ASKED,
    UndecidedHalfPhase.PARKED: HalfMessagePhase.PARKED,
    UndecidedHalfPhase.PUBLISHING: HalfMessagePhase.COMMITTING,
    UndecidedHalfPhase.COMMITTING: HalfMessagePhase.COMMITTING,
}


class IntentQueuedUntilDurable(Exception):
    """Raised if an intent cannot be answered yet, because a record about its transaction is being written. The intent
    is queued, and is handled when the record is durable."""


class OpenHalfMessage(msgspec.Struct):
    """A half message without an outcome: its stored record, its phase, and the state of its checks. All times are
    monotonic seconds."""

    record: HalfMessageStored
    age_counted_from: float  # its age is counted from here
    phase: UndecidedHalfPhase
    waiting_intents: list[CoordinatorIntent] = msgspec.field(default_factory=list)
    due: float = 0.0  # the time of its next deadline
    asks: int = 0  # checks since it was stored, loaded or revived
    disconnected_members: int = 0  # members that left while they were asked
    member: object = None  # the member that is asked, or was last
    check_number: int = 0  # the number of that check
    txn: int = 0  # the transaction that publishes it; 0: none at the moment
    tries: int = 0
    publish_retry_deadline: float = 0.0
    why: str = ""  # the last failure

    @property
    def half_message_group_key(self) -> tuple[str, str]:
        """Returns the role and the name of the group to which the half message belongs."""
        return self.record.owner, self.record.group


class HalfMessageChecksOfMember(msgspec.Struct):
    """The half messages about which one member of a group was asked and has not answered yet."""

    asked: set[int] = msgspec.field(default_factory=set)


class HalfMessageGroup(msgspec.Struct):
    """The half messages and the connected members of one group. A group is identified by a role and a name. It exists
    while it has half messages or members."""

    halves: int = 0
    # the next one to ask comes first
    members: OrderedDict[object, HalfMessageChecksOfMember] = msgspec.field(default_factory=OrderedDict)
    ready: dict[int, None] = msgspec.field(default_factory=dict)  # halves that wait for a member with room


class HalfMessageCore:
    """Decides about the half messages of one coordinator: when they are stored, checked, published or rolled back.
    `counters`: how many were prepared, committed, rolled back and parked, and how many checks were sent, since the
    take-over. In all methods `now` is in monotonic seconds."""

    def __init__(
        self,
        state: StoredHalfMessages,
        limits: HalfMessageLimits,
        coordinator: TransactionCoordinatorCore,
        epoch: int,
        now: float,
    ) -> None:
        self.counters = dict.fromkeys(("prepared", "committed", "rolled_back", "parked", "asked"), 0)
        self._state = state
        self._limits = limits
        self._coordinator = coordinator
        self._table = coordinator.table
        self._check = epoch << 40  # the last number of a question: none is used in two epochs
        self._halves: dict[int, OpenHalfMessage] = {}
        self._groups: dict[tuple[str, str], HalfMessageGroup] = {}
        self._group_of: dict[object, tuple[str, str]] = {}  # by member
        self._storing_bytes = 0
        self._bytes_of: dict[str, int] = {}  # by role, of all that have no outcome
        self._members_of: dict[str, int] = {}
        self._due: list[tuple[float, int]] = []
        self._ended: deque[tuple[float, BitMap64]] = deque()
        self._noted = now

    def start(self, now: float) -> None:
        """Resumes the half messages that earlier epochs stored. The time until the next check of each begins anew."""
        for record in self._state.open.values():
            half = OpenHalfMessage(
                record, now - record.age_s, UndecidedHalfPhase.PARKED if record.parked else UndecidedHalfPhase.WAITING
            )
            self._add(half)
            if half.phase is UndecidedHalfPhase.WAITING:
                self._arm(half, now + record.check_after_s)
        if ended := self._state.ended_half_message_ids():
            self._ended.append((now, ended))

    # ------------------------------------------------------------------ intents
    def receive(self, intent: HalfMessageIntent, now: float) -> None:
        """Decides about an intent on a half message: store it, end it, change it, or join a group that answers checks.
        The answer is an effect of the coordinator, now or when the decision is durable. Raises IntentQueuedUntilDurable
        while an earlier decision is being written; else a MagnetarError: the reason why the intent is refused."""
        match intent:
            case PrepareHalf():
                self._prepare(intent, now)
            case EndHalf():
                self._end(intent, now)
            case ChangeHalf():
                self._change(intent, now)
            case WatchHalves():
                self._watch(intent, now)
            case _:
                assert_never(intent)

    def _answer(self, intent: CoordinatorIntent, result: IntentResult) -> None:
        self._coordinator.decisions.effects.append(AnswerRequest(intent.request, result))

    def has_other_owner(self, half: int, owner: str) -> bool:
        """Returns True if `half` is the id of a half message that another role than `owner` prepared."""
        found = self._halves.get(half)
        return found.record.owner != owner if found is not None else self._state.has_other_owner(half, owner)

    def find_half_message_state(self, half: int, intent: CoordinatorIntent, owner: str | None) -> TxnState | None:
        """Returns the state of a half message; None if `half` is not the id of a half message. Raises InvalidRequest if
        another role prepared it; IntentQueuedUntilDurable while a decision about it is being written (`intent` is then
        handled later)."""
        self._table.check_owner(half, owner)
        found = self._halves.get(half)
        if found is None:
            return self._state.find_half_message_outcome(half)
        if found.phase in DECIDING_PHASES:
            found.waiting_intents.append(intent)
            raise IntentQueuedUntilDurable
        return TxnState.PREPARED

    # ------------------------------------------------------------------ prepare
    def _prepare(self, intent: PrepareHalf, now: float) -> None:
        known = self.find_half_message_state(intent.half, intent, intent.owner)
        if known is TxnState.ABORTED:
            raise self._rolled_back(intent.half)
        if known is not None:
            self._answer(intent, known)
            return
        group = self._groups.get((intent.owner, intent.group))
        self._check_size(intent, group.halves if group is not None else 0)
        if not self._coordinator.claim_half_message_id(intent.half, now):
            text = f"half {self._table.make_txn_id(intent.half)}"
            raise TransactionAborted(f"the id {text} is void: prepare the half under another one", reason="void")
        after_s = min(intent.check_after_s or self._limits.check_after_s, self._limits.open_s)
        record = HalfMessageStored(
            intent.half, intent.owner, intent.group, intent.check_key, after_s, list(intent.messages)
        )
        self._add(OpenHalfMessage(record, now, UndecidedHalfPhase.STORING, [intent]))
        self._storing_bytes += half_message_size_bytes(record)
        self._coordinator.decisions.append_decision(record)

    def _check_size(self, intent: PrepareHalf, open_halves: int) -> None:
        limits = self._limits
        if not intent.group or max(len(intent.group), len(intent.check_key)) > NAME_CHARACTERS_MAX:
            raise InvalidRequest(f"a half has a group and a check_key of at most {NAME_CHARACTERS_MAX} characters")
        if not 1 <= len(intent.messages) <= HALF_MESSAGES_MAX:
            raise InvalidRequest(f"a half has 1 to {HALF_MESSAGES_MAX} messages, not {len(intent.messages)}")
        size = sum(len(each.topic) + len(each.entry) for each in intent.messages)
        if size > HALF_BYTES_MAX:
            raise InvalidRequest(
                f"a half of {size} bytes is larger than {HALF_BYTES_MAX}: store the content elsewhere, and send where",
                limit=HALF_BYTES_MAX,
            )
        if open_halves >= limits.group_max:
            raise BackPressure(
                f"group {intent.group!r} has {open_halves} halves that are not decided; "
                "see 'magnetar transactions halves list'"
            )
        of_role = self._bytes_of.get(intent.owner, 0) + size if intent.owner else 0
        if self._state.size_bytes + self._storing_bytes + size > limits.bytes_max or (
            of_role > limits.bytes_max // ROLE_SHARE_DIVISOR
        ):
            raise BackPressure("the coordinator holds as many bytes of halves as it may, of all roles or of this one")

    # ------------------------------------------------------------------ decisions
    def _end(self, intent: EndHalf, now: float) -> None:
        self._table.check_owner(intent.half, intent.owner)
        half = self._halves.get(intent.half)
        if half is None:
            self._answer(intent, self._ended_as(intent, now))
            return
        if intent.verb in (HalfMessageEndVerb.UNKNOWN, HalfMessageEndVerb.FAILED):
            if half.phase is UndecidedHalfPhase.ASKED and half.check_number == intent.check:
                self._undecided(half, intent, now)
            self._answer(intent, TxnState.PREPARED)
            return
        self._wait_if_deciding(half, intent)
        if half.phase is UndecidedHalfPhase.PARKED:
            why = half.record.parked
            raise HalfParked(
                f"half {self._table.make_txn_id(intent.half)} is parked ({why}): an operator decides, by "
                "'magnetar transactions halves'", reason=why,
            )  # fmt: skip
        self._decided(half, intent, is_commit=intent.verb is HalfMessageEndVerb.COMMIT, now=now)

    def _ended_as(self, intent: EndHalf, now: float) -> TxnState:
        """Returns the answer to an intent to end a half message that is not open: its outcome. If the id was never used
        and the intent is a rollback, makes the id void, so that it cannot be used later. Raises TransactionAborted for
        a commit after a rollback; TransactionEnded for a rollback after a commit; TransactionForgotten if the outcome
        is not known any more."""
        self._coordinator.check_half_message_id(intent.half)
        outcome = self._state.find_half_message_outcome(intent.half)
        if outcome is None:
            taken = intent.verb is HalfMessageEndVerb.ROLLBACK and self._coordinator.claim_half_message_id(
                intent.half, now
            )
            if not taken:
                raise TransactionForgotten(
                    f"half {self._table.make_txn_id(intent.half)} is not known: it was never stored, or ended long ago"
                )
            return TxnState.ABORTED  # and it is not stored later
        if intent.verb is HalfMessageEndVerb.COMMIT and outcome is TxnState.ABORTED:
            raise self._rolled_back(intent.half)
        if intent.verb is HalfMessageEndVerb.ROLLBACK and outcome is TxnState.COMMITTED:
            raise TransactionEnded(f"half {self._table.make_txn_id(intent.half)} is committed")
        return outcome

    def _rolled_back(self, half: int) -> MagnetarError:
        return TransactionAborted(f"half {self._table.make_txn_id(half)} is rolled back", reason="rolled back")

    def _wait_if_deciding(self, half: OpenHalfMessage, intent: CoordinatorIntent) -> None:
        if half.phase in DECIDING_PHASES:
            half.waiting_intents.append(intent)
            raise IntentQueuedUntilDurable

    def _decided(self, half: OpenHalfMessage, intent: CoordinatorIntent, *, is_commit: bool, now: float) -> None:
        if is_commit:
            self._publish(half, now)
            half.publish_retry_deadline, half.tries = now + PUBLISH_RETRY_S, 0
        else:
            self._leave(half)
            half.phase = UndecidedHalfPhase.ROLLING_BACK
            self._coordinator.decisions.append_decision(HalfMessageRolledBack(half.record.half))
        half.waiting_intents.append(intent)
        self._ask(half.half_message_group_key, now)

    def _change(self, intent: ChangeHalf, now: float) -> None:
        half = self._halves.get(intent.half)
        if half is None:
            self._coordinator.check_half_message_id(intent.half)
            wanted = {
                HalfMessageChangeVerb.COMMIT: TxnState.COMMITTED, HalfMessageChangeVerb.ROLLBACK: TxnState.ABORTED
            }.get(intent.verb)
            outcome = self._state.find_half_message_outcome(intent.half)
            if outcome is None:
                raise NotFound(f"half {self._table.make_txn_id(intent.half)} is not open")
            if outcome is not wanted:
                raise TransactionEnded(f"half {self._table.make_txn_id(intent.half)} is {_past(outcome)} already")
            self._answer(intent, None)
            return
        self._wait_if_deciding(half, intent)
        match intent.verb:
            case HalfMessageChangeVerb.COMMIT | HalfMessageChangeVerb.ROLLBACK:
                self._decided(half, intent, is_commit=intent.verb is HalfMessageChangeVerb.COMMIT, now=now)
            case HalfMessageChangeVerb.PARK if half.phase is not UndecidedHalfPhase.PARKED:
                self._park(half, "by an operator", now)
                half.waiting_intents.append(intent)
            case HalfMessageChangeVerb.REVIVE if half.phase is UndecidedHalfPhase.PARKED:
                half.phase, half.age_counted_from = UndecidedHalfPhase.REVIVING, now
                half.waiting_intents.append(intent)
                self._coordinator.decisions.append_decision(HalfMessageAgeRecorded(half.record.half, 0, 0.0, ""))
            case HalfMessageChangeVerb.REVIVE if half.phase is UndecidedHalfPhase.WAITING:
                self._make_ready(half, now)
                self._answer(intent, None)
            case _:
                self._answer(intent, None)

    # ------------------------------------------------------------------ publishing
    def _publish(self, half: OpenHalfMessage, now: float) -> None:
        """Ends the check of the half message, and publishes it in a new transaction. Raises NotOwner if this epoch has
        no transaction ids left, and then ends; Unavailable if no further epoch is possible. The half message is as
        before then."""
        half.txn = self._coordinator.begin_transaction_for_half_message(half.record.owner, PUBLISH_TIMEOUT_S, now)
        self._leave(half)
        half.phase = UndecidedHalfPhase.PUBLISHING
        self._coordinator.decisions.effects.append(PublishHalfMessage(half.record.half, half.txn, half.record.messages))

    def on_published(self, half: int, txn: int, listed: Sequence[Participant], now: float) -> None:
        """Called when the messages of the half message are published in the transaction `txn`. Decides to commit this
        transaction, and with it the half message; aborts the transaction if the half message is not published in it any
        more. `listed`: the topics, each with the number and the last position of its entries."""
        found = self._halves.get(half)
        if found is None or found.phase is not UndecidedHalfPhase.PUBLISHING or found.txn != txn:
            self._coordinator.abort_transaction_for_half_message(txn, now)
            return
        try:
            self._coordinator.commit_transaction_for_half_message(txn, listed, half, now)
        except MagnetarError as error:
            self._on_publish_failed(found, error, now)
            return
        found.phase = UndecidedHalfPhase.COMMITTING

    def on_not_published(self, half: int, txn: int, error: MagnetarError, now: float) -> None:
        """Called when publishing the half message in the transaction `txn` has failed with `error`. Aborts this
        transaction. Publishes the half message again later, for at most PUBLISH_RETRY_S seconds; then refuses the
        request to commit it. If retrying cannot help, parks the half message, so that an operator must decide."""
        self._coordinator.abort_transaction_for_half_message(txn, now)
        found = self._halves.get(half)
        if found is not None and found.phase is UndecidedHalfPhase.PUBLISHING and found.txn == txn:
            self._on_publish_failed(found, error, now)

    def _on_publish_failed(self, half: OpenHalfMessage, error: MagnetarError, now: float) -> None:
        half.txn, half.why = 0, f"it is not published: {error.message}"[:REASON_CHARACTERS_MAX]
        stays = error.definite and not error.retryable and not isinstance(error, TransactionAborted)
        if not stays and now < half.publish_retry_deadline:
            half.tries += 1
            self._arm(half, now + min(CHECK_PAUSE_S_MAX, 0.25 * 2.0**half.tries))
            return
        told = error
        if not stays:
            text = f"half {self._table.make_txn_id(half.record.half)}"
            told = Unavailable(f"{text}: {half.why}; nothing of it counts so far")
        self._refuse(half, told)
        if stays:
            self._park(half, half.why, now)
        elif half.record.parked:
            half.phase = UndecidedHalfPhase.PARKED
            self._resolved(half, now)
        else:
            self._wait(half, now)
            self._resolved(half, now)

    def _refuse(self, half: OpenHalfMessage, error: MagnetarError) -> None:
        """Answers the waiting requests to commit the half message with `error`. The other requests continue to wait."""
        later, half.waiting_intents = half.waiting_intents, []
        for intent in later:
            if isinstance(intent, EndHalf | ChangeHalf) and intent.verb == HalfMessageEndVerb.COMMIT:
                self._answer(intent, error)
            else:
                half.waiting_intents.append(intent)

    # ------------------------------------------------------------------ checks
    def _watch(self, intent: WatchHalves, now: float) -> None:
        if len(self._group_of) >= CHECKING_MEMBERS_MAX:
            raise BackPressure(f"{CHECKING_MEMBERS_MAX} processes answer for halves here already")
        of_role = self._members_of.get(intent.owner, 0)
        if intent.owner and of_role >= CHECKING_MEMBERS_MAX // ROLE_SHARE_DIVISOR:
            raise BackPressure(f"{of_role} processes of this role answer for halves here already")
        self._members_of[intent.owner] = of_role + 1
        key = intent.owner, intent.group
        self._group_of[intent.member] = key
        self._groups.setdefault(key, HalfMessageGroup()).members[intent.member] = HalfMessageChecksOfMember()
        self._answer(intent, None)
        self._ask(key, now)

    def remove_member(self, member: object, now: float) -> None:
        """Removes a member that has disconnected. The half messages about which it was asked and did not answer wait
        for another check. Idempotent."""
        key = self._group_of.pop(member, None)
        if key is None:
            return
        self._members_of[key[0]] -= 1
        if not self._members_of[key[0]]:
            del self._members_of[key[0]]
        asked = self._groups[key].members.pop(member).asked
        for each in asked:
            half = self._halves[each]
            half.disconnected_members += 1
            half.why = "a process that was asked went away"
            half.phase = UndecidedHalfPhase.WAITING
            if half.disconnected_members == 1:
                self._make_ready(half, now, ask=False)
            else:
                self._arm(half, now + self._pause(half))
        self._ask(key, now)
        self._discard_group(key)

    def _ask(self, key: tuple[str, str], now: float) -> None:
        """Asks the members of the group `key` about its half messages that are ready for a check, until no member has
        room for another check."""
        group = self._groups.get(key)
        while group is not None and group.ready:
            half = self._halves[next(iter(group.ready))]
            free = [each for each, member in group.members.items() if len(member.asked) < CHECKS_PER_MEMBER_MAX]
            if not free:
                return
            member = next((each for each in free if each != half.member), free[0])
            del group.ready[half.record.half]
            group.members.move_to_end(member)
            group.members[member].asked.add(half.record.half)
            self._check += 1
            half.phase, half.member, half.check_number = UndecidedHalfPhase.ASKED, member, self._check
            half.asks += 1
            self.counters["asked"] += 1
            self._arm(half, now + self._limits.answer_s)
            record = half.record
            self._coordinator.decisions.effects.append(AskAboutHalfMessage(
                member, record.half, half.check_number, record.check_key, record.unknown, now - half.age_counted_from,
                self._limits.answer_s, record.messages,
            ))  # fmt: skip

    def _undecided(self, half: OpenHalfMessage, intent: EndHalf, now: float) -> None:
        """Handles the answer UNKNOWN or FAILED to a check: parks the half message, or checks it again later."""
        self._leave(half)
        if intent.verb is HalfMessageEndVerb.FAILED:
            half.why = f"a check failed: {intent.why}"[:REASON_CHARACTERS_MAX]
            self._wait(half, now)
        elif half.record.unknown + 1 >= self._limits.unknown_max:
            self._park(half, f"{half.record.unknown + 1} checks were answered by UNKNOWN", now, unknown=1)
        else:
            self._wait(half, now)
            # the count is this object's too, before it is durable: the next answer counts on
            noted = HalfMessageAgeRecorded(half.record.half, half.record.unknown + 1, now - half.age_counted_from, "")
            half.record = _noted(half.record, noted)
            self._coordinator.decisions.append_decision(noted)
        self._ask(half.half_message_group_key, now)

    def _leave(self, half: OpenHalfMessage) -> None:
        """Ends the check of the half message: removes it from the half messages that its member was asked about, or
        from those that wait for a member."""
        group = self._groups[half.half_message_group_key]
        group.ready.pop(half.record.half, None)
        if half.phase is UndecidedHalfPhase.ASKED and (member := group.members.get(half.member)) is not None:
            member.asked.discard(half.record.half)

    def _wait(self, half: OpenHalfMessage, now: float) -> None:
        half.phase = UndecidedHalfPhase.WAITING
        self._arm(half, now + self._pause(half))

    def _pause(self, half: OpenHalfMessage) -> float:
        doubled = self._limits.pause_s * 2.0 ** min(30, max(0, half.asks - 1))
        return min(self._limits.pause_s_max, doubled)

    def _make_ready(self, half: OpenHalfMessage, now: float, *, ask: bool = True) -> None:
        """Makes the half message ready to be checked by the next member that has room. While there is no such member,
        only its age grows."""
        self._groups[half.half_message_group_key].ready[half.record.half] = None
        self._arm(half, half.age_counted_from + self._limits.open_s)
        if ask:
            self._ask(half.half_message_group_key, now)

    def _park(self, half: OpenHalfMessage, why: str, now: float, *, unknown: int = 0) -> None:
        self._leave(half)
        half.phase = UndecidedHalfPhase.PARKING
        self._coordinator.decisions.append_decision(
            HalfMessageAgeRecorded(half.record.half, half.record.unknown + unknown, now - half.age_counted_from, why)
        )
        self._ask(half.half_message_group_key, now)

    # ------------------------------------------------------------------ what is durable
    def on_record_durable(self, record: HalfMessageRecord, now: float) -> None:
        """Called when a record about a half message is durable. Moves the half message to its next phase: a stored one
        waits for its first check, a parked one for an operator, a rolled back one is removed. Answers the intents that
        waited for the record."""
        match record:
            case HalfMessageStored():
                half = self._halves[record.half]
                self._storing_bytes -= half_message_size_bytes(record)
                self.counters["prepared"] += 1
                half.phase = UndecidedHalfPhase.WAITING
                self._arm(half, now + record.check_after_s)
                self._resolved(half, now)
            case HalfMessageAgeRecorded():
                self._on_noted(record, now)
            case HalfMessageRolledBack():
                self.remove_half_message(record.half, "rolled_back", now)

    def _on_noted(self, record: HalfMessageAgeRecorded, now: float) -> None:
        half = self._halves.get(record.half)
        if half is None:
            return
        if record.parked and half.phase is UndecidedHalfPhase.PARKING:
            half.phase = UndecidedHalfPhase.PARKED
            half.record = _noted(half.record, record)
            self.counters["parked"] += 1
            self._coordinator.decisions.effects.append(
                WarnOfParkedHalfMessage(record.half, half.record.group, record.parked)
            )
            self._resolved(half, now)
        elif half.phase is UndecidedHalfPhase.REVIVING and not record.parked:
            half.record = _noted(half.record, record)
            half.asks, half.disconnected_members, half.phase = 0, 0, UndecidedHalfPhase.WAITING
            self._make_ready(half, now)
            self._resolved(half, now)

    def remove_half_message(self, number: int, how: str, now: float) -> None:
        """Removes a half message whose outcome is durable, and answers the requests that wait for this outcome.
        `number`: its id; `how`: the counter that it adds to, "committed" or "rolled_back"."""
        half = self._halves.pop(number)
        self.counters[how] += 1
        self._groups[half.half_message_group_key].halves -= 1
        owner = half.record.owner
        self._bytes_of[owner] -= half_message_size_bytes(half.record)
        if not self._bytes_of[owner]:
            del self._bytes_of[owner]
        self._discard_group(half.half_message_group_key)
        if not self._ended or now - self._ended[-1][0] >= self._limits.retention_s / DISCARD_GROUPS_PER_PERIOD:
            self._ended.append((now, BitMap64()))
        self._ended[-1][1].add(number)
        self._resolved(half, now)

    def _resolved(self, half: OpenHalfMessage, now: float) -> None:
        later, half.waiting_intents = half.waiting_intents, []
        self._coordinator.outcomes.handle_intents(later, now)

    def _add(self, half: OpenHalfMessage) -> None:
        self._halves[half.record.half] = half
        owner = half.record.owner
        self._bytes_of[owner] = self._bytes_of.get(owner, 0) + half_message_size_bytes(half.record)
        self._groups.setdefault(half.half_message_group_key, HalfMessageGroup()).halves += 1

    def _discard_group(self, key: tuple[str, str]) -> None:
        group = self._groups[key]
        if not group.halves and not group.members:
            del self._groups[key]

    # ------------------------------------------------------------------ time
    def _arm(self, half: OpenHalfMessage, due: float) -> None:
        half.due = (
            due
            if half.phase is not UndecidedHalfPhase.WAITING
            else min(due, half.age_counted_from + self._limits.open_s)
        )
        heapq.heappush(self._due, (half.due, half.record.half))

    def tick(self, now: float) -> None:
        """Must be called about once a second. Starts checks that are due; ends checks that were not answered in time;
        parks half messages that were not decided in time; publishes again after a failure; discards old outcomes."""
        while self._due and self._due[0][0] <= now:
            due, number = heapq.heappop(self._due)
            half = self._halves.get(number)
            if half is not None and half.due == due:
                half.due = float("inf")
                self._passed(half, now)
        if len(self._due) > 2 * len(self._halves) + 1000:
            self._due = [(each.due, number) for number, each in self._halves.items() if each.due != float("inf")]
            heapq.heapify(self._due)
        self._expire_outcomes(now)
        if now - self._noted >= self._limits.open_s / AGE_RECORDS_PER_PERIOD:
            self._noted = now
            for note in self.make_half_message_age_records(now):
                self._coordinator.decisions.append_decision(note)

    def _passed(self, half: OpenHalfMessage, now: float) -> None:
        match half.phase:
            case UndecidedHalfPhase.ASKED:
                self._leave(half)
                half.why = f"a check was not answered within {self._limits.answer_s:g} s"
                self._wait(half, now)
                self._ask(half.half_message_group_key, now)
            case UndecidedHalfPhase.WAITING if now - half.age_counted_from >= self._limits.open_s:
                why = f"it was not decided within {self._limits.open_s:g} s" + (f"; {half.why}" if half.why else "")
                self._park(half, why[:REASON_CHARACTERS_MAX], now)
            case UndecidedHalfPhase.WAITING:
                self._make_ready(half, now)
            case UndecidedHalfPhase.PUBLISHING if not half.txn:
                try:
                    self._publish(half, now)
                except NotOwner:
                    pass  # the epoch ends
                except MagnetarError as error:
                    self._on_publish_failed(half, error, now)

    def _expire_outcomes(self, now: float) -> None:
        """Discards the outcomes that are older than `retention_s` seconds; some stay up to an eighth longer."""
        kept_s = self._limits.retention_s * (1 + 1 / DISCARD_GROUPS_PER_PERIOD)
        while self._ended and now - self._ended[0][0] >= kept_s:
            self._coordinator.decisions.defer_record(HalfMessageOutcomesDiscarded(self._ended.popleft()[1].serialize()))

    def make_half_message_age_records(self, now: float) -> list[HalfMessageAgeRecorded]:
        """Returns records that store the present age of each half message that waits for a check or is being
        checked."""
        return [
            HalfMessageAgeRecorded(number, half.record.unknown, now - half.age_counted_from, "")
            for number, half in self._halves.items()
            if half.phase in (UndecidedHalfPhase.WAITING, UndecidedHalfPhase.ASKED)
        ]  # fmt: skip

    # ------------------------------------------------------------------ the end of the epoch
    def take_waiting_intents(self) -> list[CoordinatorIntent]:
        """Removes all intents that wait for the outcomes of half messages, and returns them."""
        waiting = [intent for half in self._halves.values() for intent in half.waiting_intents]
        for half in self._halves.values():
            half.waiting_intents = []
        return waiting

    # ------------------------------------------------------------------ views
    def statistics(self) -> dict[str, int]:
        """Returns the numbers of open and of parked half messages, and the bytes of both together."""
        parked = sum(half.phase is UndecidedHalfPhase.PARKED for half in self._halves.values())
        return {"open": len(self._halves) - parked, "parked": parked, "bytes": self._state.size_bytes}

    def list_half_message_rows(self, now: float, half: int | None, group: str, limit: int) -> list[HalfMessageRow]:
        """Returns descriptions of up to `limit` half messages, the oldest first. `half`: only this half message, [] if
        it is not open; None: all, or, if `group` is not empty, only those of this group."""
        if half is not None:
            chosen = [each for each in (self._halves.get(half),) if each is not None]
        else:
            chosen = [each for each in self._halves.values() if group in ("", each.record.group)]
        return [self._row(each, now) for each in sorted(chosen, key=lambda each: each.age_counted_from)[:limit]]

    def _row(self, half: OpenHalfMessage, now: float) -> HalfMessageRow:
        record = half.record
        return HalfMessageRow(
            record.half, _SHOWN.get(half.phase, HalfMessagePhase.ENDING), record.owner, record.group, record.check_key,
            now - half.age_counted_from, record.unknown, len(self._groups[half.half_message_group_key].members),
            half_message_size_bytes(record),
            list(dict.fromkeys(each.topic for each in record.messages)), record.parked or half.why,
        )  # fmt: skip

    def check(self) -> None:
        """Raises AssertionError if an invariant is broken. The messages of the assertions are the invariants."""
        storing = {number for number, half in self._halves.items() if half.phase is UndecidedHalfPhase.STORING}
        assert self._halves.keys() - storing == self._state.open.keys(), "what is open is durable, or on its way"
        asked = {
            number: member for group in self._groups.values() for member, each in group.members.items()
            for number in each.asked
        }  # fmt: skip
        assert len(asked) == sum(len(m.asked) for g in self._groups.values() for m in g.members.values()), (
            "one member is asked about a half at a time"
        )
        ready = [number for group in self._groups.values() for number in group.ready]
        for number, half in self._halves.items():
            assert (number in asked) is (half.phase is UndecidedHalfPhase.ASKED), "who is asked has the question"
            assert half.phase in DECIDING_PHASES or not half.waiting_intents, "only what is being decided waits"
            assert half.phase is not UndecidedHalfPhase.PARKED or half.record.parked, "parked is durable"
            assert half.phase is not UndecidedHalfPhase.WAITING or half.due < float("inf"), (
                "what waits is looked at again"
            )
        assert all(self._halves[number].phase is UndecidedHalfPhase.WAITING for number in ready), "what is ready waits"
        for key, group in self._groups.items():
            assert group.halves == sum(
                half.half_message_group_key == key for half in self._halves.values()
            ), "halves are counted"
            free = any(len(member.asked) < CHECKS_PER_MEMBER_MAX for member in group.members.values())
            assert not (group.ready and free), "a member with room is asked"


def _noted(record: HalfMessageStored, note: HalfMessageAgeRecorded) -> HalfMessageStored:
    return HalfMessageStored(
        record.half, record.owner, record.group, record.check_key, record.check_after_s, record.messages,
        note.unknown, note.age_s, note.parked,
    )  # fmt: skip


def _past(outcome: TxnState) -> str:
    return "committed" if outcome is TxnState.COMMITTED else "rolled back"
