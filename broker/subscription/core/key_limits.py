"""The limits of each key of a fair Shared subscription (core/fair_shared.py), as its properties name them.

They are stored with the subscription, and set by `subscribe(fair_by_key=True, …)`, over REST or on the command line
like all properties of a subscription. Guarding test: tests/broker/subscription/core/test_fair_shared.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from math import isfinite

import msgspec

from ....proto.names import FAIR_BY_KEY, FAIR_IN_FLIGHT, FAIR_RATE, parse_number
from ...common.refusals import SubscribeRefusal

LIMIT_MAX = 1_000_000_000
"""Largest limit of a key: more than any subscription delivers."""


class KeyLimits(msgspec.Struct, frozen=True):
    """The limits of each key of a fair subscription; 0: no limit. `max_in_flight`: unacknowledged messages; `rate`:
    messages per second."""

    max_in_flight: int = 0
    rate: float = 0.0


def parse_key_limits(properties: Mapping[str, str]) -> KeyLimits | None:
    """Returns the limits that the properties of a subscription ask for; None: the subscription is not fair by key. A
    value that does not parse is no limit: `check_fair_properties` refuses it before it is stored."""
    if properties.get(FAIR_BY_KEY) != "true":
        return None
    rate = 0.0
    with suppress(ValueError):
        rate = float(properties.get(FAIR_RATE, "0"))
    in_flight = parse_number(properties.get(FAIR_IN_FLIGHT, "0")) or 0
    return KeyLimits(min(in_flight, LIMIT_MAX), rate if 0 < rate <= LIMIT_MAX else 0.0)


def check_fair_properties(properties: Mapping[str, str]) -> None:
    """Raises InvalidRequest if the properties of a subscription name limits of keys that do not parse, or limits
    without fair.by-key."""
    refuse = SubscribeRefusal.PROPERTIES.error
    by_key = properties.get(FAIR_BY_KEY, "false")
    if by_key not in ("true", "false"):
        raise refuse(f"{FAIR_BY_KEY} is true or false, not {by_key[:40]!r}")
    in_flight, rate = properties.get(FAIR_IN_FLIGHT), properties.get(FAIR_RATE)
    if by_key == "false" and (in_flight is not None or rate is not None):
        raise refuse(f"{FAIR_IN_FLIGHT} and {FAIR_RATE} need {FAIR_BY_KEY}=true")
    if in_flight is not None and not 0 < (parse_number(in_flight) or 0) <= LIMIT_MAX:
        raise refuse(f"{FAIR_IN_FLIGHT} is a whole number from 1 to {LIMIT_MAX}, not {in_flight[:40]!r}")
    if rate is not None and not _is_rate(rate):
        raise refuse(f"{FAIR_RATE} is messages per second, above 0 and at most {LIMIT_MAX}, not {rate[:40]!r}")


def _is_rate(text: str) -> bool:
    try:
        rate = float(text)
    except ValueError:
        return False
    return isfinite(rate) and 0 < rate <= LIMIT_MAX
