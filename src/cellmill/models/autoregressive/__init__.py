"""The `autoregressive` family: a causal transformer over the genes of a cell in rank order, for generating cells."""
