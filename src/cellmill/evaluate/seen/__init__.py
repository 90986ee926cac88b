"""Cells that a model was trained on: where they are found, and how a file's cells are recognised.

- seen: in the training or validation cells of the model or its ancestors
- held out: not seen, by name, counts or barcode
- copies: cells with equal counts, or with the same barcode, whatever their names
- same barcode: in two samples that share more barcodes than chance explains; counts may differ
- ancestors: models that the training started from or learnt from, and those before them
"""
