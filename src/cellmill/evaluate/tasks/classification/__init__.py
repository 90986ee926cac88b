"""Tasks that classify cells by label.

Each task has a file with its name. `fold_predictions.py` classifies the cells of folds for several tasks.
`degraded.py` is the base of `low_depth` and `missing_genes`. `transfer_cells.py` reads the cells of
`transfer`.
"""
