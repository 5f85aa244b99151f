"""Debounce: of a key and a window the newest message is delivered, the others are superseded, and none is lost."""

import random
from collections import defaultdict

from magnetar.client.core.debounce import END_OF_TOPIC_IDLE_S, Debounce, KeyedMessage

Given = KeyedMessage[str]


def given(number: int, key: str | None, published_ms: int) -> Given:
    return KeyedMessage(f"{key}.{number}", (1, number, -1), key, published_ms)


def in_window(debounce: Debounce[str], key: str, number: int) -> int:
    """The first ms of window `number` of a key."""
    return debounce.find_window_end_ms(key, 1_000_000_000_000) + number * 1000


def test_of_messages_in_one_window_the_newest_is_delivered_when_its_time_is_over_and_the_topic_is_quiet() -> None:
    debounce = Debounce[str](1.0)
    start_ms = in_window(debounce, "k", 0)
    assert debounce.add([given(0, "k", start_ms), given(1, "k", start_ms + 100)], 50.0) == ([], ["k.0"])
    assert debounce.add([given(2, "k", start_ms + 900)], 50.8) == ([], ["k.1"])
    assert debounce.take_due(50.99) == []
    assert debounce.next_due == 50.8 + END_OF_TOPIC_IDLE_S
    assert debounce.take_due(51.3) == ["k.2"]
    assert (debounce.next_due, debounce.superseded, debounce.held_messages) == (None, 2, [])


def test_a_later_message_of_any_key_ends_the_window_at_once() -> None:
    debounce = Debounce[str](1.0)
    start_ms = in_window(debounce, "k", 0)
    debounce.add([given(0, "k", start_ms)], 5.0)
    assert debounce.add([given(1, None, start_ms + 1000)], 5.1)[0] == ["k.0", "None.1"]


def test_a_backlog_is_debounced_by_the_times_of_its_messages_and_not_by_that_of_its_delivery() -> None:
    debounce = Debounce[str](1.0)
    start_ms = in_window(debounce, "k", 0)
    some = [given(at, "k", start_ms + at * 250) for at in range(12)]
    ready, gone = debounce.add(some, 9.0)
    assert ready == ["k.3", "k.7"]
    assert debounce.take_due(10.0) == ["k.11"]
    assert len(gone) == 9


def test_a_key_that_changes_all_the_time_is_delivered_in_each_window() -> None:
    debounce = Debounce[str](0.5)
    ready = [each for at in range(1000) for each in debounce.add([given(at, "k", 10_000_000 + at * 10)], at / 100)[0]]
    assert 19 <= len(ready) <= 20


def test_a_redelivery_supersedes_nothing_newer_and_is_superseded_in_its_own_window_alone() -> None:
    debounce = Debounce[str](1.0)
    start_ms = in_window(debounce, "k", 0)
    debounce.add([given(5, "k", start_ms + 10)], 1.0)
    assert debounce.add([given(3, "k", start_ms)], 1.1) == ([], ["k.3"])
    assert debounce.add([given(2, "k", start_ms - 1)], 1.1) == (["k.2"], [])
    assert debounce.held_messages == ["k.5"]


def test_a_copy_of_a_held_message_supersedes_nothing() -> None:
    debounce = Debounce[str](1.0)
    start_ms = in_window(debounce, "k", 0)
    debounce.add([given(0, "k", start_ms)], 1.0)
    assert debounce.add([given(0, "k", start_ms)._replace(message="again")], 1.1) == ([], [])
    assert (debounce.take_copies(), debounce.take_copies()) == (["k.0"], [])
    assert (debounce.held_messages, debounce.superseded) == (["again"], 0)
    debounce.check()


def test_what_is_given_up_is_held_again_when_it_comes_again() -> None:
    debounce = Debounce[str](1.0)
    start_ms = in_window(debounce, "k", 0)
    some = [given(0, "k", start_ms), given(1, "other", start_ms + 300)]
    debounce.add(some, 1.0)
    assert len(debounce.clear()) == 2
    assert debounce.next_due is None
    assert debounce.add(some, 2.0) == ([], [])
    debounce.check()


def test_whatever_comes_each_message_is_delivered_or_superseded_by_a_later_one_of_its_window() -> None:
    for seed in range(40):
        rng = random.Random(seed)
        debounce = Debounce[str](rng.choice([0.05, 1.0]))
        published_ms, now, log = 1_000_000, 0.0, list[Given]()
        for at in range(rng.choice([50, 400])):
            published_ms += rng.choice([0, 1, 30, 400])
            log.append(given(at, rng.choice(["a", "b", "c", None]), published_ms))
        ready, gone, at = set[str](), set[str](), 0
        while at < len(log) or debounce.held_messages:
            many = rng.randrange(1, 20)
            out, superseded = debounce.add(log[at : at + many], now) if at < len(log) else ([], [])
            at += many
            ready |= {*out, *debounce.take_due(now)}
            gone |= set(superseded)
            debounce.check()
            now += rng.choice([0.0, 0.01, 2.0])
            if rng.random() < 0.05:  # the connection is lost: what is neither delivered nor acknowledged comes again
                debounce.clear()
                at = next((n for n, each in enumerate(log) if each.message not in ready | gone), len(log))
        assert ready | gone >= {each.message for each in log}, seed
        newest = defaultdict[tuple[str, int], list[str]](list)
        for each in log:
            if each.key is not None:
                newest[each.key, debounce.find_window_end_ms(each.key, each.published_ms)].append(each.message)
            else:
                assert each.message in ready
        assert all(some[-1] in ready for some in newest.values()), f"{seed}: the newest of a window was not delivered"
        assert len(gone) > 0, seed
