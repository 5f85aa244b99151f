"""What all tests share: `spark` tests are skipped, with the reason, where Spark cannot run."""

from __future__ import annotations

import pytest

from magnetar.cli.java import why_no_spark


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("spark")]
    reason = why_no_spark() if marked else None
    for item in marked if reason else ():
        item.add_marker(pytest.mark.skip(reason=reason or ""))
