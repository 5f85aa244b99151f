"""The names of the subscription types. Each is derived from its line of `Subscribe.Type` in proto/wire.proto.

| of KEY_SHARED | where |
|---|---|
| `KEY_SHARED` | the wire, statistics |
| `Key_Shared` | `title`: the policy `subscription_types`, messages to users |
| `KeyShared` | `client_name`: the SDK |
| `key_shared` | the command line |

Which policy a type has: broker/subscription/core/policies/__init__.py.
"""

from __future__ import annotations

from . import wire_pb2 as wire

NUMBERS: dict[str, int] = dict(wire.Subscribe.Type.items())
"""Name on the wire → number."""


def title(name: str) -> str:
    return name.title()


def client_name(name: str) -> str:
    return name.title().replace("_", "")


TITLES = tuple(map(title, NUMBERS))
