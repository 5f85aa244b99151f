"""What a new connection delivers again is shown once to an application that acknowledges cumulatively in transactions.
The walk has a model of the broker and of the application, and breaks the connection anywhere."""

import random

import pytest

from magnetar.client.core.redelivery import DuplicateFilter, MessagePlace


def place(entry: int, index: int = -1) -> MessagePlace:
    return 1, entry, index


class Walk:
    """A log of entries 0, 1, 2 …, a consumer and its application. `committed` is what counts, with how often."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.filter = DuplicateFilter()
        self.filter.in_use = True
        self.acked = -1  # the broker's mark
        self.pending: int | None = None
        self.sent = -1  # the broker delivered up to here over this connection
        self.on_its_way: list[int | str] = []
        self.inbox: list[int] = []
        self.held: list[int] = []  # by the application, in its transaction
        self.asked: int | None = None  # an acknowledgement under way
        self.answered = False
        self.committed: list[int] = []

    def deliver(self) -> None:
        self.sent = max(self.sent, self.acked if self.pending is None else self.pending)
        for _ in range(self.rng.randrange(4)):
            self.sent += 1
            self.on_its_way.append(self.sent)

    def arrive(self) -> None:
        some: list[int] = []
        while self.on_its_way and len(some) < 3:
            each = self.on_its_way.pop(0)
            if isinstance(each, int):
                some.append(each)
                continue
            if some:
                self.on_its_way.insert(0, each)
            elif each == f"confirmed {self.asked}":
                self.answered = True
                self.filter.on_confirmed(place(self.asked))
            break
        if not some:
            return
        until = self.filter.find_end_of_repeats(place(some[0]))
        shown = [each for each in some if until is None or place(each) >= until]
        if shown:
            self.filter.on_messages_queued(place(shown[-1]))
            self.inbox += shown

    def take(self) -> None:
        if self.inbox and self.asked is None:
            self.held.append(self.inbox.pop(0))

    def acknowledge(self) -> None:
        if self.held and self.asked is None and not self.filter.is_unsure:
            self.asked = self.held[-1]
        elif self.filter.is_unsure:
            self.abort()

    def confirm(self) -> None:
        """The broker makes it pending, and answers after what it has sent."""
        if self.asked is not None:
            self.pending = self.asked
            self.on_its_way.append(f"confirmed {self.asked}")

    def commit(self) -> None:
        if self.pending is not None and self.answered:
            self.acked, self.pending, self.asked, self.answered = self.pending, None, None, False
            self.committed += self.held
            self.held = []

    def abort(self) -> None:
        self.pending = self.asked = None
        self.answered = False
        self.held, self.inbox, self.on_its_way = [], [], []
        self.sent = self.acked
        self.filter.clear()

    def lose(self) -> None:
        if self.inbox:
            self.filter.on_reading_restarted(place(self.inbox[0]))
        self.filter.on_lost()
        self.inbox, self.on_its_way = [], []
        self.sent = self.acked if self.pending is None else self.pending

    def step(self) -> None:
        kinds = [self.deliver, self.arrive, self.take, self.take, self.acknowledge, self.confirm, self.commit]
        self.rng.choice([*kinds, *kinds, *kinds, self.lose] if self.rng.random() < 0.98 else [self.abort])()


@pytest.mark.parametrize("seed", range(60))
def test_every_message_counts_once_and_in_order_wherever_the_connection_breaks(seed: int) -> None:
    walk = Walk(seed)
    for _ in range(2000):
        walk.step()
        assert walk.committed == list(range(len(walk.committed)))
    assert len(walk.committed) > 20


def test_what_was_not_seen_is_shown_also_before_what_was() -> None:
    repeats = DuplicateFilter()
    repeats.in_use = True
    repeats.on_messages_queued(place(7, 3))
    repeats.on_lost()
    assert repeats.until == place(7, 4)
    assert repeats.find_end_of_repeats(place(7, 0)) == place(7, 4)
    repeats.on_reading_restarted(place(5))  # it was withheld
    repeats.on_lost()
    assert repeats.find_end_of_repeats(place(5)) is None
    assert repeats.until is None


def test_one_that_begins_when_it_may_have_copies_is_unsure_until_all_comes_again() -> None:
    repeats = DuplicateFilter()
    repeats.on_messages_queued(place(7))
    repeats.on_lost()
    assert repeats.find_end_of_repeats(place(6)) is None
    assert repeats.is_unsure
    repeats.clear()
    assert not repeats.is_unsure


def test_what_the_broker_had_confirmed_comes_again_after_an_abort_and_makes_unsure() -> None:
    repeats = DuplicateFilter()
    repeats.in_use = True
    repeats.on_messages_queued(place(9))
    repeats.on_confirmed((1, 7, float("inf")))
    assert repeats.find_end_of_repeats(place(8)) is None
    assert not repeats.is_unsure
    assert repeats.find_end_of_repeats(place(7)) is None
    assert repeats.is_unsure


def test_a_deposed_consumer_is_unsure_of_what_it_has() -> None:
    repeats = DuplicateFilter()
    repeats.on_consumer_inactive()
    assert not repeats.is_unsure, "it has nothing"
    repeats.on_messages_queued(place(1))
    repeats.on_consumer_inactive()
    assert repeats.is_unsure
