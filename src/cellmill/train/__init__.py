"""The training loop, its state on disk, and what is measured of it."""
