"""`magnetar outbox`: rows are listed, parked, revived and dropped; what is wrong has its exit code."""

import json
from pathlib import Path

import pytest

from tests.support.processes import Processes, run_cli, run_here

pytest.importorskip("sqlalchemy")


@pytest.fixture
def database(tmp_path: Path) -> str:
    from sqlalchemy import MetaData, create_engine

    from magnetar.outbox import SQLAlchemyOutbox

    url = f"sqlite:///{tmp_path / 'shop.db'}"
    assert run_here("outbox", "create", "--database", url).code == 0
    engine, outbox = create_engine(url), SQLAlchemyOutbox(MetaData())
    with engine.begin() as connection:
        for value in (b"1", b"2", b"3"):
            outbox.send(connection, "orders", value, key="a")
    engine.dispose()
    return url


def rows(database: str, *more: str) -> list[dict[str, object]]:
    done = run_here("outbox", "list", "--database", database, "-o", "json", *more)
    assert done.code == 0, done.err
    found: list[dict[str, object]] = json.loads(done.out)
    return found


def test_rows_are_listed_parked_revived_and_dropped(database: str) -> None:
    first, second, third = (str(row["id"]) for row in rows(database))
    assert run_here("outbox", "park", first, second, "--database", database).out == "2 rows parked\n"
    assert len(rows(database, "--state", "parked")) == 2
    assert run_here("outbox", "revive", "--all", "--database", database).out == "2 rows revived\n"
    dropped = run_here("outbox", "drop", third, "--yes", MAGNETAR_OUTBOX_DATABASE=database)
    assert dropped.out == "1 rows dropped\n"
    status = json.loads(run_here("outbox", "status", "--database", database, "-o", "json").out)
    assert (status["waiting"], status["parked"], status["shards"]) == (2, 0, [])
    assert run_here("outbox", "shards", "4", "--database", database).code == 0


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("list", "--database", "sqlite:///{folder}/none.db"), 4, "magnetar outbox create"),
        (("list", "--database", "nonsense"), 2, "--database is a URL"),
        (("list", "--database", "oracle+oracledb://h/x"), 3, "pip install"),
        (("park", "99", "--database", "{database}"), 4, "magnetar outbox list"),
        (("revive", "--database", "{database}"), 2, "--all"),
        (("drop", "1", "--database", "{database}"), 2, "--yes"),
        (("relay", "--shard", "4", "--shards", "4", "--database", "{database}"), 2, "count from 0"),
    ],
)
def test_what_is_wrong_has_its_exit_code(
    arguments: tuple[str, ...], code: int, says: str, database: str, tmp_path: Path
) -> None:
    done = run_here("outbox", *(each.format(folder=tmp_path, database=database) for each in arguments))
    assert done.code == code, done.err
    assert says in done.err


@pytest.mark.processes
def test_a_relay_is_a_process_that_reports_and_ends_in_order(database: str, started: Processes) -> None:
    server = started.start("standalone", "standalone", "--port", "0", "--data", "data")
    url = server.wait_ready()
    refused = run_cli("outbox", "relay", "--database", database, "--url", url)
    assert refused.code == 1
    assert "magnetar namespaces set-deduplication public/default --enable" in refused.err
    assert run_here("namespaces", "set-deduplication", "public/default", "--enable", "--url", url).code == 0
    done = run_cli("outbox", "relay", "--database", database, "--url", url, "--until-empty")
    assert done.code == 0, done.err
    assert done.out.splitlines()[0] == "ready outbox-shop-0"
    assert "3 rows stored; lag 0 rows, 0.0 s; parked 0" in done.out.splitlines()[-1]
    relay = started.start("relay", "outbox", "relay", "--database", database, "--url", url, "--report", "0.1")
    assert relay.wait_ready() == "outbox-shop-0"
    assert relay.stop() == 0
    assert run_here("consume", "orders", "-s", "s", "-n", "3", "--url", url).out.splitlines() == ["1", "2", "3"]
    renumbered = run_here("outbox", "renumber", "--yes", "--database", database, "--url", url, "-o", "json")
    assert json.loads(renumbered.out) == [{"destination": "persistent://public/default/orders", "last_seq": 2}]
