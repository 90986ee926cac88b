"""Vectors, labels and knock-outs of the cells of a file by an exported model, and their files."""
