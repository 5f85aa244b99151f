"""Who may do what: the table of permissions, the grants of namespaces, and the decision."""
