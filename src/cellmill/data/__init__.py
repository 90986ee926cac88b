"""From .h5ad files to batches of tokens: cells, gene names, vocabulary, shards, stream. Torch-free."""
