"""Destinations of a training's metrics."""
