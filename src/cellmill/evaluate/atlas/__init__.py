"""Atlas of a model: the embeddings of a corpus's cells, their labels, and cells mapped to them."""
