"""Tokenizers, one file each."""
