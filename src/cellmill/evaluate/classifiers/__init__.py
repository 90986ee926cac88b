"""Classifiers of cells by their features: nearest neighbours and logistic regression."""
