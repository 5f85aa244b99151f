"""The cookie's bytes: which bookie owns a data directory. The metadata has the same facts (CookieRecord).

    cookie = note (format/mark.py) with magic "MGN-COOK"
    body   = {"bookie": uuid text, "instance": cluster instance, "directories": [place, …], "starts": count}

`starts` counts the starts that were completed; a cookie without it counts 0. Written anew at each start. A reader
refuses any damage: it never guesses the owner of a directory (ledger protocol §2.7).
Example: `MGN-COOK 0001 0000003f {"bookie":"b","instance":"i","directories":["h:/d"],"starts":2} <crc32c>`.
"""

from __future__ import annotations

import msgspec

from . import mark as note

MAGIC = b"MGN-COOK"


class Cookie(msgspec.Struct, frozen=True):
    """The content of a cookie file, which says to whom a data directory belongs: the bookie's uuid as text, the
    cluster's instance, the bookie's directories, and the number of completed starts."""

    bookie: str
    instance: str
    directories: tuple[str, ...]
    starts: int = 0


def encode(cookie: Cookie) -> bytes:
    return note.encode_checked_json(MAGIC, cookie)


def decode(data: bytes, path: str) -> Cookie:
    """Returns the cookie that is encoded in `data`. Raises DamagedFile or NewerFormat; `path` is named in the error
    text."""
    return note.decode_checked_json(data, MAGIC, Cookie, path)
