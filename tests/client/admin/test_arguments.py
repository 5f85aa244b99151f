"""Every method of AdminClient with every kind of wrong argument: typed, told by its name, and nothing is sent."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping
from typing import Any

import pytest

from magnetar.admin import Admin, AdminClient
from magnetar.client.admin.arguments import WrongArgument, WrongArgumentType
from magnetar.client.admin.operations import Operation
from magnetar.client.model.message_id import MessageId
from magnetar.proto.errors import InvalidRequest, MagnetarError
from magnetar.proto.policies import Policies
from magnetar.proto.schema import SchemaInfo, SchemaType

HIGH = "\ud800"
GOOD: dict[str, Any] = {
    "name": "public/default", "tenant": "t", "topic": "t", "subscription": "s", "role": "r", "actions": ["produce"],
    "roles": ["r"], "partitions": 1, "policies": Policies(), "properties": {"a": "b"}, "on": True, "namespace": "a/b",
    "publish_time_ms": 1, "position": MessageId(-1, 1, 1, -1), "ledger_id": 1, "entry_id": 1, "number": 1, "index": 1,
    "to": 1,
    "older_than": 1.5, "schema": SchemaInfo(type=SchemaType.STRING), "coordinator": 0, "txn": "(3,1099511627781)",
    "half": "(3,1099511627781)", "cluster": "c",
}  # fmt: skip
BAD: list[Any] = [None, b"b", object(), 1 << 70, 5, True, [5], {"a": 5}, HIGH, float("nan")]


class Nothing:
    """A transport that carries nothing."""

    def __init__(self) -> None:
        self.carried: list[str] = []

    async def call(self, operation: Operation[Any], arguments: Mapping[str, object], *, at: str = "") -> Any:
        self.carried.append(operation.name)
        raise InvalidRequest("carried")

    async def close(self) -> None: ...


METHODS = sorted(
    name for name, method in inspect.getmembers(AdminClient, inspect.iscoroutinefunction) if not name.startswith("_")
)


def takes(annotation: str, value: Any) -> bool:
    """By the text of the annotation: what this test may not call wrong."""
    if value is None:
        return "None" in annotation
    if isinstance(value, bool):
        return "bool" in annotation
    if value == [5]:
        return "Sequence[int]" in annotation
    if value == 5:
        return "int" in annotation or "float" in annotation
    return False


@pytest.mark.parametrize("name", METHODS)
async def test_a_wrong_argument_is_told_by_its_name_and_nothing_is_sent(name: str) -> None:
    transport = Nothing()
    admin = AdminClient(transport=transport)
    method = getattr(admin, name)
    parameters = list(inspect.signature(method).parameters.values())
    good = {each.name: GOOD[each.name] for each in parameters
            if each.default is each.empty and each.kind is not each.VAR_POSITIONAL}  # fmt: skip
    for each in parameters:
        if each.kind is each.VAR_POSITIONAL:
            continue
        for value in BAD:
            if takes(each.annotation, value):
                continue
            with pytest.raises(InvalidRequest, match=rf"^{each.name} is ") as raised:
                await method(**{**good, each.name: value})
            assert isinstance(raised.value, WrongArgument | WrongArgumentType)
            assert isinstance(raised.value, TypeError | ValueError)
    assert not transport.carried


async def test_right_arguments_of_every_method_are_sent() -> None:
    for name in METHODS:
        transport = Nothing()
        admin = AdminClient(transport=transport)
        method = getattr(admin, name)
        required = [each for each in inspect.signature(method).parameters.values()
                    if each.default is each.empty and each.kind is not each.VAR_POSITIONAL]  # fmt: skip
        given = {each.name: GOOD[each.name] for each in required}
        if "name" in given and ("topic" in given or "tenant" in name):
            given["name"] = "s"  # of a subscription, or a tenant
        if name != "close":
            with pytest.raises(MagnetarError, match="carried"):
                await method(**given)
            assert transport.carried


@pytest.mark.parametrize("call", [
    lambda admin: admin.create_tenant("t", admin_roles="abc"), lambda admin: admin.schema("t", -1),
    lambda admin: admin.nth_message("t", 0), lambda admin: admin.grant_topic_permission("t", "r", "produce"),
    lambda admin: admin.create_topic("t", partitions=1 << 40), lambda admin: admin.remove_topic_policies("t", 5),
    lambda admin: admin.create_topic("t", partitions="4"), lambda admin: admin.transactions(-1),
    lambda admin: admin.transaction("no id"), lambda admin: admin.transaction(None),
])  # fmt: skip
async def test_what_no_server_should_see(call: Any) -> None:
    admin = AdminClient("magnetar://127.0.0.1:1", timeout_s=0.2)
    with pytest.raises(InvalidRequest):
        await call(admin)
    await admin.close()


def test_the_blocking_face_says_the_same() -> None:
    with Admin("magnetar://127.0.0.1:1") as admin, pytest.raises(InvalidRequest, match=r"^topic is text"):
        admin.create_topic(None)  # type: ignore[arg-type]


def test_the_signatures_are_those_of_the_methods() -> None:
    told = str(inspect.signature(AdminClient.create_topic))
    assert told == "(self, topic: 'str', *, partitions: 'int' = 0) -> 'None'"
    assert asyncio.iscoroutinefunction(AdminClient.create_topic)
