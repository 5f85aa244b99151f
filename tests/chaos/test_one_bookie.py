"""One real bookie under load: killed at random moments."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.chaos import kills

pytestmark = pytest.mark.processes


async def test_a_bookie_killed_at_random_moments_loses_nothing(tmp_path: Path) -> None:
    """Ten times here; `python -m tests.chaos.kills --kills 50` is the long run."""
    facts = await kills.run(tmp_path, 10, random.Random(11))
    assert facts["acked"] > 1000
    assert facts["checked"] > 1000
    assert facts["deleted_ledgers"] > 10
