"""How a model is laid out over processes. Knows nn.Module, meshes and names, never a model family."""
