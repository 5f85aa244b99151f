"""How memory is shared out: within the budget, no share below its least, given values kept; what cannot be is said."""

import random

import pytest

from magnetar.bookie.server import BOOKIE_MEMORY_SHARES as OF_BOOKIE
from magnetar.bookie.server import BookieConfig
from magnetar.broker.common.config import BrokerConfig
from magnetar.broker.server import BROKER_MEMORY_SHARES as OF_BROKER
from magnetar.metadata.server import METADATA_MEMORY_SHARES as OF_METADATA
from magnetar.proto.errors import InvalidConfiguration
from magnetar.runtime.config import (
    MIB,
    MemoryShare,
    compute_minimum_bytes,
    get_setting_value,
    plan_memory,
    replace_settings,
)

ALL = (*OF_BROKER, *OF_BOOKIE)
A = MemoryShare("a", "x.a_bytes", 1, 1, 10, 1000, "…")
B = MemoryShare("b", "x.b_bytes", 1, 3, 10, 100, "…")
C = MemoryShare("c", "x.c_bytes", 4, 1, 5, 50, "…")


def test_what_is_left_is_divided_by_weight_and_what_one_cannot_take_goes_to_the_others() -> None:
    assert plan_memory(40, (A, B, C), {}).values == {"x.a_bytes": 10, "x.b_bytes": 10, "x.c_bytes": 5}
    assert plan_memory(90, (A, B, C), {}).values == {"x.a_bytes": 20, "x.b_bytes": 40, "x.c_bytes": 7}
    assert plan_memory(400, (A, B, C), {}).values == {"x.a_bytes": 145, "x.b_bytes": 100, "x.c_bytes": 38}
    assert plan_memory(10_000, (A, B, C), {}).values == {"x.a_bytes": 1000, "x.b_bytes": 100, "x.c_bytes": 50}


def test_a_given_value_stays_and_the_others_divide_the_rest() -> None:
    found = plan_memory(200, (A, B, C), {"x.b_bytes": 150})
    assert found.values == {"x.a_bytes": 20, "x.b_bytes": 150, "x.c_bytes": 7}
    assert found.limits == {"a": 20, "b": 150, "c": 28}
    assert plan_memory(45, (A, B, C), {"x.b_bytes": 0}).values["x.b_bytes"] == 0


@pytest.mark.parametrize("seed", range(200))
def test_within_the_budget_and_the_bounds_and_never_less_of_a_larger_one(seed: int) -> None:
    rng = random.Random(seed)
    shares = [each.multiply_share(rng.randint(1, 3)) for each in rng.sample(ALL, rng.randint(1, len(ALL)))]
    given = {each.setting: rng.randrange(each.most + 1 if each.most < 1 << 40 else 1 << 28)
             for each in rng.sample(shares, rng.randint(0, len(shares) // 3))}  # fmt: skip
    needed = compute_minimum_bytes(shares, given)
    budget = needed + rng.randrange(1 << rng.randint(1, 36))
    smaller, larger = plan_memory(budget, shares, given), plan_memory(budget + rng.randrange(1 << 30), shares, given)
    assert sum(smaller.limits.values()) <= budget
    for each in shares:
        value = smaller.values[each.setting]
        assert value == given.get(each.setting, value)
        assert value <= larger.values[each.setting]
        assert each.setting in given or each.least <= value <= each.most
    with pytest.raises(InvalidConfiguration):
        plan_memory(needed - 1, shares, given)


def test_a_budget_that_is_too_small_says_what_is_needed_and_which_settings_take_it() -> None:
    needed = compute_minimum_bytes(ALL, {})
    with pytest.raises(InvalidConfiguration, match=f"needs {-(-needed // MIB)} MiB at least") as small:
        plan_memory(needed - 1, ALL, {})
    assert small.value.fields["setting"] == "process.memory_bytes"
    assert small.value.fields["allowed"] == f"≥ {needed}"
    given = {"broker.cache_bytes": 300 * MIB, "bookie.store.memtable_bytes": 200 * MIB}
    wrong = r"bookie.store.memtable_bytes = 209715200 \(600 MiB\), broker.cache_bytes = 314572800 \(300 MiB\) this"
    with pytest.raises(InvalidConfiguration, match=wrong):
        plan_memory(512 * MIB, ALL, given)


@pytest.mark.parametrize(
    ("section", "config", "shares"),
    [("broker", BrokerConfig(), OF_BROKER), ("bookie", BookieConfig("/x"), OF_BOOKIE)],
)
def test_each_share_is_a_setting_and_its_bounds_are_values_that_the_setting_may_have(
    section: str, config: BrokerConfig | BookieConfig, shares: tuple[MemoryShare, ...]
) -> None:
    for each in shares:
        name = each.setting.removeprefix(f"{section}.")
        assert isinstance(get_setting_value(config, name), int)
        assert each.least < each.most
        for value in (each.least, each.most):
            assert get_setting_value(replace_settings(config, {name: value}), name) == value
    least = plan_memory(compute_minimum_bytes(shares, {}), shares, {}).apply_to_config(config, section)
    assert get_setting_value(least, shares[0].setting.removeprefix(f"{section}.")) == shares[0].least


def test_every_share_has_a_name_and_a_setting_of_its_own() -> None:
    every = (*ALL, *OF_METADATA)
    assert len({each.name for each in every}) == len({each.setting for each in every}) == len(every)
