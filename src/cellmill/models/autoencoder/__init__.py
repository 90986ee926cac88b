"""The `autoencoder` family: the encoder, and a bottleneck from which an objective's decoder reads the cell."""
