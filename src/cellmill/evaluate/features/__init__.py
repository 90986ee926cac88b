"""Features of cells and genes, and what they are made from.

These are principal components, chosen genes, dot products of cells, and nearest neighbours.
"""
