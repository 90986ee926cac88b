"""Starts the processes of a training job. Torch-free: the head of a cluster need not have it."""
