"""A publish that waits for a ledger: its client learns why, while it waits."""

from pathlib import Path
from typing import Any

import pytest

from magnetar.client import aio
from magnetar.client.common.errors import Timeout
from magnetar.proto.errors import NotEnoughBookies
from tests.broker.topic.test_maintenance import TOPIC, deployment

WHY = "3 writable bookies are needed, 0 are registered"


async def test_a_send_that_times_out_while_bookies_are_missing_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with deployment(tmp_path, roll_entries=2) as at, aio.Client(f"magnetar://{at.broker.endpoint}") as client:
        producer = await client.create_producer(TOPIC, send_timeout_millis=3000)
        idle = await client.create_producer(TOPIC, send_timeout_millis=3000)
        await producer.send(b"first")
        ledgers, missing = at.topic.log._managed_ledger._ledgers, True  # type: ignore[attr-defined]
        draft = ledgers.draft_record

        async def none_left(**options: Any) -> Any:
            if missing:
                raise NotEnoughBookies(WHY, wanted=3, available=0)
            return await draft(**options)

        monkeypatch.setattr(ledgers, "draft_record", none_left)
        await producer.send(b"second")  # the ledger is full
        with caplog.at_level("WARNING", logger="magnetar.client"), pytest.raises(Timeout, match=WHY):
            await producer.send(b"third")
        said = [each.getMessage() for each in caplog.records if each.name.startswith("magnetar.client")]
        assert sum(WHY in each for each in said) == 1, "once, and not by a producer that sent nothing"
        missing = False
        await producer.send(b"again")
        await idle.send(b"too")
