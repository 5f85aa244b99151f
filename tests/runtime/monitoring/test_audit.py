"""The audit log: what a caller that is refused again and again may write into it."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import pytest

from magnetar.runtime.access import Caller
from magnetar.runtime.monitoring.audit import CALLERS_MAX, AuditLog
from magnetar.runtime.monitoring.logs import audit_to
from tests.security.test_token import Clock


def test_the_file_is_its_owners_alone_also_after_a_rotation(tmp_path: Path) -> None:
    file, audit = tmp_path / "audit.log", logging.getLogger("magnetar.audit")
    before = (audit.handlers[:], audit.level, audit.propagate)
    mask = os.umask(0o022)
    try:
        audit_to(str(file))
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
            audit.refused(Caller(f"10.0.0.1:{port}"), "Broker.Lookup", "the token has expired")
        audit.refused(Caller("10.0.0.2:1"), "Broker.Lookup", "x" * 10_000)
        clock.now_ms += 1000
        audit.refused(Caller("10.0.0.1:50"), "Broker.Lookup", "the token has expired")
    lines = [json.loads(each.getMessage()) for each in caplog.records]
    first = [f"10.0.0.1:{port}" for port in range(10)]
    assert [line["from"] for line in lines] == [*first, "10.0.0.2:1", "10.0.0.1:50"]
    assert (len(lines[10]["why"]), lines[11]["left_out"]) == (256, 40)
    for number in range(2 * CALLERS_MAX):
        audit.refused(Caller(f"10.{number}.0.1:1"), "Broker.Lookup", "the token has expired")
    assert len(audit._denials) <= CALLERS_MAX
