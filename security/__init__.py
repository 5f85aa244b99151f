"""The identity of callers, and what they may do."""
