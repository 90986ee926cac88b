"""The `scgpt` family: a post-norm transformer over genes and binned values, the architecture of scGPT."""
