"""The owner of a topic, for clients that ask with an `http://` service URL (wire protocol: HTTP look-up)."""

from __future__ import annotations

from starlette.responses import PlainTextResponse

from .....proto import operations as op
from .....proto.errors import NotFound, Unavailable
from .....proto.operation import Permission
from ....cluster.core.bundles import bundle_of
from ..call import Call
from ..table import route

LOOKUP = "/lookup/v2/topic/{domain:domain}/{tenant}/{namespace}/{topic}"


@route("GET", LOOKUP, "Where clients of Pulsar's protocol reach the topic; `listenerName` names the listener.",
       answer="LookupData")  # fmt: skip
async def lookup_topic(call: Call) -> object:
    broker, topic = call.broker, call.topic
    await broker.access.require(call.context.principal, Permission.LOOKUP, topic=topic)
    owner = await broker.lookup(topic)
    listener = call.query.get("listenerName") or call.headers.get("x-pulsar-listenername", "")
    urls = owner.pulsar.get(listener)
    if urls is None:
        raise NotFound(f"the broker of the topic has no listener {listener[:100]!r} of Pulsar's protocol")
    clear = next((url for url in urls if url.startswith("pulsar://")), None)
    tls = next((url for url in urls if url.startswith("pulsar+ssl://")), None)
    http = owner.http or None
    return {
        "brokerUrl": clear, "brokerUrlTls": tls, "brokerUrlSsl": tls or "", "nativeUrl": clear,
        "httpUrl": http if http is None or http.startswith("http://") else None,
        "httpUrlTls": http if http is None or http.startswith("https://") else None,
    }


@route("GET", "/lookup/v2/service-url", "Where this broker serves gRPC, for Magnetar's SDK.",
       answer="{serviceUrl}", is_open=True)  # fmt: skip
async def service_url(call: Call) -> object:
    me = call.broker.me
    if me is None:
        raise Unavailable("this broker does not serve at the moment; ask another one, or try again")
    return {"serviceUrl": f"magnetar{'+ssl' * me.http.startswith('https')}://{me.endpoint}"}


@route("GET", LOOKUP + "/bundle", "The bundle that has the topic.", answer='"0x…_0x…"')
async def bundle_of_topic(call: Call) -> object:
    await call.admin(op.PARTITIONS, topic=call.topic.full)
    record = await call.broker.catalog.namespace(call.topic.namespace_name)
    return PlainTextResponse(bundle_of(call.topic, record.bundles))
