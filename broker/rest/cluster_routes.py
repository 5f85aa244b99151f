"""Routes of the process and of the brokers of the cluster: health, metrics, versions, settings, and the OpenAPI
document.

`/healthz` answers 200 if the event loop runs; `/readyz` if the broker is ready to serve (else 503, with the reason).
Both need no credentials, and tell nothing else. `/metrics` contains the names of topics, so it needs a super user if
callers are authenticated.

Also in this file, below its heading: the owner of a topic, for clients that ask with an `http://` service URL (lookup).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from urllib.parse import urlencode

from starlette.responses import PlainTextResponse, Response, StreamingResponse

from ...metadata import paths
from ...proto import operations as op
from ...proto.errors import InvalidRequest, NotFound, Unavailable
from ...proto.operations import Permission
from ...proto.statistics import BookieInfo
from ...proto.versions import PRODUCT
from ...runtime.metrics import MetricsPage, MetricsQuery
from ...runtime.metrics_server import MEASURE_TIMEOUT_S, format_metrics_page
from ..cluster.bundles_core import find_topic_bundle_name
from ..session.inspection import (
    SHOWN_SETTING_NAMES,
    list_changed_settings,
    list_settings,
    parse_setting_name,
    parse_setting_value,
)
from .call import HttpError, RestRequest, make_openapi_document, register_route

# ------------------------------------------------------------------------------------------------------- cluster


BROKERS_PATH = "/admin/v2/brokers"


# ------------------------------------------------------------------ for orchestrators and monitoring
@register_route("GET", "/healthz", "The process is alive.", answer='text "ok"', is_open=True)
async def healthz(call: RestRequest) -> Response:
    return PlainTextResponse("ok\n")


@register_route("GET", "/livez", "As /healthz; a loop that hangs does not answer it.", answer='text "ok"', is_open=True)
async def livez(call: RestRequest) -> Response:
    return await healthz(call)


@register_route("GET", "/readyz", "The broker is registered and can make ledgers; else 503 and why not.",
    answer='text "ok"',
       is_open=True)  # fmt: skip
async def readyz(call: RestRequest) -> Response:
    why = await call.broker.readiness.why_not_ready()
    return PlainTextResponse(f"not ready: {why}\n" if why else "ok\n", 503 if why else 200)


@register_route("GET", "/status.html", "Pulsar's name of /healthz.", answer='text "OK"', is_open=True)
async def status(call: RestRequest) -> Response:
    return PlainTextResponse("OK\n")


@register_route("GET", "/metrics", "Prometheus' text: what `--metrics` shows.", answer="text")
async def metrics(call: RestRequest) -> Response:
    await call.authorize(op.LIST_BROKERS)
    try:
        page = MetricsPage(MetricsQuery.parse(urlencode(call.query)))
    except (InvalidRequest, ValueError) as error:
        raise HttpError(str(error)) from None
    try:
        async with asyncio.timeout(MEASURE_TIMEOUT_S):
            await call.measure(page)
    except TimeoutError:
        raise Unavailable(f"the metrics were not read within {MEASURE_TIMEOUT_S:g} s") from None
    return StreamingResponse(_pieces(page), media_type="text/plain; version=0.0.4; charset=utf-8")


@register_route("GET", "/metrics/", "The same: Pulsar's way to write it.", answer="text")
async def metrics_as_pulsar(call: RestRequest) -> Response:
    return await metrics(call)


async def _pieces(page: MetricsPage) -> AsyncIterator[bytes]:
    """Yields the page in pieces; between two pieces other tasks of the event loop run."""
    for each in format_metrics_page(page):
        yield each
        await asyncio.sleep(0)


@register_route("GET", "/openapi.json", "This document.", answer="OpenAPI 3.1", is_open=True)
async def openapi(call: RestRequest) -> object:
    return make_openapi_document()


# ------------------------------------------------------------------ brokers
async def _http(call: RestRequest) -> list[str]:
    """Returns the HTTP address (HOST:PORT) of each broker; the gRPC address of a broker that serves no HTTP."""
    await call.authorize(op.LIST_BROKERS)
    return sorted(each.http.partition("://")[2] or each.endpoint for each in await call.broker.list_brokers())


@register_route("GET", BROKERS_PATH, "The brokers that run.", answer="[host:port]")
async def list_brokers(call: RestRequest) -> object:
    return await _http(call)


@register_route("GET", BROKERS_PATH + "/leaderBroker", "The broker that cleans up: the first by name.",
       answer="{brokerId, serviceUrl}")  # fmt: skip
async def leader(call: RestRequest) -> object:
    """Returns the addresses of the leader: the first broker by name, which deletes the orphaned ledgers of the cluster.
    Raises NotFound if no broker is registered, and the errors of `RestRequest.authorize` and
    `TopicManager.list_brokers`."""
    await call.authorize(op.LIST_BROKERS)
    found = min(await call.broker.list_brokers(), key=lambda each: each.name, default=None)
    if found is None:
        raise NotFound("no broker is registered")
    return {"brokerId": found.http.partition("://")[2] or found.endpoint, "serviceUrl": found.http or None}


@register_route("GET", BROKERS_PATH + "/health", "As /readyz, with an error for 503.", answer='text "ok"', is_open=True)
async def health(call: RestRequest) -> Response:
    if why := await call.broker.readiness.why_not_ready():
        raise Unavailable(why)
    return PlainTextResponse("ok")


@register_route("GET", BROKERS_PATH + "/ready", "The same.", answer='text "ok"', is_open=True)
async def ready(call: RestRequest) -> Response:
    return await health(call)


@register_route("GET", BROKERS_PATH + "/version", "The version of this broker.", answer="text")
async def version(call: RestRequest) -> Response:
    return PlainTextResponse(PRODUCT)


@register_route("GET", BROKERS_PATH + "/configuration", "The settings that change while brokers run.", answer="[name]")
async def configuration(call: RestRequest) -> object:
    await call.authorize(op.LIST_BROKERS)
    return SHOWN_SETTING_NAMES


@register_route("GET", BROKERS_PATH + "/configuration/values", "Those that were changed.", answer="{name: text}")
async def changed_configuration(call: RestRequest) -> object:
    await call.authorize(op.GET_POLICIES)
    return list_changed_settings(await call.broker.policies.read_cluster_policies_record())


@register_route(
    "GET", BROKERS_PATH + "/configuration/runtime", "The settings in force at this broker.", answer="{name: text}"
)
async def runtime_configuration(call: RestRequest) -> object:
    await call.authorize(op.LIST_BROKERS)
    return {each.name: each.value for each in list_settings(call.broker)}


@register_route("POST", BROKERS_PATH + "/configuration/{name}/{value}",
    "Changes a setting of all brokers, while they run.",
       answer="200")  # fmt: skip
async def change_configuration(call: RestRequest) -> Response:
    await call.authorize(op.CHANGE_SETTING)
    name, value = _setting_name(call, "update"), call.names["value"]
    try:
        parse_setting_value(name, value)
    except InvalidRequest as error:
        raise HttpError(f"Invalid dynamic-config value: {error}", 412) from error
    await call.call_local(op.CHANGE_SETTING, name=name, value=value)
    return Response()


@register_route(
    "DELETE", BROKERS_PATH + "/configuration/{name}", "Each broker has its own value of it again.", answer="200"
)
async def remove_configuration(call: RestRequest) -> Response:
    await call.authorize(op.REMOVE_SETTING)
    await call.call_local(op.REMOVE_SETTING, name=_setting_name(call, "delete"))
    return Response()


def _setting_name(call: RestRequest, act: str) -> str:
    """Returns our name of the setting. Raises HttpError (412) with Pulsar's text if it cannot change at run time."""
    try:
        return parse_setting_name(call.names["name"])
    except InvalidRequest as error:
        raise HttpError(f"Can't {act} non-dynamic configuration", 412) from error


