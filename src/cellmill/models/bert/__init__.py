"""The `bert` family: a post-norm transformer over genes and their places, the architecture of Geneformer."""
