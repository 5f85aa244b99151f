"""Names and ids of topics, namespaces, subscriptions, positions and messages.

    topic         persistent://tenant/namespace/local[-partition-N]    N without leading zeros
                  `local` alone is persistent://public/default/local; `tenant/namespace/local` gets the scheme
                  non-persistent://tenant/namespace/local: not stored, and another topic than the persistent one
    namespace     tenant/namespace
    message id    ledger:entry:partition:batch   partition -1: the topic has no partitions; batch -1: the whole entry
    earliest      -1:-1                          latest  (2^63-1):(2^63-1)

Tenants and namespaces match `[-=:.\\w]+`. Local names and subscriptions are any printable text without `/`: a name can
always be typed, logged and put into a path. No name is longer than NAME_BYTES_MAX in UTF-8. A name that breaks a rule
raises InvalidName, before anything is sent. Message ids are ordered by ledger, entry, batch index, and at last
partition (Pulsar's order).

Hashes of keys choose the partition to which a producer sends, and the slot of a Key_Shared subscription:

    hash_key(key)                      Murmur3 x86 32-bit, seed 0, of the key's UTF-8 bytes, masked with 0x7fffffff
    choose_partition_of_key(key, n)    hash_key(key) % n
    compute_key_slot(key)              hash_key(key) % 65536, 1 in place of 0; of the ordering key if there is one, else
                                       of the key

The numbers are Pulsar's. So a topic to which clients of both systems write keeps the order of each key, and a consumer
that names the slot of a key (STICKY) gets its messages. Pulsar's broker also takes modulo 65536 for such consumers, and
for ranges that it halves. Only for its hash ring, whose owners no client can predict, it takes modulo 65535.

Also in this file, below its heading: the parsing of whole numbers in text that is not trusted (digits).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from hashlib import sha256
from sys import intern
from typing import NamedTuple

import mmh3

from . import wire_pb2 as wire
from .errors import InvalidName

STICKY_SLOTS = 65535
"""The last slot of Key_Shared; the first one is 1."""


def hash_key(key: str | bytes) -> int:
    """Returns the hash of a message's key, from 0 to 2^31 - 1, by which its partition is chosen. Raises
    UnicodeEncodeError if the key has a lone surrogate, which would crash mmh3."""
    return mmh3.hash(key.encode() if isinstance(key, str) else key, 0, False) & 0x7FFFFFFF


def choose_partition_of_key(key: str | bytes, partitions: int) -> int:
    """Returns the partition, from 0 to `partitions` - 1, to which messages with this key go. Raises UnicodeEncodeError
    like `hash_key`."""
    assert partitions > 0, "a key needs at least one partition"
    return hash_key(key) % partitions


def compute_key_slot(key: str | bytes) -> int:
    """Returns the slot, 1 … 65535, of a message's key. Key_Shared assigns slots to consumers. Raises UnicodeEncodeError
    if the key has a lone surrogate, like `hash_key`."""
    return mmh3.hash(key.encode() if isinstance(key, str) else key, 0, False) & STICKY_SLOTS or 1


ROLE_CHARACTERS_MAX = 256
NAME_BYTES_MAX = 255
"""The longest part of a name, in bytes, as is usual for file systems and ZooKeeper. It keeps metadata paths short."""

TEXT_MAX = 4 * NAME_BYTES_MAX + 20
"""The longest whole name, in characters. A longer one is neither parsed nor quoted."""

INT64_MAX = (1 << 63) - 1

REAL_TOPIC, REAL_SUBSCRIPTION, ORIGIN_MESSAGE_ID = "REAL_TOPIC", "REAL_SUBSCRIPTION", "ORIGIN_MESSAGE_ID"
REDELIVERY_COUNT, DEAD_LETTER_REASON = "REDELIVERY_COUNT", "DEAD_LETTER_REASON"
RECONSUME_TIMES, DELAY_TIME = "RECONSUMETIMES", "DELAY_TIME"
"""Properties of dead letters and of messages that are tried again: the origin, and the failures. A broker, and clients
in all languages, write them."""
REDRIVEN = "REDRIVEN"
"""Property that counts how often a dead letter went back."""
REDRIVEN_ORIGIN, REDRIVEN_LETTER = "REDRIVEN_ORIGIN_MESSAGE_ID", "REDRIVEN_LETTER_ID"
"""Properties of a message that went back: the id of the message that became a letter first, and that of the letter that
went back last. Both are written as ORIGIN_MESSAGE_ID is: `(ledger,entry,partition,batch)`."""
REDRIVEN_TO = "REDRIVEN_TO"
"""Property of a message that went back to its topic for one subscription: the full name of the topic, without a
partition, `/`, and the subscription. It holds in that topic alone, so a copy in another topic is for all again. Brokers
look for it in the head of an entry: such a message is alone in its entry, or in chunks (proto/entry_filter.py)."""
FAIR_BY_KEY, FAIR_IN_FLIGHT, FAIR_RATE = "fair.by-key", "fair.max-in-flight-per-key", "fair.rate-per-key"
"""Properties of a Shared subscription whose keys take turns, and their limits."""
FAIRNESS_PROPERTIES = (FAIR_BY_KEY, FAIR_IN_FLIGHT, FAIR_RATE)
ORIGIN_PROPERTIES = (REAL_TOPIC, REAL_SUBSCRIPTION, ORIGIN_MESSAGE_ID)
ERROR, ERROR_MESSAGE, ERROR_TRACEBACK = "ERROR", "ERROR_MESSAGE", "ERROR_TRACEBACK"
ERROR_ATTEMPTS, ERROR_CONSUMER = "ERROR_ATTEMPTS", "ERROR_CONSUMER"
"""Properties of dead letters: the class of the last error, its text, its traceback, how often the message was given
back, and the consumer that gave it back last."""
ERROR_PROPERTIES = (ERROR, ERROR_MESSAGE, ERROR_TRACEBACK, ERROR_ATTEMPTS, ERROR_CONSUMER)
FAILURE_PROPERTIES = (REDELIVERY_COUNT, DEAD_LETTER_REASON, RECONSUME_TIMES, DELAY_TIME, *ERROR_PROPERTIES)
REDRIVEN_DIGITS_MAX = 9


def count_redrives(properties: Mapping[str, str]) -> int:
    """Returns how often a message with these properties went back from a dead-letter topic; 0 if REDRIVEN is no plain
    number."""
    told = properties.get(REDRIVEN, "")
    return (parse_number(told) or 0) if len(told) <= REDRIVEN_DIGITS_MAX else 0


def make_redriven_properties(
    letter: Mapping[str, str], letter_id: str, *, is_retry: bool = False, only_to: str = ""
) -> dict[str, str]:
    """Returns the properties of a dead letter's copy that goes back to a topic. Properties of the letter that describe
    its failure are left out, and properties that say that it was a letter are added.

    `letter`: the properties of the letter; `letter_id`: its id. `is_retry`: the copy goes to a retry-letter topic,
    whose consumers need the origin of the letter. `only_to`: the value of REDRIVEN_TO; "": every subscription gets the
    copy."""
    gone = (*FAILURE_PROPERTIES, REDRIVEN_TO) if is_retry else (*FAILURE_PROPERTIES, *ORIGIN_PROPERTIES, REDRIVEN_TO)
    kept = {REDRIVEN_TO: only_to} if only_to else {}
    kept |= {name: value for name, value in letter.items() if name not in gone}
    if origin := letter.get(REDRIVEN_ORIGIN) or letter.get(ORIGIN_MESSAGE_ID):
        kept[REDRIVEN_ORIGIN] = origin
    return {**kept, REDRIVEN_LETTER: letter_id, REDRIVEN: str(count_redrives(letter) + 1)}


_SCHEMES = ("non-persistent://", "persistent://")  # by `persistent`
_STRICT = re.compile(r"[-=:.\w]+\Z")
_PARTITION = re.compile(r"(.+)-partition-(0|[1-9][0-9]{0,8})\Z", re.DOTALL)
_DIGITS = re.compile(r"[\d\u00b2\u00b3\u00b9\u2070-\u2089]+\Z")
"""Matches digits of any script, including superscript and subscript ones."""
_TEXT_ID = re.compile(r"(-?\d{1,19}):(-?\d{1,19})(?::(-?\d{1,9}))?(?::(-?\d{1,9}))?\Z")


def _check_length(kind: str, text: str) -> None:
    if len(text) > TEXT_MAX:
        raise InvalidName(f"{kind} name of {len(text)} characters is too long", size=len(text), limit=TEXT_MAX)


def _check_size(kind: str, text: str) -> None:
    if len(text) > NAME_BYTES_MAX:
        _check_length(kind, text)
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise InvalidName(f"{kind} {text!r} is not valid Unicode", name=repr(text)) from error
    if size > NAME_BYTES_MAX:
        raise InvalidName(f"{kind} name of {size} bytes is too long", size=size, limit=NAME_BYTES_MAX)


@lru_cache(maxsize=256)  # the topics that are opened are of few namespaces
def _check_strict(kind: str, text: str) -> str:
    _check_size(kind, text)
    if not _STRICT.match(text):
        raise InvalidName(f"{kind} name {text!r} is not made of letters, digits and any of -=:._", name=text)
    return text


def _check_loose(kind: str, text: str) -> str:
    _check_size(kind, text)
    if not text or not text.isprintable() or text != text.strip() or "/" in text or text in (".", ".."):
        raise InvalidName(f"{kind} name {text!r} must be printable text without '/', and not empty", name=repr(text))
    return text


def check_tenant_name(text: str) -> str:
    """Returns `text` unchanged if it is a valid name of a tenant. Raises InvalidName otherwise."""
    return _check_strict("tenant", text)


def check_resource_group_name(text: str) -> str:
    """Returns `text` unchanged if it is a valid name of a resource group. Raises InvalidName otherwise."""
    return _check_strict("resource group", text)


def check_namespace_name(text: str) -> str:
    """Returns the local name of a namespace (without its tenant) unchanged. Raises InvalidName if it breaks the rules
    of names."""
    return _check_strict("namespace", text)


def check_subscription_name(text: str) -> str:
    """Returns `text` unchanged if it is a valid name of a subscription. Raises InvalidName otherwise."""
    return _check_loose("subscription", text)


def check_producer_name(text: str) -> str:
    """Returns the name of a producer unchanged. Raises InvalidName if it is too long or not printable text. Most
    characters are allowed, because Pulsar's Java client names its producers of dead letters after topics."""
    _check_size("producer", text)
    if not text or not text.isprintable() or text != text.strip():
        raise InvalidName(f"producer name {text!r} must be printable text, and not empty", name=repr(text))
    return text


