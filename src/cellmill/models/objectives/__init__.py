"""Objectives: targets, loss, and the metrics and verdicts of `evaluate`, in a file named after each.

`masked.py` has masked_value and masked_gene, `contrastive.py` supervised_contrastive, and
`cell_decoding.py` also denoise. `per_cell.py`, `terms.py` and `views.py` have what they share.
"""
