"""Schemas of topics: what a definition has to be, which ones go together, and the registry in the metadata."""
