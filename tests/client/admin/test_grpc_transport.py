"""What an operation's arguments and answers are on the wire, and which broker is asked."""

from __future__ import annotations

import asyncio
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import pytest

from magnetar.client.admin import AdminClient
from magnetar.client.admin.grpc_transport import (
    GrpcTransport,
    StoredMessage,
    decode_reply,
    encode_request,
    rpc_of_operation,
)
from magnetar.client.connect.connections import make_client_world
from magnetar.client.model.message_id import MessageId
from magnetar.proto import operations
from magnetar.proto import statistics as values
from magnetar.proto import wire_pb2 as wire
from magnetar.proto.errors import (
    ConnectionLost,
    InvalidRequest,
    MagnetarError,
    NotOwner,
    TimedOut,
    TopicNotFound,
    Unavailable,
)
from magnetar.proto.names import Position
from magnetar.proto.operations import AnsweringBroker, Operation, find_answer_type
from magnetar.proto.policies import Policies
from magnetar.proto.translation import get_field_types

ALL = operations.OPERATIONS
RENAMED = {"auto_topic_creation": "auto_topic_creation_off"}


def _kinds(hint: Any) -> list[Any]:
    """The types that a type is made of."""
    inner = [each for arg in typing.get_args(hint) for each in _kinds(arg)]
    return inner or [hint]


@pytest.mark.parametrize("name", ALL)
def test_an_answer_has_the_fields_of_its_reply_and_all_of_them(name: str) -> None:
    compared = 0

    def compare(kind: Any, descriptor: Any) -> None:
        nonlocal compared
        shown = {RENAMED.get(each.name, each.name) for each in fields(kind)}
        assert shown == set(descriptor.fields_by_name), f"{kind.__name__} and {descriptor.name}"
        compared += 1
        for field_name, hint in get_field_types(kind):
            if typing.get_origin(hint) in (Mapping, dict):  # of texts to texts, or lists of texts
                continue
            (inner,) = (each for each in _kinds(hint) if each is not types.NoneType and each is not ...)
            if is_dataclass(inner):
                compare(inner, descriptor.fields_by_name[field_name].message_type)

    answer = find_answer_type(name, MessageId=MessageId, StoredMessage=StoredMessage)
    reply = rpc_of_operation(ALL[name]).reply.DESCRIPTOR
    inner = _kinds(answer)[0]
    if inner is StoredMessage:
        assert reply.name == "PeekMessagesReply"
        return
    if is_dataclass(inner) and inner is not MessageId:
        compare(inner, reply if is_dataclass(answer) else reply.fields[0].message_type)
        assert compared
    elif inner in (None, types.NoneType):
        assert not reply.fields, "nothing that is answered is dropped"


@pytest.mark.parametrize("name", ALL)
def test_whose_answer_it_is_follows_from_the_request(name: str) -> None:
    request = rpc_of_operation(ALL[name]).request.DESCRIPTOR
    if ALL[name].asked_of is AnsweringBroker.OWNER:
        assert {"topic", "name"} & set(request.fields_by_name)


def test_an_answer_is_made_of_its_reply_down_to_the_last_list() -> None:
    reply = wire.TopicStatsReply(
        name="t", messages_in=3, rate_in=0.5, quota="what a later version says",
        subscriptions=[
            wire.SubscriptionStats(
                name="s", type="KEY_SHARED", mark_delete=wire.Position(ledger_id=4, entry_id=5),
                blocked="everything was delivered",
                consumers=[wire.ConsumerStats(name="c", slots=[wire.SlotRange(first=1, last=2)])],
            )
        ],
    )  # fmt: skip
    found = decode_reply(operations.TOPIC_STATS, {"topic": "t"}, reply)
    assert (found.messages_in, found.rate_in, found.quota) == (3, 0.5, values.BacklogQuotaState.UNKNOWN)
    (subscription,) = found.subscriptions
    assert subscription.type is values.SubscriptionType.KEY_SHARED
    assert (subscription.mark_delete, subscription.blocked) == (Position(4, 5), values.Blocked.CAUGHT_UP)
    assert subscription.consumers[0].slots == (values.SlotRange(1, 2),)
    with pytest.raises(AttributeError):
        found.name = "u"  # type: ignore[misc]


def test_arguments_go_to_the_fields_of_their_names() -> None:
    given = {"topic": "t", "subscription": "s", "message_id": MessageId(1, 2, 3)}
    _, request = encode_request(operations.RESET_SUBSCRIPTION, given)
    assert (request.topic, request.name, request.message_id.entry_id) == ("t", "s", 3)  # type: ignore[attr-defined]
    _, request = encode_request(operations.CREATE_NAMESPACE, {"namespace": "a/b", "auto_topic_creation": False})
    assert (request.name, request.auto_topic_creation_off) == ("a/b", True)  # type: ignore[attr-defined]
    for wrong in ({"topic": "t", "partitions": -1}, {"topic": "t", "partitions": "4"}, {"topic": "\ud800"}):
        with pytest.raises(InvalidRequest, match="CreateTopic"):
            encode_request(operations.CREATE_TOPIC, wrong)


def test_the_types_of_subscriptions_are_those_of_the_wire() -> None:
    known = {each.value for each in values.SubscriptionType} - {"", "unknown"}
    assert known == set(wire.Subscribe.Type.keys())
    assert {each.value for each in values.KeyDistribution} - {"", "unknown"} == set(wire.KeySharedPolicy.Mode.keys())


