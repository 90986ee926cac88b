"""Objectives: one file each, with its loss and its figures and verdicts for `evaluate`."""
