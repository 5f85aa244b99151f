"""The handlers; importing this package registers their routes (table.py), the more special paths first."""

from . import cluster, lookup, schemas, permissions, tenants, policies, namespaces, transactions  # noqa: I001
from . import rows, subscriptions, messages, statistics, topics

__all__ = (
    "cluster", "lookup", "messages", "namespaces", "permissions", "policies", "rows", "schemas",
    "statistics", "subscriptions", "tenants", "topics", "transactions",
)  # fmt: skip
