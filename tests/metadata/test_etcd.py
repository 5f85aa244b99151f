"""The store on one real etcd: what becomes of it when servers, answers, leases, history, room and tokens go."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from magnetar.metadata import etcd
from magnetar.metadata.etcd import EtcdStore
from magnetar.metadata.remote import connect_metadata_at
from magnetar.metadata.session import EtcdAddress, MetadataAccess, SessionState, parse_address
from magnetar.metadata.store import (
    ANY_VERSION,
    NODE_ABSENT,
    NodeChanged,
    PutNode,
    VersionedValue,
    WatchReset,
    commit_in_parts,
    create_if_absent,
    update_node,
)
from magnetar.proto.errors import (
    ConnectionLost,
    InternalError,
    InvalidRequest,
    MessageTooLarge,
    NodeExists,
    OutcomeUnknown,
    SessionExpired,
    Unauthenticated,
    Unauthorized,
    Unavailable,
    UntrustedServer,
)
from magnetar.runtime.access import TlsFiles
from magnetar.runtime.process import make_system_world
from tests.metadata.stores import EtcdBackend
from tests.support.certificates import Authority
from tests.support.etcd import EtcdCluster, why_no_etcd

pytestmark = pytest.mark.skipif(why_no_etcd() is not None, reason=str(why_no_etcd()))


@pytest.fixture
async def backend() -> AsyncIterator[EtcdBackend]:
    backend = EtcdBackend()
    yield backend
    await backend.close()


@contextlib.asynccontextmanager
async def _open(address: EtcdAddress, timeout_s: float = 10.0) -> AsyncIterator[EtcdStore]:
    store = await connect_metadata_at(make_system_world(1), address, timeout_s)
    assert isinstance(store, EtcdStore)
    try:
        yield store
    finally:
        await store.close()


def _address(cluster: EtcdCluster) -> EtcdAddress:
    address = parse_address(cluster.url)
    assert isinstance(address, EtcdAddress)
    return address


Call = Callable[[], Awaitable[Any]]


class Intercepted:
    """The channel of a store, each call of which goes through `between(call, rpc, request)`."""

    def __init__(self, store: EtcdStore, between: Callable[[Call, Any, Any], Awaitable[Any]]) -> None:
        self._channel, self._between = store._channel, between
        store._channel = self  # type: ignore[assignment]

    async def call(self, rpc: Any, request: Any, *, timeout_s: float) -> Any:
        return await self._between(lambda: self._channel.call(rpc, request, timeout_s=timeout_s), rpc, request)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)


async def test_a_commit_whose_answer_is_lost_is_unknown_and_decided_by_content(backend: EtcdBackend) -> None:
    store = await backend.store()
    lose = True

    async def lossy(call: Call, rpc: Any, request: Any) -> Any:
        nonlocal lose
        answer = await call()
        if rpc is etcd.TXN_RPC and lose:
            lose = False
            raise ConnectionLost("the answer was lost")
        return answer

    Intercepted(store, lossy)
    with pytest.raises(ConnectionLost) as lost:
        await store.put("/a", b"1", NODE_ABSENT)
    assert not lost.value.definite
    assert await store.get("/a") == VersionedValue(b"1", 0), "it was done"
    lose = True
    assert await update_node(store, "/b", lambda current: b"mine") == VersionedValue(b"mine", 0), "once"


async def test_commits_that_wait_leave_together_and_one_that_is_refused_harms_no_other(backend: EtcdBackend) -> None:
    store = await backend.store()
    await store.put("/n/7", b"there")
    begun = await store.revision()
    commits = [store.put(f"/n/{number}", b"", NODE_ABSENT) for number in range(200)]
    results = await asyncio.gather(*commits, return_exceptions=True)
    assert [type(each) for each in results if each != 0] == [NodeExists]
    assert isinstance(results[7], NodeExists)
    assert await store.revision() - begun < 199, "some had a revision together"
    assert len(await store.children("/n")) == 200


async def test_a_store_that_is_closed_leaves_no_commit_waiting(backend: EtcdBackend) -> None:
    store = await backend.store()
    commits = [asyncio.ensure_future(store.put(f"/n/{number}", bytes(10_000))) for number in range(300)]
    await asyncio.sleep(0)
    await store.close()
    results = await asyncio.gather(*commits, return_exceptions=True)
    assert all(each == 0 or isinstance(each, SessionExpired | ConnectionLost) for each in results)


async def test_a_watch_goes_on_exactly_where_it_was_after_its_connection_broke(backend: EtcdBackend) -> None:
    store, other = await backend.store(), await backend.store()
    seen = await store.revision()
    watch = store.watch("/w", seen)
    first = asyncio.ensure_future(anext(watch))
    for round_ in range(3):
        version = await other.put("/w", b"")
        assert await first == NodeChanged("/w", version, await other.revision())
        first = asyncio.ensure_future(anext(watch))
        await store._channel.close()
        assert await other.put(f"/w/{round_}", b"") == 0
        assert await first == NodeChanged(f"/w/{round_}", 0, await other.revision())
        first = asyncio.ensure_future(anext(watch))
    first.cancel()
    assert store.state is not SessionState.LOST


async def test_a_watch_over_a_compaction_is_reset_only_if_it_missed_something(backend: EtcdBackend) -> None:
    store, other = await backend.store(), await backend.store()
    seen = await store.revision()
    old = store.watch("/w", seen)
    live = store.watch("/w", seen)
    hearing = asyncio.ensure_future(anext(live))
    await other.put("/w", b"")
    assert await hearing == NodeChanged("/w", 0, await other.revision())
    await other.delete("/w")
    await backend.lose_history(other)
    newest = await other.revision()
    assert await anext(live) == NodeChanged("/w", NODE_ABSENT, newest), "it was attached all the time"
    assert await anext(old) == WatchReset(newest)
    await other.put("/w", b"")
    for watch in (live, old):
        assert await anext(watch) == NodeChanged("/w", 0, await other.revision())


async def test_a_session_whose_lease_etcd_has_ended_is_lost_and_writes_nothing(backend: EtcdBackend) -> None:
    store, other = await backend.store(), await backend.store()
    await store.put("/e", b"", ephemeral=True)
    await other._call(etcd.LEASE_REVOKE_RPC, etcd.etcd.LeaseRevokeRequest(ID=store._lease))
    assert await other.get("/e") is None
    with pytest.raises(SessionExpired):
        await store.put("/lasting", b"")
    await store.wait_session_lost()
    assert await other.get("/lasting") is None


async def test_many_operations_go_in_parts_and_what_is_too_large_is_refused(backend: EtcdBackend) -> None:
    store = await backend.store()
    puts = [PutNode(f"/n/{at:04d}", b"", NODE_ABSENT) for at in range(300)]
    await create_if_absent(store, puts)
    await create_if_absent(store, puts)
    assert len(await store.children("/n")) == 300
    await commit_in_parts(store, [PutNode(each.path, b"again") for each in puts])
    assert await store.get("/n/0299") == VersionedValue(b"again", 1)
    with pytest.raises(InvalidRequest, match="--max-txn-ops"):
        await store.commit(puts)
    with pytest.raises(MessageTooLarge, match="--max-request-bytes"):
        await store.commit([PutNode("/x", bytes(1 << 20)), PutNode("/y", bytes(1 << 20))])


async def test_a_full_etcd_refuses_commits_by_name_and_goes_on_when_there_is_room(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with EtcdCluster(tmp_path, arguments=("--quota-backend-bytes", str(4 << 20))) as cluster:
        async with _open(_address(cluster)) as store:
            with contextlib.suppress(Unavailable, OutcomeUnknown):
                for at in range(20):
                    await store.put(f"/full/{at}", bytes(1 << 20))
            stored = await store.children("/full")
            assert len(stored) < 20
            for expected in (ANY_VERSION, NODE_ABSENT):
                with pytest.raises(Unavailable, match=r"nothing was written.*NOSPACE.*etcdctl alarm disarm") as refusal:
                    await store.put("/full/more", b"", expected)
                assert refusal.value.definite
            assert await store.children("/full") == stored
            await store.delete("/full/0")
            disk = await store.measure_disk()
            assert disk is not None, "although a deletion was taken meanwhile"
            assert "alarm NOSPACE" in disk.refusal
            (told,) = [each for each in caplog.records if "NOSPACE" in each.message]
            assert told.levelname == "ERROR", "once, for the operator"
            assert await store.get("/full/1") is not None, "reads go on"
            with pytest.raises(Unavailable, match=r"no metadata session.*NOSPACE"):
                await connect_metadata_at(make_system_world(1), _address(cluster), 1.0)
            for name in stored[1:]:
                await store.delete(f"/full/{name}")
            cluster.make_room(await store.revision())
            assert await store.put("/after", b"") == 0
            assert await store.measure_disk() is None


async def test_a_server_of_another_etcd_cluster_is_left_before_anything_is_read_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with EtcdCluster(tmp_path / "one") as one, EtcdCluster(tmp_path / "two") as two:
        address = _address(one)
        (mine,), (odd,) = address.servers, _address(two).servers
        async with _open(_address(two)) as other:
            await other.put("/a", b"of the other cluster")
            before = await other.revision()
            async with _open(address, 20.0) as store:
                await store.put("/a", b"mine")
                store._address = address._replace(servers=(mine, odd))
                store._number = 0
                one.pause(0)
                async with asyncio.timeout(30):
                    while f"{odd} is a server of another etcd cluster" not in caplog.text:  # noqa: ASYNC110
                        await asyncio.sleep(0.05)
                one.resume(0)
                assert await store.get("/a") == VersionedValue(b"mine", 0)
                assert store.session_id
                assert await store.put("/b", b"", NODE_ABSENT) == 0, "the session goes on"
            assert await other.children("/") == ["a"]
            assert await other.revision() == before, "nothing was written there"
        (told,) = [each for each in caplog.records if each.levelname == "ERROR"]
        assert "another etcd cluster" in told.message, "once"
        assert str(mine) in told.message


async def test_the_commit_that_fills_etcd_is_unknown(tmp_path: Path) -> None:
    with EtcdCluster(tmp_path, arguments=("--quota-backend-bytes", str(4 << 20))) as cluster:
        async with _open(_address(cluster)) as store:

            async def fill_and_say_full(call: Call, rpc: Any, request: Any) -> Any:
                """As etcd answers the commit that fills it."""
                answer = await call()
                if rpc is etcd.TXN_RPC:
                    raise InternalError("etcdserver: mvcc: database space exceeded")
                return answer

            Intercepted(store, fill_and_say_full)
            with pytest.raises(OutcomeUnknown, match="NOSPACE") as unknown:
                await store.put("/filled", b"1")
            assert not unknown.value.definite
            assert await store.get("/filled") == VersionedValue(b"1", 0)


async def test_nobody_at_the_address_and_a_root_of_another_cluster_are_told_apart(backend: EtcdBackend) -> None:
    with pytest.raises(Unavailable):
        await connect_metadata_at(make_system_world(1), parse_address("etcd://127.0.0.1:1/m"), 0.3)
    store = await backend.store()
    await store.put("/a", b"")
    async with _open(backend.address._replace(root=backend.address.root + "x")) as neighbour:
        assert await neighbour.children("/") == []


async def test_foreign_keys_beside_and_among_the_nodes_stop_no_listing_and_no_watch(backend: EtcdBackend) -> None:
    store = await backend.store()
    root = backend.address.root.encode()
    watch = store.watch("/", await store.revision())
    first = asyncio.ensure_future(anext(watch))
    foreign = (root, root + b"/a/\xff\xfe", root + b"//x", root + b"/a//", root + b"0", b"/registry/x", root + b"/a\0x")
    for key in foreign:
        await store._call(etcd.PUT_RPC, etcd.etcd.PutRequest(key=key, value=b"?"))
    await store.put("/a/b", b"ours")
    change = await first
    while change != NodeChanged("/a/b", 0, await store.revision()):
        change = await anext(watch)
    assert "a" in await store.children("/")
    assert "b" in await store.children("/a")
    assert await store.get("/a/b") == VersionedValue(b"ours", 0)


async def test_ten_thousand_children_are_listed_in_pages_at_one_revision(backend: EtcdBackend) -> None:
    store, other = await backend.store(), await backend.store()
    names = [f"{number:05d}" for number in range(10_000)]
    await commit_in_parts(store, [PutNode(f"/n/{name}", b"", NODE_ABSENT) for name in names])
    asked: list[Any] = []

    async def overtaken(call: Call, rpc: Any, request: Any) -> Any:
        """Another writer deletes and makes nodes between the pages."""
        if rpc is etcd.RANGE_RPC and request.limit:
            asked.append(request)
            await other.delete(f"/n/{names[-len(asked)]}")
            await other.put(f"/n/{20_000 + len(asked)}", b"")
        return await call()

    Intercepted(store, overtaken)
    found = await store.children("/n")
    assert len(asked) == 4
    assert found == [*names[:-1], "20001"], "as it was when the first page was read"


async def test_a_user_who_may_not_any_more_is_told_and_goes_on_when_he_may_again(
    secured: EtcdCluster, authority: Authority
) -> None:
    token = secured.ask(0, "auth/authenticate", {"name": "root", "password": "secret"})["token"]
    async with _open(_with(secured, authority.ca)) as store:
        await store.put("/a", b"1")
        revoke = {"role": "ours", "key": PERMISSION["key"], "range_end": PERMISSION["range_end"]}
        secured.ask(0, "auth/role/revoke", revoke, token=token)
        with pytest.raises(Unauthorized):
            await store.put("/a", b"2")
        with pytest.raises(Unauthorized):
            await store.get("/a")
        token = secured.ask(0, "auth/authenticate", {"name": "root", "password": "secret"})["token"]
        secured.ask(0, "auth/role/grant", {"name": "ours", "perm": PERMISSION}, token=token)
        assert await store.put("/a", b"2") == 1


async def test_one_dead_server_of_the_address_is_passed_over(backend: EtcdBackend) -> None:
    dead = parse_address("etcd://127.0.0.1:1/m")
    assert isinstance(dead, EtcdAddress)
    for servers in (dead.servers + backend.address.servers, backend.address.servers + dead.servers):
        async with _open(backend.address._replace(servers=servers)) as store:
            await store.put("/a", b"")


# ------------------------------------------------------------------------------------------ secured
PERMISSION = {"permType": "READWRITE", "key": "L21hZ25ldGFy", "range_end": "L21hZ25ldGFz"}
"""/magnetar…"""


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.make(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory, authority: Authority) -> Iterator[EtcdCluster]:
    with EtcdCluster(tmp_path_factory.mktemp("etcd"), tls=_issue(authority)) as cluster:
        for name in ("root", "ours", "stranger"):
            cluster.ask(0, "auth/user/add", {"name": name, "password": "secret"})
        for role in ("root", "ours"):
            cluster.ask(0, "auth/role/add", {"name": role})
            cluster.ask(0, "auth/user/grant", {"user": role, "role": role})
        cluster.ask(0, "auth/role/grant", {"name": "ours", "perm": PERMISSION})
        cluster.ask(0, "auth/enable", {})
        yield cluster


def _issue(authority: Authority) -> TlsFiles:
    files = authority.issue("server")
    return TlsFiles(files.certificate, files.key, authority.ca)


def _with(cluster: EtcdCluster, ca: str, credentials: str = "ours:secret") -> EtcdAddress:
    return _address(cluster)._replace(access=MetadataAccess(ca, credentials=lambda: credentials))


async def test_over_tls_with_a_user_all_is_as_without_and_an_expired_token_costs_nothing(
    secured: EtcdCluster, authority: Authority
) -> None:
    async with _open(_with(secured, authority.ca)) as store:
        watch = store.watch("/w", await store.revision())
        first = asyncio.ensure_future(anext(watch))
        await store.put("/w", b"", ephemeral=True)
        assert await first == NodeChanged("/w", 0, await store.revision())
        store._token = "never.1"
        assert await store.put("/w", b"") == 1
        store._token = "never.2"
        assert await store.get("/w") == VersionedValue(b"", 1)
        assert await anext(watch) == NodeChanged("/w", 1, await store.revision())


async def test_a_token_that_expires_under_many_calls_and_looks_breaks_no_connection(
    secured: EtcdCluster, authority: Authority, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(etcd, "SERVER_CHECK_INTERVAL_S", 0.001)
    async with _open(_with(secured, authority.ca)) as store:
        tokens = 0

        async def counted(call: Call, rpc: Any, request: Any) -> Any:
            nonlocal tokens
            tokens += rpc is etcd.AUTHENTICATE_RPC
            return await call()

        Intercepted(store, counted)
        for round_ in range(5):
            store._token = f"never.{round_}" if round_ % 2 else ""
            puts = [store.put(f"/n/{number}", b"") for number in range(50)]
            assert await asyncio.gather(*puts) == [round_] * 50, "each is done once"
        assert tokens <= 10, "calls that wait for a token share it"
        assert not [each for each in caplog.records if "no connection" in each.message]


async def test_without_an_answer_to_the_question_for_a_token_nothing_was_done(
    secured: EtcdCluster, authority: Authority
) -> None:
    async with _open(_with(secured, authority.ca)) as store:
        left = 1

        async def lossy(call: Call, rpc: Any, request: Any) -> Any:
            nonlocal left
            if rpc is etcd.AUTHENTICATE_RPC and left:
                left -= 1
                raise ConnectionLost("no answer")
            return await call()

        Intercepted(store, lossy)
        store._token = ""
        assert await store.put("/once", b"", NODE_ABSENT) == 0
        assert left == 0


async def test_a_wrong_user_a_stranger_and_another_authority_are_said_at_once(
    secured: EtcdCluster, authority: Authority, tmp_path: Path
) -> None:
    for address, kind in (
        (_with(secured, authority.ca, "ours:wrong"), Unauthenticated),
        (_with(secured, authority.ca, "stranger:secret"), Unauthorized),
        (_address(secured)._replace(access=MetadataAccess(authority.ca)), Unauthenticated),
        (_with(secured, Authority.make(tmp_path).ca), UntrustedServer),
    ):
        with pytest.raises(kind):
            await connect_metadata_at(make_system_world(1), address, 5.0)
