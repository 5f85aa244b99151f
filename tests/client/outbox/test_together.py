"""An atomic relay in a world of values: of each unit readers see all or nothing, once, whatever dies; and order."""

import random
from collections.abc import Callable
from functools import partial

import pytest

from magnetar.client.outbox.destination_core import (
    AtomicUnitQueue,
    ClaimedRow,
    ClaimedShard,
    DestinationCore,
    DestinationStatus,
    RelaySettings,
    RowsOutcome,
    RunDatabaseTransaction,
    SendInTransaction,
    SendRows,
)
from magnetar.client.outbox.relay_core import RelayCore
from magnetar.client.outbox.rows import OutboxBehind, RelayFenced, RowState

from .model import SMALL, Relay, World

TxnRelay = partial(Relay, atomic=True)
Make = Callable[[], tuple[World, set[int], set[int]]]


def plain() -> tuple[World, set[int], set[int]]:
    """One topic alone, two topics, three partitions, and a unit that is larger than a claim."""
    world = World(partitions={"b": 2})
    world.commit_unit(1, (1, "a", "x"), (2, "b", "x"), (3, "b", "y"))
    world.commit_unit(2, (4, "a", "x"))
    world.commit_unit(3, (5, "b", "y"), (7, "a", "x"))
    world.commit_unit(4, (6, "a", None), (8, "b", None), (9, "b", "x"), (10, "a", "x"), (11, "b", "y"))
    world.commit_unit(5, (12, "b", "x"))
    return world, set(range(1, 13)), set()


def failing() -> tuple[World, set[int], set[int]]:
    """A row of the second unit is refused for ever: units 2, 3 (of its key) and 5 (of a key of 3) wait."""
    world = World()
    world.commit_unit(1, (1, "a", "x"))
    world.commit_unit(2, (2, "a", "x"), (3, "b", "y"), poison=[3])
    world.commit_unit(3, (4, "a", "x"), (5, "b", "z"))
    world.commit_unit(4, (6, "a", "w"), (7, "b", "w"))
    world.commit_unit(5, (8, "b", "z"))
    return world, {1, 6, 7}, {2, 3}


def put_off() -> tuple[World, set[int], set[int]]:
    world, expected, parked = plain()
    world.topic("a").put_off = 2
    return world, expected, parked


MAKES = [plain, failing, put_off]


def finish(world: World, *, atomic: bool = True) -> None:
    relay = TxnRelay(world, atomic=atomic)
    relay.finish()
    assert relay.error is None, relay.error
    world.learn_all()


def steps_of(make: Make) -> int:
    world, expected, parked = make()
    relay, count = TxnRelay(world), 0
    while not (world.done() and not relay.steps):
        relay.step()
        world.check_units()
        count += 1
        assert count < 2000
    world.learn_all()
    world.check(expected, parked=parked)
    return count


def order_kept(world: World, places: dict[int, tuple[str, str | None]]) -> bool:
    for topic in world.topics.values():
        of_key: dict[tuple[str, str | None], list[int]] = {}
        for id_ in topic.ids:
            if places[id_][1] is not None:
                of_key.setdefault(places[id_], []).append(id_)
        if any(ids != sorted(ids) for ids in of_key.values()):
            return False
    return True


def places_of(world: World) -> dict[int, tuple[str, str | None]]:
    return {id_: row.place for id_, row in world.rows.items()}


@pytest.mark.parametrize("make", MAKES)
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("lost", [0, 1, 2])
def test_an_atomic_relay_that_dies_at_any_step_leaves_each_unit_there_once_and_whole(
    make: Make, late: bool, lost: int
) -> None:
    for at in range(steps_of(make) + 1):
        world, expected, parked = make()
        places = places_of(world)
        relay = TxnRelay(world)
        relay.lost = lost
        for _ in range(at):
            relay.step()
            world.check_units()
        relay.die(late=late)
        world.check_units()
        finish(world)
        world.check_units()
        world.check(expected, parked=parked)
        assert order_kept(world, places), f"died at step {at}"


