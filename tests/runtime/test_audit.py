"""The audit log: what a caller that is refused again and again may write into it."""

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from magnetar.runtime.access import Caller, Principal, PrincipalKind
from magnetar.runtime.logs import LOGGED_CALLERS_MAX, OPERATION_REPEATS_MAX, AuditLog, open_audit_log
from tests.security.test_token import Clock


def test_the_file_is_its_owners_alone_also_after_a_rotation(tmp_path: Path) -> None:
    file, audit = tmp_path / "audit.log", logging.getLogger("magnetar.audit")
    before = (audit.handlers[:], audit.level, audit.propagate)
    mask = os.umask(0o022)
    try:
        open_audit_log(str(file))
        for number in range(3):
            audit.info("%d", number)
            assert file.stat().st_mode & 0o777 == 0o600
            file.rename(tmp_path / f"audit.{number}")
        assert [(tmp_path / f"audit.{number}").read_text() for number in range(3)] == ["0\n", "1\n", "2\n"]
    finally:
        os.umask(mask)
        for handler in audit.handlers:
            handler.close()
        audit.handlers[:], audit.level, audit.propagate = before


def test_an_address_that_is_refused_again_and_again_writes_ten_lines_a_second_and_others_theirs(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("magnetar.audit"), "propagate", True)
    clock = Clock()
    audit = AuditLog(clock)
    with caplog.at_level(logging.INFO, "magnetar.audit"):
        for port in range(50):
            audit.record_refusal(Caller(f"10.0.0.1:{port}"), "Broker.Lookup", "the token has expired")
        audit.record_refusal(Caller("10.0.0.2:1"), "Broker.Lookup", "x" * 10_000)
        clock.now_ms += 1000
        audit.record_refusal(Caller("10.0.0.1:50"), "Broker.Lookup", "the token has expired")
    lines = [json.loads(each.getMessage()) for each in caplog.records]
    first = [f"10.0.0.1:{port}" for port in range(10)]
    assert [line["from"] for line in lines] == [*first, "10.0.0.2:1", "10.0.0.1:50"]
    assert (len(lines[10]["why"]), lines[11]["left_out"]) == (256, 40)
    for number in range(2 * LOGGED_CALLERS_MAX):
        audit.record_refusal(Caller(f"10.{number}.0.1:1"), "Broker.Lookup", "the token has expired")
    assert len(audit._denials) <= LOGGED_CALLERS_MAX


PROGRAM, ADMIN = Principal("etl", PrincipalKind.CLIENT, "token"), Principal("admin", PrincipalKind.CLIENT, "token")


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[dict[str, object]]]:
    monkeypatch.setattr(logging.getLogger("magnetar.audit"), "propagate", True)
    caplog.set_level(logging.INFO, "magnetar.audit")
    return lambda: [json.loads(each.getMessage()) for each in caplog.records if each.name == "magnetar.audit"]


def test_a_role_that_acts_in_a_loop_writes_ten_lines_a_minute_of_an_act_and_how_many_more(
    lines: Callable[[], list[dict[str, object]]],
) -> None:
    """Whatever it names. Another act of it, and other roles, are written."""
    clock = Clock()
    audit = AuditLog(clock)
    for number in range(500):
        audit.log_operation(PROGRAM, "10.0.0.1:1", "Admin.CreateSubscription", f"t{number}", "done", fields=["topic"])
        audit.log_operation(PROGRAM, "10.0.0.1:1", "Admin.DeleteSubscription", f"t{number}", "NotFound")
    audit.log_operation(PROGRAM, "10.0.0.1:1", "Admin.SkipMessages", "t", "done")
    audit.log_operation(ADMIN, "10.0.0.2:1", "Admin.DeleteTopic", "t", "done", is_administration=True)
    assert len(lines()) == 2 * OPERATION_REPEATS_MAX + 2
    clock.now_ms += 61_000
    audit.log_operation(PROGRAM, "10.0.0.1:1", "Admin.CreateSubscription", "t", "done")
    told = lines()[2 * OPERATION_REPEATS_MAX + 2 :]
    assert [(each["principal"], each["act"], each.get("left_out")) for each in told] == [
        ("client:etl", "Admin.DeleteSubscription", 490), ("client:etl", "Admin.CreateSubscription", 490)
    ]  # fmt: skip


def test_no_act_of_administration_is_hidden_and_one_that_is_repeated_is_counted(
    lines: Callable[[], list[dict[str, object]]],
) -> None:
    clock = Clock()
    audit = AuditLog(clock)
    for number in range(300):
        audit.log_operation(ADMIN, "10.0.0.2:1", "Admin.DeleteTopic", f"t{number}", "done", is_administration=True)
        audit.log_operation(ADMIN, "10.0.0.2:1", "Admin.CreateTopic", "same", "AlreadyExists", is_administration=True)
    audit.log_operation(ADMIN, "10.0.0.2:1", "Admin.CreateTopic", "same", "done", is_administration=True)
    found = [(each["act"], each["on"], each["result"]) for each in lines()]
    assert [each for _, each, _ in found if each != "same"] == [f"t{number}" for number in range(300)]
    assert found.count(("Admin.CreateTopic", "same", "AlreadyExists")) == OPERATION_REPEATS_MAX
    assert found[-1] == ("Admin.CreateTopic", "same", "done")
    clock.now_ms += 61_000
    audit.log_operation(PROGRAM, "10.0.0.1:1", "Admin.SkipMessages", "t", "done")
    *counted, _ = lines()[len(found) :]
    assert [(each["act"], each["on"], each["left_out"]) for each in counted] == [("Admin.CreateTopic", "same", 290)]


def test_what_the_audit_log_counts_is_bounded_and_said_before_it_is_forgotten(
    lines: Callable[[], list[dict[str, object]]],
) -> None:
    audit = AuditLog(Clock())
    for _ in range(25):
        audit.log_operation(PROGRAM, "10.0.0.1:1", "Admin.SkipMessages", "t", "done")
    for number in range(2 * LOGGED_CALLERS_MAX):
        audit.log_operation(ADMIN, "10.0.0.2:1", "Admin.DeleteTopic", f"t{number}", "done", is_administration=True)
    assert len(audit._acts) <= LOGGED_CALLERS_MAX
    assert [each["act"] for each in lines() if each.get("left_out") == 15] == ["Admin.SkipMessages"]
