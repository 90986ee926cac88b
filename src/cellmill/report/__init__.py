"""The page over all runs: what is collected, its figures, its HTML."""
