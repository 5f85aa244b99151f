"""The handlers; importing this package registers their routes (table.py), the more special paths first."""

from . import cluster, lookup, permissions, tenants, policies, namespaces, subscriptions, messages, statistics, topics  # noqa: I001

__all__ = (
    "cluster", "lookup", "messages", "namespaces", "permissions", "policies", "statistics", "subscriptions", "tenants",
    "topics",
)  # fmt: skip
