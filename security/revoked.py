"""Tokens that are refused before their end: a file with one id (`jti`) or role (`sub`) a line.

Empty lines and lines that begin with # are skipped. The file is looked at every few seconds (`Watched`): tokens on it
are refused from then on, and open streams of theirs end. A file that is missing at the start is an error, because a
misspelled path would revoke nothing; one that cannot be used later keeps the list before.
"""

from __future__ import annotations

import os
from pathlib import Path

from ..proto.errors import InvalidConfiguration, InvalidRequest
from ..proto.names import is_role
from ..runtime.access import Principal
from ..runtime.clock import Clock
from .token import unverified_parts
from .watched import Watched

FILE_BYTES_MAX = 1 << 20
HEAD = "# Tokens that are refused: one id (jti) or role (sub) a line. See docs/security.md.\n"


class Revoked:
    """The refused tokens. Raises InvalidConfiguration if the file cannot be read, or a line is neither id nor role."""

    def __init__(self, path: str, clock: Clock) -> None:
        self._listed = Watched(path, lambda: read(path), clock)

    def has(self, principal: Principal) -> bool:
        listed = self._listed.current()
        return principal.name in listed or principal.credential_id in listed


def read(path: str) -> frozenset[str]:
    """The ids and roles. InvalidConfiguration."""
    try:
        with open(path.removeprefix("file:").removeprefix("//"), "rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
        lines = [line.strip() for line in data.decode().split("\n")]
    except OSError as error:
        raise InvalidConfiguration(f"the list of revoked tokens {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError:
        raise InvalidConfiguration(f"the list of revoked tokens {path} is not UTF-8") from None
    if len(data) > FILE_BYTES_MAX:
        raise InvalidConfiguration(f"the list of revoked tokens {path} has more than {FILE_BYTES_MAX} bytes")
    for number, line in enumerate(lines, 1):
        if line and not line.startswith("#") and not is_role(line):
            raise InvalidConfiguration(f"line {number} of {path} is neither the id nor the role of a token")
    return frozenset(line for line in lines if line and not line.startswith("#"))


def id_of(token: str) -> str:
    """Returns the `jti` of a token; the signature is not verified. Unauthenticated: it is no token; InvalidRequest: it
    has no such id."""
    found = unverified_parts(token)[1].get("jti")
    if not isinstance(found, str):
        raise InvalidRequest("the token has no id (jti): revoke its role, or replace the key of tokens")
    return found


def revoke(path: str, what: str) -> None:
    """Adds an id or a role to the list. InvalidRequest: it is neither; InvalidConfiguration: the file is unusable."""
    if not is_role(what) or what != what.strip() or what.startswith("#"):
        raise InvalidRequest(
            "neither the id nor the role of a token: printable text on one line, without # at its start"
        )
    listed = read(path) if os.path.exists(path) else frozenset()
    if what in listed:
        return
    try:
        with open(path, "ab") as file:
            begun = not file.tell() or Path(path).read_bytes().endswith(b"\n")
            file.write(("" if begun else "\n").encode() + what.encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise InvalidConfiguration(f"the list of revoked tokens {path} cannot be written: {error.strerror}") from error
