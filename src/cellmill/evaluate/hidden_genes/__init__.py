"""Prediction of genes that are hidden from a model, by the model's decoder and by a ridge regression."""
