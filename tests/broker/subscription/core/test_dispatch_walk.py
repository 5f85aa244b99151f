"""Random walks of every policy against a model that knows what may happen (dispatch_walk.py)."""

from collections.abc import Callable

import pytest

from magnetar.broker.subscription.core.policy import KeyLimits
from tests.broker.subscription.core.dispatch_walk import EXCLUSIVE, FAILOVER, KEY_SHARED, SHARED, Walk

SEEDS = {EXCLUSIVE: 6, SHARED: 10, FAILOVER: 10, KEY_SHARED: 24}
"""Of each walk; `--walks N` takes N times as many, the compiled twin a quarter."""
STEPS = 400


@pytest.mark.parametrize("type_", SEEDS, ids=["exclusive", "shared", "failover", "key_shared"])
def test_whatever_happens_nothing_is_skipped_doubled_stuck_or_out_of_order(
    type_: int, walks: Callable[[int], range]
) -> None:
    deliveries = 0
    for seed in walks(SEEDS[type_]):
        walk = Walk(type_, seed)
        try:
            walk.run(STEPS)
        except AssertionError as error:
            raise AssertionError(f"Walk({type_}, {seed}).run({STEPS}): {error}") from error
        deliveries += walk.deliveries
    assert deliveries > len(walks(SEEDS[type_])) * STEPS // 20, "the walks hardly delivered anything"


@pytest.mark.parametrize("type_", [SHARED, KEY_SHARED], ids=["shared", "key_shared"])
@pytest.mark.parametrize("options", [{"holds": True}, {"delays": True}, {"holds": True, "delays": True}], ids=str)
def test_what_is_held_back_or_delayed_comes_when_it_is_let_go_or_due_and_not_before(
    type_: int, options: dict[str, bool], walks: Callable[[int], range]
) -> None:
    for seed in walks(8):
        walk = Walk(type_, seed, **options)
        try:
            walk.run(STEPS)
        except AssertionError as error:
            raise AssertionError(f"Walk({type_}, {seed}, **{options}).run({STEPS}): {error}") from error


@pytest.mark.parametrize("type_", SEEDS, ids=["exclusive", "shared", "failover", "key_shared"])
@pytest.mark.parametrize("options", [{}, {"holds": True, "delays": True}], ids=str)
def test_a_pending_entry_is_delivered_to_no_consumer_and_an_abort_gives_back_exactly_its_own(
    type_: int, options: dict[str, bool], walks: Callable[[int], range]
) -> None:
    for seed in walks(SEEDS[type_]):
        walk = Walk(type_, seed, transactions=True, **options)
        try:
            walk.run(STEPS)
        except AssertionError as error:
            raise AssertionError(f"Walk({type_}, {seed}, transactions=True, **{options}).run: {error}") from error


@pytest.mark.parametrize("type_", [EXCLUSIVE, FAILOVER, KEY_SHARED], ids=["exclusive", "failover", "key_shared"])
@pytest.mark.parametrize("options", [{}, {"holds": True}, {"holds": True, "transactions": True}], ids=str)
def test_what_fails_holds_back_what_follows_it_until_it_is_done_and_nothing_else(
    type_: int, options: dict[str, bool], walks: Callable[[int], range]
) -> None:
    for seed in walks(SEEDS[type_]):
        walk = Walk(type_, seed, ordered=True, **options)
        try:
            walk.run(STEPS)
        except AssertionError as error:
            raise AssertionError(f"Walk({type_}, {seed}, ordered=True, **{options}).run: {error}") from error


@pytest.mark.parametrize("type_", SEEDS, ids=["exclusive", "shared", "failover", "key_shared"])
@pytest.mark.parametrize(
    "options",
    [
        {}, {"whole": True}, {"holds": True, "delays": True}, {"transactions": True},
        {"transactions": True, "delays": True},
    ],
    ids=["alone", "whole", "delays", "transactions", "both"],
)
def test_what_a_filter_does_not_want_is_acknowledged_and_holds_up_nothing(
    type_: int, options: dict[str, bool], walks: Callable[[int], range]
) -> None:
    for seed in walks(16):
        walk = Walk(type_, seed, filters=True, **options)
        try:
            walk.run(STEPS)
        except AssertionError as error:
            raise AssertionError(f"Walk({type_}, {seed}, filters=True, **{options}).run: {error}") from error


@pytest.mark.parametrize("type_", SEEDS, ids=["exclusive", "shared", "failover", "key_shared"])
def test_a_consumer_of_whole_entries_is_shown_whole_ones_and_ends_the_backlog(
    type_: int, walks: Callable[[int], range]
) -> None:
    for seed in walks(16):
        walk = Walk(type_, seed, whole=True)
        try:
            walk.run(STEPS)
        except AssertionError as error:
            raise AssertionError(f"Walk({type_}, {seed}, whole=True).run: {error}") from error


@pytest.mark.parametrize(
    "fair", [KeyLimits(), KeyLimits(3), KeyLimits(0, 8.0), KeyLimits(2, 4.0)], ids=["turns", "flight", "rate", "both"]
)
@pytest.mark.parametrize("options", [{}, {"holds": True, "delays": True}, {"transactions": True}], ids=str)
def test_keys_that_take_turns_stay_within_their_limits_and_nothing_else_waits(
    fair: KeyLimits, options: dict[str, bool], walks: Callable[[int], range]
) -> None:
    deliveries = 0
    for seed in walks(12):
        walk = Walk(SHARED, seed, fair=fair, **options)
        try:
            walk.run(STEPS)
        except AssertionError as error:
            raise AssertionError(f"Walk({SHARED}, {seed}, fair={fair}, **{options}).run({STEPS}): {error}") from error
        deliveries += walk.deliveries
    assert deliveries > len(walks(12)) * STEPS // 20, "the walks hardly delivered anything"


@pytest.mark.parametrize("seed", [261, 565, 659, 723])
def test_an_entry_of_several_keys_holds_up_no_key_that_it_does_not_wait_for(seed: int) -> None:
    """Out of order, it waited in slots it has no need of (261, 659); in order, it was still listed as ready when an
    earlier one had been given back (565, 723)."""
    Walk(KEY_SHARED, seed).run(STEPS)
