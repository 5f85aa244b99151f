"""Secrets: read from files and the environment, and never shown.

A file with a secret is readable for its owner alone, who is the reader or root: with wider modes it is refused, as ssh
does. The error has the command that mends it.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import logging
import os
import stat
from collections.abc import Callable
from typing import Generic, TypeVar

from ..proto.errors import InvalidConfiguration, MagnetarError
from ..runtime.clock import Clock

SECRET_BYTES_MAX = 64 << 10
"""Most bytes of a file or variable: a key of RSA 16,384 has about 13,000."""
NAME_MAX = 80
"""Characters of a file's name that an error shows; tokens are longer."""


class Secret:
    """Bytes that no repr, error or log line shows."""

    __slots__ = ("_value",)

    def __init__(self, value: bytes) -> None:
        self._value = value

    def reveal(self) -> bytes:
        return self._value

    def __eq__(self, other: object) -> bool:
        """Compares in constant time."""
        return isinstance(other, Secret) and hmac.compare_digest(self._value, other._value)

    def __hash__(self) -> int:
        return hash(self._value)

    def __repr__(self) -> str:
        return "<secret>"

    def __reduce__(self) -> str:
        raise TypeError("a secret is not pickled")


def read_secret(source: str) -> Secret:
    """Reads a secret from `source`: a path, `file:PATH`, `env:NAME` (text) or `data:;base64,…`. Raises
    InvalidConfiguration.
    """
    if source.startswith("env:"):
        name = source.removeprefix("env:")
        value = os.environ.get(name, "")
        if not value:
            raise InvalidConfiguration(f"the environment has no variable {name}")
        return Secret(value.encode())
    if source.startswith("data:"):
        head, separator, body = source.partition(",")
        if not separator or not head.endswith(";base64"):
            raise InvalidConfiguration("a secret given inline begins with data:;base64,")
        try:
            return Secret(base64.b64decode(body, validate=True))
        except binascii.Error as error:
            raise InvalidConfiguration("a secret given inline is not base64") from error
    return Secret(read_private_file(source.removeprefix("file:").removeprefix("//")))


def describe_source(source: str) -> str:
    """Returns how errors and logs name a source: someone may have written the secret itself where its path belongs."""
    if source.startswith("data:"):
        return "the secret given inline"
    name = os.path.basename(source)
    if len(name) <= NAME_MAX and not name.startswith("eyJ"):
        return source
    return f"the file with a name of {len(name)} characters (write the path of a secret, never the secret itself)"


def read_private_file(path: str, bytes_max: int = SECRET_BYTES_MAX) -> bytes:
    """Returns the content of a file that only its owner may read. Raises InvalidConfiguration if others may; it says
    what to type.
    """
    try:
        with open(path, "rb") as file:
            found = os.fstat(file.fileno())
            if stat.S_IMODE(found.st_mode) & 0o077:
                raise InvalidConfiguration(f"others may read the secret in {path}: chmod 600 {path}")
            if found.st_uid not in (os.geteuid(), 0):
                raise InvalidConfiguration(f"the secret in {path} belongs to another user: chown it, or copy it")
            data = file.read(bytes_max + 1)
    except OSError as error:
        raise InvalidConfiguration(f"{describe_source(path)} cannot be read: {error.strerror}") from None
    if not data or len(data) > bytes_max:
        raise InvalidConfiguration(
            f"{describe_source(path)} is empty or has more than {bytes_max} bytes: it is no secret"
        )
    return data


# ------------------------------------------------------------------------------------------------------- watched
# A value that is made of a secret's source, and made anew when its file changes.
#
# The file is looked at when the value is asked for, at most every CHECK_S: no task, no thread. A change is another
# inode, modification time or size. A file that cannot be used keeps the value before in use, and the log says so once;
# at the start the error goes to the caller.


T = TypeVar("T")

CHECK_S = 2.0

_LOG = logging.getLogger("magnetar.security")


class WatchedValue(Generic[T]):
    """The value that `load` makes of `source` (as for `read_secret`), loaded again when the source changes. `version`
    is incremented with each new value.
    """

    def __init__(self, source: str, load: Callable[[], T], clock: Clock) -> None:
        self.version = 0
        self._source = source
        self._load = load
        self._clock = clock
        self._stamp = _stamp(source)
        self._value = load()
        self._look_at = clock.monotonic() + CHECK_S

    def current(self) -> T:
        """Returns the value; checks every CHECK_S whether the source has changed. If the new one cannot be loaded, the
        old value stays.
        """
        now = self._clock.monotonic()
        if now >= self._look_at:
            self._look_at = now + CHECK_S
            self._reload()
        return self._value

    def _reload(self) -> None:
        stamp = _stamp(self._source)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._value = self._load()
        except MagnetarError as error:
            _LOG.error("%s has changed and is not used, what it said before stays: %s", self._source, error)
            return
        self.version += 1
        _LOG.info("%s has changed and is used from now on", self._source)


def _stamp(source: str) -> object:
    try:
        found = os.stat(source.removeprefix("file:").removeprefix("//"))
    except (OSError, ValueError):
        return None  # `env:` and `data:` do not change
    return found.st_ino, found.st_mtime_ns, found.st_size
