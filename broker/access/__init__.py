"""The permissions of callers: the table, the grants of namespaces, and the decision."""
