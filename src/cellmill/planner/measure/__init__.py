"""Sizes of a model, measured by passes on the meta device."""
