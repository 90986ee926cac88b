"""Atlas of a model: the embeddings and labels of the corpus's cells, to which new cells are mapped."""
