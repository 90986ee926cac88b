"""Starts the processes of a training job.

Torch-free but for `agent`: the head of a cluster need not have torch.
"""
