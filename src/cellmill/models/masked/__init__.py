"""The `masked` family: a bidirectional encoder that fills in what is hidden."""
