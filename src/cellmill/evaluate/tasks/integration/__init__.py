"""Task `integration`: mixing of batches and separation of labels, and its measures."""
