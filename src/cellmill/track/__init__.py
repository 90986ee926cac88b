"""Where the numbers of a running training go."""
