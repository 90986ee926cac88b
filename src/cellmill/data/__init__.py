"""From files of counts to batches of tokens: counts, gene names, vocabulary, shards, stream.

Torch-free. Imports point one way: stream, shards, prepare, genes, inputs, then the files of this
folder.
"""
