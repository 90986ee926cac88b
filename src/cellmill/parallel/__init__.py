"""Parallel layouts of a model. Knows nn.Module, device meshes and parameter names, but no model
family.
"""
