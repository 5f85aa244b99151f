"""Who may what over HTTP: the same questions, refusals and lines of the audit log as over gRPC."""

import json
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from magnetar.broker.rest.call import REST_ROUTES
from magnetar.broker.server import RestProtocol
from magnetar.proto.errors import Unauthenticated
from magnetar.runtime.access import Caller, ListenerAccess, Principal, PrincipalKind
from magnetar.runtime.logs import AUDIT_LOGGER
from tests.broker.rest.http import ANY, V2, Http, T, serving

NS = f"{V2}/namespaces/public/default"
SUPER = {"Authorization": "Bearer root"}
OF_CLUSTER = ("peers", "failureDomains")
ALICE = {"Authorization": "Bearer alice"}
NAMES = {
    "domain:domain": "persistent", "tenant": "public", "namespace": "default", "topic": "t",
    "subscription": "s", "role": "r", "bundle": "0x00000000_0x40000000", "cluster": "magnetar",
    "number": "1", "seconds": "1", "milliseconds": "1", "ledger": "1", "entry": "1",
    "version": "1", "coordinator": "1", "most": "1", "least": "1", "timeout": "1",
}  # fmt: skip


class Names:
    """A guard whose tokens are names."""

    async def authenticate(self, caller: Caller) -> Principal:
        kind, _, name = caller.authorization.partition(" ")
        if kind != "Bearer" or name == "wrong":
            raise Unauthenticated("bring a token")
        return Principal(name, PrincipalKind.CLIENT, "token", is_super=name == "root")

    def authorize(self, principal: Principal, path: str) -> None: ...

    def why_lapsed(self, principal: Principal) -> str:
        return ""


class AnonymousNames(Names):
    """Who brings nothing is a guest, as `anonymous_role` makes one."""

    async def authenticate(self, caller: Caller) -> Principal:
        if not caller.authorization:
            return Principal("guest", PrincipalKind.ANONYMOUS)
        return await super().authenticate(caller)


@asynccontextmanager
async def guarded(folder: Path, guard: Names | None = None) -> AsyncIterator[tuple[Http, Http]]:
    """With a guard, and without."""
    async with serving(folder) as (free, broker, running):
        rest = RestProtocol(broker.topic_manager, broker._services)
        listener = await running.world.network.serve_bytes(ANY, rest.serve, ListenerAccess(guard or Names()))
        http = Http(f"http://{listener.endpoint}")
        try:
            yield http, free
        finally:
            await http.close()
            rest.shut_down()
            await listener.close(1.0)


@pytest.fixture
def lines() -> Iterator[list[dict[str, str]]]:
    """Of the audit log, as they are written."""
    found: list[dict[str, str]] = []
    handler, logger = logging.Handler(), logging.getLogger(AUDIT_LOGGER)
    handler.emit = lambda record: found.append(json.loads(record.getMessage()))  # type: ignore[method-assign]
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield found
    logger.removeHandler(handler)
    logger.setLevel(level)


async def test_a_caller_without_rights_is_told_nothing_and_changes_nothing(tmp_path: Path) -> None:
    async with guarded(tmp_path) as (http, free):
        await free.done("PUT", T)
        of_cluster = ("", "/magnetar", *(f"/magnetar/{each}" for each in OF_CLUSTER))
        shown = {f"{V2}/{each}" for each in ("tenants", "brokers/version", *(f"clusters{each}" for each in of_cluster))}
        shown |= {f"{NS}/topics", *(f"{V2}/persistent/public/default{each}" for each in ("", "/partitioned"))}
        for row in REST_ROUTES:
            path = row.path
            for name, value in NAMES.items():
                path = path.replace(f"{{{name}}}", value)
            nothing = await http.ask(row.method, path)
            assert nothing.status == (200 if row.is_open else 401), path
            if row.is_open or path in shown:
                continue
            bodies: list[object] = [None, 1, {}, [], "x", True, ["produce"], {"ledgerId": 1, "entryId": 1}]
            bodies += [[path], {"type": "STRING"}]
            answers = {(await http.ask(row.method, path, body, **ALICE)).status for body in bodies}
            assert answers <= {403, 400, 412, 406}, (row.method, path, answers)
            assert 403 in answers or row.body, (row.method, path, answers)
        assert await free.get(f"{V2}/persistent/public/default") == ["persistent://public/default/t"]
        assert await free.get(f"{T}/subscriptions") == []


