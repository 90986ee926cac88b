"""CPU-seconds of tasks, planned before they start."""
