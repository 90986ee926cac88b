"""Results of an exported model on the cells of a file, and the files of these results.

Results are vectors, labels, numbers, predicted genes, knock-outs, responses to perturbations, and UMAP.
"""