@pytest.mark.parametrize("make", MAKES)
@pytest.mark.parametrize("late", [False, True])
def test_a_relay_that_is_not_atomic_goes_on_after_an_atomic_one_at_any_step(make: Make, late: bool) -> None:
    """An open transaction of the one before may have what the topic says that it has."""
    for at in range(steps_of(make) + 1):
        world, expected, _ = make()
        relay = TxnRelay(world)
        for _ in range(at):
            relay.step()
        relay.die(late=late)
        poison = world.poison
        plain = TxnRelay(world, atomic=False)
        for _ in range(500):
            plain.step()
            if not any(row.state in (RowState.WAITING, RowState.CLAIMED) for row in world.rows.values()):
                break
        world.learn_all()
        found = world.visible()
        assert len(found) == len(set(found)), f"died at step {at}"
        assert expected <= set(found), f"died at step {at}"
        assert not poison & set(found)


def test_any_order_of_facts_deaths_and_lost_commits_keeps_units_whole(walks: Callable[[int], range]) -> None:
    """Older relays live on for a while; commits get no answer; destinations take nothing for a while."""
    for seed in walks(60):
        rng = random.Random(seed)
        world = World(partitions={"b": 3})
        places: dict[int, tuple[str, str | None]] = {}
        poison = {id_ for id_ in range(1, 41) if rng.random() < 0.04}
        relays, id_, unit = [TxnRelay(world)], 0, 0
        for _ in range(500):
            if id_ < 40 and rng.random() < 0.15:
                unit += 1
                rows = []
                for _ in range(min(40 - id_, rng.choice((1, 1, 2, 3, 6)))):
                    id_ += 1
                    rows.append((id_, rng.choice("abc"), rng.choice([None, "k", "l", str(id_)])))
                    places[id_] = rows[-1][1:]
                world.commit_unit(unit, *rows, poison=sorted(poison & {row[0] for row in rows}))
            rng.choice(relays).step(rng)
            if rng.random() < 0.02:
                relays.append(TxnRelay(world))
            if rng.random() < 0.02:
                relays[-1].die(late=rng.random() < 0.5)
                relays.append(TxnRelay(world))
            if rng.random() < 0.04:
                relays[-1].lost = 1 + rng.randrange(2)
            if rng.random() < 0.03:
                relays[-1].lost_turns = 1
            if rng.random() < 0.1:
                world.learn_one()
            refused = [each for each in world.rows.values() if each.poison and each.state >= RowState.HELD]
            if refused and rng.random() < 0.05:
                rng.choice(refused).poison = False  # the topic takes it now; an operator revives what is parked
                for each in world.rows.values():
                    each.state = RowState.WAITING if each.state is RowState.PARKED else each.state
            for topic in world.topics.values():
                topic.put_off = rng.randrange(3) if rng.random() < 0.02 else topic.put_off
            world.check_units()
            relays = [each for each in relays if not each.dead]
            assert relays, f"seed {seed}: the newest ended"
        for old in relays[:-1]:
            old.die(late=True)
        last = relays[-1]
        last.finish(5000)
        assert last.error is None, f"seed {seed}: {last.error}"
        world.learn_all()
        world.check_units()
        stored = set(world.visible())
        assert not stored & world.poison, f"seed {seed}"
        assert stored == places.keys() - world.rows.keys(), f"seed {seed}: what is not there waits or is parked"
        assert order_kept(world, places), f"seed {seed}"


def test_a_unit_that_is_refused_is_parked_whole_and_what_it_keeps_waits() -> None:
    world, expected, parked = failing()
    finish(world)
    world.check(expected, parked=parked)
    assert {row.attempts for row in world.rows.values() if row.id in parked} == {SMALL.attempts_max}
    assert all(world.rows[id_].state is RowState.WAITING for id_ in (4, 5, 8)), "its keys, and keys of what waits, wait"
    for id_ in parked:
        world.rows[id_].poison, world.rows[id_].state = False, RowState.WAITING
    finish(world)
    world.check(set(range(1, 9)))
    assert world.topics["a"].ids.index(2) < world.topics["a"].ids.index(4)


