"""What tests of a broker over real gRPC begin with."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.broker.protocols.grpc.test_services import House
from tests.support.cluster import cluster


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    async with cluster(tmp_path) as running:
        house = House(running)
        yield house
        await house.channel.close()
