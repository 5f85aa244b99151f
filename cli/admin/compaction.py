"""`magnetar topics compact` and `compaction-status`: pulsar-admin's verbs, for a topic or all its partitions."""

from __future__ import annotations

import time
from typing import Any

from click import option

from ..common.session import Session, verb

POLL_S = 0.5
COLUMNS = ("topic", "state", "step", "progress", "messages", "entries", "bytes", "horizon", "dueBytes", "error")


@verb(option("-w", "--wait-complete", is_flag=True, help="Wait until none is running."))
def status(session: Session, topic: str, wait_complete: bool) -> None:
    """The last compaction of a topic (of each partition), and what is compacted.

    Example: magnetar topics compaction-status prices -w
    """
    rows = _rows(session, topic)
    while wait_complete and any(row["state"] == "RUNNING" for row in rows):
        time.sleep(POLL_S)
        rows = _rows(session, topic)
    session.out.rows(rows, COLUMNS)


def _rows(session: Session, topic: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for part in session.admin.parts(topic):
        found = session.admin.compaction_status(part)
        share = f"{min(100, 100 * found.looked_at // found.to_look_at)} %" if found.to_look_at else ""
        rows.append(
            {
                "topic": part, "state": found.state, "step": found.step, "progress": share, "messages": found.messages,
                "entries": found.entries, "bytes": found.bytes, "dueBytes": found.due_bytes, "error": found.error,
                "horizon": str(found.horizon) if found.ledger_id >= 0 else "",
            }
        )  # fmt: skip
    return rows
