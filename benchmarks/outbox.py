"""outbox: rows of a PostgreSQL database into a topic, by the relay of one shard.

The rows are there before the relay starts, and are more than it sends in `--seconds`. PostgreSQL, the broker and its
bookie sync what they confirm; all of them share this machine with the relay.
"""

from __future__ import annotations

import time

from .harness import Options, Run, measured, progress, server

ROWS_PER_S = 25_000
"""So many rows are made for each second, so that they do not end."""
WARM_UP_S = 1.0
DEADLINE_S = 60.0


def outbox(options: Options) -> Run:
    """Rows per second that are claimed, stored in the topic and deleted."""
    from sqlalchemy import MetaData, create_engine

    import magnetar
    from magnetar.admin import Admin
    from magnetar.outbox import Relay, SQLAlchemyOutbox
    from magnetar.proto.policies import Policies
    from tests.support.postgres import Postgres, why_no_postgres

    if (reason := why_no_postgres()) is not None:
        raise RuntimeError(reason)
    with server(options.bookies) as running, Postgres() as database, magnetar.Client(running.url) as client:
        with Admin(running.url) as admin:
            admin.set_namespace_policies("public/default", Policies(deduplication=True))
        engine, metadata = create_engine(database.database("bench")), MetaData()
        box = SQLAlchemyOutbox(metadata)
        metadata.create_all(engine)
        warm_up_s = options.at_most(WARM_UP_S)
        rows = int(ROWS_PER_S * (options.seconds + warm_up_s))
        _fill(engine, rows, options.size)
        progress(f"outbox: {rows:,} rows of {options.size} bytes")
        run = Run(0.0)
        with Relay(client, engine, box, name="bench") as relay:
            _until_stored(relay, 1, DEADLINE_S)
            time.sleep(warm_up_s)
            with measured(run, server=running.pid):
                before, since = relay.statistics()["stored_rows"], time.perf_counter()
                time.sleep(options.seconds)
                _until_stored(relay, before + 1, DEADLINE_S)
                stored, took = relay.statistics()["stored_rows"] - before, time.perf_counter() - since
            lag = relay.lag()
        assert lag.waiting, "the rows ended before the time did"
        engine.dispose()
        run.value = stored / took
        run.detail = {"rows": stored, "seconds": took, "left": lag.waiting}
        return run


def _fill(engine: object, rows: int, size: int) -> None:
    """As `SQLAlchemyOutbox.send` writes them, in one statement: 1,000 keys."""
    from sqlalchemy import Engine, text

    assert isinstance(engine, Engine)
    with engine.begin() as connection:
        connection.execute(
            text(
                "INSERT INTO magnetar_outbox (topic, key, value, properties, created, key_hash, size, state, attempts)"
                " SELECT 'persistent://public/default/bench', (n % 1000)::text, decode(repeat('6d', :size), 'hex'),"
                " '{\"source\": \"bench\"}', 0, n % 1000, :size + 25, 0, 0 FROM generate_series(1, :rows) AS n"
            ),
            {"rows": rows, "size": size},
        )
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("VACUUM ANALYZE magnetar_outbox"))


def _until_stored(relay: object, rows: int, seconds: float) -> None:
    from magnetar.outbox import Relay

    assert isinstance(relay, Relay)
    deadline = time.perf_counter() + seconds
    while relay.statistics()["stored_rows"] < rows:
        if relay.error is not None or time.perf_counter() > deadline:
            raise RuntimeError(f"the relay sends nothing: {relay.statistics()}")
        time.sleep(0.01)
