"""Authenticates callers by user and password (`Authorization: Basic …`), with the password hashes of an htpasswd file.

An unknown user and a wrong password get the same answer after the same work. For an unknown user, the password is
compared with the hash of another user, and the result is ignored. Hashes are computed in HASHES_AT_ONCE workers;
further callers wait, at most WAITING_CALLERS_MAX. A successful login is cached for LOGIN_CACHE_S under a keyed digest
of user and password, or until the file changes. A password that another machine sends without encryption is refused.

Password files of Apache's htpasswd: lines `user:hash`, with bcrypt (`-B`), `$apr1$` (`-m`) or `{SHA}` (`-s`).

Hashes of crypt(3) are refused, because DES uses only eight characters of the password, and its salt is short. Empty
lines and lines that begin with # are skipped. The text of an error names the number of a line, and never quotes it.

Also in this file, below its heading: the limit to the guessing of passwords (guessing).
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import hmac
import ipaddress
import os
import re
from collections import OrderedDict
from collections.abc import Mapping

from ..proto.errors import InvalidConfiguration, Unauthenticated, Unavailable
from ..proto.names import is_valid_role
from ..runtime.access import Caller, Principal, PrincipalKind
from ..runtime.clock import Clock
from ..runtime.tasks import Worker, Workers
from .settings import BasicSection, WatchedValue, read_private_file
from .token import PrincipalCache

BCRYPT_COST_MAX = 14
"""Greatest cost of bcrypt: a password of cost 14 takes about 1.3 s of a core; each caller may ask for one."""

BCRYPT_BYTES_MAX = 72
"""Bytes of a password that bcrypt looks at; htpasswd cuts what is longer."""

_BCRYPT = re.compile(r"\$2[aby]\$(\d\d)\$[./A-Za-z0-9]{53}")
_APR1 = re.compile(r"\$apr1\$([./A-Za-z0-9]{1,8})\$[./A-Za-z0-9]{22}")
_SHA = re.compile(r"\{SHA\}[+/A-Za-z0-9]{27}=")
_DIGITS = b"./0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


def parse_htpasswd(text: bytes) -> Mapping[str, str]:
    """Returns the password hash of each user in the text of an htpasswd file. Raises InvalidConfiguration if a line is
    malformed, or if a user occurs twice."""
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
        reason = "is not USER:HASH" if not colon or not is_valid_role(user) else _unusable(hashed)
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


def matches_password(password: bytes, hashed: str) -> bool:
    """Returns whether `hashed` is a hash of the password. `hashed` must be a hash that `parse_htpasswd` returned.
    Occupies one core for up to a second or more, so it must not be called in an event loop."""
    if hashed.startswith("$2"):
        import bcrypt

        return bcrypt.checkpw(password[:BCRYPT_BYTES_MAX], hashed.encode())
    if match := _APR1.fullmatch(hashed):
        found = hash_apr1(password, match[1].encode())
    else:
        found = "{SHA}" + base64.b64encode(hashlib.sha1(password, usedforsecurity=False).digest()).decode()
    return hmac.compare_digest(found.encode(), hashed.encode())


def hash_apr1(password: bytes, salt: bytes) -> str:
    """Returns the hash of the password by Apache's variant of MD5 (apr1), with 1,000 rounds, as a line of htpasswd has
    it: `$apr1$SALT$HASH`."""
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


# ------------------------------------------------------------------------------------------------------ guessing
# Limits the guessing of passwords: after UNDELAYED_FAILURES failures of a key, each further one makes the next wait
# longer.
#
# A key is an address or a user. The wait is 1 s at first and doubles to 60 s; a key without failures for
# FAILURE_MEMORY_S is forgotten. Pure: time comes in as `now_s`. The number of keys is bounded: the one that failed
# longest ago goes first.


UNDELAYED_FAILURES = 5
WAIT_MAX_S = 60.0
FAILURE_MEMORY_S = 600.0
FAILED_KEYS_MAX = 10_000


class FailedLogins:
    """Counts the failed logins, by address and by user. From the UNDELAYED_FAILURES-th failure on, the next attempt
    must wait, longer after each failure."""

    def __init__(self) -> None:
        self._failed: OrderedDict[str, tuple[int, float]] = OrderedDict()  # key → number, when the last was

    def delay_s(self, key: str, now_s: float) -> float:
        """Returns for how many seconds the address or user `key` must wait before the next attempt to log in; 0 if it
        may try now. `now_s`: monotonic seconds."""
        count, last_s = self._failed.get(key, (0, now_s))
        if count < UNDELAYED_FAILURES or now_s - last_s >= FAILURE_MEMORY_S:
            return 0.0
        wait_s = min(WAIT_MAX_S, 2.0 ** min(count - UNDELAYED_FAILURES, 10))
        return max(0.0, last_s + wait_s - now_s)

    def record_failure(self, key: str, now_s: float) -> None:
        """Counts a failed login of the address or user `key`, at the time `now_s` (monotonic seconds)."""
        count, last_s = self._failed.pop(key, (0, now_s))
        self._failed[key] = (1 if now_s - last_s >= FAILURE_MEMORY_S else count + 1, now_s)
        if len(self._failed) > FAILED_KEYS_MAX:
            self._failed.popitem(last=False)

    def clear_failures(self, key: str) -> None:
        """Removes the count of failed logins of this key, because a login succeeded."""
        self._failed.pop(key, None)


# --------------------------------------------------------------------------------------------------------- basic


HASHES_AT_ONCE = 2
WAITING_CALLERS_MAX = 100
LOGIN_CACHE_S = 300.0
CREDENTIALS_CHARACTERS_MAX = 2048
"""Characters of base64: user and password."""
PASSWORD_FILE_BYTES_MAX = 1 << 20


class BasicProvider:
    """Authenticates users by a file of users and password hashes. The constructor raises InvalidConfiguration if the
    file cannot be read, if other users may read it, or if a line is malformed. A file that changes later is read again.
    """

    def __init__(self, settings: BasicSection, clock: Clock, workers: Workers) -> None:
        try:
            import bcrypt  # noqa: F401
        except ImportError as error:
            raise InvalidConfiguration("security needs more packages: pip install 'magnetar[security]'") from error
        self._users: WatchedValue[Mapping[str, str]] = WatchedValue(settings.file, lambda: _read(settings.file), clock)
        self._clock = clock
        self._workers = workers
        self._idle: list[Worker] = []
        self._started = 0
        self._turn = asyncio.Semaphore(HASHES_AT_ONCE)
        self._waiting = 0
        self._guessing = FailedLogins()
        self._key = os.urandom(32)
        self._known = PrincipalCache()
        self._version = 0

    async def authenticate(self, credentials: str, caller: Caller) -> Principal:
        """Returns the principal of the user whose name and password are in `credentials`, the text after `Basic ` in
        the header. May wait for other comparisons of passwords.

        Raises Unauthenticated if the credentials are malformed or wrong, or if another machine sent the password
        without encryption. Also raises it after too many failures of this address or user. Raises Unavailable if too
        many logins wait.
        """
        address = caller.peer.rpartition(":")[0].strip("[]")
        if not (caller.is_encrypted or _is_loopback(address)):
            raise Unauthenticated("a password is not taken in clear: use a magnetar+ssl:// URL, which encrypts it")
        user, password = parse_basic_credentials(credentials)
        digest = hmac.digest(self._key, f"{len(user)}:{user}".encode() + password, hashlib.sha256)
        users = self._users.load_current()
        if self._version != self._users.version:
            self._version = self._users.version
            self._known.clear()
        found = self._known.find(digest, self._clock.monotonic())
        if found is None:
            await self._check(users, user, password, (f"address {address}", f"user {user}"))
            found = Principal(user, PrincipalKind.CLIENT, "basic", proof=self._proof(users.get(user, "")))
            if self._version == self._users.version:
                self._known.add(digest, found, self._clock.monotonic() + LOGIN_CACHE_S)
        return found

    def why_lapsed(self, principal: Principal) -> str:
        """Returns the reason why the principal's login is not valid any more; empty if it is still valid. This provider
        must have authenticated the principal."""
        hashed = self._users.load_current().get(principal.name)
        same = hashed is not None and hmac.compare_digest(principal.proof, self._proof(hashed))
        return "" if same else "the user or its password has changed"

    def _proof(self, hashed: str) -> bytes:
        return hmac.digest(self._key, hashed.encode(), hashlib.sha256)

    async def _check(self, users: Mapping[str, str], user: str, password: bytes, keys: tuple[str, str]) -> None:
        self._refuse_guessing(keys)
        if self._waiting >= WAITING_CALLERS_MAX + HASHES_AT_ONCE:
            raise Unavailable("too many logins with a password wait for their turn: try again")
        self._waiting += 1
        try:
            is_right = await self._compared(users, user, password, keys)
        finally:
            self._waiting -= 1
        if is_right:
            self._guessing.clear_failures(keys[1])  # the address keeps its failures: it may have one user of its own
            return
        for key in keys:
            self._guessing.record_failure(key, self._clock.monotonic())
        raise Unauthenticated("the user or the password is wrong")

    def _refuse_guessing(self, keys: tuple[str, str]) -> None:
        """Raises Unauthenticated while the address or the user must wait after failed logins."""
        wait_s = max(self._guessing.delay_s(key, self._clock.monotonic()) for key in keys)
        if wait_s:
            raise Unauthenticated(f"too many failed logins of this address or user: wait {wait_s:.0f} s")

    async def _compared(self, users: Mapping[str, str], user: str, password: bytes, keys: tuple[str, str]) -> bool:
        await self._turn.acquire()
        try:
            self._refuse_guessing(keys)  # of those that failed while this one waited
            if not self._idle:
                self._started += 1
                self._idle.append(self._workers.start(f"password-{self._started}"))
            worker = self._idle.pop()
            comparing = worker.run(_verify, users, self._key, user, password)
        except BaseException:
            self._turn.release()
            raise
        comparing.add_done_callback(lambda _: self._freed(worker))
        await asyncio.wait((comparing,))  # a caller that disconnects does not free the worker before it is done
        return comparing.result()

    def _freed(self, worker: Worker) -> None:
        self._idle.append(worker)
        self._turn.release()


def parse_basic_credentials(credentials: str) -> tuple[str, bytes]:
    """Returns the user and the password in `credentials`, which must be the base64 text of USER:PASSWORD; the password
    may contain colons. Raises Unauthenticated if they are malformed."""
    if len(credentials) > CREDENTIALS_CHARACTERS_MAX:
        raise Unauthenticated(f"the user and password have more than {CREDENTIALS_CHARACTERS_MAX} characters")
    try:
        user, colon, password = base64.b64decode(credentials, validate=True).partition(b":")
        name = user.decode()
    except (binascii.Error, ValueError):
        colon = b""
    if not colon or b"\0" in password:
        raise Unauthenticated("the credentials are not base64 of USER:PASSWORD")
    return name, password


def _read(source: str) -> Mapping[str, str]:
    return parse_htpasswd(read_private_file(source.removeprefix("file:").removeprefix("//"), PASSWORD_FILE_BYTES_MAX))


def _verify(users: Mapping[str, str], key: bytes, user: str, password: bytes) -> bool:
    """Returns whether the password is the user's. Runs in a worker."""
    hashed = users.get(user)
    if hashed is None and users:
        number = int.from_bytes(hmac.digest(key, user.encode(), hashlib.sha256)[:8], "big")
        matches_password(password, list(users.values())[number % len(users)])
    return hashed is not None and matches_password(password, hashed)


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False
