"""Embeddings of cells, and what they are worth beside plain baselines."""
