"""From .h5ad files to batches of tokens: counts, gene names, vocabulary, shards, stream.
Torch-free.
"""
