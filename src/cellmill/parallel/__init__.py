"""Parallel layouts of a model: modules, device meshes and names of parameters, but no family."""
