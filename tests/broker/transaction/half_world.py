"""A coordinator with half messages over its epochs: topics that take what is published, members that are asked.

What is published is visible if its transaction has a durable commit. `HalfWorld` keeps, beside the rules of
tests/broker/transaction/judge.py: a half is visible once if it is committed, and else not at all; it has at most
one outcome, over all epochs and answers; nothing is answered while its record is on its way; one member is asked about
it at a time, and of its own group.
"""

from collections import Counter
from collections.abc import Sequence
from copy import deepcopy

from magnetar.broker.transaction.halves_core import UndecidedHalfPhase
from magnetar.broker.transaction.intents_core import (
    AnswerRequest,
    AskAboutHalfMessage,
    ChangeHalf,
    CoordinatorEffect,
    CoordinatorLimits,
    EndHalf,
    GetTransactionStatus,
    HalfMessageEndVerb,
    HalfMessageLimits,
    JoinTransaction,
    PrepareHalf,
    PublishHalfMessage,
    WarnOfParkedHalfMessage,
    WatchHalves,
)
from magnetar.broker.transaction.records_core import (
    AnyCoordinatorRecord,
    HalfMessage,
    HalfMessageRolledBack,
    HalfMessageStored,
    Participant,
    TransactionsCommitted,
)
from magnetar.proto.errors import MagnetarError, TransactionAborted, TransactionEnded
from magnetar.proto.states import TxnState
from tests.broker.transaction.judge import World

HALF_LIMITS = HalfMessageLimits(
    group_max=30, bytes_max=10_000, check_after_s=10, pause_s=30, pause_s_max=600, answer_s=30, unknown_max=4,
    open_s=86_400, retention_s=3_600,
)  # fmt: skip


