"""The corpus on disk."""