@register_route("GET", BROKERS_PATH + "/internal-configuration", "Where the metadata is.",
       answer="InternalConfigurationData")  # fmt: skip
async def internal_configuration(call: RestRequest) -> object:
    await call.authorize(op.LIST_BROKERS)
    return {
        "zookeeperServers": "", "metadataStoreUrl": "", "configurationStoreServers": "",
        "configurationMetadataStoreUrl": "", "ledgersRootPath": paths.LEDGERS,
        "bookkeeperMetadataServiceUri": None, "stateStorageServiceUrl": None,
    }  # fmt: skip


@register_route("GET", BROKERS_PATH + "/{cluster}", "The brokers that run.", answer="[host:port]")
async def list_brokers_of_cluster(call: RestRequest) -> object:
    found = await _http(call)
    call.check_cluster_in_path()
    return found


# ------------------------------------------------------------------ bookies
@register_route("GET", "/admin/v2/bookies/all", "The bookies that run.", answer="{bookies: [{bookieId}]}")
async def bookies(call: RestRequest) -> object:
    found = await call.call_local(op.LIST_BOOKIES)
    return {"bookies": [{"bookieId": each.endpoint} for each in sorted(found, key=lambda each: each.endpoint)]}


@register_route("GET", "/admin/v2/bookies/racks-info", "The racks of bookies, by their group.",
       answer="{group: {bookie: {rack, hostname}}}")  # fmt: skip
