"""Training: the worker of each rank, its loop, its checkpoints and its telemetry."""
