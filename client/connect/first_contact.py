"""The first contact with a broker: how long it is tried, and what is said when nothing is there.

A client that never reached a broker has probably been given a wrong address, or no server runs: it says so soon, with
what to do. One that reached a broker before knows that the address is right, and is patient: its operations have their
whole time-out (client/connect/connections.py).

| what is at every address of the service URL | given up after |
|---|---|
| nothing listens, or the host name is not known | REFUSED_S |
| no answer, or a connection and not a word on it | connection_timeout_s |
| something that does not speak gRPC | at once (WrongProtocol) |

Guard: tests/client/connect/test_first_contact.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...proto.errors import MagnetarError, Unavailable
from ...runtime.network import Endpoint
from .service_url import PULSAR_PORTS

REFUSED_S = 1.0
"""Seconds for which a refused connection is tried again: a server that is being started listens within half a second.
"""
SERVED_PORT = 7650
"""Port at which `magnetar standalone` listens without being told."""


class FirstContact:
    """The attempts of one operation of a client that has reached no broker."""

    def __init__(self, endpoints: Callable[[], Sequence[Endpoint]], connection_timeout_s: float) -> None:
        """Begins the first contact. `endpoints`: those that are tried now."""
        self._endpoints = endpoints
        self._timeout_s = connection_timeout_s
        self._refused: set[str] = set()

    def failed(self, error: MagnetarError, next_s: float) -> MagnetarError | None:
        """Notes that an attempt failed with `error`; the next one would begin `next_s` after the first. Returns what to
        raise instead; None: try again."""
        how, endpoint = how_unreached(error), error.fields.get("endpoint", "")
        if how == "refused":
            self._refused.add(endpoint)
            if next_s >= REFUSED_S and self._refused.issuperset(map(str, self._endpoints())):
                return no_server(error, self._endpoints())
        if how is not None and next_s >= self._timeout_s:
            return no_server(error, self._endpoints(), f" within {self._timeout_s:g} s")
        return None


def how_unreached(error: MagnetarError) -> str | None:
    """Returns "refused" or "silent" where there was no connection (runtime/grpc/errors.py); None: something answered.
    """
    return error.fields.get("unreached") if isinstance(error, Unavailable) else None


def no_server(error: MagnetarError, endpoints: Sequence[Endpoint], when: str = "") -> MagnetarError:
    """Returns the error to raise for `error`, the last one: with what to do, and with the cause that it had."""
    others = "" if len(endpoints) == 1 else f" (asked: {', '.join(map(str, endpoints))})"
    told = Unavailable(f"{error.message}{when}{others}. {_what_to_do(endpoints[0].port)}", **error.fields)
    told.__cause__ = error.__cause__
    return told


def _what_to_do(port: int) -> str:
    if port in PULSAR_PORTS:
        return f"{port} is the port of Pulsar's clients; this one connects to {SERVED_PORT}"
    how = "" if port == SERVED_PORT else f" --port {port}"
    return f"Is a server running there? 'magnetar standalone{how}' starts one"
