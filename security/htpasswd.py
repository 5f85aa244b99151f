"""Password files of Apache's htpasswd: lines `user:hash`, with bcrypt (`-B`), `$hash_apr1$` (`-m`) or `{SHA}` (`-s`).

Hashes of crypt(3) are refused: DES looks at eight characters only, and a short salt is quickly tried out. Empty lines
and lines that begin with # are skipped. An error names the line, never what it says.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
from collections.abc import Mapping

from ..proto.errors import InvalidConfiguration
from ..proto.names import is_role

BCRYPT_COST_MAX = 14
"""Greatest cost of bcrypt: a password of cost 14 takes about 1.3 s of a core; each caller may ask for one."""

BCRYPT_BYTES_MAX = 72
"""Bytes of a password that bcrypt looks at; htpasswd cuts what is longer."""

_BCRYPT = re.compile(r"\$2[aby]\$(\d\d)\$[./A-Za-z0-9]{53}")
_APR1 = re.compile(r"\$apr1\$([./A-Za-z0-9]{1,8})\$[./A-Za-z0-9]{22}")
_SHA = re.compile(r"\{SHA\}[+/A-Za-z0-9]{27}=")
_DIGITS = b"./0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


def parse(text: bytes) -> Mapping[str, str]:
    """Returns the hash of each user. Raises InvalidConfiguration if a line is malformed, or a user occurs twice."""
    try:
        lines = text.decode().split("\n")
    except UnicodeDecodeError:
        raise InvalidConfiguration("the file of [basic] is not UTF-8") from None
    users: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        line = line.removesuffix("\r")
        if not line.strip() or line.startswith("#"):
            continue
        user, colon, hashed = line.partition(":")
        reason = "is not USER:HASH" if not colon or not is_role(user) else _unusable(hashed)
        if reason or user in users:
            wrong = reason or "has a user of an earlier line"
            raise InvalidConfiguration(f"line {number} of the file of [basic] {wrong}")
        users[user] = hashed
    return users


def _unusable(hashed: str) -> str:
    """Returns why a hash is refused; empty if it is accepted."""
    if match := _BCRYPT.fullmatch(hashed):
        cost = int(match[1])
        return "" if 4 <= cost <= BCRYPT_COST_MAX else f"has bcrypt of a cost outside 4 to {BCRYPT_COST_MAX}"
    if _APR1.fullmatch(hashed) or _SHA.fullmatch(hashed):
        return ""
    if re.fullmatch(r"[./A-Za-z0-9]{13}", hashed):
        return "has a DES hash, which looks at 8 characters only: make it anew with  htpasswd -B"
    return "has a hash other than bcrypt, $apr1$ and {SHA}: make it anew with  htpasswd -B"


def matches(password: bytes, hashed: str) -> bool:
    """Returns whether the password has this hash, which must be one that `parse` returned. Takes up to a second of a
    core.
    """
    if hashed.startswith("$2"):
        import bcrypt

        return bcrypt.checkpw(password[:BCRYPT_BYTES_MAX], hashed.encode())
    if match := _APR1.fullmatch(hashed):
        found = hash_apr1(password, match[1].encode())
    else:
        found = "{SHA}" + base64.b64encode(hashlib.sha1(password, usedforsecurity=False).digest()).decode()
    return hmac.compare_digest(found.encode(), hashed.encode())


def hash_apr1(password: bytes, salt: bytes) -> str:
    """Returns Apache's MD5 hash of the password, with 1,000 rounds."""
    inner = _md5(password + salt + password)
    text = password + b"$apr1$" + salt + (inner * (len(password) // 16 + 1))[: len(password)]
    for bit in range(len(password).bit_length()):
        text += b"\0" if len(password) >> bit & 1 else password[:1]
    digest = _md5(text)
    for number in range(1000):
        parts = [password if number % 2 else digest]
        parts += [salt] if number % 3 else []
        parts += [password] if number % 7 else []
        digest = _md5(b"".join([*parts, digest if number % 2 else password]))
    groups = [(0, 6, 12), (1, 7, 13), (2, 8, 14), (3, 9, 15), (4, 10, 5)]
    encoded = b"".join(_digits(digest[a] << 16 | digest[b] << 8 | digest[c], 4) for a, b, c in groups)
    return f"$apr1${salt.decode()}${(encoded + _digits(digest[11], 2)).decode()}"


def _md5(text: bytes) -> bytes:
    return hashlib.md5(text, usedforsecurity=False).digest()


def _digits(value: int, count: int) -> bytes:
    return bytes(_DIGITS[value >> 6 * at & 63] for at in range(count))
