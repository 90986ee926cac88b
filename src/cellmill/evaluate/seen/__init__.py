"""Cells that a model was trained on, and how they are recognised in a file.

- A seen cell is among the training or validation cells of the model or of its ancestors.
- A held-out cell is not seen, as far as names, counts and barcodes tell.
- Copies are cells with equal counts, or with the same barcode, under any names.
- Two cells have the same barcode only if their samples share more barcodes than chance explains. Their
  counts may differ.
- The ancestors of a model are the models that its training started from or learnt from, and the
  ancestors of these models.
"""
