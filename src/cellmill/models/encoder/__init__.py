"""The `encoder` family: a bidirectional transformer over the tokens of a cell."""
