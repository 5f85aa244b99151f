"""A program with one more policy, "max_pigeons": a line of proto/applied.py and a row of proto/policies.py.

It sets and reads it on every face and prints what each answers, as JSON; test_new_policy.py runs it.
"""

import importlib.util
import sys
from pathlib import Path
from typing import Any


def edited(name: str, at: str, line: str) -> None:
    """The module with a line after the one that begins with `at`, before anything else imports it."""
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    lines = Path(spec.origin).read_text().splitlines()
    lines.insert(next(number for number, text in enumerate(lines) if text.startswith(at)) + 1, line)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    exec(compile("\n".join(lines), spec.origin, "exec"), module.__dict__)


edited("magnetar.proto.applied", "    max_topics:", "    max_pigeons: Limit = 7  # on the roof; 0: any number")
edited("magnetar.proto.policies", "POLICIES: ", """    PolicyDefinition("max-pigeons", (
        Field("max_pigeons", "limit", ("-n", "--max-pigeons"), "On the roof; 0: any number."),
    ), "How many pigeons.", "-n 3", rest=PolicyRestNames("maxPigeons", "maxPigeons", "max_pigeons")),
""")

import asyncio  # noqa: E402
import json  # noqa: E402

from magnetar.broker.common.config import BrokerConfig  # noqa: E402
from magnetar.broker.rest.call import make_openapi_document  # noqa: E402
from magnetar.client.admin import AdminClient, Policies  # noqa: E402
from magnetar.proto import wire_pb2 as wire  # noqa: E402
from magnetar.proto.errors import InvalidRequest, Unauthorized  # noqa: E402
from magnetar.proto.names import TopicName  # noqa: E402
from tests.broker.access.roles import ROOT, roles  # noqa: E402
from tests.broker.rest.http import V2, T, serving  # noqa: E402
from tests.support.processes import run_here  # noqa: E402

N = f"{V2}/namespaces/public/default"


async def main(folder: Path) -> dict[str, Any]:
    return {**await _faces(folder / "faces"), **await _rights(folder / "rights"), **_documents()}


async def _faces(folder: Path) -> dict[str, Any]:
    async with serving(folder) as (http, broker, _), AdminClient(url := f"magnetar://{broker.endpoint}") as admin:
        await admin.create_topic("t")
        topic = await broker.topic_manager.load_topic(TopicName.parse("t"))

        async def run(*words: str) -> list[Any]:
            done = await asyncio.to_thread(run_here, *words, MAGNETAR_URL=url)
            return [done.code, done.out]

        found: dict[str, Any] = {"default": topic.applied.max_pigeons}  # type: ignore[attr-defined]
        await http.done("POST", f"{N}/maxPigeons", 3)
        found["rest"] = await http.get(f"{N}/maxPigeons")
        found["in_namespace"] = (await http.get(N))["max_pigeons"]
        found["inherited"] = await http.get(f"{T}/maxPigeons?applied=true")
        found["not_set"] = (await http.ask("GET", f"{T}/maxPigeons")).status
        found["refused"] = (await http.ask("POST", f"{N}/maxPigeons", -3)).status
        found["cli_get"] = await run("topics", "get-max-pigeons", "t", "--applied", "-o", "json")
        found["cli_set"] = await run("topics", "set-max-pigeons", "t", "-n", "4")
        found["asyncio"] = (await admin.topic_policies("t")).max_pigeons  # type: ignore[attr-defined]
        await admin.set_topic_policies("t", Policies(max_pigeons=5))  # type: ignore[call-arg]
        found["set"] = (await admin.topic_policies("t", applied=True)).max_pigeons  # type: ignore[attr-defined]
        found["cli_remove"] = await run("topics", "remove-max-pigeons", "t")
        found["removed"] = (await admin.topic_policies("t")).max_pigeons  # type: ignore[attr-defined]
        found["help"] = (await run("topics", "set-max-pigeons", "--help"))[1]
        try:
            await admin.set_topic_policies("t", Policies(max_pigeons=-1))  # type: ignore[call-arg]
        except InvalidRequest as error:
            found["checked"] = error.message
        return found


async def _rights(folder: Path) -> dict[str, Any]:
    async with roles(folder) as acme:
        request, found = wire.ChangePoliciesRequest(namespace="acme/orders", set='{"max_pigeons": 2}'), {}
        for role in ("stranger", "acme-admin", ROOT):
            try:
                await acme.call(role, "Admin.ChangePolicies", request)
                found[role] = "done"
            except Unauthorized:
                found[role] = "Unauthorized"
        return {"rights": found}


def _documents() -> dict[str, Any]:
    paths = [path for path in make_openapi_document()["paths"] if path.endswith("/maxPigeons")]
    return {"openapi": sorted(paths), "setting": BrokerConfig().max_pigeons}  # type: ignore[attr-defined]


if __name__ == "__main__":
    for name in ("faces", "rights"):
        (Path(sys.argv[1]) / name).mkdir()
    print(json.dumps(asyncio.run(main(Path(sys.argv[1])))))