def test_a_destination_that_takes_nothing_keeps_its_units_and_their_keys_alone() -> None:
    world = World()
    world.commit_unit(1, (1, "a", "x"), (2, "b", "x"))
    world.commit_unit(2, (3, "a", "x"))
    world.topic("b").put_off = 10_000
    relay = TxnRelay(world)
    while not world.topic("b").epoch or relay.core.sent_rows < 3:
        relay.step()
    world.commit_unit(3, (4, "a", "y"))
    for _ in range(200):
        relay.step()
    assert world.visible() == [4]
    world.topic("b").put_off = 0
    relay.finish()
    world.learn_all()
    world.check({1, 2, 3, 4})
    assert world.topics["a"].ids == [4, 1, 3]


def test_an_older_atomic_relay_learns_that_it_is_fenced() -> None:
    world, expected, _ = plain()
    old = TxnRelay(world)
    for _ in range(12):
        old.step()
    new = TxnRelay(world)
    for _ in range(600):
        if not old.dead:
            old.step()
        new.step()
        world.check_units()
        if world.done() and old.dead:
            break
    assert isinstance(old.error, RelayFenced)
    assert new.error is None
    world.learn_all()
    world.check(expected)


def test_a_restored_database_is_refused_also_when_units_are_sent_together() -> None:
    world, _, _ = plain()
    finish(world)
    restored = World(partitions=dict(world.partitions), topics=world.topics)
    restored.commit_unit(100, (100, "a", None))
    relay = TxnRelay(restored)
    relay.finish()
    assert isinstance(relay.error, OutboxBehind)


# ---------------------------------------------------------------------------------- the parts
def row(id_: int, seq: int, destination: str, unit: int | None, size: int = 10) -> ClaimedRow:
    return ClaimedRow(id_, seq, destination, size, None, b"", None, None, None, 0, unit)


def together(settings: RelaySettings, last_open: dict[str, int]) -> AtomicUnitQueue:
    destinations = {}
    for name, last in last_open.items():
        destinations[name] = each = DestinationCore(name, settings)
        each.try_begin_opening_producer(0.0)
        each.on_opened(last, sure=False)
    return AtomicUnitQueue(settings, destinations)


def test_what_may_be_stored_is_sent_again_an_entry_for_each_row_and_the_rest_in_whole_entries() -> None:
    found = together(RelaySettings(rows_per_claim=100, rows_per_entry=10), {"a": 3, "b": 1})
    found.add([row(1, 0, "a", 1), row(2, 1, "b", 1), row(3, 2, "a", 2), row(4, 3, "a", 2)])  # both may be stored
    found.add([row(5, 4, "a", 3), row(6, 5, "a", 3), row(7, 6, "b", 4), row(8, 7, "b", 5)])
    parts = found.start_transaction()
    assert [[each.id for each in entry] for entry in parts["a"]] == [[1], [3], [4], [5, 6]]
    assert [[each.id for each in entry] for entry in parts["b"]] == [[2], [7, 8]]


def test_a_unit_with_a_row_above_what_its_topic_has_is_certainly_not_stored() -> None:
    found = together(RelaySettings(), {"a": 5, "b": 1})
    found.add([row(1, 4, "a", 1), row(2, 5, "b", 1)])
    assert not found.may_be_stored(found.queue[0])
    assert [each.id for each in found.take_unstored_rows()] == [1, 2]
    found.add([row(3, 1, "b", 2), row(4, 5, "a", 2)])
    assert found.may_be_stored(found.queue[0])
    assert found.take_unstored_rows() == [], "what may be stored keeps its ids"
    assert not found.may_claim, "and nothing more is claimed before it is known"


def test_a_flight_has_as_much_as_a_claim_and_never_a_part_of_a_unit() -> None:
    found = together(RelaySettings(rows_per_claim=3, bytes_per_claim=100), {"a": -1})
    found.add([row(1, 0, "a", 1), row(2, 1, "a", 2), row(3, 2, "a", 2), row(4, 3, "a", 3)])
    assert [each.id for entry in found.start_transaction()["a"] for each in entry] == [1, 2, 3]
    assert not found.start_transaction(), "one at a time"
    found.take_stored_rows()
    found.add([row(5, 4, "a", 4, 60), row(6, 5, "a", 4, 60)])
    assert [each.id for entry in found.start_transaction()["a"] for each in entry] == [4]
    found.take_stored_rows()
    assert [each.id for entry in found.start_transaction()["a"] for each in entry] == [5, 6], "a large one is alone"


