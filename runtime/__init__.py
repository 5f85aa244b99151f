"""The base of each process: clock, files, workers, network, configuration, logs, metrics, life cycle."""
