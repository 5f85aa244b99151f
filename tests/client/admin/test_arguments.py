"""Every method of AdminClient with every kind of wrong argument: typed, told by its name, and nothing is sent."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import inspect
from collections import UserDict, UserList
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy
import pytest

from magnetar.admin import Admin, AdminClient
from magnetar.client.admin.grpc_transport import WrongArgument, WrongArgumentType
from magnetar.client.model.message_id import MessageId
from magnetar.proto.errors import InvalidRequest, MagnetarError
from magnetar.proto.operations import Operation
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


class Number(enum.IntEnum):
    ONE, TWO, SEVEN, NONE = 1, 2, 7, 0


class Colour(enum.Enum):
    RED = 1


class Broken(Sequence[Any], Mapping[Any, Any]):  # type: ignore[misc]
    """Everything that it is asked for raises."""

    def __getitem__(self, index: Any) -> Any:
        raise RuntimeError("broken")

    def __len__(self) -> int:
        raise RuntimeError("broken")

    __iter__ = items = __index__ = __float__ = __len__  # type: ignore[assignment]


class Nothing:
    """A transport that carries nothing."""

    def __init__(self) -> None:
        self.carried: list[str] = []
        self.arguments: list[dict[str, object]] = []

    async def call(self, operation: Operation[Any], arguments: Mapping[str, object], *, at: str = "") -> Any:
        self.carried.append(operation.name)
        self.arguments.append(dict(arguments))
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
    if isinstance(value, bytes):
        return "bytes" in annotation
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
        if "name" in given and ("topic" in given or "tenant" in name or "group" in name):
            given["name"] = "s"  # of a subscription, a tenant, or a group
        if name != "close":
            with pytest.raises(MagnetarError, match="carried"):
                await method(**given)
            assert transport.carried


class Index:
    """A whole number by Python's rule alone."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __index__(self) -> int:
        return self.value


class Printed(str):
    """Text that prints as something else, as members of enums do."""

    def __str__(self) -> str:
        return "printed"

    def __format__(self, how: str) -> str:
        return "formatted"


def disguised(value: Any, number: Callable[[int], Any]) -> Any:
    """The same, by types that Python's own functions take."""
    match value:
        case bool():
            return value
        case int():
            return number(value)
        case float():
            return numpy.float32(value) if float(numpy.float32(value)) == value else Fraction(value)
        case str():
            return Printed(value)
        case list():
            return UserList(disguised(each, number) for each in value)
        case dict():
            return UserDict({disguised(name, number): disguised(each, number) for name, each in value.items()})
    return value


def plain(value: Any) -> bool:
    """No part of it is of a program's own class, or of numpy's."""
    if isinstance(value, list | tuple):
        return all(map(plain, value))
    if isinstance(value, dict):
        return all(map(plain, value.items()))
    ours = type(value).__module__.partition(".")[0] in ("builtins", "magnetar")
    return ours or not isinstance(value, str | int | float)


def choices(parameter: inspect.Parameter) -> list[Any]:
    """Values for it, one of each kind that it takes."""
    found = [GOOD[parameter.name]] if parameter.name in GOOD else []
    return found + [value for text, value in VALUES.items() if text in parameter.annotation]


VALUES: dict[str, Any] = {
    "str": "s", "int": 7, "Sequence[str]": ["a", "b"], "Sequence[int]": [1, 2], "Mapping": {"a": "b"}, "float": 2.5,
}  # fmt: skip


