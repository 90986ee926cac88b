"""From shards to micro-batches: the path of a count in training."""
