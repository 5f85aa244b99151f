"""Routes as Pulsar's tools and client suites call them, with their statuses and bodies; one broker in this process."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from magnetar.broker.node import topic_manager
from magnetar.broker.rest import cluster_routes as _cluster
from magnetar.broker.rest.call import REST_ROUTES, make_openapi_document, make_openapi_path
from tests.broker.rest.http import V2, Http, T, serving

assert _cluster, "the routes are registered"
NS = f"{V2}/namespaces/public/default"


# ------------------------------------------------------------------ tenants and namespaces
async def test_what_set_up_scripts_of_client_suites_send_is_taken(tmp_path: Path) -> None:
    async with serving(tmp_path, cluster="standalone") as (http, _, _):
        await http.done("PUT", f"{V2}/clusters/standalone", {"serviceUrl": "http://localhost:8080/"})
        assert await http.get(f"{V2}/clusters") == ["standalone"]
        await http.done("PUT", f"{V2}/clusters/other", {}, 405)
        await http.done("PUT", f"{V2}/tenants/private", {"adminRoles": [], "allowedClusters": ["standalone"]})
        policies = {
            "replication_clusters": ["standalone"], "max_producers_per_topic": 3, "unknown": {"of": ["a", "later"]},
            "auth_policies": {"namespace_auth": {"anonymous": ["produce", "consume"]}}, "bundles": {"numBundles": 8},
        }  # fmt: skip
        await http.done("PUT", f"{V2}/namespaces/private/auth", policies)
        shown = await http.get(f"{V2}/namespaces/private/auth")
        assert shown["auth_policies"]["namespace_auth"] == {"anonymous": ["produce", "consume"]}
        assert (shown["max_producers_per_topic"], shown["bundles"]["numBundles"]) == (3, 8)
        await http.done("PUT", f"{V2}/namespaces/private/two", {"numBundles": 2, "boundaries": []})
        assert (await http.ask("PUT", f"{V2}/namespaces/private/three", raw=b"null")).status == 204
        await http.done("POST", f"{NS}/deduplication", True)
        await http.done("POST", f"{NS}/backlogQuota", {"limitSize": 1 << 20, "policy": "producer_exception"})
        await http.done("POST", f"{NS}/permissions/anonymous", ["produce", "consume"])
        await http.done("POST", f"{NS}/publishRate", {"publishThrottlingRateInMsg": 100})
        await http.done("PUT", f"{T}/partitions", 4)
        await http.done("PUT", f"{T}/partitions", 4, 409)


async def test_a_namespace_keeps_what_was_noted_of_it(http: Http) -> None:
    namespace = f"{V2}/namespaces/public/noted"
    await http.done("PUT", namespace, {"properties": {"owner": "ada"}})
    await http.done("PUT", f"{namespace}/properties", {"tier": "1", "é": ""})
    await http.done("PUT", f"{namespace}/property/owner/eve%2Fbob")
    assert await http.get(f"{namespace}/properties") == {"owner": "eve/bob", "tier": "1", "é": ""}
    assert (await http.get(namespace))["properties"] == {"owner": "eve/bob", "tier": "1", "é": ""}
    assert (await http.ask("GET", f"{namespace}/property/owner")).body == b"eve/bob"
    await http.done("POST", f"{namespace}/messageTTL", 9)  # and policies leave properties alone, and they them
    assert (await http.ask("DELETE", f"{namespace}/property/tier")).body == b"1"
    await http.get(f"{namespace}/property/tier", 404)
    assert await http.get(f"{namespace}/messageTTL") == 9
    await http.done("DELETE", f"{namespace}/properties")
    assert await http.get(f"{namespace}/properties") == {}
    for wrong, status in (({"": "x"}, 412), ({"a": 1}, 400), ([], 400), ({"a": "x" * 70_000}, 412)):
        await http.done("PUT", f"{namespace}/properties", wrong, status)
    assert await http.get(f"{namespace}/properties") == {}
    await http.get(f"{V2}/namespaces/public/nowhere/properties", 404)


# ------------------------------------------------------------------ look-ups and the process
async def test_a_look_up_says_where_pulsars_protocol_is_served(tmp_path: Path) -> None:
    async with serving(tmp_path) as (http, broker, _):
        for domain in ("persistent", "non-persistent"):
            found = await http.get(f"/lookup/v2/topic/{domain}/public/default/x")
            assert found["brokerUrl"] == broker.pulsar_urls[""][0]
            assert {"brokerUrlTls", "brokerUrlSsl", "httpUrl", "httpUrlTls", "nativeUrl"} <= set(found)
            assert found["httpUrl"] == broker.http_url
        await http.get("/lookup/v2/topic/persistent/public/default/x?listenerName=elsewhere", 404)
        await http.done("PUT", T)
        bundle = await http.ask("GET", "/lookup/v2/topic/persistent/public/default/t/bundle")
        assert bundle.body.startswith(b"0x")
        await http.done("PUT", f"{NS}/{bundle.body.decode()}/unload?destinationBroker=any")
        await http.done("PUT", f"{NS}/unload")
        await http.done("PUT", f"{NS}/0x1_0x2/unload", status=412)


async def test_health_metrics_and_brokers_are_served(tmp_path: Path) -> None:
    async with serving(tmp_path) as (http, broker, running):
        for path in ("/healthz", "/readyz", "/status.html", f"{V2}/brokers/health", f"{V2}/brokers/ready"):
            assert (await http.ask("GET", path)).body.strip().lower() == b"ok"
        assert b"magnetar_process_" in (await http.ask("GET", "/metrics/?level=none")).body
        refused = await http.ask("GET", "/metrics?level=topics")
        assert refused.status == 400
        assert b"level must be topic, namespace, none" in refused.body
        address = broker.http_url.partition("://")[2]
        assert await http.get(f"{V2}/brokers") == [address] == await http.get(f"{V2}/brokers/magnetar")
        assert (await http.get(f"{V2}/brokers/leaderBroker"))["brokerId"] == address
        assert (await http.get(f"{V2}/brokers/internal-configuration"))["ledgersRootPath"] == "/ledgers"
        found = (await http.get(f"{V2}/bookies/all"))["bookies"]
        assert [*found[0]] == ["bookieId"]
        assert set((await http.get(f"{V2}/bookies/racks-info"))["default"]) <= {each["bookieId"] for each in found}
        await http.get(f"{V2}/bookies/racks-info/none:3181", 404)
        assert (await http.get(f"{V2}/brokers/configuration/runtime"))["cluster"] == "magnetar"
        broker.topic_manager.suspend_ownership()
        assert (await http.ask("GET", "/readyz")).status == 503
        assert (await http.ask("GET", "/healthz")).status == 200
        await broker.topic_manager.resume_ownership(running.sessions[0])
        assert (await http.ask("GET", "/readyz")).status == 200


async def test_readyz_says_that_no_ledger_can_be_made_while_bookies_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topic_manager, "LEDGER_CREATABLE_CACHE_S", 0.5)
    async with serving(tmp_path) as (http, broker, running):
        assert (await http.ask("GET", "/readyz")).status == 200
        for bookie in running.bookies:
            await bookie.close()
        wanted = broker.topic_manager.config.ensemble_size
        text = f"no new ledger can be made: {wanted} writable bookies are needed, 0 are registered"
        async with asyncio.timeout(20):
            while (found := await http.ask("GET", "/readyz")).status == 200:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        assert (found.status, text in found.body.decode()) == (503, True), found.body
        assert text in (await http.ask("GET", f"{V2}/brokers/health")).body.decode()
        assert (await http.ask("GET", "/healthz")).status == 200
        await running.add_bookie()
        async with asyncio.timeout(20):
            while (await http.ask("GET", "/readyz")).status != 200:  # noqa: ASYNC110
                await asyncio.sleep(0.02)


async def test_a_topic_of_another_broker_is_answered_with_its_address(tmp_path: Path) -> None:
    async with serving(tmp_path) as (http, broker, running):
        await http.done("PUT", T)
        await http.get(f"{T}/stats")
        other = await running.add_broker(http_listen=broker._config.http_listen)
        there = Http(other.http_url)
        found = await there.ask("GET", f"{T}/stats?getPreciseBacklog=true")
        assert found.status == 307
        assert found.headers["location"] == f"{broker.http_url}{T}/stats?getPreciseBacklog=true"
        await there.done("PUT", f"{T}2/partitions", 2)
        for number in range(2):
            await http.get(f"{T}2-partition-{number}/stats")
        await there.done("PUT", f"{T}2/subscription/s", "latest")
        assert sorted((await there.get(f"{T}2/partitioned-stats"))["partitions"]) == [
            f"persistent://public/default/t2-partition-{number}" for number in range(2)
        ]
        await there.close()


# ------------------------------------------------------------------ the table
def test_the_document_has_every_route_once() -> None:
    paths = make_openapi_document()["paths"]
    assert sum(map(len, paths.values())) == len({(row.method, row.path) for row in REST_ROUTES}) == len(REST_ROUTES)
    names = [each["operationId"] for path in paths.values() for each in path.values()]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("row", [row for row in REST_ROUTES if row.method == "GET"], ids=make_openapi_path)
def test_a_route_that_shows_something_says_what(row: Any) -> None:
    assert row.answer
    assert row.summary.endswith(".")
