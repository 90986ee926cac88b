"""Task `integration`, and its measures of how well batches mix and labels stay separate."""
