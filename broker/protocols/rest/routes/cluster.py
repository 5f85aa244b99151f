"""The process and its brokers: health, metrics, versions, and the document of these routes.

`/healthz` says that the event loop turns; `/readyz` that the broker is registered and serves. Neither asks who calls,
and neither says more than that. `/metrics` has the names of topics, so it needs a super user where callers are asked.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec
from starlette.responses import PlainTextResponse, Response, StreamingResponse

from .....metadata import paths
from .....proto import operations as op
from .....proto.errors import NotFound, Unavailable
from .....proto.policies import NAMES, decode
from .....proto.statistics import BookieInfo
from .....proto.versions import PRODUCT
from .....runtime.monitoring.metrics import Page
from .....runtime.monitoring.metrics_server import MEASURE_TIMEOUT_S, as_text
from ..call import Call
from ..configuration import SHOWN, removed, shown, taken, written
from ..openapi import document
from ..table import route

BROKERS = "/admin/v2/brokers"


# ------------------------------------------------------------------ for machines that look after machines
@route("GET", "/healthz", "The process is alive.", answer='text "ok"', is_open=True)
async def healthz(call: Call) -> Response:
    return PlainTextResponse("ok\n")


@route("GET", "/readyz", "The broker is registered and can make ledgers; else 503 and why not.", answer='text "ok"',
       is_open=True)  # fmt: skip
async def readyz(call: Call) -> Response:
    why = await call.broker.readiness.why_not()
    return PlainTextResponse(f"not ready: {why}\n" if why else "ok\n", 503 if why else 200)


@route("GET", "/status.html", "Pulsar's name of /healthz.", answer='text "OK"', is_open=True)
async def status(call: Call) -> Response:
    return PlainTextResponse("OK\n")


@route("GET", "/metrics", "Prometheus' text: what `--metrics` shows.", answer="text")
async def metrics(call: Call) -> Response:
    await call.authorize(op.LIST_BROKERS)
    page = Page()
    try:
        async with asyncio.timeout(MEASURE_TIMEOUT_S):
            await call.measure(page)
    except TimeoutError:
        raise Unavailable(f"the metrics were not read within {MEASURE_TIMEOUT_S:g} s") from None
    return StreamingResponse(_pieces(page), media_type="text/plain; version=0.0.4; charset=utf-8")


async def _pieces(page: Page) -> AsyncIterator[bytes]:
    """Yields the page in pieces; others have their turn between two of them."""
    for each in as_text(page):
        yield each
        await asyncio.sleep(0)


@route("GET", "/openapi.json", "This document.", answer="OpenAPI 3.1", is_open=True)
async def openapi(call: Call) -> object:
    return document()


# ------------------------------------------------------------------ brokers
async def _http(call: Call) -> list[str]:
    """Returns HOST:PORT of each broker; of one that serves no HTTP that of gRPC."""
    await call.authorize(op.LIST_BROKERS)
    return sorted(each.http.partition("://")[2] or each.endpoint for each in await call.broker.brokers())


@route("GET", BROKERS, "The brokers that run.", answer="[host:port]")
async def list_brokers(call: Call) -> object:
    return await _http(call)


@route("GET", BROKERS + "/leaderBroker", "The broker that cleans up: the first by name.",
       answer="{brokerId, serviceUrl}")  # fmt: skip
async def leader(call: Call) -> object:
    await call.authorize(op.LIST_BROKERS)
    found = min(await call.broker.brokers(), key=lambda each: each.name, default=None)
    if found is None:
        raise NotFound("no broker is registered")
    return {"brokerId": found.http.partition("://")[2] or found.endpoint, "serviceUrl": found.http or None}


@route("GET", BROKERS + "/health", "As /readyz, with an error for 503.", answer='text "ok"', is_open=True)
async def health(call: Call) -> Response:
    if why := await call.broker.readiness.why_not():
        raise Unavailable(why)
    return PlainTextResponse("ok")


@route("GET", BROKERS + "/ready", "The same.", answer='text "ok"', is_open=True)
async def ready(call: Call) -> Response:
    return await health(call)


@route("GET", BROKERS + "/version", "The version of this broker.", answer="text")
async def version(call: Call) -> Response:
    return PlainTextResponse(PRODUCT)


@route("GET", BROKERS + "/configuration", "The settings that change while brokers run.", answer="[name]")
async def configuration(call: Call) -> object:
    await call.authorize(op.LIST_BROKERS)
    return SHOWN


@route("GET", BROKERS + "/configuration/values", "Those that were changed.", answer="{name: text}")
async def changed_configuration(call: Call) -> object:
    return shown(decode(await call.admin(op.GET_POLICIES)))


@route("GET", BROKERS + "/configuration/runtime", "The settings in force at this broker.", answer="{name: text}")
async def runtime_configuration(call: Call) -> object:
    await call.authorize(op.LIST_BROKERS)
    config, policies = call.broker.config, call.broker.policies.defaults
    return {name: written(getattr(policies if name in NAMES else config, name)) for name in config.__struct_fields__}


@route("POST", BROKERS + "/configuration/{name}/{value}", "Changes a setting of all brokers, while they run.",
       answer="200")  # fmt: skip
async def change_configuration(call: Call) -> Response:
    await call.authorize(op.CHANGE_POLICIES)
    given = taken(call.names["name"], call.names["value"])
    await call.admin(op.CHANGE_POLICIES, set=msgspec.json.encode(given).decode())
    return Response()


@route("DELETE", BROKERS + "/configuration/{name}", "Each broker has its own value of it again.", answer="200")
async def remove_configuration(call: Call) -> Response:
    await call.authorize(op.CHANGE_POLICIES)
    await call.admin(op.CHANGE_POLICIES, remove=removed(call.names["name"]))
    return Response()


@route("GET", BROKERS + "/internal-configuration", "Where the metadata is.",
       answer="InternalConfigurationData")  # fmt: skip
async def internal_configuration(call: Call) -> object:
    await call.authorize(op.LIST_BROKERS)
    return {
        "zookeeperServers": "", "metadataStoreUrl": "", "configurationStoreServers": "",
        "configurationMetadataStoreUrl": "", "ledgersRootPath": paths.LEDGERS,
        "bookkeeperMetadataServiceUri": None, "stateStorageServiceUrl": None,
    }  # fmt: skip


@route("GET", BROKERS + "/{cluster}", "The brokers that run.", answer="[host:port]")
async def list_brokers_of_cluster(call: Call) -> object:
    found = await _http(call)
    call.check_cluster()
    return found


# ------------------------------------------------------------------ bookies
@route("GET", "/admin/v2/bookies/all", "The bookies that run.", answer="{bookies: [{bookieId}]}")
async def bookies(call: Call) -> object:
    found = await call.admin(op.LIST_BOOKIES)
    return {"bookies": [{"bookieId": each.endpoint} for each in sorted(found, key=lambda each: each.endpoint)]}


@route("GET", "/admin/v2/bookies/racks-info", "The racks of bookies that have one.",
       answer="{group: {bookie: {rack, hostname}}}")  # fmt: skip
async def racks(call: Call) -> object:
    found = await call.admin(op.LIST_BOOKIES)
    return {"default": {each.endpoint: _rack(each) for each in found if each.rack}}


@route("GET", "/admin/v2/bookies/racks-info/{bookie}", "The rack of one; 404: it has none.", answer="{rack, hostname}")
async def rack(call: Call) -> object:
    asked = call.names["bookie"]
    for each in await call.admin(op.LIST_BOOKIES):
        if asked in (each.endpoint, each.id) and each.rack:
            return _rack(each)
    raise NotFound(f"no bookie {asked[:100]!r} has a rack; `magnetar bookies set-rack` gives it one")


def _rack(bookie: BookieInfo) -> dict[str, str]:
    return {"rack": bookie.rack, "hostname": bookie.id}
