"""Names of genes, and the vocabulary."""
