"""What tests of a broker over real gRPC begin with."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.broker.grpc.test_services import Deployment
from tests.support.cluster import cluster


@pytest.fixture
async def deployment(tmp_path: Path) -> AsyncIterator[Deployment]:
    async with cluster(tmp_path) as running:
        deployment = Deployment(running)
        yield deployment
        await deployment.channel.close()
