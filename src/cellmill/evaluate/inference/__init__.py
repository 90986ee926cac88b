"""Results of an exported model on the cells of a file, and their files: vectors, labels, numbers and
their calibration, hidden genes, knock-outs, responses to perturbations, and UMAP.
"""
