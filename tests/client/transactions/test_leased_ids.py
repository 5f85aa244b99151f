"""Ids that were leased ahead: none is given twice, none after its time, none of a coordinator that was lost."""

import random

from magnetar.client.transactions.coordinators import LEASED_IDS_MAX, LEASED_IDS_MIN, LeasedTransactionIds
from magnetar.proto.states import TxnId


def test_no_id_is_taken_twice_or_after_half_of_its_lease() -> None:
    rng, ids, now, next_, taken = random.Random(5), LeasedTransactionIds(), 0.0, 0, []
    valid: dict[TxnId, float] = {}
    lost = 0
    for _ in range(20_000):
        now += rng.random() * 0.2
        found = ids.take_leased_id(now)
        if found is None or (ids.is_running_low and rng.random() < 0.5):
            count, coordinator = rng.randrange(1, ids.wanted + 1), rng.randrange(4)
            ids.add_lease(TxnId.from_parts(coordinator, 1, next_), count, 10.0, now)
            valid.update((TxnId.from_parts(coordinator, 1, next_ + n), now + 5.0) for n in range(count))
            next_ += count
        if found is not None:
            assert now < valid.pop(found), "it is valid, and was not taken"
            taken.append(found)
        if rng.random() < 0.01:
            gone = rng.randrange(4)
            ids.discard(gone)
            valid = {each: until for each, until in valid.items() if each.most != gone}
            lost += 1
        ids.check()
    assert len(taken) == len(set(taken)) > 5000
    assert lost > 100


def test_a_busy_client_leases_more_at_a_time_and_an_idle_one_fewer() -> None:
    ids, now = LeasedTransactionIds(), 0.0
    assert ids.wanted == LEASED_IDS_MIN
    for block in range(20):
        ids.add_lease(TxnId(0, block * LEASED_IDS_MAX), ids.wanted, 60.0, now)
        while ids.take_leased_id(now) is not None:
            pass
    assert ids.wanted == LEASED_IDS_MAX
    for _ in range(20):
        ids.add_lease(TxnId(1, 0), 1, 60.0, now)
        now += 60
        assert ids.take_leased_id(now) is None
    assert ids.wanted == LEASED_IDS_MIN


def test_what_is_given_up_early_costs_a_coordinator_little() -> None:
    """It holds those ids open until the end of their lease, and has room for so many."""
    ids, held, used = LeasedTransactionIds(), 0, 0
    for round_ in range(500):
        for block in range(round_ % 8):
            ids.add_lease(TxnId(round_, block * LEASED_IDS_MAX), ids.wanted, 600.0, 0.0)
            held += ids.wanted
            while not ids.is_running_low and ids.take_leased_id(0.0) is not None:
                used += 1
        ids.take_leased_id(0.0)
        used += 1
        ids.discard(round_)
        assert ids.wanted == LEASED_IDS_MIN or not round_
        assert ids.take_leased_id(0.0) is None
    assert held < 4 * used + LEASED_IDS_MIN * 500