def is_valid_role(text: str) -> bool:
    """Returns whether the text may be the name of a role: 1 to ROLE_CHARACTERS_MAX printable characters, without white
    space at its ends."""
    return 0 < len(text) <= ROLE_CHARACTERS_MAX and text.isprintable() and text == text.strip()


def check_role(text: str) -> str:
    """Returns the name of a role unchanged. Raises InvalidName if it is not valid (`is_valid_role`)."""
    if not is_valid_role(text):
        raise InvalidName(f"a role is printable text of 1 to {ROLE_CHARACTERS_MAX} characters, not {text[:40]!r}")
    return text


@dataclass(frozen=True, slots=True, order=True)
class NamespaceName:
    """The name of a namespace: `tenant/namespace`."""

    tenant: str
    namespace: str

    @classmethod
    def parse(cls, text: str) -> NamespaceName:
        """Returns the name of a namespace in the text TENANT/NAMESPACE. Raises InvalidName if it breaks the rules of
        names."""
        _check_length("namespace", text)
        parts = text.split("/")
        if len(parts) != 2:
            raise InvalidName(f"namespace {text!r} is not TENANT/NAMESPACE", name=text)
        return cls(check_tenant_name(parts[0]), check_namespace_name(parts[1]))

    def __str__(self) -> str:
        return f"{self.tenant}/{self.namespace}"