class HalfWorld(World):
    def __init__(self, limits: HalfMessageLimits = HALF_LIMITS) -> None:
        self.publishing: list[PublishHalfMessage] = []
        self.asks: list[AskAboutHalfMessage] = []  # all of this epoch
        self.open_asks: dict[int, AskAboutHalfMessage] = {}  # by half: who may be asked now
        self.log_of: list[tuple[int, int, str, bytes]] = []  # txn, half, topic, entry
        self.members: dict[object, tuple[str, str]] = {}
        self.stored: dict[int, HalfMessageStored] = {}
        self.outcome: dict[int, TxnState] = {}  # durable
        self.in_doubt: set[int] = set()
        self.numbers = 1_000_000
        self.alarms: list[int] = []
        super().__init__(CoordinatorLimits(halves=limits))

    def _next_epoch(self):  # type: ignore[no-untyped-def]
        self.publishing, self.asks, self.open_asks, self.members = [], [], {}, {}
        self.in_doubt = set()
        return super()._next_epoch()

    # ------------------------------------------------------------------ events
    def number(self) -> int:
        self.numbers += 1
        return self.numbers

    def prepare(
        self, *topics: str, owner: str = "me", group: str = "g", half: int = 0, request: int = 0,
        check_after_s: float = 0,
    ) -> int:  # fmt: skip
        half = half or self.begin(self.number(), owner=owner)
        messages = [HalfMessage(topic, b"%d" % half) for topic in topics or ("a",)]
        self.ask(PrepareHalf(request or self.number(), half, owner, group, f"key-{half}", messages, check_after_s))
        return half

    def end_half(self, half: int, verb: HalfMessageEndVerb, owner: str = "me", check: int = 0) -> int:
        request = self.number()
        if self.open_asks.get(half) is not None and self.open_asks[half].check == check:
            del self.open_asks[half]
        elif verb in (HalfMessageEndVerb.COMMIT, HalfMessageEndVerb.ROLLBACK) and half not in self.in_doubt:
            self.open_asks.pop(half, None)
        self.ask(EndHalf(request, half, verb, owner, check, "no answer"))
        return request

    def answer(self, asked: AskAboutHalfMessage, verb: HalfMessageEndVerb) -> int:
        return self.end_half(asked.half, verb, check=asked.check)

    def watch(self, member: object, owner: str = "me", group: str = "g") -> None:
        self.members[member] = owner, group
        self.ask(WatchHalves(self.number(), member, owner, group))

    def remove_member(self, member: object) -> None:
        self.members.pop(member)
        self.open_asks = {half: each for half, each in self.open_asks.items() if each.member != member}
        self.core.halves.remove_member(member, self.now)
        self._do(self.core.decisions.take_effects())

    def publish(self, number: int = 0, *, upto: int = 100) -> None:
        """The messages go into their topics; `upto`: the broker that publishes stops after so many."""
        if not self.publishing:
            return
        each = self.publishing.pop(number % len(self.publishing))
        for topic, entry in each.messages[:upto]:
            request = self.number()
            self.ask(JoinTransaction(request, each.txn, topic))
            if self.answers.get(request) is not TxnState.OPEN:
                self.not_published(each, TransactionAborted("its transaction is over"))
                return
            self.log_of.append((each.txn, each.half, topic, entry))
        if upto < len(each.messages):
            self.not_published(each, MagnetarError("the topic went away"))
            return
        counts = Counter(topic for topic, _ in each.messages)
        listed = [Participant(topic, count, 1, count) for topic, count in counts.items()]
        self.core.halves.on_published(each.half, each.txn, listed, self.now)
        self._do(self.core.decisions.take_effects())

    def not_published(self, each: PublishHalfMessage, error: MagnetarError) -> None:
        if each in self.publishing:
            self.publishing.remove(each)
        self.core.halves.on_not_published(each.half, each.txn, error, self.now)
        self._do(self.core.decisions.take_effects())

    def tick(self, seconds: float) -> None:
        self.now += seconds
        for half, each in list(self.open_asks.items()):
            if each.asked_at + HALF_LIMITS.answer_s <= self.now:  # type: ignore[attr-defined]
                del self.open_asks[half]
        self._do(self.core.tick(self.now))

    def take(self) -> bool:
        found = super().take()
        if found and self.append_now is not None:
            for record in self.append_now.records:
                self.in_doubt |= {half} if (half := half_of(record)) else set()
        return found

    def _write(self, records: Sequence[AnyCoordinatorRecord]) -> None:
        self.in_doubt.clear()
        for record in records:
            if isinstance(record, HalfMessageStored):
                assert record.half not in self.stored, "a half is stored once"
                self.stored[record.half] = deepcopy(record)
            elif isinstance(record, TransactionsCommitted | HalfMessageRolledBack) and record.half:
                state = TxnState.COMMITTED if isinstance(record, TransactionsCommitted) else TxnState.ABORTED
                assert record.half not in self.outcome, "a half has one outcome"
                assert record.half in self.stored, "what is decided was stored"
                self.outcome[record.half] = state
        super()._write(records)

    # ------------------------------------------------------------------ effects
    def _do(self, effects: Sequence[CoordinatorEffect]) -> None:
        rest: list[CoordinatorEffect] = []
        for effect in effects:
            if isinstance(effect, PublishHalfMessage):
                self.publishing.append(effect)
            elif isinstance(effect, AskAboutHalfMessage):
                self._asked(effect)
            elif isinstance(effect, WarnOfParkedHalfMessage):
                self.alarms.append(effect.half)
            else:
                rest.append(effect)
        super()._do(rest)

    def _asked(self, effect: AskAboutHalfMessage) -> None:
        record = self.stored[effect.half]
        assert effect.half not in self.outcome, "a decided half is not asked about"
        assert effect.half not in self.open_asks, "one member is asked at a time"
        assert self.members[effect.member] == (record.owner, record.group), "a member of its group is asked"
        kept = _Asked(*effect)
        kept.asked_at = self.now
        self.asks.append(kept)
        self.open_asks[effect.half] = kept

    def _answered(self, answer: AnswerRequest) -> None:
        assert isinstance(answer.request, int)
        asked = self.asked[answer.request]
        if isinstance(asked, GetTransactionStatus) and asked.txn in self.stored:
            self.answers[answer.request] = answer.result
            if isinstance(answer.result, TxnState):
                assert asked.txn not in self.in_doubt, "nothing is told while it is in doubt"
                assert answer.result is self.outcome.get(asked.txn, TxnState.PREPARED), "what is durable is told"
            return
        super()._answered(answer)
        intent, result = self.asked[answer.request], answer.result
        if isinstance(intent, PrepareHalf) and isinstance(result, TxnState):
            assert intent.half in self.stored, "a half is durable before it is answered"
        if isinstance(intent, EndHalf | PrepareHalf) and result in (TxnState.COMMITTED, TxnState.ABORTED):
            assert intent.half not in self.in_doubt, "nothing is answered while it is in doubt"
            if intent.half in self.stored:
                assert self.outcome.get(intent.half) is result, f"{result} answered, and that is not durable"
            else:
                assert result is TxnState.ABORTED, "what was never stored is not committed"
        if isinstance(intent, EndHalf) and isinstance(result, TransactionAborted) and intent.half in self.stored:
            assert self.outcome.get(intent.half) is not TxnState.COMMITTED, "what is committed is not called aborted"
        if isinstance(intent, EndHalf) and isinstance(result, TransactionEnded):
            assert self.outcome.get(intent.half) is TxnState.COMMITTED, "ended: it is committed"

    # ------------------------------------------------------------------ judging
    def visible(self, half: int) -> list[str]:
        """Topics that show its messages, one for each."""
        return [topic for txn, of, topic, _ in self.log_of if of == half and txn in self.judge.committed]

    def judge_halves(self) -> None:
        for half, record in self.stored.items():
            wanted = [each.topic for each in record.messages] if self.outcome.get(half) is TxnState.COMMITTED else []
            assert sorted(self.visible(half)) == sorted(wanted), f"{half} is visible {self.visible(half)}"

    def parked(self, half: int) -> bool:
        found = self.core.halves._halves.get(half)
        return found is not None and found.phase is UndecidedHalfPhase.PARKED


class _Asked(AskAboutHalfMessage):
    asked_at: float


def half_of(record: AnyCoordinatorRecord) -> int:
    return record.half if isinstance(record, TransactionsCommitted | HalfMessageRolledBack | HalfMessageStored) else 0


__all__ = ["HALF_LIMITS", "ChangeHalf", "HalfWorld"]
