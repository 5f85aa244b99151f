
import pytest

from magnetar.client.client import Client
from magnetar.client.common.errors import InvalidConfiguration, InvalidUrl
from magnetar.client.connect.discovery import parse_service_url
from magnetar.runtime.network import Endpoint


@pytest.mark.parametrize(
    ("text", "endpoints"),
    [
        ("magnetar://localhost", [("localhost", 7650)]),
        ("pulsar://localhost", [("localhost", 7650)]),
        ("pulsar://localhost:6650,b:6650", [("localhost", 7650), ("b", 7650)]),
        ("magnetar://a:1,b,c:3/", [("a", 1), ("b", 7650), ("c", 3)]),
        ("PULSAR://10.0.0.1:99", [("10.0.0.1", 99)]),
        ("magnetar://[::1]:5", [("::1", 5)]),
        ("magnetar://[::1]", [("::1", 7650)]),
        ("magnetar://a:1,a:1", [("a", 1)]),
        ("magnetar+ssl://a,b:2", [("a", 7650), ("b", 2)]),
        ("pulsar+ssl://a:6651", [("a", 7650)]),
    ],
)
def test_urls_name_brokers(text: str, endpoints: list[tuple[str, int]]) -> None:
    found = parse_service_url(text)
    assert (found.endpoints, found.encrypted) == (tuple(Endpoint(*each) for each in endpoints), "+ssl" in text)
    assert bool(found.ask_at) == text.lower().startswith("pulsar"), "those are asked for the address first"


@pytest.mark.parametrize(
    ("text", "asked"),
    [
        ("pulsar://a,b:99", [("a", 6650), ("b", 99)]),
        ("pulsar+ssl://a", [("a", 6651)]),
        ("http://a,b:80", [("a", 8080), ("b", 80)]),
        ("https://a/", [("a", 8443)]),
    ],
)
def test_addresses_that_are_asked_have_the_ports_of_their_protocols(text: str, asked: list[tuple[str, int]]) -> None:
    assert parse_service_url(text).ask_at == tuple(Endpoint(*each) for each in asked)


@pytest.mark.parametrize(
    "text",
    ["", "localhost", "localhost:7650", "ftp://a:1", "http://a:1/admin", "magnetar://", "magnetar://a:b", "magnetar://a:70000",
     "magnetar://a:0", "magnetar://a:1/b", "magnetar://u@a:1", "magnetar://a b:1", "magnetar://,", "topic://a"],
)  # fmt: skip
def test_anything_else_is_refused_with_what_to_write(text: str) -> None:
    with pytest.raises(InvalidUrl):
        Client(text)


def test_what_a_client_cannot_do_is_said_when_it_is_made() -> None:
    with pytest.raises(TypeError, match="nonsense"):
        Client("magnetar://a", nonsense=1)  # type: ignore[call-arg]
    with pytest.raises(InvalidConfiguration):
        Client("magnetar://a", operation_timeout_seconds=0)
    with pytest.raises(InvalidConfiguration):
        Client("magnetar://a", "token")
    Client("magnetar://a", None, io_threads=4, stats_interval_in_seconds=0, tls_validate_hostname=False)
