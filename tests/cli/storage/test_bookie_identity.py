"""What an operator tells the metadata of a stopped bookie, in the folder of a stopped standalone."""

import asyncio
import json
from pathlib import Path

import pytest

from magnetar.metadata import paths
from magnetar.metadata.records import CookieRecord
from magnetar.metadata.sqlite import SqliteStore
from magnetar.metadata.store import get_record, put_record
from magnetar.runtime.process import make_system_world
from tests.support.processes import run_here

BOOKIE = "6f9619ff-8b86-4d01-b42d-00cf4fc964ff"
NAMED = {"move": ["other:/data"], "replace-directory": ["ledgers-1"]}
"""What a command names besides the bookie."""


def cookie(folder: Path, record: CookieRecord | None = None) -> CookieRecord | None:
    """What the metadata says of the bookie; after `record` was put there, if given."""

    async def ask() -> CookieRecord | None:
        store = await SqliteStore.open(make_system_world(), str(folder / "metadata.sqlite"))
        session = store.new_session()
        if record is not None:
            await put_record(session, paths.cookie(record.bookie), record)
        found = await get_record(session, paths.cookie(BOOKIE), CookieRecord)
        await store.close()
        return None if found is None else found[0]

    return asyncio.run(ask())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    cookie(tmp_path, CookieRecord(bookie=BOOKIE, instance="i", directories=("h:/d",), starts=3))
    return tmp_path


def test_of_two_bookies_whose_ids_begin_so_none_is_forgotten(folder: Path) -> None:
    cookie(folder, CookieRecord(bookie=f"{BOOKIE[:-1]}0", instance="i", directories=("h:/e",), starts=1))
    done = run_here("bookies", "forget", BOOKIE[:8], "--data", str(folder), "-y")
    assert (done.code, "2 bookies' ids begin with" in done.err) == (1, True), done.err
    assert cookie(folder) is not None
    assert run_here("bookies", "forget", BOOKIE, "--data", str(folder), "-y").code == 0


def test_a_bookie_is_forgotten_by_the_beginning_of_its_id_and_unknown_afterwards(folder: Path) -> None:
    words = ["bookies", "forget", BOOKIE[:8], "--data", str(folder), "-y", "-o", "json"]
    done = run_here(*words)
    assert done.code == 0, done.err
    assert json.loads(done.out)[0]["places"] == ["h:/d"]
    assert cookie(folder) is None
    again = run_here(*words)
    assert again.code != 0
    assert "knows no bookie" in again.err


@pytest.mark.parametrize("beginning", ["", BOOKIE[:7]])
@pytest.mark.parametrize("words", [["forget"], ["move"], ["replace-directory"], ["accept-metadata"]])
def test_a_beginning_of_fewer_than_eight_characters_names_no_bookie(
    folder: Path, words: list[str], beginning: str
) -> None:
    place = NAMED.get(words[0], [])
    before = cookie(folder)
    done = run_here("bookies", *words, beginning, *place, "--data", str(folder), "-y")
    assert (done.code, "too short" in done.err) == (1, True), done.err
    assert cookie(folder) == before


@pytest.mark.parametrize("words", [["forget"], ["move"], ["replace-directory"], ["accept-metadata"]])
def test_the_question_names_the_whole_id_and_the_place_and_nothing_is_changed_before_the_answer(
    folder: Path, words: list[str]
) -> None:
    place = NAMED.get(words[0], [])
    before = cookie(folder)
    done = run_here("bookies", *words, BOOKIE[:8], *place, "--data", str(folder))
    assert (done.code, f"{BOOKIE} at h:/d" in done.err) == (2, True), done.err
    assert cookie(folder) == before
    unknown = run_here("bookies", *words, "0" * 8, *place, "--data", str(folder))
    assert "knows no bookie" in unknown.err, "who is not there is not asked about"


def test_a_directory_is_moved(folder: Path) -> None:
    done = run_here("bookies", "move", BOOKIE, "other:/data", "--data", str(folder), "-y")
    assert done.code == 0, done.err
    found = cookie(folder)
    assert found is not None
    assert found.directories == ("other:/data",)


def test_restored_metadata_is_accepted(folder: Path) -> None:
    done = run_here("bookies", "accept-metadata", BOOKIE, "--data", str(folder), "-y")
    assert done.code == 0, done.err
    found = cookie(folder)
    assert found is not None
    assert found.starts > 1 << 50


def test_a_directory_that_is_lost_is_given_up_by_its_name(folder: Path) -> None:
    words = ["bookies", "replace-directory", BOOKIE, "ledgers-1", "--data", str(folder), "-y"]
    done = run_here(*words)
    assert (done.code, "it has none besides its data directory" in done.err) == (4, True), done.err
    cookie(folder, CookieRecord(bookie=BOOKIE, instance="i", directories=("h:/d",), starts=3, ledgers=((0, 2),)))
    assert run_here(*words).code == 0
    found = cookie(folder)
    assert found is not None
    assert found.replaced == ("ledgers-1",)