async def test_a_stranger_is_told_the_same_of_what_exists_and_of_what_does_not(tmp_path: Path) -> None:
    """Every route with every kind of body, of names that exist and of names of which one does not."""
    async with guarded(tmp_path) as (http, _):
        for path, body in (
            ("tenants/real-tenant", {"adminRoles": ["other"], "allowedClusters": ["magnetar"]}),
            ("namespaces/real-tenant/real-space", None),
            ("persistent/real-tenant/real-space/real-topic", None),
            ("persistent/real-tenant/real-space/real-topic/subscription/real-name", "earliest"),
            ("persistent/real-tenant/real-space/real-parts/partitions", 2),
        ):
            assert (await http.ask("PUT", f"{V2}/{path}", body, **SUPER)).status == 204
        places = ["tenant", "namespace", "topic", "subscription"]
        real = dict(zip(places, ("real-tenant", "real-space", "real-topic", "real-name"), strict=True))
        kinds = [real, {**real, "topic": "real-parts"}, {**real, "topic": "real-parts-partition-1"}]
        kinds += [{**real, each: real[each].replace("real", "gone")} for each in places]
        bodies: list[object] = [1, {}, [], "x", True, ["produce"], {"ledgerId": 1, "entryId": 1}, {"type": "STRING"}]
        told = 0
        for row in REST_ROUTES:
            for body in bodies if row.body else [None]:
                answers = {}
                for names in kinds:
                    path = row.path
                    for name, value in {**NAMES, **names}.items():
                        path = path.replace(f"{{{name}}}", value)
                    if path not in answers:
                        found = await http.ask(row.method, path, body, **ALICE)
                        text = found.body.decode()
                        for name in places:
                            text = text.replace(names[name], name)
                        answers[path] = found.status, text.replace("real-parts", "topic")
                        told += 1
                assert row.is_open or len(set(answers.values())) == 1, (row.method, row.path, body, answers)
        assert told > 3000


async def test_a_role_may_what_it_is_granted_and_no_more(tmp_path: Path) -> None:
    async with guarded(tmp_path) as (http, _):
        assert (await http.ask("PUT", T, **SUPER)).status == 204
        assert (await http.ask("GET", f"{T}/stats", **ALICE)).status == 403
        assert (await http.ask("POST", f"{NS}/permissions/alice", ["consume"], **SUPER)).status == 204
        assert (await http.ask("GET", f"{T}/stats", **ALICE)).status == 200
        assert (await http.ask("PUT", f"{T}/subscription/s", "earliest", **ALICE)).status == 204
        assert (await http.ask("GET", f"{T}/lastMessageId", **ALICE)).status == 200
        assert (await http.ask("DELETE", T, **ALICE)).status == 403
        assert (await http.get(f"{NS}/permissions", **SUPER)) == {"alice": ["consume"]}
        assert (await http.ask("POST", f"{T}/permissions/bob", ["produce"], **SUPER)).status == 204
        assert await http.get(f"{T}/permissions", **SUPER) == {"alice": ["consume"], "bob": ["produce"]}
        assert (await http.ask("DELETE", f"{T}/permissions/bob", **SUPER)).status == 204
        assert (await http.ask("POST", f"{NS}/permissions/subscription/s", ["bob"], **SUPER)).status == 204
        assert await http.get(f"{NS}/permissions/subscription", **SUPER) == {"s": ["bob"]}
        assert (await http.ask("POST", f"{T}/subscription/s/skip_all", **ALICE)).status == 403
        assert (await http.ask("DELETE", f"{NS}/permissions/s/bob", **SUPER)).status == 204
        assert (await http.ask("POST", f"{T}/subscription/s/skip_all", **ALICE)).status == 204
        assert (await http.ask("DELETE", f"{NS}/permissions/alice", **SUPER)).status == 204
        assert (await http.ask("GET", f"{T}/stats", **ALICE)).status == 403
        assert (await http.ask("GET", "/metrics", **ALICE)).status == 403
        assert (await http.ask("GET", "/metrics", **SUPER)).status == 200


async def test_wrong_credentials_are_refused_and_acts_are_written_down(
    tmp_path: Path, lines: list[dict[str, str]]
) -> None:
    async with guarded(tmp_path) as (http, _):
        for header in ("Bearer wrong", "Digest x", "Bearer " + "x" * 20_000):
            found = await http.ask("PUT", T, Authorization=header)
            assert (found.status, found.headers["www-authenticate"]) == (401, "Bearer, Basic")
        assert (await http.ask("PUT", T, Authorization="Bearer root\r\nAuthorization: Bearer alice")).status == 401
        assert (await http.ask("PUT", T, **SUPER)).status == 204
        assert (await http.ask("DELETE", T, **ALICE)).status == 403
    assert [each["act"] for each in lines if each["result"] == "done"] == ["Admin.CreateTopic"]
    assert sum(each["result"] == "denied" for each in lines) == 5
    assert not any("wrong" in json.dumps(each) for each in lines)
