"""How a server begins when the metadata goes away meanwhile."""

import pytest

from magnetar.cli.run import servers
from magnetar.proto.errors import ConnectionLost, InvalidConfiguration, MagnetarError, SessionExpired
from magnetar.runtime.clock import SystemClock


class Starts:
    """Fails with each of these, then serves; `ready` from the n-th on."""

    def __init__(self, *failures: MagnetarError, ready_at: int) -> None:
        self.failures, self.ready_at, self.count = list(failures), ready_at, 0

    async def __call__(self) -> None:
        self.count += 1
        if self.failures:
            raise self.failures.pop(0)

    def is_ready(self) -> bool:
        return self.count >= self.ready_at


async def test_a_start_that_loses_the_metadata_begins_again() -> None:
    starts = Starts(ConnectionLost("cut"), SessionExpired("too late"), ready_at=3)
    await servers.start_until_ready(SystemClock(), starts, starts.is_ready, pause_s=0.0)
    assert starts.count == 3


async def test_a_server_that_was_ready_or_cannot_start_at_all_is_not_begun_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for starts in (Starts(SessionExpired("gone"), ready_at=1), Starts(InvalidConfiguration("wrong"), ready_at=9)):
        with pytest.raises(MagnetarError):
            await servers.start_until_ready(SystemClock(), starts, starts.is_ready, pause_s=0.0)
        assert starts.count == 1
    monkeypatch.setattr(servers, "METADATA_WAIT_S", 0.0)
    late = Starts(ConnectionLost("cut"), ConnectionLost("cut"), ready_at=9)
    with pytest.raises(ConnectionLost):
        await servers.start_until_ready(SystemClock(), late, late.is_ready, pause_s=0.0)
    assert late.count == 1
