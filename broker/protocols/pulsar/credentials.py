"""The credentials of CONNECT and AUTH_RESPONSE, as the broker's guard takes them (security/authenticator.py).

| auth_method_name | auth_data | as |
|---|---|---|
| `token` (also OAuth2) | the token; a token file of Pulsar's C++ client ends with its newline | `Bearer TOKEN` |
| `basic` | `user:password` | `Basic BASE64` |
| `tls`, `none`, empty | – | the client certificate, or nothing |

Another method is nothing too: the anonymous role, where there is one, or refused.
"""

from __future__ import annotations

import base64
from dataclasses import replace

from ....runtime.access import AUTHORIZATION_MAX, Caller


def caller_of(caller: Caller, method: str, data: bytes) -> Caller:
    data = data[:AUTHORIZATION_MAX]
    if method == "token":
        return replace(caller, authorization=f"Bearer {data.decode('latin-1').strip()}")
    if method == "basic":
        return replace(caller, authorization=f"Basic {base64.b64encode(data).decode()}")
    return caller
