"""Databases for the tests of the outbox: SQLite in the test's folder, and a PostgreSQL server of the run's own."""

from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest

from tests.support.postgres import Postgres, why_no_postgres

sqlalchemy = pytest.importorskip("sqlalchemy")
_numbers = count(1)


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    reason = why_no_postgres()
    if reason is not None:
        pytest.skip(reason)
    with Postgres() as server:
        yield server


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """URL of an empty database."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'shop.db'}"
    server: Postgres = request.getfixturevalue("postgres")
    return server.database(f"shop{next(_numbers)}")


@pytest.fixture
def engine(database: str) -> Iterator[sqlalchemy.Engine]:
    made = sqlalchemy.create_engine(database)
    yield made
    made.dispose()


Send = Callable[..., None]
