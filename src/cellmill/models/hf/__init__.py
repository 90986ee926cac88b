"""The `hf` family: an encoder or causal model of the transformers library by its config."""
