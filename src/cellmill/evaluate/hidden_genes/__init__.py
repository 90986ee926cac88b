"""Prediction of genes that are hidden from a model, by its decoder and by the ridge regression of an export."""
