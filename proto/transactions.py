"""Ids and states of transactions (docs/transactions.md).

    id      (most, least)    most: number of the coordinator, from 0; Pulsar's Java client routes by it
                             least: epoch of the coordinator << 40 | counter within the epoch, from 0
    text    (3,1099511627781)                                          as Pulsar's clients print it

Example: counter 5 of the epoch 1 of coordinator 3 is `TxnId(3, (1 << 40) | 5)`. An epoch grows with each take-over of a
coordinator, so no id is given twice. Counters have gaps of random length, so an id does not tell the next one. Epochs
have EPOCH_BITS bits: ids fit 63 bits, Java's long.
"""

from __future__ import annotations

import enum
import re
from typing import NamedTuple

from .errors import InvalidRequest
from .routing import partition_of

COUNTER_BITS, EPOCH_BITS = 40, 23
COORDINATORS_MAX = 1 << 10
_TEXT = re.compile(r"\(?(\d{1,4}),\s?(\d{1,19})\)?\Z")


class TxnState(enum.IntEnum):
    """The state of a transaction, as a coordinator answers it. The numbers are those of proto/wire.proto."""

    OPEN = 0
    PREPARED = 1
    """Durable: it survives its coordinator and its client, until its deadline; it ends by a commit or an abort."""
    COMMITTED = 2
    ABORTED = 3


class Isolation(enum.IntEnum):
    """The messages that a consumer sees: committed ones, or all that are stored, also of open and aborted transactions.
    """

    READ_COMMITTED = 0
    READ_UNCOMMITTED = 1


class TxnId(NamedTuple):
    """The id of a transaction: Pulsar's two halves."""

    most: int
    least: int

    @classmethod
    def of(cls, coordinator: int, epoch: int, counter: int) -> TxnId:
        """Checks nothing: the coordinator keeps within the bits."""
        return cls(coordinator, epoch << COUNTER_BITS | counter)

    @classmethod
    def checked(cls, most: int, least: int) -> TxnId:
        """Returns the id. InvalidRequest: the numbers cannot be an id of this cluster."""
        if not (0 <= most < COORDINATORS_MAX and 0 <= least < 1 << (COUNTER_BITS + EPOCH_BITS)):
            raise InvalidRequest(f"({most},{least}) is no transaction id")
        return cls(most, least)

    @classmethod
    def parse(cls, text: str) -> TxnId:
        """Parses an id. InvalidRequest: the text is no id."""
        found = _TEXT.match(text)
        if found is None:
            raise InvalidRequest(f"{text[:100]!r} is no transaction id; one looks like (3,1099511627781)")
        return cls.checked(int(found[1]), int(found[2]))

    @property
    def coordinator(self) -> int:
        """The number of its coordinator."""
        return self.most

    @property
    def epoch(self) -> int:
        """Returns the epoch of the coordinator when the transaction began."""
        return self.least >> COUNTER_BITS

    @property
    def counter(self) -> int:
        """Returns the number within the epoch, from 0."""
        return self.least & (1 << COUNTER_BITS) - 1

    def __str__(self) -> str:
        return f"({self.most},{self.least})"


def coordinator_of(name: str, coordinators: int) -> int:
    """Returns the coordinator that has the transactions of a name: of a holder, or of a sink."""
    return partition_of(name, coordinators)


HALF_MESSAGES_MAX = 100
HALF_BYTES_MAX = 256 << 10
"""Encoded bytes of all messages of a half: it is one request, of which a broker takes 512 KiB (runtime/network.py)."""
