"""What a bookie did lately, remembered and forgotten."""

from magnetar.ledger.placement_core import FAULT_FORGET_RATE, FAULT_WEIGHT_MAX, BookieFaultKind, BookieHealth


def test_trouble_halves_with_time_and_is_forgotten() -> None:
    trouble = BookieHealth(half_life_s=10.0)
    trouble.record_read_fault("a", BookieFaultKind.FAILED, 100.0)
    trouble.record_read_fault("b", BookieFaultKind.SLOW, 100.0)
    assert trouble.fault_weights(100.0) == {"a": 1.0, "b": 0.5}
    assert trouble.fault_weights(109.9).keys() == {"a", "b"}
    assert trouble.fault_weights(110.1) == {"a": trouble.fault_weights(110.1)["a"]}, (
        "slow once is forgotten after a half-life"
    )
    assert trouble.fault_weights(119.9)["a"] >= FAULT_FORGET_RATE
    assert trouble.fault_weights(120.1) == {}, "a failure after two"


def test_trouble_adds_up_but_however_much_it_was_ends_in_time() -> None:
    trouble = BookieHealth(half_life_s=10.0)
    for second in range(100):
        trouble.record_read_fault("a", BookieFaultKind.SLOW, float(second))
        assert trouble.fault_weights(float(second))["a"] <= FAULT_WEIGHT_MAX
    trouble.record_read_fault("b", BookieFaultKind.SLOW, 99.0)
    weights = trouble.fault_weights(99.0)
    assert weights["a"] > weights["b"], "who was slow all the time is asked after who was once"
    assert trouble.fault_weights(99.0 + 41.0) == {}
    assert trouble.counts["a"] == {BookieFaultKind.FAILED: 0, BookieFaultKind.SLOW: 100, BookieFaultKind.DAMAGED: 0}


def test_a_bookie_that_has_started_anew_is_as_good_as_any() -> None:
    trouble = BookieHealth(half_life_s=10.0)
    trouble.record_read_fault("a", BookieFaultKind.DAMAGED, 0.0)
    trouble.reset_weight("a")
    assert trouble.fault_weights(0.0) == {}
    assert trouble.counts["a"][BookieFaultKind.DAMAGED] == 1, "counts stay"
