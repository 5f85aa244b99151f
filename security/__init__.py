"""The authentication of callers, and the files and settings that it needs."""
