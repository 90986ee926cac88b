"""Objectives: targets, loss, and the metrics and verdicts of `evaluate`, in a file named after each.

`masked.py` has masked_value and masked_gene, `contrastive.py` supervised_contrastive, and
`cell_decoding.py` also denoise. Folder `shared` has the code that several of them need.
"""
