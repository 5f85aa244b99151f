"""Bytes that brokers store."""
