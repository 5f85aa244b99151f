"""What each process stands on: clock, files, workers, network, configuration, logs, metrics, life cycle."""
