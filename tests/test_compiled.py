"""The compiled twin is tested where it is asked for; `make test-compiled`."""

from __future__ import annotations

import copy
import os
import pickle

from magnetar.bookie.requests import adds
from magnetar.bookie.store import memtable
from magnetar.bookie.store.journal import journal
from magnetar.broker.log import appender
from magnetar.broker.session import producer as session
from magnetar.broker.topic import producer as publisher
from magnetar.client.core import batcher, producer
from magnetar.client.model import message_id
from magnetar.ledger import handle, sender
from magnetar.proto import entry, versions
from magnetar.runtime.monitoring import metrics
from magnetar.runtime.peer import inside
from tests.compiled import COMPILED


def test_the_twin_that_is_asked_for_is_tested() -> None:
    wanted = os.environ.get("MAGNETAR_TEST_COMPILED") == "1"
    client, server = (batcher, producer, entry, message_id), (session, publisher, appender, handle, sender, inside)
    for each in (*client, *server, adds, memtable, journal, metrics):
        assert str(each.__file__).endswith(".py") is not wanted, f"{each.__file__} is tested"
    assert COMPILED is wanted
    assert versions.is_compiled() is wanted
    assert ("(compiled)" in versions.shown()) is wanted


def test_an_id_is_copied_and_pickled() -> None:
    made = message_id.MessageId(1, 2, 3, 4)
    for each in (made, message_id.KnownId(1, 2, 3, 4, 5, "topic")):
        assert copy.copy(each) == copy.deepcopy(each) == pickle.loads(pickle.dumps(each)) == made
        assert type(pickle.loads(pickle.dumps(each))) is type(each)
        assert pickle.loads(pickle.dumps(each)).batch_size() == each.batch_size()
