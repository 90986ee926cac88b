"""cellmill: from `.h5ad` files to an evaluated, exported single-cell foundation model."""

__version__ = "0.1.0"