@dataclass(frozen=True, slots=True, order=True)
class TopicName:
    """The name of a topic, or of one partition of a topic. `local` is its last part, without the suffix of a partition;
    `partition` is the number of the partition, -1: the name is that of the whole topic.

    `full` is the whole name with its scheme. `stored_local` is the last part with the suffix of the partition, as it is
    stored and listed. Both are computed once, because opening a topic uses them a dozen times."""

    tenant: str
    namespace: str
    local: str
    partition: int = -1
    persistent: bool = True
    namespace_name: NamespaceName = field(init=False, repr=False, compare=False)
    full: str = field(init=False, repr=False, compare=False)
    stored_local: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        local = self.local if self.partition < 0 else f"{self.local}-partition-{self.partition}"
        object.__setattr__(self, "namespace_name", _namespace_name(self.tenant, self.namespace))
        object.__setattr__(self, "full", f"{_SCHEMES[self.persistent]}{self.tenant}/{self.namespace}/{local}")
        object.__setattr__(self, "stored_local", local)

    @classmethod
    @lru_cache(maxsize=1024)  # the requests of a client that opens a topic follow each other
    def parse(cls, text: str) -> TopicName:
        """Returns the name of a topic in one of the forms at the head of this module. Raises InvalidName if it breaks
        the rules of names. Results are cached."""
        _check_length("topic", text)
        persistent, (tenant, namespace, local) = _topic_parts(text)
        tenant, namespace = intern(check_tenant_name(tenant)), intern(check_namespace_name(namespace))
        _check_loose("topic", local)
        partition = -1
        if found := _PARTITION.match(local):
            local, partition = found[1], int(found[2])
        elif "-partition-" in local and _DIGITS.match(local.rpartition("-partition-")[2]):
            raise InvalidName(f"topic {text!r} ends in a partition number that is not written plainly", name=text)
        return cls(tenant, namespace, local, partition, persistent)

    @property
    def base(self) -> TopicName:
        """Returns the name of the topic to which this partition belongs; the name itself if it is not that of a
        partition."""
        return self if self.partition < 0 else replace(self, partition=-1)

    @property
    def is_partition(self) -> bool:
        """Returns whether this is one partition of a partitioned topic."""
        return self.partition >= 0

    def with_partition(self, number: int) -> TopicName:
        """Returns the name of the partition `number`, from 0, of this topic."""
        assert number >= 0, "a partition number is not negative"
        return replace(self, partition=number)

    def check_room_for_partitions(self, partitions: int) -> None:
        """Raises InvalidName if a partition's name would be longer than a name may be, with so many partitions."""
        if not partitions:
            return
        end = f"-partition-{partitions - 1}"
        size, room = len(self.local.encode()), NAME_BYTES_MAX - len(end)
        if size > room:
            raise InvalidName(
                f"topic name of {size} bytes has no room for the end {end} of its last partition: with "
                f"{partitions} partitions it has at most {room} bytes",
                size=size, limit=room,
            )  # fmt: skip

    def __str__(self) -> str:
        return self.full


