"""The metadata service's decisions: what a request may be, who has a session, what a watch still has to hear."""
