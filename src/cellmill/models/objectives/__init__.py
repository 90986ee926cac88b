"""Objectives: one file for each, with its targets, its loss, and the metrics and verdicts of `evaluate`.

`cell_decoding.py` also implements objective `denoise`. The folder `shared` has the code that several
objectives need.
"""
