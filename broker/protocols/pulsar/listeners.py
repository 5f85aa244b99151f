"""The addresses at which clients of Pulsar's protocol reach a broker, for the answers of its look-ups.

`pulsar_listeners` has Pulsar's form, `NAME:URL,NAME:URL`; a name may come several times, with a `pulsar://` and a
`pulsar+ssl://` URL, and a `magnetar://` URL for Magnetar's SDK (`listener_name`). A client of Pulsar that names no
listener gets the first one, and the SDK the address of `--advertise`.
"""

from __future__ import annotations

from ....proto.errors import InvalidConfiguration
from ....runtime.network import Endpoint
from ...common.config import BrokerConfig

SCHEMES = ("pulsar", "pulsar+ssl", "magnetar", "magnetar+ssl")


def advertised_urls(config: BrokerConfig, listening: Endpoint, *, is_encrypted: bool) -> dict[str, tuple[str, ...]]:
    """Returns the URLs by the name of the listener. Raises InvalidConfiguration."""
    if config.pulsar_listeners:
        return parse(config.pulsar_listeners)
    host = config.advertised.host if config.advertised is not None else listening.host
    return {"": (f"{SCHEMES[is_encrypted]}://{Endpoint(host, listening.port)}",)}


def parse(text: str) -> dict[str, tuple[str, ...]]:
    """Parses `pulsar_listeners`. Raises InvalidConfiguration."""
    found: dict[str, tuple[str, ...]] = {}
    for part in text.split(","):
        name, _, url = part.strip().partition(":")
        scheme, _, address = url.partition("://")
        try:
            Endpoint.parse(address)
        except ValueError:
            address = ""
        if not name or not address or scheme not in SCHEMES:
            raise InvalidConfiguration(
                f"pulsar_listeners: {part.strip()!r} is not NAME:pulsar://HOST:PORT", setting="pulsar_listeners"
            )
        found[name] = (*found.get(name, ()), url)
    return {"": found[next(iter(found))], **found}