async def racks(call: RestRequest) -> object:
    groups: dict[str, dict[str, object]] = {"default": {}}
    for each in await call.call_local(op.LIST_BOOKIES):
        if each.rack:
            groups.setdefault(each.group or "default", {})[each.endpoint] = _rack(each)
    return groups


@register_route(
    "GET", "/admin/v2/bookies/racks-info/{bookie}", "The rack of one; 404: it has none.", answer="{rack, hostname}"
)
async def rack(call: RestRequest) -> object:
    asked = call.names["bookie"]
    for each in await call.call_local(op.LIST_BOOKIES):
        if asked in (each.endpoint, each.id) and each.rack:
            return _rack(each)
    raise NotFound(f"no bookie {asked[:100]!r} has a rack; `magnetar bookies set-rack` gives it one")


def _rack(bookie: BookieInfo) -> dict[str, str]:
    return {"rack": bookie.rack, "hostname": bookie.id}


# -------------------------------------------------------------------------------------------------------- lookup
# The owner of a topic, for clients that ask with an `http://` service URL (wire protocol: HTTP look-up).


LOOKUP_PATH = "/lookup/v2/topic/{domain:domain}/{tenant}/{namespace}/{topic}"


@register_route("GET", LOOKUP_PATH,
    "Where clients of Pulsar's protocol reach the topic; `listenerName` names the listener.",
       answer="LookupData")  # fmt: skip
async def lookup_topic(call: RestRequest) -> object:
    broker, topic = call.broker, call.topic
    await broker.access.check_permission(call.context.principal, Permission.LOOKUP, topic=topic)
    owner = await broker.find_owner(topic)
    listener = call.query.get("listenerName") or call.headers.get("x-pulsar-listenername", "")
    urls = owner.pulsar.get(listener)
    if urls is None:
        raise NotFound(f"the broker of the topic has no listener {listener[:100]!r} of Pulsar's protocol")
    clear = next((url for url in urls if url.startswith("pulsar://")), None)
    tls = next((url for url in urls if url.startswith("pulsar+ssl://")), None)
    http = owner.http or None
    return {
        "brokerUrl": clear,
        "brokerUrlTls": tls,
        "brokerUrlSsl": tls or "",
        "nativeUrl": clear,
        "httpUrl": http if http is None or http.startswith("http://") else None,
        "httpUrlTls": http if http is None or http.startswith("https://") else None,
    }


@register_route("GET", "/lookup/v2/service-url", "Where this broker serves gRPC, for Magnetar's SDK.",
       answer="{serviceUrl}", is_open=True)  # fmt: skip
async def service_url(call: RestRequest) -> object:
    me = call.broker.own_broker_record
    if me is None:
        raise Unavailable("this broker does not serve at the moment; ask another one, or try again")
    return {"serviceUrl": f"magnetar{'+ssl' * me.http.startswith('https')}://{me.endpoint}"}


@register_route("GET", LOOKUP_PATH + "/bundle", "The bundle that has the topic.", answer='"0x…_0x…"')
async def bundle_of_topic(call: RestRequest) -> object:
    await call.call_local(op.PARTITIONS, topic=call.topic.full)
    record = await call.broker.catalog.get_namespace(call.topic.namespace_name)
    return PlainTextResponse(find_topic_bundle_name(call.topic, record.bundles))
