"""The policies that are set at one level, a namespace or a topic: the fields of `AppliedPolicies`; None: the level
inherits the policy.

Type checkers and editors see policy_levels.pyi, which `python -m tests.stubs` writes.
"""

from __future__ import annotations

from typing import get_type_hints

from msgspec import defstruct

from .applied import AppliedPolicies

_KINDS = get_type_hints(AppliedPolicies)
Policies = defstruct(
    "Policies", [(name, _KINDS[name] | None, None) for name in AppliedPolicies.__struct_fields__],
    module="magnetar.proto.policies", frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=False,
)  # fmt: skip
Policies.__doc__ = "The policies of one level; a field that is None is inherited."