@pytest.mark.parametrize("number", [numpy.int64, numpy.uint8, Index, Number], ids=lambda each: each.__name__)
@pytest.mark.parametrize("name", METHODS)
async def test_what_python_takes_for_a_number_or_text_is_sent_as_the_plain_one(
    name: str, number: Callable[[int], Any]
) -> None:
    parameters = [each for each in inspect.signature(getattr(AdminClient, name)).parameters.values()
                  if each.name != "self"]  # fmt: skip
    good = {each.name: GOOD[each.name] for each in parameters
            if each.default is each.empty and each.kind is not each.VAR_POSITIONAL}  # fmt: skip
    for each in parameters:
        for value in choices(each):
            sent = []
            for given in (value, disguised(value, number)):
                transport = Nothing()
                method = getattr(AdminClient(transport=transport), name)
                with contextlib.suppress(InvalidRequest):  # "carried", or what only the method can tell of the value
                    if each.kind is each.VAR_POSITIONAL:
                        await method(*good.values(), given)
                    else:
                        await method(**{**good, each.name: given})
                sent.append(transport.arguments)
            assert sent[0] == sent[1], (each.name, value)
            assert plain([list(one.items()) for one in sent[1]]), (each.name, sent[1])


@pytest.mark.parametrize("value", [
    bytearray(b""), memoryview(b""), b"", numpy.bytes_(b"t"), numpy.array(["a"]), {"a"}, iter(["a"]),
    {"a": "b"}.keys(), Broken(),
], ids=lambda each: type(each).__name__)  # fmt: skip
async def test_what_is_like_bytes_or_breaks_is_no_list_and_no_dict(value: Any) -> None:
    transport = Nothing()
    admin = AdminClient(transport=transport)
    with pytest.raises(WrongArgumentType, match=r"^admin_roles is a list"):
        await admin.create_tenant("t", admin_roles=value)
    with pytest.raises(WrongArgumentType, match=r"^properties is a dict"):
        await admin.set_topic_properties("t", value)
    with pytest.raises(WrongArgumentType, match=r"^topic is text"):
        await admin.delete_topic(value)
    with pytest.raises(WrongArgumentType, match=r"^partitions is a whole number"):
        await admin.create_topic("t", partitions=value)
    assert not transport.carried


@pytest.mark.parametrize("value", [
    numpy.bool_(True), numpy.float64(1.0), Decimal(1), Colour.RED, 1j, "1", b"1", numpy.datetime64(1, "s"), Broken(),
], ids=lambda each: type(each).__name__)  # fmt: skip
async def test_what_python_takes_for_no_whole_number_is_refused(value: Any) -> None:
    admin = AdminClient(transport=Nothing())
    with pytest.raises(WrongArgumentType, match=r"^partitions is a whole number of 64 bits"):
        await admin.create_topic("t", partitions=value)
    if not isinstance(value, float | Decimal | numpy.bool_):  # they have `__float__`
        with pytest.raises(WrongArgumentType, match=r"^older_than is a number"):
            await admin.expire_messages("t", "s", value)


@pytest.mark.parametrize("value", [numpy.uint64(2**64 - 1), Index(1 << 63), Fraction(10**400), numpy.float64("nan")])
async def test_a_number_that_cannot_be_sent_is_refused_whatever_its_type(value: Any) -> None:
    with pytest.raises(WrongArgument, match=r"^older_than is a number"):
        await AdminClient(transport=Nothing()).expire_messages("t", "s", value)


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


async def test_the_parameters_of_the_client_itself_are_checked_too() -> None:
    for seconds in (numpy.float32(3), numpy.int64(3), Fraction(3), Number.SEVEN):
        await AdminClient("magnetar://x", timeout_s=seconds).close()  # type: ignore[arg-type]
    for wrong in (True, "3", None, numpy.array([3, 4]), 0, -1, float("nan"), 1 << 70):
        with pytest.raises((TypeError, ValueError), match=r"^timeout_s is a number"):
            AdminClient("magnetar://x", timeout_s=wrong)  # type: ignore[arg-type]
    for path in (5, None, b"ca.pem", HIGH, "-----BEGIN CERTIFICATE-----"):
        with pytest.raises((TypeError, ValueError), match=r"^tls_trust_certs_file_path is the path of a file"):
            AdminClient("magnetar+ssl://x", tls_trust_certs_file_path=path)  # type: ignore[arg-type]
