"""Expression of genes that are hidden from a model: its decoder, and the ridge regression of an export."""
