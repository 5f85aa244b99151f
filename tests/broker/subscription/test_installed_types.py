"""A subscription type from an installed package: loaded by name, refused when it is wrong, and used by the SDK."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from magnetar.broker.server import find_installed_policies
from magnetar.broker.subscription.core.in_log_order import Exclusive
from magnetar.broker.subscription.core.subscription_types import (
    SUBSCRIPTION_TYPE_ROWS,
    SubscriptionTypeRow,
    find_subscription_type,
    load_installed_types,
)
from magnetar.client import aio
from magnetar.client.common.errors import InvalidConfiguration as WrongArgument
from magnetar.proto.errors import InvalidConfiguration, InvalidRequest
from tests.broker.subscription.test_new_type import Numbered
from tests.client.consume.test_ranges import url_of
from tests.support.cluster import cluster

BY_TURNS = SubscriptionTypeRow(77, "BY_TURNS", Numbered)


@pytest.fixture(autouse=True)
def only_ours() -> Iterator[None]:
    before = dict(SUBSCRIPTION_TYPE_ROWS)
    yield
    SUBSCRIPTION_TYPE_ROWS.clear()
    SUBSCRIPTION_TYPE_ROWS.update(before)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Installs a package with three entry points."""
    folder = tmp_path / "site"
    info = folder / "by_turns-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: by-turns\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[magnetar.subscription_policies]\nby-turns = by_turns:BY_TURNS\nbroken = by_turns:absent\n"
        "nothing = by_turns:NOTHING\n"
    )
    (folder / "by_turns.py").write_text(
        "from tests.broker.subscription.test_installed_types import BY_TURNS\nNOTHING = 7\n"
    )
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "by_turns", raising=False)


@pytest.mark.usefixtures("package")
async def test_a_broker_loads_what_its_setting_names_and_the_sdk_uses_it(tmp_path: Path) -> None:
    async with cluster(tmp_path, subscription_policies=" by-turns ") as running, aio.Client(url_of(running)) as client:
        consumers = [
            await client.subscribe(
                "t", "s", 77, consumer_name=name, initial_position=aio.InitialPosition.Earliest
            ) for name in "ab"
        ]  # fmt: skip
        producer = await client.create_producer("t", batching_enabled=False)
        for number in range(6):
            await producer.send(b"%d" % number)
        for first, consumer in enumerate(consumers):
            for number in range(first, 6, 2):
                message = await consumer.receive(10000)
                assert message.data() == b"%d" % number
                await consumer.acknowledge(message)
        for wrong in (63, 128, 7, True):
            with pytest.raises(WrongArgument, match="number of an installed type, 64 to 127"):
                await client.subscribe("t", "s", wrong)


@pytest.mark.usefixtures("package")
async def test_nothing_is_loaded_unless_the_setting_says_so(tmp_path: Path) -> None:
    async with cluster(tmp_path):
        assert 77 not in SUBSCRIPTION_TYPE_ROWS
    with pytest.raises(InvalidRequest, match="no subscription type 77"):
        find_subscription_type(77)


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(
    ("names", "why"),
    [
        ("absent", "0 installed packages have an entry point 'absent'"), ("broken", "'broken' cannot be imported"),
        ("nothing", "'nothing' is no SubscriptionTypeRow, but 7"),
        ("by-turns,by-turns", "has the number 77 of another one"),
    ],
)
async def test_a_broker_with_a_wrong_setting_does_not_start(tmp_path: Path, names: str, why: str) -> None:
    with pytest.raises(InvalidConfiguration, match=why):
        async with cluster(tmp_path, subscription_policies=names):
            pass
    assert 77 not in SUBSCRIPTION_TYPE_ROWS


class Unmade(Numbered):
    def __init__(self, options: Any) -> None:
        raise RuntimeError("needs a licence")


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (SubscriptionTypeRow(7, "BY_TURNS", Numbered), "not in 64"),
        (SubscriptionTypeRow(77, "By", Numbered), "in capitals"),
        (SubscriptionTypeRow(77, "SHARED", Numbered), "no free name"),
        (SubscriptionTypeRow(77, "X", Unmade), "a licence"),
        (SubscriptionTypeRow(77, "X", type("Empty", (), {"__init__": lambda *_: None})), "has no .*choose_member"),  # type: ignore
    ],
    ids=str,
)
def test_a_type_that_cannot_be_registered_is_refused(given: SubscriptionTypeRow, why: str) -> None:
    with pytest.raises(InvalidConfiguration, match=why):
        load_installed_types(["x"], lambda _: [given])
    assert 77 not in SUBSCRIPTION_TYPE_ROWS


def test_loading_again_changes_nothing() -> None:
    for _ in range(2):
        load_installed_types(["x"], lambda _: [BY_TURNS])
        assert SUBSCRIPTION_TYPE_ROWS[77].policy is Numbered
        assert SUBSCRIPTION_TYPE_ROWS[77].installed
    assert SUBSCRIPTION_TYPE_ROWS[0].policy is Exclusive
    assert find_installed_policies("no such name") == []
