"""Code that several objectives share: views of cells, heads on cell vectors, and terms of losses."""
