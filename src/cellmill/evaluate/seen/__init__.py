"""Cells that a model was trained on: where they are found, and how a file's cells are recognised."""
