"""What each process is built on: clock, files, workers, network, configuration, logs, metrics, life cycle."""
