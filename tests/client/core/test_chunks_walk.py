"""Many messages in chunks on a Shared subscription, more of them begun than may be: every one is complete in the end.

The broker delivers in log order, and again what it is asked for, in log order; other things happen between. Some
messages have no last chunk, because their producers died.
"""

import random
from contextlib import nullcontext

import pytest

from magnetar.client.core.consumer import ConsumerCore
from magnetar.client.core.effects import AttachedConsumerOptions, ConsumerEffect, RequestRedelivery, SendAcks
from magnetar.client.core.failover import Backoff
from magnetar.proto.entry_pb2 import MessageMetadata
from magnetar.proto.names import Position

LEDGER = 3
ROUNDS_MAX = 60
"""So often may each chunk come, on the average."""


class Walk:
    def __init__(
        self, seed: int, messages: int, pending_max: int, nack_delay_s: float, *, cut_off: int = 0,
        spread_s: float = 0.01,
    ) -> None:  # fmt: skip
        """`cut_off`: so many messages never get their last chunk. `spread_s`: between two deliveries."""
        self.rng = random.Random(seed)
        self.now = 100.0
        self.spread_s = spread_s
        options = AttachedConsumerOptions(
            nack_delay_ms=lambda _: int(nack_delay_s * 1000), chunks_pending_max=pending_max, ordered=False,
            log_order=False,
        )  # fmt: skip
        self.core = ConsumerCore(options, queue_size=1000, lock=nullcontext(), backoff=Backoff(random.Random(seed)))
        self.core.on_opened()
        self.log = self.interleaved(messages, cut_off)
        self.coming = list(range(len(self.log)))  # in the order in which they come: first what comes again
        self.again = 0  # of them; the rest is new
        self.acked: set[int] = set()
        self.complete: set[str] = set()
        self.wanted = {f"m{number}" for number in range(cut_off, messages)}

    def interleaved(self, messages: int, cut_off: int) -> list[MessageMetadata]:
        """Every producer sends its message, a chunk each in turn, more or less."""
        left = {}
        for number in range(messages):
            of = self.rng.randint(2, self.rng.choice([5, 20]))
            left[number] = [
                MessageMetadata(
                    producer_name=f"p{number}", sequence_id=0, publish_time=1, uuid=f"m{number}",
                    num_chunks_from_msg=of, total_chunk_msg_size=of, chunk_id=each,
                )
                for each in range(of - (number < cut_off))
            ]  # fmt: skip
        found, in_turn = [], self.rng.random() < 0.5
        turn = list(left)
        while left:
            number = turn.pop(0) if in_turn else self.rng.choice(turn)
            found.append(left[number].pop(0))
            if not left[number]:
                del left[number]
                turn = [each for each in turn if each != number]
            elif in_turn:
                turn.append(number)
        return found

    def do(self, effects: list[ConsumerEffect]) -> None:
        for effect in effects:
            match effect:
                case RequestRedelivery(entries, counted):
                    assert entries is not None
                    assert not counted, "nothing of it was shown"
                    waiting = sorted({*self.coming[: self.again], *entries[LEDGER]})
                    self.coming = waiting + self.coming[self.again :]
                    self.again = len(waiting)
                case SendAcks(group):
                    self.acked |= set(group.whole.get(LEDGER, ()))

    def run(self) -> None:
        """Until nothing but what is cut off is left, or as many chunks came as are enough."""
        left = ROUNDS_MAX * len(self.log)
        while self.complete != self.wanted and left > 0:
            due = self.core.next_timer_at
            if self.coming and (due is None or self.now + self.spread_s < due):
                left -= 1
                self.now += self.spread_s
                self.again = max(0, self.again - 1)
                self.deliver(self.coming.pop(0))
                continue
            assert due is not None, "chunks are neither on their way nor asked for"
            self.now = max(self.now, due)
            self.do(self.core.run_timers(self.now))
            self.core.check()

    def deliver(self, entry_id: int) -> None:
        if entry_id in self.acked:
            return
        begun = self.core.add_chunk(self.log[entry_id], Position(LEDGER, entry_id), b"x", self.now)
        if begun is not None:
            self.complete.add(begun.metadata.uuid)
            for place in begun.places:
                self.acked.add(place.entry_id)
                self.core.acknowledge(place, -1, 0)
            self.core.chunks.take_chunk_positions(next(reversed(begun.places)))
        self.do(self.core.take_effects(self.now))


@pytest.mark.parametrize("seed", range(40))
def test_more_messages_begun_than_may_be_are_all_complete_in_the_end(seed: int) -> None:
    rng = random.Random(seed)
    delay_s = rng.choice([0.1, 1.0, 10.0, 60.0])
    walk = Walk(seed, rng.randint(2, 60), rng.randint(1, 10), delay_s, spread_s=rng.choice([0.001, 0.05, 0.5]))
    walk.run()
    assert walk.complete == walk.wanted, f"{len(walk.wanted - walk.complete)} of {len(walk.wanted)} never are"


@pytest.mark.parametrize("seed", range(40))
def test_messages_without_an_end_do_not_keep_others_from_theirs(seed: int) -> None:
    rng = random.Random(seed)
    pending_max, delay_s = rng.randint(1, 10), rng.choice([0.1, 1.0, 10.0, 60.0])
    cut_off, spread_s = rng.randint(pending_max, 20), rng.choice([0.001, 0.05])
    walk = Walk(seed, 40, pending_max, delay_s, cut_off=cut_off, spread_s=spread_s)
    walk.run()
    assert walk.complete == walk.wanted, f"{len(walk.wanted - walk.complete)} of {len(walk.wanted)} never are"
