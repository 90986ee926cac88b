"""Features of cells, and what they are made from: components, chosen genes, products, neighbours."""
