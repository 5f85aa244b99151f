"""A real bookie: killed at random moments, on a disk that is full to the last byte, with an old copy of its data."""

import contextlib
import random
from pathlib import Path

import pytest

from tests.chaos import full_disk, kills, limbo

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


async def test_a_bookie_with_an_old_copy_of_its_directory_gets_back_what_it_lost(tmp_path: Path) -> None:
    """One of three; a directory that was wiped is refused."""
    facts = await limbo.run(tmp_path)
    assert "magnetar bookies forget" in facts["refused"]
    assert facts["in_limbo_served"] > 0
    assert facts["in_limbo_unknown"] >= 3 * 40  # and what the old copy was made too early for
    assert (facts["served"], facts["unknown"]) == (6 * 40, 0)
