"""The permissions of callers: the permission that each rpc needs, the grants of namespaces, and the decision."""
