"""Objectives: one file each, with its loss and its metrics and verdicts for `evaluate`."""