@lru_cache(maxsize=1024)
def _namespace_name(tenant: str, namespace: str) -> NamespaceName:
    return NamespaceName(tenant, namespace)


def _topic_parts(text: str) -> tuple[bool, tuple[str, str, str]]:
    scheme, separator, rest = text.partition("://")
    if not separator:
        parts = text.split("/")
        if len(parts) == 1:
            return True, ("public", "default", parts[0])  # `str` itself: a subclass may print as something else
    elif scheme in ("persistent", "non-persistent"):
        parts = rest.split("/")
    else:
        raise InvalidName(f"{text!r}: a topic starts with persistent://, not {scheme}://", name=text)
    if len(parts) != 3:
        raise InvalidName(f"topic {text!r} is neither NAME nor [persistent://]TENANT/NAMESPACE/NAME", name=text)
    return scheme != "non-persistent", (parts[0], parts[1], parts[2])


class Position(NamedTuple):
    """The place of an entry in a topic: its ledger id and its entry id. Positions are ordered by ledger, then by
    entry."""

    ledger_id: int
    entry_id: int

    def __str__(self) -> str:
        return f"{self.ledger_id}:{self.entry_id}"

    @classmethod
    def parse(cls, text: str) -> Position:
        """Parses a position from text in the form of `str`, such as "3:14". Raises ValueError if the text has another
        form."""
        ledger_id, _, entry_id = text.partition(":")
        return cls(int(ledger_id), int(entry_id))


