"""Objectives: one file each, with its loss and how `evaluate` judges it."""
