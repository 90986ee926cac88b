"""What a run leaves on disk: its folder, checkpoints, identity, metrics and accounting."""