EARLIEST = Position(-1, -1)
LATEST = Position(INT64_MAX, INT64_MAX)


DEAD_LETTERS, RETRIES = "-DLQ", "-RETRY"
"""Suffixes of the default names of dead-letter topics and retry-letter topics."""
LETTER_TOPIC_BYTES_MAX = NAME_BYTES_MAX - len("-partition-9999")
"""The longest default name of a letter topic, in bytes: the topic may be made with partitions."""
LETTER_SUBSCRIPTION_BYTES_MAX = 100
"""Bytes of the subscription in a shortened name of a letter topic."""
SHORTENED_DIGITS = 20
"""The fewest hexadecimal digits of a hash in a shortened name: 80 bits."""


def shorten_name(text: str, size_bytes: int) -> str:
    """Returns `text` if it has at most `size_bytes` bytes in UTF-8. Otherwise returns exactly that many bytes: the
    beginning of the text, `~`, and the first digits of the SHA-256 of the whole text."""
    whole = text.encode("utf-8", "surrogatepass")
    if len(whole) <= size_bytes:
        return text
    begin = whole[: size_bytes - SHORTENED_DIGITS - 1].decode("utf-8", "ignore")
    return f"{begin}~{sha256(whole).hexdigest()}".encode()[:size_bytes].decode()


def make_letter_topic_name(topic: TopicName, subscription: str, suffix: str) -> TopicName:
    """Returns the default dead-letter topic (`suffix` DEAD_LETTERS) or retry-letter topic (RETRIES) of a subscription:
    `<topic>-<subscription><suffix>`. Raises InvalidName if `subscription` is not valid in a name.

    A name with more than LETTER_TOPIC_BYTES_MAX bytes is shortened (`shorten_name`): first the subscription to
    LETTER_SUBSCRIPTION_BYTES_MAX, then the topic to the bytes that are left. Both suffixes leave the same room, and a
    shortened topic has exactly the bytes that are left, so that the letter topics of `<shortened topic>` are those of
    `<topic>` (`find_retried_topic`)."""
    local, room = topic.local, LETTER_TOPIC_BYTES_MAX - len(RETRIES) - 1
    if len(f"{local}{subscription}".encode("utf-8", "surrogatepass")) > room:
        subscription = shorten_name(subscription, LETTER_SUBSCRIPTION_BYTES_MAX)
        local = shorten_name(local, room - len(subscription.encode("utf-8", "surrogatepass")))
    return TopicName.parse(replace(topic.base, local=f"{local}-{subscription}{suffix}").full)


def is_default_letter_topic(topic: TopicName, subscription: str, suffix: str) -> bool:
    """Returns whether `make_letter_topic_name` makes this name for some topic, this subscription and this suffix."""
    return bool(_letter_ending(topic, subscription, suffix))


