"""Who fails again and again waits, longer each time."""

from magnetar.security.basic import FAILED_KEYS_MAX, FAILURE_MEMORY_S, UNDELAYED_FAILURES, WAIT_MAX_S, FailedLogins


def test_five_failures_are_free_then_the_wait_doubles_from_a_second_to_a_minute() -> None:
    guessing, waits, now_s = FailedLogins(), [], 100.0
    for _ in range(UNDELAYED_FAILURES + 8):
        waits.append(guessing.delay_s("k", now_s))
        now_s += waits[-1]
        guessing.record_failure("k", now_s)
    assert waits == [0.0] * UNDELAYED_FAILURES + [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, WAIT_MAX_S, WAIT_MAX_S]
    assert guessing.delay_s("other", now_s) == 0.0


def test_a_success_and_ten_minutes_forget_the_failures() -> None:
    guessing = FailedLogins()
    for _ in range(2 * UNDELAYED_FAILURES):
        guessing.record_failure("k", 0.0)
        guessing.record_failure("l", 0.0)
    assert guessing.delay_s("k", FAILURE_MEMORY_S - 1) == 0.0
    assert guessing.delay_s("k", 1.0) > 0
    guessing.clear_failures("k")
    assert guessing.delay_s("k", 1.0) == 0.0
    guessing.record_failure("l", FAILURE_MEMORY_S)
    assert guessing.delay_s("l", FAILURE_MEMORY_S) == 0.0


def test_the_number_of_keys_is_bounded_and_the_oldest_goes_first() -> None:
    guessing = FailedLogins()
    for number in range(UNDELAYED_FAILURES):
        guessing.record_failure("first", number)
    for number in range(FAILED_KEYS_MAX):
        guessing.record_failure(f"k{number}", UNDELAYED_FAILURES)
    assert len(guessing._failed) == FAILED_KEYS_MAX
    assert guessing.delay_s("first", UNDELAYED_FAILURES) == 0.0
