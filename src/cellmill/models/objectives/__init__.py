"""Objectives: targets, loss, and the metrics and verdicts of `evaluate`, in a file named after each.

`cell_decoding.py` also has denoise. Folder `shared` has the code that several of them need.
"""