def find_retried_topic(topic: TopicName, subscription: str) -> TopicName:
    """Returns the topic whose default retry-letter topic for this subscription is `topic`; `topic` itself if it is not
    the name of a retry-letter topic. Where that name is shortened, returns a shortened name of the topic, which has the
    same letter topics. Raises InvalidName if nothing is left of the local name without that ending."""
    if ending := _letter_ending(topic, subscription, RETRIES):
        return TopicName.parse(topic.base.full.removesuffix(ending))
    return topic


def _letter_ending(topic: TopicName, subscription: str, suffix: str) -> str:
    for each in (subscription, shorten_name(subscription, LETTER_SUBSCRIPTION_BYTES_MAX)):
        if topic.local.endswith(ending := f"-{each}{suffix}"):
            return ending
    return ""


def make_redriven_to(topic: TopicName, subscription: str) -> str:
    """Returns the value of REDRIVEN_TO of a message in `topic` that only this subscription gets."""
    return f"{topic.base.full}/{subscription}"


def parse_redriven_to(value: str, topic: TopicName) -> str:
    """Returns the name of the only subscription that gets a message of `topic` with this value of REDRIVEN_TO. Returns
    "" if all subscriptions get it: the message has no such value, or came from another topic with it."""
    where, _, subscription = value.rpartition("/")
    return subscription if where == topic.base.full else ""


@dataclass(frozen=True, slots=True)
class MessageId:
    """The id of a message: the position of its entry, its partition (-1: none), and its index in the batch (-1: no
    batch)."""

    ledger_id: int
    entry_id: int
    partition: int = -1
    batch_index: int = -1

    @classmethod
    def parse(cls, text: str) -> MessageId:
        """Parses a message id from the text `ledger:entry[:partition[:batch]]`, `earliest` or `latest`. Raises
        InvalidName if the text has another form, or if a number is too large."""
        if text in ("earliest", "latest"):
            return cls(*(EARLIEST if text == "earliest" else LATEST))
        found = _TEXT_ID.match(text)
        if found is None or max(abs(int(found[1])), abs(int(found[2]))) > INT64_MAX:
            raise InvalidName(f"{text!r} is not a message id LEDGER:ENTRY[:PARTITION[:BATCH]]", name=text)
        return cls(int(found[1]), int(found[2]), int(found[3] or -1), int(found[4] or -1))

    @classmethod
    def from_wire(cls, message: wire.MessageId) -> MessageId:
        return cls(message.ledger_id, message.entry_id, message.partition, message.batch_index)

    def to_wire(self) -> wire.MessageId:
        return wire.MessageId(
            ledger_id=self.ledger_id, entry_id=self.entry_id, partition=self.partition, batch_index=self.batch_index
        )

    @property
    def position(self) -> Position:
        return Position(self.ledger_id, self.entry_id)

    def _order(self) -> tuple[int, int, int, int]:
        return self.ledger_id, self.entry_id, self.batch_index, self.partition

    def __lt__(self, other: MessageId) -> bool:
        return self._order() < other._order()

    def __le__(self, other: MessageId) -> bool:
        return self._order() <= other._order()

    def __gt__(self, other: MessageId) -> bool:
        return self._order() > other._order()

    def __ge__(self, other: MessageId) -> bool:
        return self._order() >= other._order()

    def __str__(self) -> str:
        return f"{self.ledger_id}:{self.entry_id}:{self.partition}:{self.batch_index}"


# -------------------------------------------------------------------------------------------------------- digits
# Text that a stranger may give, as a whole number.
#
# `str.isdigit` is true of `²` and of ten thousand nines, and `int` raises ValueError for both; `int` takes the digits
# of every script, so that one number has many spellings. Guard: tests/proto/test_digits.py, which also finds other
# ways.


DIGITS_MAX = 19
"""The largest number of digits of a number below 2^63."""


def parse_number(text: str) -> int | None:
    """Parses a whole number of ASCII digits and returns it. Returns None if the text is anything else, or has more than
    DIGITS_MAX digits."""
    return int(text) if len(text) <= DIGITS_MAX and text.isascii() and text.isdigit() else None
