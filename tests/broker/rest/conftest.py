"""What tests of REST begin with: a broker that serves it, and a connection to it."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.broker.rest.http import Http, serving


@pytest.fixture
async def http(tmp_path: Path) -> AsyncIterator[Http]:
    async with serving(tmp_path) as (http, _, _):
        yield http
