"""The page over all runs and corpora: what is read, its tables, its charts, its HTML."""
