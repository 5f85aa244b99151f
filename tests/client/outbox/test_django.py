"""The outbox and the inbox as Django apps, in a process of their own: Django is configured once for each."""

import subprocess
import sys
from pathlib import Path

import pytest
from sqlalchemy import Engine, MetaData, create_engine, inspect, select

from magnetar.client.inbox.tables import SQLAlchemyInbox
from magnetar.client.outbox.relay import OutboxAdmin
from magnetar.client.outbox.rows import RowKeyEncoding, parse_schema
from magnetar.client.outbox.tables import SQLAlchemyOutbox, check_outbox_tables
from magnetar.proto.schema import SchemaType
from tests.support.postgres import Postgres

pytest.importorskip("django")
pytestmark = pytest.mark.processes

PROGRAM = '''
import sys
from django.conf import settings
settings.configure(
    INSTALLED_APPS=["magnetar.outbox.django", "magnetar.inbox.django"], DATABASES={"default": %s}, USE_TZ=True
)
import django
django.setup()
from django.core.management import call_command
from django.db import transaction
from magnetar.inbox import DjangoInbox
from magnetar.outbox import DjangoOutbox
import magnetar.outbox.django, magnetar.client.outbox.django
assert magnetar.outbox.django is magnetar.client.outbox.django
call_command("makemigrations", "--check", "--dry-run", verbosity=0)
call_command("migrate", verbosity=0)
outbox, inbox = DjangoOutbox(), DjangoInbox()

def refused(act):
    try:
        act()
    except transaction.TransactionManagementError as error:
        assert "transaction.atomic()" in str(error), error
    else:
        raise AssertionError("it was taken outside of a transaction")

from magnetar.schema import Int8Schema, KeyValueEncodingType, KeyValueSchema, StringSchema
PAIRS = KeyValueSchema(StringSchema(), Int8Schema(), KeyValueEncodingType.SEPARATED)
refused(lambda: outbox.send("orders", b"x"))
refused(lambda: inbox.first_time("billing", "1"))
class Wakes:
    woken = 0
    def wake(self):
        Wakes.woken += 1
wakes = Wakes()
outbox.relays.add(wakes)
with transaction.atomic():
    outbox.send("orders", ("17", 1), schema=PAIRS, properties={"a": "b"})
    assert not Wakes.woken, "before the commit nothing happens"
assert Wakes.woken == 1
try:
    with transaction.atomic():
        outbox.send("orders", b"lost")
        assert inbox.first_time("billing", "1")
        raise RuntimeError
except RuntimeError:
    pass
with transaction.atomic():
    assert inbox.first_time("billing", "1"), "the transaction before was rolled back"
with transaction.atomic():
    assert not inbox.first_time("billing", "1")
    assert inbox.first_time("shipping", "1")
with transaction.atomic():
    outbox.send("orders", b"1")
    try:
        with transaction.atomic():
            outbox.send("orders", b"lost")
            raise RuntimeError
    except RuntimeError:
        pass
    with transaction.atomic():
        outbox.send("bills", b"2")
    outbox.send("orders", b"3")
from types import SimpleNamespace
from magnetar.inbox import once
called = []
@once(inbox, "once", key=lambda message: message.number)
def handle(message):
    assert transaction.get_connection().in_atomic_block
    called.append(message.number)
    if len(called) == 1:
        raise KeyError
try:
    handle(SimpleNamespace(number="5"))
except KeyError:
    pass
handle(SimpleNamespace(number="5"))
handle(SimpleNamespace(number="5"))
assert called == ["5", "5"], "the first was rolled back, and the third is a repeat"
from magnetar.client.outbox.django.models import OutboxRow
one, *unit = OutboxRow.objects.order_by("id").values_list("unit", flat=True)
assert len(unit) == 3 and len(set(unit)) == 1 and one not in unit, "a transaction's rows are one unit"
OutboxRow.objects.filter(unit=unit[0]).delete()
assert inbox.purge() == 0
assert inbox.purge(older_than_s=-5) == 3
print("done")
'''


def run(settings: dict[str, object]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM % repr(settings)], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.stdout.strip() == "done", done.stderr


def same_columns(engine: Engine) -> None:
    """The migrations make what SQLAlchemyOutbox uses."""
    outbox, inbox = SQLAlchemyOutbox(MetaData()), SQLAlchemyInbox(MetaData())
    check_outbox_tables(engine, outbox)
    found = inspect(engine)
    for table in (outbox.rows, outbox.shards, outbox.positions, inbox.rows):
        columns = {each["name"]: each["nullable"] for each in found.get_columns(table.name)}
        columns.pop("id", None) if "id" not in table.columns else None
        assert columns == {each.name: each.nullable for each in table.columns}
    (row,) = OutboxAdmin(engine, outbox).rows()
    assert (row.topic, row.key, row.state) == ("persistent://public/default/orders", "MTc=", "waiting")
    with engine.connect() as connection:
        told = connection.execute(select(outbox.rows.c.value_schema, outbox.rows.c.key_form)).one()
    assert (parse_schema(told.value_schema).type, told.key_form) == (SchemaType.KEY_VALUE, RowKeyEncoding.BYTES)
    engine.dispose()


def test_a_django_application_writes_rows_in_its_transactions_on_sqlite(tmp_path: Path) -> None:
    run({"ENGINE": "django.db.backends.sqlite3", "NAME": str(tmp_path / "shop.db")})
    same_columns(create_engine(f"sqlite:///{tmp_path / 'shop.db'}"))


def test_a_django_application_writes_rows_in_its_transactions_on_postgresql(postgres: Postgres) -> None:
    url = postgres.database("django")
    run({
        "ENGINE": "django.db.backends.postgresql", "NAME": "django", "USER": "magnetar", "HOST": "127.0.0.1",
        "PORT": str(postgres.port),
    })  # fmt: skip
    same_columns(create_engine(url))


def test_neither_sqlalchemy_nor_django_is_imported_before_it_is_used() -> None:
    text = (
        "import sys, magnetar, magnetar.outbox, magnetar.inbox; magnetar.outbox.RelaySettings;"
        " print([each for each in ('sqlalchemy', 'django') if each in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
