"""Files of a run: its folder, checkpoints, identity, metrics and accounting."""
