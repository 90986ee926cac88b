"""Embeddings of cells, and tasks that judge them against baselines."""
