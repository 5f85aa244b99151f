"""What tests of a broker begin with: a cluster of one, and one that is called over real gRPC."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.broker.grpc.test_services import Deployment
from tests.support.cluster import Cluster, cluster


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with cluster(tmp_path) as running:
        yield running


@pytest.fixture
async def deployment(running: Cluster) -> AsyncIterator[Deployment]:
    deployment = Deployment(running)
    yield deployment
    await deployment.channel.close()
