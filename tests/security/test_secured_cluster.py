"""A secured cluster of real processes works as any other, and a process without its credentials does nothing to it."""

import asyncio
import json
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from magnetar.cli.common.processes import Processes
from magnetar.ledger.peer_format import (
    NO_LEDGER_KEY,
    BookieOperation,
    BookieRequestFlags,
    BookieRequestHead,
    encode_admin_request,
    encode_ping_request,
)
from magnetar.proto.errors import ConnectionLost, MagnetarError, Unauthorized
from magnetar.runtime.network import Endpoint, PeerClientKeys
from magnetar.runtime.process import make_system_world
from tests.support.processes import run_here
from tests.support.secured import SecuredCluster

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredCluster]:
    with SecuredCluster(tmp_path_factory.mktemp("secured"), session_timeout_s=6.0) as running:
        yield running


def test_what_is_sent_arrives_and_an_operator_administers(secured: SecuredCluster) -> None:
    with secured.client() as client:
        consumer = client.subscribe("orders", "s")
        producer = client.create_producer("orders")
        for number in range(100):
            producer.send(b"%d" % number)
        assert [consumer.receive(20_000).data() for _ in range(100)] == [b"%d" % each for each in range(100)]
    for command in (("bookies", "state"), ("bookies", "gc", "--plan"), ("ledgers", "list"), ("bookies", "list"),
                    ("bookies", "racks"), ("metadata", "backup"), ("repair", "disable"), ("repair", "enable"),
                    ):  # fmt: skip
        done = secured.cli(*command)
        assert done.code == 0, (command, done.err)


def test_status_notes_that_bookies_do_not_answer_a_caller_without_keys(secured: SecuredCluster) -> None:
    admin = {
        "MAGNETAR_URL": secured.url, "MAGNETAR_TLS_CA": str(secured.folder / "ca.pem"),
        "MAGNETAR_TOKEN": str(secured.folder / "admin.token"),
    }  # fmt: skip
    told = run_here("status", "-o", "json", **admin)
    needed = {each["text"]: each["needed"] for each in json.loads(told.out)["alarms"]}
    (note,) = [text for text in needed if text.startswith("Bookies and repair were not asked: ")]
    assert "asks for keys: give --security" in note
    assert not needed[note]
    assert told.code == int(any(needed.values())), told.out
    nowhere = {"MAGNETAR_SECURITY": secured.settings, "MAGNETAR_METADATA": "127.0.0.1:1"}
    told = run_here("status", "--timeout", "9", **admin, **nowhere)
    assert (told.code, "No bookie says how repair gets on: no metadata service at 127.0.0.1:1" in told.out) == (1, True)


def test_brokers_that_refuse_each_others_own_token_are_named_with_what_helps(tmp_path: Path) -> None:
    with SecuredCluster(tmp_path, bookies=1, brokers=2) as running:
        token = running.folder / "broker.token"
        made = (
            "security", "token", "create", "--role", "broker", "--days", "90", "--out", str(token), "--replace",
            "--folder",
        )  # fmt: skip
        other = tmp_path / "other"
        assert run_here("security", "init", str(other)).code == 0
        assert run_here(*made, str(other)).code == 0
        found = json.loads(running.cli("status", "-o", "json").out)
        (alarm,) = [each for each in found["alarms"] if each["code"] == "D01"]
        assert "refuses the own token or certificate of the broker that was asked" in alarm["text"]
        assert "token create" in alarm["command"]
        assert run_here(*made, str(running.folder)).code == 0
        found = json.loads(running.cli("status", "-o", "json").out)
        assert not [each for each in found["alarms"] if "refuses" in each["text"]]


def test_a_bookie_that_restarts_has_another_key_and_is_used_again(secured: SecuredCluster) -> None:
    with secured.client() as client:
        producer = client.create_producer("restarted")
        producer.send(b"before")
        for bookie in secured.bookies:  # each ledger is on all three: none can be spared for long
            bookie.kill()
            bookie.start()
            bookie.wait_ready()
            producer.send(b"between")
        reader = client.subscribe("restarted", "s", initial_position=first())
        assert [reader.receive(20_000).data() for _ in range(4)] == [b"before", *[b"between"] * 3]
    assert len(secured.cli("bookies", "state").out.splitlines()) >= 4


def first() -> object:
    import magnetar

    return magnetar.InitialPosition.Earliest


