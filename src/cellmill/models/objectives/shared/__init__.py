"""Code that several objectives share: views of cells, heads of cell vectors, terms of losses."""
