"""A program with one more operation, "DescribeTopic": a row and the function that does it, and nothing else.

It asks for it on every face and prints what each answers, as JSON; test_new_operation.py runs it.
"""

from __future__ import annotations

from typing import Any

from magnetar.proto.operations import (
    MANAGE_RULE,
    AnsweringBroker,
    CliVerb,
    HttpRoute,
    Operation,
    RequestField,
    add_operation,
)

ROW: Operation[tuple[str, ...]] = Operation(
    "DescribeTopic", MANAGE_RULE, AnsweringBroker.OWNER, request="DeleteRequest", reply="Names",
    takes=(RequestField("force", bool, "Although nothing asks for it."),),
    method="describe_topic", help="What a topic is called.",
    routes=(HttpRoute("GET", "/description", "What the topic is called.", answer="[text]"),),
    cli=CliVerb("topics describe", "What it is called.", "What a topic is called.", "orders"),
)  # fmt: skip
add_operation(ROW, "tuple[str, ...]")  # before anything else is imported, as if it were in the file

import asyncio  # noqa: E402
import inspect  # noqa: E402
import json  # noqa: E402
import sys  # noqa: E402
from pathlib import Path  # noqa: E402

from magnetar.broker.grpc.admin import AdminService  # noqa: E402
from magnetar.broker.rest.call import make_openapi_document  # noqa: E402
from magnetar.client.admin import Admin, AdminClient  # noqa: E402
from magnetar.proto import wire_pb2 as wire  # noqa: E402
from magnetar.proto.errors import Unauthorized  # noqa: E402
from magnetar.runtime.network import find_rpc  # noqa: E402
from tests.broker.access.roles import ROOT, roles  # noqa: E402
from tests.broker.rest.http import T, serving  # noqa: E402
from tests.docs.administration import operations_table  # noqa: E402
from tests.docs.tables import permissions_table  # noqa: E402
from tests.support.processes import run_here  # noqa: E402


async def describe_topic(self: AdminService, request: wire.DeleteRequest, context: Any) -> list[str]:
    topic = await self._topic(request.name)
    return [topic.name.full.rpartition("/")[2], *(["by force"] if request.force else [])]


AdminService.describe_topic = describe_topic  # type: ignore[attr-defined]


async def main(folder: Path) -> dict[str, Any]:
    return {**await _faces(folder / "faces"), **await _rights(folder / "rights"), **_documents()}


async def _faces(folder: Path) -> dict[str, Any]:
    async with serving(folder) as (http, broker, running), AdminClient(url := f"magnetar://{broker.endpoint}") as admin:
        await admin.create_topic("t")
        await admin.create_topic("wide", partitions=2)
        request = wire.DeleteRequest(name="persistent://public/default/t", force=True)
        channel = running.world.network.connect(broker.endpoint)
        found = await channel.call(find_rpc("Admin", "DescribeTopic"), request, timeout_s=10)
        await channel.close()

        async def run(*words: str) -> list[Any]:
            done = await asyncio.to_thread(run_here, "topics", "describe", *words, MAGNETAR_URL=url)
            return [done.code, done.out]

        def blocking() -> list[str]:
            with Admin(url) as other:
                answer: list[str] = other.describe_topic("t", force=True)  # type: ignore[attr-defined]
            return answer

        return {
            "grpc": list(found.names),
            "rest": await http.get(f"{T}/description"), "rest_force": await http.get(f"{T}/description?force=true"),
            "rest_wide": await http.get(T.replace("/t", "/wide") + "/description"),
            "rest_missing": (await http.ask("GET", T.replace("/t", "/none") + "/description")).status,
            "cli": await run("t"), "cli_force": await run("t", "-f", "-o", "json"), "cli_wide": await run("wide"),
            "cli_missing": (await run("none"))[0], "cli_help": await run("--help"),
            "asyncio": await admin.describe_topic("t", force=True),  # type: ignore[attr-defined]
            "blocking": await asyncio.to_thread(blocking),
            "signature": str(inspect.signature(Admin.describe_topic)),  # type: ignore[attr-defined]
            "doc": inspect.getdoc(AdminClient.describe_topic),  # type: ignore[attr-defined]
        }  # fmt: skip


async def _rights(folder: Path) -> dict[str, Any]:
    async with roles(folder) as acme:
        name = "persistent://acme/orders/t"
        await acme.call(ROOT, "Admin.CreateTopic", wire.TopicSpec(name=name))
        found = {}
        for role in ("stranger", "acme-admin"):
            try:
                answer = await acme.call(role, "Admin.DescribeTopic", wire.DeleteRequest(name=name))
                found[role] = list(answer.names)
            except Unauthorized:
                found[role] = ["Unauthorized"]
        return {"rights": found}


def _documents() -> dict[str, Any]:
    (line,) = (line for line in operations_table().splitlines() if "`DescribeTopic`" in line)
    (needs,) = (line for line in permissions_table().splitlines() if "Admin.DescribeTopic" in line)
    routes = [
        each for path, of in make_openapi_document()["paths"].items() for each in of.values() if "description" in path
    ]
    return {"line": line, "needs": needs, "openapi": [each["summary"] for each in routes]}


if __name__ == "__main__":
    for name in ("faces", "rights"):
        (Path(sys.argv[1]) / name).mkdir()
    print(json.dumps(asyncio.run(main(Path(sys.argv[1])))))