# ------------------------------------------------------------------------------------ another transport
@dataclass
class Recorded:
    """A transport that is no network at all."""

    answers: dict[str, Any]
    asked: list[tuple[str, dict[str, object], str]] = field(default_factory=list)

    async def call(self, operation: Operation[Any], arguments: Mapping[str, object], *, at: str = "") -> Any:
        self.asked.append((operation.name, dict(arguments), at))
        answer = self.answers.get(operation.name)
        if isinstance(answer, dict):
            answer = answer[at]
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def close(self) -> None:
        self.asked.append(("close", {}, ""))


async def test_the_client_works_over_any_transport_with_plain_values() -> None:
    transport = Recorded({"Partitions": 2, "ExpireMessages": 5})
    async with AdminClient(transport=transport) as admin:
        assert [part.rpartition("/")[2] for part in await admin.parts("t")] == ["t-partition-0", "t-partition-1"]
        assert await admin.expire_messages("t", "s", 60.0) == 5
        await admin.set_topic_policies("t", Policies(max_producers=3))
    full = "persistent://public/default/t"
    assert [each[:2] for each in transport.asked[:2]] == [
        ("Partitions", {"topic": full}),
        ("ExpireMessages", {"topic": full, "subscription": "s", "older_than_s": 60.0}),
    ]
    assert [each[0] for each in transport.asked[2:]] == ["ChangePolicies", "close"]


async def test_a_broker_that_does_not_say_how_many_topics_it_has_is_listed_all_the_same() -> None:
    listed = tuple(values.BrokerInfo(name, f"{name}:1", 0) for name in "abc")
    answers = {"": listed, "a:1": (values.BrokerInfo("a", "a:1", 7),), "b:1": Unavailable("gone"), "c:1": ()}
    async with AdminClient(transport=Recorded({"ListBrokers": answers})) as admin:
        assert [each.topics for each in await admin.brokers()] == [7, None, None]


# ------------------------------------------------------------------------------------ which broker
@dataclass
class Brokers:
    """Channels of addresses; each answers what is next in its list, and the last for ever."""

    says: dict[str, list[Any]]
    asked: list[str] = field(default_factory=list)

    def connect(self, endpoint: Any, access: Any) -> Any:
        return _Channel(self, endpoint)


@dataclass
class _Channel:
    brokers: Brokers
    endpoint: Any

    async def call(self, rpc: Any, request: Any, *, timeout_s: float) -> Any:
        self.brokers.asked.append(f"{self.endpoint.host} {rpc.path.rpartition('/')[2]}")
        says = self.brokers.says[self.endpoint.host]
        answer = says.pop(0) if len(says) > 1 else says[0]
        if isinstance(answer, Exception):
            raise answer
        await asyncio.sleep(0)
        return answer

    async def close(self) -> None:
        pass


REFUSED = Unavailable("Connection refused", unreached="refused", endpoint="a:1")


async def _outcome(says: dict[str, list[Any]], timeout_s: float = 2.0) -> tuple[Any, list[str]]:
    brokers = Brokers(says)
    transport = GrpcTransport("magnetar://a:1,b:1", timeout_s, replace(make_client_world(), network=brokers))  # type: ignore[arg-type]
    transport._connections._next = 1  # the next is the first of the service URL
    try:
        return await transport.call(operations.TRIM_TOPIC, {"topic": "persistent://public/default/t"}), brokers.asked
    except MagnetarError as error:
        return error, brokers.asked
    finally:
        await transport.close()


async def test_who_reached_no_broker_learns_it_after_one_round() -> None:
    error, asked = await _outcome({"a": [REFUSED], "b": [REFUSED]})
    assert asked == ["a TrimTopic", "b TrimTopic"]
    assert isinstance(error, Unavailable)
    assert "Is a server running there?" in error.message


async def test_the_owner_that_a_broker_names_is_asked() -> None:
    done, asked = await _outcome({"a": [NotOwner("no", owner="c:1")], "c": [wire.Empty()]})
    assert (done, asked) == (None, ["a TrimTopic", "c TrimTopic"])


async def test_a_broker_that_is_gone_is_left_out_and_what_passes_is_tried_again() -> None:
    says = {"a": [REFUSED], "b": [ConnectionLost("cut"), wire.LookupReply(owner="c:1")], "c": [wire.Empty()]}
    done, asked = await _outcome(says)
    assert done is None, done
    assert asked[:2] == ["a TrimTopic", "b TrimTopic"]
    assert asked[-2:] == ["b Lookup", "c TrimTopic"]


async def test_when_time_is_over_without_an_answer_the_refusal_before_is_told_too() -> None:
    full, late = Unavailable("nothing was written: etcd is full"), TimedOut("no answer in time")
    error, _ = await _outcome({"a": [full, late], "b": [full, late]}, 0.5)
    assert isinstance(error, TimedOut)
    assert error.message == "no answer in time; before: nothing was written: etcd is full"


async def test_a_failure_that_stays_is_raised_at_once() -> None:
    error, asked = await _outcome({"a": [TopicNotFound("none")]})
    assert isinstance(error, TopicNotFound)
    assert asked == ["a TrimTopic"]
