"""The policies in force for a topic: every policy resolved, topic > namespace > broker (Pulsar B5).

`Applied` (proto/applied.py) is a value: code that decides by a policy reads `topic.applied` anew each time and never
keeps a field of it. The broker's own level is its configuration, which has the same fields (broker/common/config.py
`BrokerConfig`), and what was changed of it for all brokers while they run (`DYNAMIC`).
Inheritance is by field, but what is only sensible together is set together (`check` in proto/policies.py: both
retentions, all three quorums). Kept current by broker/cluster/policy_cache.py: a changed policy applies to the next
decision, without a restart or an unload; what was decided before stays.
Guarding test: tests/broker/common/test_applied.py.
"""

from __future__ import annotations

from msgspec.structs import replace

from ...proto.applied import Applied
from ...proto.policies import Policies

NAMES = Applied.__struct_fields__
FIXED = ("max_message_bytes", "ensemble_size", "write_quorum", "ack_quorum")
"""Settings of a broker that hold while it runs: its frames are as large, and its own ledgers have as many copies."""
DYNAMIC = tuple(name for name in NAMES if name not in FIXED)
"""Names of the policies that can change while brokers run, for all at once (PolicyCache)."""


def resolve(broker: Applied, *levels: Policies) -> Applied:
    """The policies in force: of the levels above the broker, namespace then topic, the last one that sets a field wins.
    """
    values = {name: getattr(broker, name) for name in NAMES}
    for level in levels:
        for name in NAMES:
            value = getattr(level, name)
            if value is not None:
                values[name] = value
    values["max_message_bytes"] = min(values["max_message_bytes"], broker.max_message_bytes)
    return Applied(**values)


def as_policies(applied: Applied) -> Policies:
    """Returns policies with every field set: what `--applied` shows."""
    return Policies(**{name: getattr(applied, name) for name in NAMES})


UNUSED_S = 60
"""Seconds without producers and consumers after which a non-persistent topic ends, where no policy says otherwise."""


def of_non_persistent(applied: Applied) -> Applied:
    """The policies of a non-persistent topic: it keeps no state, and ends when it is unused."""
    return replace(
        applied, inactive_s=applied.inactive_s or UNUSED_S, inactive_mode="delete_when_no_subscriptions",
        deduplication=False, compaction_threshold_bytes=0,
    )  # fmt: skip
