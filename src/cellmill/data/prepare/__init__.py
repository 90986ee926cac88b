"""From an input to cells."""
