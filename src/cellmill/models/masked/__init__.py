"""The `masked` family: a bidirectional encoder trained on masked tokens."""
