"""Random histories of half messages, with crashes and hand-overs at every point; then all of them are decided.

The rules are tests/broker/transaction/half_world.py's. A seed replays its history.
"""

import random
from collections import Counter

import pytest

from magnetar.broker.transaction.intents_core import ChangeHalf, HalfMessageChangeVerb, HalfMessageEndVerb
from magnetar.proto.errors import MagnetarError, TopicTerminated, Unavailable
from magnetar.proto.states import TxnState
from tests.broker.transaction.half_world import HalfWorld

GROUPS = (("me", "g"), ("me", "h"), ("you", "g"))
CHOICES = {
    "prepare": 10, "prepare again": 2, "end": 8, "answer": 14, "late answer": 3, "change": 2, "watch": 5, "leave": 4,
    "publish": 14, "publish a part": 2, "not published": 3, "take": 16, "appended": 16, "tick": 10, "settle": 8,
    "crash": 1, "hand over": 0.7,
}  # fmt: skip


class History:
    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.world = HalfWorld()
        self.halves: dict[int, tuple[str, str]] = {}
        self.members = 0
        self.happened: Counter[str] = Counter()

    def step(self) -> None:
        name = self.rng.choices(list(CHOICES), list(CHOICES.values()))[0]
        self.happened[name] += 1
        getattr(self, name.replace(" ", "_"))()

    def _half(self) -> int:
        halves = list(self.halves)
        return self.rng.choice(halves[-8:] if self.rng.random() < 0.8 else halves)

    def prepare(self) -> None:
        owner, group = self.rng.choice(GROUPS)
        topics = [self.rng.choice("abc") for _ in range(self.rng.randint(1, 3))]
        half = self.world.prepare(*topics, owner=owner, group=group)
        self.halves[half] = owner, group

    def prepare_again(self) -> None:
        """A request that is repeated, or comes late."""
        if self.halves:
            half = self._half()
            owner, group = self.halves[half]
            self.world.prepare(half=half, owner=owner, group=group)

    def end(self) -> None:
        if self.halves:
            half = self._half()
            self.world.end_half(half, self.rng.choice(list(HalfMessageEndVerb)), self.halves[half][0])

    def answer(self) -> None:
        asked = [each for each in self.world.open_asks.values() if each.half not in self.world.in_doubt]
        if asked:
            each = self.rng.choice(asked)
            self.world.end_half(
                each.half, self.rng.choice(list(HalfMessageEndVerb)), self.halves[each.half][0], check=each.check
            )

    def late_answer(self) -> None:
        if self.world.asks:
            each = self.rng.choice(self.world.asks[-20:])
            if each.half not in self.world.open_asks:
                self.world.end_half(
                    each.half, self.rng.choice(list(HalfMessageEndVerb)), self.halves[each.half][0], check=each.check
                )

    def change(self) -> None:
        if self.halves:
            half = self._half()
            self.world.open_asks.pop(half, None)
            verb = self.rng.choice(list(HalfMessageChangeVerb))
            if verb is not HalfMessageChangeVerb.REVIVE or self.world.parked(half):
                self.world.ask(ChangeHalf(self.world.number(), half, verb))

    def watch(self) -> None:
        self.members += 1
        self.world.watch(f"member {self.members}", *self.rng.choice(GROUPS))

    def leave(self) -> None:
        if self.world.members:
            self.world.remove_member(self.rng.choice(list(self.world.members)))

    def publish(self) -> None:
        self.world.publish(self.rng.randrange(100))

    def publish_a_part(self) -> None:
        self.world.publish(self.rng.randrange(100), upto=self.rng.randint(0, 2))

    def not_published(self) -> None:
        if self.world.publishing:
            error: MagnetarError = self.rng.choice((Unavailable("not now"), TopicTerminated("never")))
            self.world.not_published(self.rng.choice(self.world.publishing), error)

    def take(self) -> None:
        if self.rng.random() < 0.2:
            self.world.core.decisions.append_deferred_records_next()
        self.world.take()

    def appended(self) -> None:
        if self.world.append_now is not None:
            self.world.appended()

    def tick(self) -> None:
        self.world.tick(self.rng.choices((0.5, 5, 12, 35, 700, 30_000), (8, 8, 6, 4, 2, 0.3))[0])

    def settle(self) -> None:
        self.world.settle(self.rng.randrange(100))

    def crash(self) -> None:
        self.world.crash(lands=self.rng.randrange(6), told=self.rng.random() < 0.5)

    def hand_over(self) -> None:
        self.world.hand_over()

    # ------------------------------------------------------------------ the end
    def decide_all(self) -> None:
        """Everything works, and a member of each group is there that knows what to say."""
        world = self.world
        self.appended()
        for number, group in enumerate(GROUPS):
            world.watch(f"last {number}", *group)
        for _ in range(40):
            for half in self.halves:
                if world.parked(half):
                    world.ask(ChangeHalf(world.number(), half, HalfMessageChangeVerb.REVIVE))
            world.core.decisions.append_deferred_records_next()
            world.flush()
            for asked in list(world.open_asks.values()):
                verb = HalfMessageEndVerb.COMMIT if asked.half % 2 else HalfMessageEndVerb.ROLLBACK
                world.end_half(asked.half, verb, self.halves[asked.half][0], check=asked.check)
            while world.publishing:
                world.publish()
            world.flush()
            while world.settling:
                world.settle()
            world.tick(40.0)
        assert not world.core.halves._halves, "every half is decided when its group answers"
        world.judge_halves()


@pytest.mark.parametrize("seed", range(80))
def test_every_half_has_one_outcome_and_is_visible_once_if_it_is_committed(seed: int) -> None:
    history = History(seed)
    for _ in range(500):
        history.step()
        history.world.judge_halves()
    history.decide_all()
    assert set(history.world.outcome.values()) == {TxnState.COMMITTED, TxnState.ABORTED}, "the walk decides both ways"
    assert len(history.world.asks) > 0, "the walk asks"
