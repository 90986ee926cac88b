"""Sizes of a model, which passes on the meta device measure, and the speed of CPU cores."""