def test_a_refused_flight_is_tried_unit_by_unit() -> None:
    found = together(RelaySettings(rows_per_claim=10), {"a": -1})
    found.add([row(1, 0, "a", 1), row(2, 1, "a", 2), row(3, 2, "a", None), row(4, 3, "a", None)])
    found.start_transaction()
    assert found.take_refused_unit() == ()
    assert [each.id for entry in found.start_transaction()["a"] for each in entry] == [1]
    found.take_stored_rows()
    assert [each.id for entry in found.start_transaction()["a"] for each in entry] == [2]
    assert [each.id for each in found.take_refused_unit()] == [2]
    assert [each.id for each in found.take_unstored_rows()] == [3, 4]


def test_a_flight_waits_until_all_its_destinations_are_ready() -> None:
    found = together(SMALL, {"a": -1, "b": -1})
    found._at["b"].state = DestinationStatus.WAITS
    found.add([row(1, 0, "a", 1), row(2, 1, "b", 1), row(3, 2, "a", 2)])
    assert not found.start_transaction(), "nothing passes it: ids of a destination rise"
    assert found.is_blocked()


def test_a_row_that_an_open_transaction_may_have_is_not_given_up_without_transactions_either() -> None:
    core = RelayCore(0, 1, SMALL)
    core.on_shard_claimed(ClaimedShard(1, 10, {}, [row(1, 4, "a", 1), row(2, 5, "a", 1)], 0.0, was_atomic=True), 0.0)
    effects = core.on_opened("a", 4, 0.0)
    assert [each.rows[0].id for each in effects if isinstance(each, SendRows)] == [1], (
        "sent again, though the topic has 4"
    )
    core.on_group_outcome("a", RowsOutcome.ROW_REFUSED, "too large", 0.0)
    core.check()
    assert not core.refused_rows
    assert core.destinations["a"].state is DestinationStatus.WAITS


def test_what_was_claimed_before_a_refusal_was_known_gives_its_ids_back() -> None:
    """It may have the keys of the refused unit, which is tried again later."""
    core = RelayCore(0, 1, SMALL, atomic=True)
    core.on_shard_claimed(ClaimedShard(1, 1, {}, [row(1, 0, "a", 1)], 0.0), 0.0)
    effects = [*core.on_opened("a", -1, 0.0), *core.on_topics_found(["a"], 0.0), *core.on_topic_resolved("a", 0, 0.0)]
    assert any(isinstance(each, SendInTransaction) for each in effects)
    assert core._turning is not None
    claiming = next(
        each.turn
        for each in core.on_database_committed(core._turning, [], 1, 0.0)
        if isinstance(each, RunDatabaseTransaction)
    )
    assert claiming.claim is not None
    core.on_transaction_outcome(RowsOutcome.ROW_REFUSED, "too large", (), 0.0)
    effects = core.on_database_committed(claiming, [row(2, 1, "a", 2)], 2, 0.0)
    core.check()
    recording = next(each.turn for each in effects if isinstance(each, RunDatabaseTransaction))
    assert [each.row.id for each in recording.failures] == [1]
    assert [each.id for each in recording.release] == [2]


def test_a_unit_that_may_be_stored_and_is_refused_is_not_given_up() -> None:
    """What it holds is refused today; it may have been stored yesterday."""
    core = RelayCore(0, 1, SMALL, atomic=True)
    core.on_shard_claimed(ClaimedShard(1, 10, {}, [row(1, 4, "a", 1)], 0.0, was_atomic=True), 0.0)
    effects = core.on_opened("a", 4, 0.0)
    assert [type(each) for each in effects if isinstance(each, SendInTransaction)] == [SendInTransaction]
    core.on_transaction_outcome(RowsOutcome.ROW_REFUSED, "too large", (), 0.0)
    core.check()
    assert not core.refused_rows
    assert core.atomic_units is not None
    assert [each[0].id for each in core.atomic_units.queue] == [1]
    assert core.destinations["a"].state is DestinationStatus.WAITS
