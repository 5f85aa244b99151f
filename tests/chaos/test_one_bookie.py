"""One real bookie under load: killed at random moments, and on a disk that is full to the last byte."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path

import pytest

from tests.chaos import full_disk, kills

pytestmark = pytest.mark.processes


async def test_a_bookie_killed_at_random_moments_loses_nothing(tmp_path: Path) -> None:
    """Ten times here; `python -m tests.chaos.kills --kills 50` is the long run."""
    facts = await kills.run(tmp_path, 10, random.Random(11))
    assert facts["acked"] > 1000
    assert facts["checked"] > 1000
    assert facts["deleted_ledgers"] > 10


async def test_a_full_disk_is_said_kept_and_left(tmp_path: Path) -> None:
    """Once here; `python -m tests.chaos.full_disk` does it three times."""
    with contextlib.ExitStack() as stack:
        try:
            place = stack.enter_context(full_disk.small_disk(tmp_path, 256))
        except PermissionError as error:
            pytest.skip(str(error))
        facts = await full_disk.run(tmp_path, place, 1, random.Random(5))
    assert facts["full_used"][0] > 0.9
    assert facts["acked"] > 3000
