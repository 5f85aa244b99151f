"""The handlers; importing this module registers their routes (call.py), the more special paths first."""

# isort: off
from . import cluster_routes, schemas_routes, tenants_routes, policies_routes, namespaces_routes, transactions_routes
from . import rows_routes, subscriptions_routes, topics_routes
# isort: on

__all__ = (
    "cluster_routes", "namespaces_routes", "policies_routes", "rows_routes", "schemas_routes", "subscriptions_routes",
    "tenants_routes", "topics_routes", "transactions_routes",
)  # fmt: skip
