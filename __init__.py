"""Magnetar: a durable message broker with Pulsar's model and BookKeeper's storage, in Python."""
