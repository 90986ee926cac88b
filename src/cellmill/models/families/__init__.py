"""Families, the architectures of models.

`encoder.py` has encoder, profile and autoencoder, `post_norm.py` bert and scgpt, `hf.py` models of
the package transformers; `autoregressive.py` also generates cells.
"""
