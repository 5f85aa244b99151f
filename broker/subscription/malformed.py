"""Entries whose head declares messages that are not in them: no number of a head charges a limit for ever.

A delivery charges the limits of unacknowledged messages with what the entry's head declares (core/dispatch.py): to look
inside would be work for each message. A consumer that cannot read the entry may never acknowledge it; it would be
blocked, and so would the next one that gets it. So at the moment when a limit is reached, the entries that take more
than a SHARE of it are looked at, in a thread where that is long. What is malformed is discarded: acknowledged by the
broker, and logged. Only bytes that are intact are judged, and what is encrypted or a chunk is left to its consumers.
Many small numbers charge no more than entries of that size would that a consumer does not acknowledge.
Guarding tests: tests/client/consume/test_malformed.py.
"""

from __future__ import annotations

from ...proto.entry import client_part_of, decode_columns, is_intact, parse_header
from ...proto.errors import CorruptEntry
from ...proto.names import Position
from ...runtime.files import Buffer
from .core.deliveries import DispatchLimits
from .core.policies.policy import Member

SHARE = 16
"""Divisor of a limit: an entry that takes more than this part of it is doubted. At most so many entries are checked
when the limit is reached."""


def doubted(member: Member, limits: DispatchLimits) -> list[Position]:
    """Returns the entries that the consumer holds and that take more than their share of a limit."""
    share = max(1, min((each for each in limits if each), default=0) // SHARE)
    return [position for position, messages in member.outstanding.items() if messages > share]


def is_malformed(entry: Buffer) -> bool:
    """Whether no consumer can read the stored entry."""
    if not is_intact(entry):
        return False
    part = client_part_of(entry)
    try:
        header = parse_header(part, verify=False)
        if not header.metadata.encryption_keys and header.metadata.num_chunks_from_msg <= 1:
            decode_columns(header, part)
    except CorruptEntry:
        return True
    return False