def test_processes_without_credentials_or_with_others_do_not_join(secured: SecuredCluster, tmp_path: Path) -> None:
    other = tmp_path / "other"
    assert run_here("security", "init", str(other), "--cluster", "other").code == 0
    before = _bookies(secured)
    where = ("--metadata", secured.metadata.address, "--wait", "3", "--listen", "127.0.0.1:0")
    with Processes(tmp_path) as strangers:
        for name, credentials in (("clear", ()), ("other", ("--security", str(other / "security.toml")))):
            for kind in ("bookie", "broker"):
                data = ("--data", str(tmp_path / name)) if kind == "bookie" else ()
                stranger = strangers.start(f"{name}-{kind}", kind, *where, *credentials, *data)
                assert stranger.wait() != 0, (name, kind)
    assert _bookies(secured) == before


def _bookies(secured: SecuredCluster) -> list[tuple[str, ...]]:
    """Which, where, in what state; not how full their disk is, which others fill as well."""
    listed = json.loads(secured.cli("bookies", "list", "-o", "json").out)
    return [(each["id"], each["endpoint"], each["state"]) for each in listed]


REQUESTS = (
    (encode_ping_request(), ()),
    (encode_admin_request(), (b'{"verb": "gc-start"}',)),
    (BookieRequestHead(BookieOperation.READ_LAC, BookieRequestFlags.FENCE, 1, -1, 0, 0, NO_LEDGER_KEY).encode(), ()),
)


async def test_a_stranger_can_neither_ask_read_fence_nor_delete_at_a_bookie(secured: SecuredCluster) -> None:
    network = make_system_world().network
    for bookie in secured.bookies:
        ready = dict(each.partition("=")[::2] for each in bookie.lines[0].split() if "=" in each)
        identity, where = uuid.UUID(ready["id"]).bytes, Endpoint.parse(bookie.address)
        own = network.generate_keys()
        for access, wanted in (
            (PeerClientKeys(), Unauthorized),
            (PeerClientKeys(own.public, own), ConnectionLost),  # another key than the bookie's
        ):
            for head, frames in REQUESTS:
                peer = network.connect_peer(where, identity, access)
                with pytest.raises(MagnetarError) as refused:
                    await peer.request(head, frames, timeout_s=30)
                assert isinstance(refused.value, wanted), refused.value
                await peer.close()


def test_a_stranger_that_knows_a_bookies_key_is_refused_as_no_member(secured: SecuredCluster) -> None:
    """A public key is no secret: every member reads it in the metadata."""
    from dataclasses import replace

    from magnetar.metadata import paths
    from magnetar.metadata.records import BookieRecord
    from magnetar.metadata.remote import connect_metadata
    from magnetar.metadata.store import get_record
    from magnetar.security.members import make_member_network
    from magnetar.security.settings import SecuritySettings

    async def main() -> None:
        world = make_system_world()
        section = SecuritySettings.load(secured.settings).members
        assert section is not None
        member = replace(world, network=make_member_network(world.network, section, "operator", world.clock))
        store = await connect_metadata(member, Endpoint.parse(secured.metadata.address))
        [name, *_] = await store.children(paths.AVAILABLE_BOOKIES)
        found = await get_record(store, paths.bookie(name), BookieRecord)
        assert found is not None
        access = PeerClientKeys(found[0].key, world.network.generate_keys())
        peer = world.network.connect_peer(Endpoint.parse(found[0].endpoint), uuid.UUID(name).bytes, access)
        with pytest.raises(Unauthorized, match="no member"):
            await peer.request(encode_ping_request(), timeout_s=30)
        await peer.close()
        with pytest.raises(Unauthorized, match="may not write"):
            await store.put(paths.member("broker", "ab" * 32), b"x")
        await store.close()

    asyncio.run(main())


def test_commands_without_an_operators_certificate_are_refused(secured: SecuredCluster) -> None:
    clear = {"MAGNETAR_METADATA": secured.metadata.address}
    done = run_here("bookies", "racks", **clear)
    assert done.code != 0
    brokers_only = {
        "MAGNETAR_URL": secured.url, "MAGNETAR_TLS_CA": str(secured.folder / "ca.pem"),
        "MAGNETAR_TOKEN": str(secured.folder / "admin.token"),
    }  # fmt: skip
    done = run_here("bookies", "state", **brokers_only)
    assert (done.code, "--security" in done.err) == (1, True), done.err
