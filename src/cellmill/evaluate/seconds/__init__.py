"""Estimates of the CPU-seconds of tasks from the sizes of a dataset, and the plan that is printed."""
